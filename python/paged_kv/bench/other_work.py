"""The share of the CPU that other processes used while something was measured.

Other processes are all but this one and its descendants. The load average is no measure of them: it counts our own
threads too, and follows with a delay of a minute.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")
MARK_ABOVE = 0.05
"""Rows with more other work are marked. Our threads need all cores, so a share of 5 % that others use costs 5 % of the
time or more, the tolerance of `--compare`. It is above the resolution of the figure: two cores have 200 ticks a second.
"""
BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of a line of /proc/stat: user, nice, system, irq, softirq, and steal, which other virtual machines took."""


@dataclass(frozen=True)
class CpuTimes:
    """Ticks since the start of the machine, over the cores that this process may run on."""

    elapsed: int
    busy: int
    own: int
    """Of this process, its descendants, and the descendants that it waited for."""

    @staticmethod
    def read(proc: Path = PROC) -> CpuTimes | None:
        """None where the system has no /proc."""
        try:
            lines = [line.split() for line in (proc / "stat").read_text().splitlines()]
        except OSError:
            return None
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        cores = [[int(ticks) for ticks in line[1:9]] for line in lines if line[0] in names]
        busy = sum(core[column] for core in cores for column in BUSY)
        return CpuTimes(sum(map(sum, cores)), busy, own_ticks(proc, os.getpid()))


def own_ticks(proc: Path, root: int) -> int:
    """Ticks of a process and its descendants, those that ended and were waited for included."""
    ticks, children = {}, dict[int, list[int]]()
    for path in proc.glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # from the third on; the second is a name
        except OSError:
            continue  # it has just ended
        process = int(path.parent.name)
        ticks[process] = sum(map(int, fields[11:15]))
        children.setdefault(int(fields[1]), []).append(process)
    total, open_processes = 0, [root]
    while open_processes:
        process = open_processes.pop()
        total += ticks.get(process, 0)
        open_processes += children.get(process, [])
    return total


def other_work(before: CpuTimes | None, after: CpuTimes | None) -> float | None:
    """The share 0 to 1 of the cores' time that others used in between; None where it is unknown."""
    if before is None or after is None or after.elapsed <= before.elapsed:
        return None
    others = after.busy - before.busy - (after.own - before.own)
    return round(min(max(others / (after.elapsed - before.elapsed), 0.0), 1.0), 2)


def worst(shares: Iterable[float | None]) -> float | None:
    """The largest of those that are known."""
    return max((share for share in shares if share is not None), default=None)


def is_marked(row: Mapping[str, Any]) -> bool:
    """Whether others used more than `MARK_ABOVE` during a row's runs; False where it is unknown, as in older files."""
    return (row.get("other_work") or 0) > MARK_ABOVE


def marked_title(row: Mapping[str, Any]) -> str:
    """The title of a row, with a * if it is marked."""
    return f"{row['title']} *" if is_marked(row) else str(row["title"])


def footnote(rows: Iterable[Mapping[str, Any]]) -> str:
    """What the * means and the shares of the marked rows; empty where none is marked."""
    shares = [f"{row['case']} {row['other_work']:.2f}" for row in rows if is_marked(row)]
    if not shares:
        return ""
    return f"* Other processes used more than {MARK_ABOVE:.2f} of the cores' time: {', '.join(shares)}."
