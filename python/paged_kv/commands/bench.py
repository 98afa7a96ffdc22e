"""`paged-kv bench`. What measures, `paged_kv.bench`, is imported here alone, and only when the command runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from paged_kv.errors import ContractError
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS

FOLDER = Path("paged-kv-bench")


@click.command()
@click.option("--quick", is_flag=True, help="Three cases, no peers, well under two minutes; writes no file by itself.")
@click.option("--cases", "names", multiple=True, metavar="NAME", help="Only this case; repeat it. See --list.")
@click.option("--no-peers", is_flag=True, help="Only ours and the bandwidth.")
@click.option("--repeats", type=click.IntRange(min=9), default=31, show_default=True, help="Runs behind a median.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help=f"Folder for the JSON. Default: {FOLDER}")
@click.option("--compare", type=click.Path(path_type=Path), metavar="OLD.json", help="Say what became slower; exit 1.")
@click.option("--measured", type=click.Path(path_type=Path), metavar="NEW.json", help="Compare this; measure nothing.")
@click.option("--tolerance", type=click.FloatRange(0, 1), default=0.05, show_default=True, help="Of --compare.")
@click.option("--target", type=click.Choice(list(REQUIRED_FLAGS)), help="Compile ours for another CPU family.")
@click.option("--prefix", default="", metavar="COMMAND", help="Put before every job's command: `numactl -N 0`.")
@click.option("--profile", is_flag=True, help="Show where the time of a model's steps goes (of the cases step-...).")
@click.option("--list", "only_list", is_flag=True, help="Name the cases.")
@click.pass_context
def bench(
    context: click.Context,
    quick: bool,
    names: tuple[str, ...],
    no_peers: bool,
    repeats: int,
    out: Path | None,
    compare: Path | None,
    measured: Path | None,
    tolerance: float,
    target: str | None,
    prefix: str,
    profile: bool,
    only_list: bool,
) -> None:
    """Measure decoding on this CPU: share of the read bandwidth, and factors to other systems that are installed.

    Results of cases that did not run this time, and of other CPU families, stay as they were. --compare says for each
    case whether it became slower or faster than in an older file: by its share of the bandwidth, else by the factors
    over other systems, else by its time. The exit status is 1 where one is slower.
    """
    from rich.console import Console

    from paged_kv.bench import provenance, report
    from paged_kv.bench.case_kinds import StepCase
    from paged_kv.bench.cases import Selection, cases_of
    from paged_kv.bench.compare import changes, check_family, print_changes, read_results, slower
    from paged_kv.bench.run import Run, merged

    family = target or provenance.cpu_family()
    cases = cases_of(family)
    if only_list:
        for case in cases:
            click.echo(f"{case.name:<20}{case.title}")
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
    selection = Selection.of(names, quick=quick, with_peers=not no_peers, cases=cases)
    if profile and not any(isinstance(case, StepCase) for case in selection.cases):
        steps = ", ".join(case.name for case in cases if isinstance(case, StepCase))
        raise ContractError(f"--profile is of a model's steps, which none of these cases runs: {steps} do")
    file = None if quick and out is None else (out or FOLDER) / f"{family}.json"
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    run = Run(selection, repeats, shlex.split(prefix), family, target, with_profile=profile)
    for results in run.results():
        if file is not None:  # after every case: a run that is broken off has not been in vain
            report.write_json(merged(file, results, cases), file)
    report.print_table(results["rows"], console)
    if file is not None:
        click.echo(f"written: {file}", err=True)
    if old is not None:
        context.exit(compared(old, results))
