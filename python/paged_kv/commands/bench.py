"""`paged-kv bench`. What measures, `paged_kv.bench`, is imported here alone, and only when the command runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from paged_kv.errors import ContractError
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS

FOLDER = Path("paged-kv-bench")


@click.command()
@click.option("--quick", is_flag=True, help="Three cases, no peers, well under two minutes; writes no file by itself.")
@click.option("--all", "every", is_flag=True, help="Also quantised weights, experts, MLA, cascades; more peers.")
@click.option("--cases", "names", multiple=True, metavar="NAME", help="Only this case; repeat it. See --list.")
@click.option("--no-peers", is_flag=True, help="Only ours and the bandwidth.")
@click.option("--repeats", type=click.IntRange(min=9), default=31, show_default=True, help="Runs behind a median.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help=f"Folder for the CSV. Default: {FOLDER}")
@click.option("--compare", type=click.Path(path_type=Path), metavar="OLD.csv", help="Say what became slower; exit 1.")
@click.option("--measured", type=click.Path(path_type=Path), metavar="NEW.csv", help="Compare this; measure nothing.")
@click.option("--tolerance", type=click.FloatRange(0, 1), default=0.05, show_default=True, help="Of --compare.")
@click.option("--target", type=click.Choice(list(REQUIRED_FLAGS)), help="Compile ours for another CPU family.")
@click.option("--prefix", default="", metavar="COMMAND", help="Put before every job's command: `numactl -N 0`.")
@click.option("--profile", is_flag=True, help="Show where the time of a model's steps goes (of the cases step-...).")
@click.option("--list", "only_list", is_flag=True, help="Name the cases and their targets.")
@click.pass_context
def bench(
    context: click.Context,
    quick: bool,
    every: bool,
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

    Brackets hold this project's targets. Results of cases that did not run this time, and of other CPU families, stay
    as they were. --compare says for each
    case whether it became slower or faster than in an older file: by its share of the bandwidth, else by the factors
    over other systems, else by its time. The exit status is 1 where one is slower. A row during which other processes
    used more than 0.05 of the cores' time is marked with *, and is not comparable where it is slower.
    """
    from rich.console import Console

    from paged_kv.bench import goals, provenance, report
    from paged_kv.bench.cases import CASES, QUICK, cases_of, selected
    from paged_kv.bench.compare import changes, check_family, print_changes, slower
    from paged_kv.bench.results import Results, merged, read_results, write_results
    from paged_kv.bench.run import Run
    from paged_kv.bench.weight_cases import StepCase

    family = target or provenance.cpu_family()
    cases = cases_of(family, every=every)
    if only_list:
        targets = goals.goals_of(family)
        for case in cases:
            click.echo(f"{case.name:<20}{case.title}: {goals.described(case, targets)}")
        return
    console = Console(width=None if sys.stdout.isatty() else 150)

    def compared(old: Results, new: Results) -> int:
        differences = changes(old["rows"], new["rows"])
        print_changes(differences, tolerance, console)
        return 1 if slower(differences, tolerance) else 0

    old = None if compare is None else read_results(compare)  # before a run writes the same file
    if measured is not None:
        if old is None or compare is None:
            raise ContractError("--measured: requires --compare OLD.csv")
        new = read_results(measured)
        check_family(old, compare, new["family"])
        context.exit(compared(old, new))
    if old is not None and compare is not None:
        check_family(old, compare, family)
    chosen = selected(cases, names or (QUICK if quick else ()))
    if profile and not any(isinstance(case, StepCase) for case in chosen):
        steps = ", ".join(case.name for case in cases if isinstance(case, StepCase))
        raise ContractError(f"--profile: expected a case of a model's steps ({steps}), got none")
    file = None if quick and out is None else (out or FOLDER) / f"{family}.csv"
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    results: Results = {}
    with_peers = not (no_peers or quick)
    run = Run(chosen, repeats, shlex.split(prefix), family, target, with_peers=with_peers, with_profile=profile)
    for results in run.results():
        if file is not None:  # after every case: a run that is broken off has not been in vain
            write_results(merged(file, results, CASES), file)
    report.print_table(results["rows"], console)
    if missed := [row["case"] for row in results["rows"] if goals.met(row) is False]:
        click.echo(f"below their targets: {', '.join(missed)}", err=True)
    if file is not None:
        click.echo(f"written: {file}", err=True)
    if old is not None:
        context.exit(compared(old, results))
