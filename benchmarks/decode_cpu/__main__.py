"""The command: measures, and writes results, pictures and pages of this checkout."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks import pages
from benchmarks.decode_cpu import cases, goals, roofline
from benchmarks.provenance import CHECKOUT, commit
from paged_kv.bench import report
from paged_kv.bench.cases import Selection, cases_of
from paged_kv.bench.provenance import cpu_family
from paged_kv.bench.run import Run, limits, merged, run_job
from paged_kv.errors import ContractError, PagedKVError
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS

RESULTS = CHECKOUT / "benchmarks" / "results" / "decode_cpu"


@click.command()
@click.option("--cases", "names", multiple=True, metavar="NAME", help="Only this case; repeat it. See --list.")
@click.option("--no-peers", is_flag=True, help="Only ours and the bandwidth.")
@click.option("--repeats", type=click.IntRange(min=9), default=31, show_default=True, help="Runs behind a median.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, help="Folder for the JSON and the PNG.")
@click.option("--update-pages", is_flag=True, help="Also write the tables of this checkout's pages.")
@click.option("--target", type=click.Choice(list(REQUIRED_FLAGS)), help="Compile ours for another CPU family.")
@click.option("--prefix", default="", metavar="COMMAND", help="Put before every job's command: `numactl -N 0`.")
@click.option("--list", "only_list", is_flag=True, help="Name the cases and what they should reach.")
def main(
    names: tuple[str, ...],
    no_peers: bool,
    repeats: int,
    out: Path,
    update_pages: bool,
    target: str | None,
    prefix: str,
    only_list: bool,
) -> None:
    """Measure decoding on this CPU as `paged-kv bench`, with more cases and peers, and against targets.

    Results of cases that did not run this time, and of other CPU families, stay as they were, each with its own date
    and commit. `paged-kv bench --compare OLD.json --measured NEW.json` compares two files.
    """
    family = target or cpu_family()
    grid, wanted = cases_of(family, cases.CASES), goals.goals_of(family)
    if only_list:
        for case in grid:
            click.echo(f"{case.name:<20}{case.title}: {goals.described(wanted.get(case.name, goals.Goal()))}")
        return
    if update_pages and not out.resolve().is_relative_to(CHECKOUT):
        raise ContractError("--update-pages needs results in this checkout: --out")
    selection = Selection.of(names, with_peers=not no_peers, cases=grid)
    out.mkdir(parents=True, exist_ok=True)
    file, command, facts = out / f"{family}.json", shlex.split(prefix), {"commit": commit(CHECKOUT)}
    job = (command, "benchmarks.decode_cpu.roofline", str(repeats))
    roof = {} if no_peers else run_job(*job, limits=limits(target))
    peaks = {"peaks": roof["peaks"]} if "peaks" in roof else {}  # else those of an earlier run stay
    rows: list[dict[str, Any]] = []
    written: dict[str, Any] = {}
    for results in Run(selection, repeats, command, family, target, cases.__name__).results():
        rows = [goals.with_goal(row, wanted) | facts for row in results["rows"]]
        written = merged(file, results | facts | peaks | {"rows": rows}, grid)
        report.write_json(written, file)  # after every case: a run that is broken off has not been in vain
    report.print_table(rows, Console(width=None if sys.stdout.isatty() else 150))
    if missed := [row["case"] for row in rows if goals.met(row) is False]:
        click.echo(f"below their targets: {', '.join(missed)}")
    drawn = roofline.draw(written, out / f"{family}.png")
    click.echo(f"written: {file}{', .png' if drawn else ''}", err=True)
    if update_pages:
        pages.write(out)


if __name__ == "__main__":
    try:
        main()
    except PagedKVError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
