"""Finds the values of `CpuTuning` that are fastest on the CPU of this machine, and writes them into the table.

    python -m benchmarks.tune [--field NAME]... [--repeats N] [--dry-run] [--target FAMILY] [--prefix COMMAND]

One field after the other, each candidate value against the present one, by turns in one process; a value is taken where
it is faster over the cases that decide the field, and a second round looks again at what the first one changed. The row
of this CPU's family in mojo_ops/isa/cpu_tuning_table.mojo is written anew, all others stay; what was measured goes to
benchmarks/results/tuning/FAMILY.csv. Every candidate is compiled, some 30 s each, once on a machine.
"""

from __future__ import annotations

import csv
import json
import math
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.tune_job import TUNE_CASES
from benchmarks.tuning_table import Row, TuningTable, Values
from paged_kv.bench.case_kinds import AttentionCase, Case
from paged_kv.bench.provenance import cpu_family, provenance
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent / "mojo_ops"
TABLE = Path("isa") / "cpu_tuning_table.mojo"
MARGIN = 0.02
"""A value must be faster by this part: less is noise, and the table would change with every run."""
JOB_SECONDS = 900


@dataclass(frozen=True)
class Choice:
    """The candidates of a field, as Mojo spells them, and the cases (`tune_job.TUNE_CASES`) that decide."""

    candidates: tuple[str, ...]
    cases: tuple[str, ...]


CHOICES: dict[str, Choice] = {
    "fast_bf16_dot": Choice(("False", "True"), ("linear-1", "linear-8", "bf16", "group8", "prefill")),
    "interleaved_slots": Choice(("0", "16", "65536"), ("bf16", "page128", "hnd")),
    "decode_prefetch_level": Choice(("1", "2"), ("bf16", "f32", "group8", "hnd")),
    "decode_prefetch_bytes": Choice(("0", "32768", "65536"), ("bf16", "f32", "group8", "hnd")),
    "decode_unit_bytes": Choice(("16384", "65536"), ("bf16", "f32", "group8", "hnd")),
    "linear_row_streams": Choice(("1", "2", "4", "8"), ("linear-1",)),
    "linear_streams": Choice(("1", "2", "4", "8"), ("linear-4",)),
    "linear_row_prefetch": Choice(("0", "1", "2"), ("linear-1",)),
    "linear_prefetch": Choice(("0", "1", "2"), ("linear-4", "linear-8")),
    "blocks_ahead": Choice(("0", "1", "2", "3", "4"), ("linear-q8_0-1", "linear-q4_k-1", "linear-q8_0-8")),
}
"""By field of `CpuTuning`, in the order in which they are tried."""

Speeds = Callable[[Sequence[Values], Sequence[str]], list[dict[str, float | None]]]
"""For some rows of values and some cases: for each row, by case, its speed relative to the first row's."""


@dataclass(frozen=True)
class Trial:
    """One candidate: its speed relative to the value that the field had then, by case."""

    round: int
    field: str
    value: str
    speeds: Mapping[str, float | None]
    taken: bool


def descend(
    start: Values, choices: Mapping[str, Choice], speeds: Speeds, *, rounds: int = 2, margin: float = MARGIN
) -> tuple[Values, list[Trial]]:
    """Coordinate descent from `start`: the best row found, and every candidate that was tried.

    A candidate that fails, or is wrong, on one of its cases is not taken.
    """
    best, trials = dict(start), []
    pending = list(choices)
    for turn in range(rounds):
        changed = []
        for field in pending:
            choice = choices[field]
            values = list(dict.fromkeys([best[field], *choice.candidates]))
            rows = [{**best, field: value} for value in values]
            found = speeds(rows, choice.cases)
            means = [mean(one.values()) for one in found]
            at = max(range(len(rows)), key=lambda i: means[i])
            if means[at] <= 1 + margin:
                at = 0
            if at:
                changed.append(field)
            for i, value in enumerate(values):
                trials.append(Trial(turn, field, value, found[i], i == at))
            best = rows[at]
        # The other fields were measured beside values that stand no longer.
        pending = [field for field in choices if changed and changed != [field]]
    return best, trials


def mean(speeds: Iterable[float | None]) -> float:
    """The geometric mean; 0 where one is missing."""
    found = list(speeds)
    if not found or any(one is None for one in found):
        return 0.0
    return math.exp(sum(math.log(one) for one in found if one) / len(found))


class Builds:
    """Copies of the Mojo package, one a row of values, and the jobs that measure them."""

    def __init__(
        self, folder: Path, table: TuningTable, family: str, repeats: int, prefix: Sequence[str], target: str | None
    ) -> None:
        self._folder, self._table, self._family, self._target = folder, table, family, target
        self._sources = folder / "sources"
        shutil.copytree(SOURCES, self._sources)  # they may be edited while this runs
        self._repeats, self._prefix = repeats, prefix
        self._made: dict[str, Path] = {}
        self._failed: set[tuple[str, str]] = set()
        self._compiled: set[tuple[str, str]] = set()

    def speeds(self, rows: Sequence[Values], cases: Sequence[str]) -> list[dict[str, float | None]]:
        """`Speeds`."""
        found: list[dict[str, float | None]] = [{} for _ in rows]
        for case in cases:
            usable = [at for at, row in enumerate(rows) if self._compiles(case, row)]
            results = self._job(case, self._repeats, [rows[at] for at in usable]) if 0 in usable else None
            for one in found:
                one[case] = None
            for at, result in zip(usable, results or [], strict=False):
                found[at][case] = result.get("speed")
        return found

    def _compiles(self, case: str, row: Values) -> bool:
        """Return whether a row compiles; what was compiled once is on disk, so that measuring takes seconds."""
        key = (graph_of(TUNE_CASES[case]), repr(row))
        if key not in self._compiled | self._failed:
            (self._failed if self._job(case, 0, [row]) is None else self._compiled).add(key)
        return key in self._compiled

    def _job(self, case: str, repeats: int, rows: Sequence[Values]) -> list[dict[str, Any]] | None:
        """Return what `tune_job` says of each row; None where it died."""
        result = self._folder / "result.json"
        result.unlink(missing_ok=True)
        folders = [str(self._build(row)) for row in rows]
        arguments = [case, str(repeats), str(result), self._target or "-", *folders]
        command = [*self._prefix, sys.executable, "-m", "benchmarks.tune_job", *arguments]
        done = subprocess.run(command, capture_output=True, cwd=HERE.parent, timeout=JOB_SECONDS)
        if done.returncode or not result.exists():
            lines = [line for line in done.stderr.decode(errors="replace").splitlines() if "error" in line.lower()]
            click.echo(f"  {case}: failed: {lines[0][:200] if lines else done.returncode}", err=True)
            return None
        found: list[dict[str, Any]] = json.loads(result.read_text())
        return found

    def _build(self, row: Values) -> Path:
        """The package with that row for this family."""
        key = repr(row)
        if key not in self._made:
            folder = self._folder / str(len(self._made)) / "mojo_ops"
            shutil.copytree(self._sources, folder)
            (folder / TABLE).write_text(self._table.with_row(self._family, Row(row)).render())
            self._made[key] = folder
        return self._made[key]


def graph_of(case: Case) -> str:
    """Return what tells the compiled graphs of two cases apart."""
    return f"{case.dtype} {case.kv_dtype}" if isinstance(case, AttentionCase) else "linear"


@click.command()
@click.option("--field", "fields", multiple=True, metavar="NAME", help="Only this field; repeat it.")
@click.option("--repeats", type=click.IntRange(min=5), default=31, show_default=True, help="Turns behind a median.")
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True, help="Over all fields.")
@click.option("--dry-run", is_flag=True, help="Print what would be written.")
@click.option("--target", type=click.Choice(list(REQUIRED_FLAGS)), help="Of another family, whose code runs here.")
@click.option("--prefix", default="", metavar="COMMAND", help="Put before every job's command: `numactl -N 0`.")
def tune(fields: tuple[str, ...], repeats: int, rounds: int, dry_run: bool, target: str | None, prefix: str) -> None:
    """Measure the values of CpuTuning on this CPU, and write its family's row."""
    table, family, facts = TuningTable.read(SOURCES / TABLE), target or cpu_family(), provenance(target)
    choices = {name: choice for name, choice in CHOICES.items() if name in table.fields and name in (fields or CHOICES)}
    for name in sorted((set(fields) | set(table.fields)) - set(choices)):
        if name not in table.fields or name not in CHOICES:
            click.echo(f"{name}: {'no candidates' if name in table.fields else 'no such field'}", err=True)
    with tempfile.TemporaryDirectory() as folder:
        builds = Builds(Path(folder), table, family, repeats, shlex.split(prefix), target)

        def speeds(rows: Sequence[Values], cases: Sequence[str]) -> list[dict[str, float | None]]:
            found = builds.speeds(rows, cases)
            for row, one in zip(rows, found, strict=True):
                changed = ", ".join(f"{name}={row[name]}" for name in row if row[name] != rows[0][name]) or "as it is"
                cells = ", ".join(f"{case} {'-' if speed is None else f'{speed:.3f}'}" for case, speed in one.items())
                click.echo(f"{changed}: {cells}", err=True)
            return found

        best, trials = descend(table.row(family).values, choices, speeds, rounds=rounds)
    row = Row(best, f"{facts['machine']}, {facts['date']}")
    text = table.with_row(family, row).render()
    if dry_run:
        click.echo(text, nl=False)
        return
    (SOURCES / TABLE).write_text(text)
    write_trials(trials, HERE / "results" / "tuning" / f"{family}.csv", facts)


def write_trials(trials: Sequence[Trial], path: Path, facts: Mapping[str, str]) -> None:
    """Write what was measured: a line a candidate and case."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["round", "field", "value", "case", "speed", "taken", *facts])
        for trial in trials:
            for case, speed in trial.speeds.items():
                shown = "" if speed is None else f"{speed:.4g}"
                line = [trial.round + 1, trial.field, trial.value, case, shown, "yes" if trial.taken else ""]
                writer.writerow([*line, *facts.values()])


if __name__ == "__main__":
    tune()
