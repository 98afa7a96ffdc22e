"""Servers on the CPU, in turns: tokens a second of decoding and time to the first token, streamed over HTTP.

    python -m benchmarks.serve_cpu [--models small|large] [--cases NAME]... [--groups NAME]... [--turns N]
                                            [--folder DIR] [--out DIR] [--update-pages] [--list]

`paged-kv serve`, MAX Serve with its own architecture, vLLM's server, llama.cpp's server, and for comparison the
steps of `paged-kv generate`; on two seeded Llama checkpoints that are written once (0.9 GB and 9 GB, in DIR). Servers
of a group (`serve_cases.TOGETHER`) are alive at the same time, all but one of them stopped by a signal, and take turns
case by case: the memory of some machines changes its speed from one minute to the next. A factor is the median of the
ratios within a turn. Requests are greedy and ignore end-of-sequence tokens. Prompts are random tokens, new ones
wherever the time to the first token is measured; decoding is measured over prompts that the servers' prefix caches
hold.

What is not installed is left out, and the results say so:

    MAX Serve           pip install 'paged-kv[max-serve]' for the interpreter that runs this
    vLLM                paged_kv/bench/peers/vllm_step.py says how; PAGED_KV_VLLM_PYTHON names its interpreter
    llama.cpp           `llama-server` with `llama-quantize` beside it, by PAGED_KV_LLAMA_SERVER or on the PATH;
                        servers/http.py says how to build them. GGUF files are written with pip install gguf

A group takes up to 8 GB of memory with the small model and 16 GB with the large one, and some minutes.
Writes FAMILY.csv, by LLVM's name of the CPU target, into benchmarks/results/serve_cpu; --update-pages the section of
docs/performance.md.
"""

from __future__ import annotations

import itertools
import signal
import sys
import tempfile
from pathlib import Path

import click

from benchmarks import CHECKOUT, serve_report
from benchmarks.pages import update_page
from benchmarks.serve_cases import CASES, MODELS, SIZES, TOGETHER, size_of
from benchmarks.serve_checkpoint import write_checkpoint
from benchmarks.serve_results import Row, merged, read_results, row_of, write_results
from benchmarks.serve_run import Group
from paged_kv.bench.other_work import CpuTimes, other_work
from paged_kv.bench.provenance import cpu_family, provenance
from paged_kv.errors import ContractError, PagedKVError
from paged_kv.runtime.cache_folder import cache_folder

RESULTS = CHECKOUT / "benchmarks" / "results" / "serve_cpu"
GROUPS = tuple(dict.fromkeys(name for groups in TOGETHER.values() for name in groups))


@click.command()
@click.option("--models", multiple=True, type=click.Choice(list(MODELS)), help="Only this model.")
@click.option("--cases", "names", multiple=True, metavar="NAME", help="Only this case; repeat it. See --list.")
@click.option("--groups", multiple=True, type=click.Choice(GROUPS), help="Only these systems; repeat it.")
@click.option(
    "--turns", type=click.IntRange(min=0), default=5, show_default=True, help="Of each case; 0: measure nothing."
)
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Where the checkpoints are kept.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, help="Folder for the CSV file."
)
@click.option("--update-pages", is_flag=True, help="Also write this checkout's table.")
@click.option("--list", "only_list", is_flag=True, help="Name the cases and the groups.")
def serve_cpu(
    models: tuple[str, ...],
    names: tuple[str, ...],
    groups: tuple[str, ...],
    turns: int,
    folder: Path | None,
    out: Path,
    update_pages: bool,
    only_list: bool,
) -> None:
    """Measure servers on this CPU. Results of cases and groups that do not run this time stay as they were."""
    if only_list:
        for case in CASES:
            click.echo(f"{case.name:<16}{case.title}")
        for model, together in TOGETHER.items():
            for name, keys in together.items():
                click.echo(f"--models {model} --groups {name}: {', '.join(keys)}")
        return
    unknown = set(names) - {case.name for case in CASES}
    if unknown:
        raise ContractError(f"--cases: {min(unknown)!r} is none of {', '.join(case.name for case in CASES)}")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{cpu_family()}.csv"
    for model, size in itertools.product(TOGETHER, SIZES):
        chosen = [case for case in CASES if case.model == model and (not names or case.name in names)]
        cases = [case for case in chosen if size_of(case) == size]
        if not cases or not turns or (models and model not in models):
            continue
        checkpoint = write_checkpoint(MODELS[model], (folder or cache_folder() / "serve_cpu") / model)
        for group, keys in TOGETHER[model].items():
            if groups and group not in groups:
                continue
            click.echo(f"{model}, {group}: starting {', '.join(keys)} ...", err=True)
            with tempfile.TemporaryDirectory() as logs, Group(keys, checkpoint, Path(logs), size) as alive:
                for case in cases:
                    before = CpuTimes.read()
                    figures = alive.measure(case, turns)
                    facts = provenance() | {"other_work": other_work(before, CpuTimes.read())}
                    row = row_of(case, group, figures, facts)
                    write(path, [row], alive.versions)  # after every case: a run that is broken off is not in vain
                    click.echo(serve_report.text([row]))
    if update_pages:
        write_pages(out, CHECKOUT)


def write(path: Path, rows: list[Row], versions: dict[str, str]) -> None:
    """Adds rows to a family's file."""
    earlier = read_results(path) if path.exists() else {"rows": [], "versions": {}}
    results = {"family": path.stem, "versions": earlier["versions"] | versions, "rows": merged(earlier["rows"], rows)}
    write_results(results, path)


def write_pages(folder: Path, checkout: Path) -> None:
    """The section of docs/performance.md, of the family measured last."""
    families = [read_results(path) for path in sorted(folder.glob("*.csv"))]
    section = serve_report.markdown(serve_report.newest(families))
    update_page(checkout / "docs" / "performance.md", section, serve_report.MARK)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are ended on the way out
    try:
        serve_cpu()
    except PagedKVError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
