"""Compare a run's rows with those of an older file of results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paged_kv.bench.other_work import is_marked
from paged_kv.bench.results import Row
from paged_kv.errors import ContractError


@dataclass(frozen=True)
class Change:
    """One case, then and now. `factor` above 1: faster by that factor. None: one of the two has no right figure."""

    case: str
    measure: str
    old: str
    new: str
    factor: float | None
    lost: bool = False
    """True if a figure or a correct result has been lost."""
    other_work: str = ""
    """The sides, "then" and "now", of which the row is marked for other processes' work."""

    def verdict(self, tolerance: float) -> str:
        if self.lost:
            return "LOST"
        if self.factor is None:
            return "new"
        if self.factor < 1 - tolerance:
            return "not comparable" if self.other_work else "SLOWER"
        return "faster" if self.factor > 1 + tolerance else "same"


def check_family(old: Mapping[str, Any], path: Path, family: str) -> None:
    """Raises `ContractError` where the older results are of another CPU family."""
    if old["family"] != family:
        raise ContractError(
            f"{path} has results of CPU family {old['family']}, and these are of {family}: "
            "figures of different families say nothing about the code"
        )


def changes(old: Sequence[Row], new: Sequence[Row]) -> list[Change]:
    """A change for every row of `new`."""
    before = {row["case"]: row for row in old}
    return [
        replace(_change(old, row), other_work=_marked_sides(old, row))
        for row, old in ((row, before.get(row["case"])) for row in new)
    ]


def slower(compared: Sequence[Change], tolerance: float) -> list[Change]:
    """Those that fail a comparison."""
    return [change for change in compared if change.verdict(tolerance) in ("SLOWER", "LOST")]


def print_changes(compared: Sequence[Change], tolerance: float, console: Console) -> None:
    table = Table(title=f"Slower or faster: by more than {tolerance:.0%}", title_justify="left")
    for name in ("case", "by", "then", "now", "factor", "", "other work"):
        table.add_column(name, justify="right" if name in ("then", "now", "factor") else "left")
    for change in compared:
        factor = "" if change.factor is None else f"{change.factor:.2f}"
        cells = change.case, change.measure, change.old, change.new, factor, change.verdict(tolerance)
        table.add_row(*cells, change.other_work)
    console.print(table)


def _marked_sides(old: Row | None, new: Row) -> str:
    sides = {"then": old, "now": new}
    return " and ".join(name for name, row in sides.items() if row is not None and is_marked(row))


def _change(old: Row | None, new: Row) -> Change:
    """By the share, else by the factors over peers, else by the time: ratios within a turn tell more than times do."""
    case = new["case"]
    if old is None or not _right(old):
        return Change(case, "", "", _time(new), None)
    if not _right(new):
        return Change(case, "", _time(old), new["note"] or "wrong result", None, lost=True)
    if old["share"] is not None and new["share"] is not None:
        return Change(case, "share", f"{old['share']:.2f}", f"{new['share']:.2f}", new["share"] / old["share"])
    then, now = _factors(old), _factors(new)
    common = sorted((now[name] / then[name], name) for name in then.keys() & now.keys())
    if common:
        factor = statistics.median(ratio for ratio, _ in common)
        _, name = common[(len(common) - 1) // 2]
        what = name if len(common) == 1 else f"median of {len(common)} peers; {name}"
        return Change(case, what, f"{then[name]:.2f}x", f"{now[name]:.2f}x", factor)
    return Change(case, "time", _time(old), _time(new), old["ms"] / new["ms"])


def _right(row: Row) -> bool:
    return row["ms"] is not None and bool(row["right"])


def _time(row: Row) -> str:
    return row["note"] or "" if row["ms"] is None else f"{row['ms']:.3g} ms"


def _factors(row: Row) -> dict[str, float]:
    """By peer, its time over ours; those with a right result."""
    peers = [peer for versus in row["versus"] for peer in versus["peers"]]
    return {peer["name"]: peer["ratio"] for peer in peers if peer["ratio"] is not None and peer["right"]}
