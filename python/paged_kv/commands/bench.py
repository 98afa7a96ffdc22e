"""`paged-kv bench`. What measures, `paged_kv.bench`, is imported here alone, and only when the command runs."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paged_kv.errors import ContractError, ToolchainError
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS

if TYPE_CHECKING:
    from paged_kv.bench.case_kinds import Case


@click.command()
@click.option("--quick", is_flag=True, help="Three cases, no peers, well under two minutes; writes no files by itself.")
@click.option("--cases", "names", multiple=True, metavar="NAME", help="Only this case; repeat it. See --list.")
@click.option("--no-peers", is_flag=True, help="Only ours and the bandwidth.")
@click.option("--repeats", type=click.IntRange(min=9), default=31, show_default=True, help="Runs behind a median.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for the CSV, JSON and PNG.")
@click.option("--update-pages", is_flag=True, help="Also write the tables of this checkout's pages.")
@click.option("--compare", type=click.Path(path_type=Path), metavar="OLD.json", help="Say what became slower; exit 1.")
@click.option("--measured", type=click.Path(path_type=Path), metavar="NEW.json", help="Compare this; measure nothing.")
@click.option("--tolerance", type=click.FloatRange(0, 1), default=0.05, show_default=True, help="Of --compare.")
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
    update_pages: bool,
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
    from rich.console import Console

    from paged_kv.bench import report, roofline
    from paged_kv.bench.cases import Selection
    from paged_kv.bench.compare import changes, check_family, print_changes, read_results, slower
    from paged_kv.bench.provenance import CHECKOUT
    from paged_kv.bench.run import Run, default_folder, merged
    from paged_kv.bench.targets import cases_of, cpu_family

    family = target or cpu_family()
    cases = cases_of(family)
    if only_list:
        _list(cases)
        return
    console = Console(width=None if sys.stdout.isatty() else 150)

    def compared(old: dict[str, Any], new: dict[str, Any]) -> int:
        found = changes(old["rows"], new["rows"])
        print_changes(found, tolerance, console)
        return 1 if slower(found, tolerance) else 0

    old = None if compare is None else read_results(compare)  # before a run writes the same file
    if measured is not None:
        if old is None or compare is None:
            raise ContractError("--measured needs --compare OLD.json")
        new = read_results(measured)
        check_family(old, compare, new["family"])
        context.exit(compared(old, new))
    if old is not None and compare is not None:
        check_family(old, compare, family)
    try:
        selection = Selection.of(names, quick=quick, with_peers=not no_peers, cases=cases)
    except KeyError as error:
        known = ", ".join(case.name for case in cases)
        raise ContractError(f"--cases: {error.args[0]!r} is none of {known}") from None
    folder = out or (None if quick else default_folder())
    pages = CHECKOUT / "benchmarks" / "pages.py"  # in the repository, not in the wheel
    if update_pages and not (pages.is_file() and folder and folder.resolve().is_relative_to(CHECKOUT)):
        raise ContractError("--update-pages needs a checkout, and a run that writes files into it")
    if folder is not None:
        if find_spec("matplotlib") is None:
            raise ToolchainError("the picture needs matplotlib: pip install 'paged-kv[bench]'")
        folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    written: dict[str, Any] = {}
    for results in Run(selection, repeats, shlex.split(prefix), family, target).results():
        if folder is not None:  # after every case: a run that is broken off has not been in vain
            written = merged(folder / f"{family}.json", results)
            report.write_json(written, folder / f"{family}.json")
    report.print_table(results["rows"], console)
    if folder is not None:
        report.write_csv(written["rows"], folder / f"{family}.csv")
        drawn = roofline.draw(written, folder / f"{family}.png")
        click.echo(f"written: {folder / family}.json, .csv{', .png' if drawn else ''}", err=True)
        if update_pages:
            subprocess.run([sys.executable, "-m", "benchmarks.pages", folder.resolve()], cwd=CHECKOUT, check=True)
    if old is not None:
        context.exit(compared(old, results))


def _list(cases: Sequence[Case]) -> None:
    for case in cases:
        targets = [] if case.share is None else [f"{case.share:g} of the bandwidth"]
        targets += [f"{one.at_least:g}x {one.label}" for one in case.versus if one.at_least is not None]
        joint = " or " if case.either else ", "
        click.echo(f"{case.name:<14}{case.title}: {joint.join(targets) or 'no target'}")
