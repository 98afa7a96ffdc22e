"""The history of a trace of pages: how many pages are free, cached and used over time, and how many requests own
each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import integer, printable
from paged_kv.commands.trace import FORMAT
from paged_kv.errors import ContractError, PagedKVError
from paged_kv.files import read_regular

_GAINS = ("allocated", "shared", "hit")
MOST_PAGES = 2**24
"""The most pages of a trace that is read."""


@dataclass(frozen=True)
class PageHistory:
    """The pages of one run, after each event."""

    pages: int
    page_size: int
    seconds: npt.NDArray[np.float64]
    """`[N]`, ascending."""
    used: npt.NDArray[np.int64]
    """`[N]` pages that requests own."""
    cached: npt.NDArray[np.int64]
    """`[N]` pages that no request owns and whose tokens are known."""
    owners: npt.NDArray[np.int64]
    """`[rows, bins]`: the most owners that a page of the row had in a bin of time; -1 where it was cached."""
    requests: int
    evicted: int
    copied: int
    hits: int
    """Pages of prompts that were known."""

    @property
    def free(self) -> npt.NDArray[np.int64]:
        """`[N]` pages that no request owns and the prefix cache has no record of."""
        return self.pages - self.used - self.cached


def read_history(path: Path, rows: int = 512, bins: int = 800) -> PageHistory:
    """Reads a trace of `paged-kv generate --trace`.

    Args:
        path: The path of the file.
        rows: The largest number of rows of `owners`; adjacent pages share one where there are more.
        bins: The number of columns of `owners`.

    Raises:
        ContractError: it cannot be read, or is no such trace; the message names the line.
    """
    try:
        lines = read_regular(path).decode().splitlines()
    except (OSError, ValueError) as error:
        raise ContractError(f"{printable(path)}: cannot be read: {printable(error)}") from None
    if not lines:
        raise ContractError(f"{printable(path)}: is empty")
    number = 1
    events: list[_Event] = []
    try:
        head = _record(lines[0])
        if head.get("format") != FORMAT:
            raise ContractError(f"format is {printable(repr(head.get('format')))}, expected {FORMAT!r}")
        pages = integer("pages", head.get("pages"), 1, MOST_PAGES)
        page_size = integer("page_size", head.get("page_size"), 1)
        for line in lines[1:]:
            number += 1
            events.append(_event(_record(line), pages, events[-1][0] if events else 0.0))
        number = 0
        return _history(pages, page_size, events, rows, bins)
    except PagedKVError as error:
        where = f"line {number}: " if number else ""
        raise ContractError(f"{printable(path)}: {where}{error}") from None


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ContractError(f"no JSON: {printable(error)}") from None
    if not isinstance(record, dict):
        raise ContractError("no JSON object")
    return record


_Event = tuple[float, str, Any, npt.NDArray[np.int64]]


def _event(record: dict[str, Any], pages: int, before: float) -> _Event:
    """Time, kind, request and pages of one line."""
    seconds, listed = record.get("seconds"), record.get("pages")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not before <= seconds < 1e12:
        raise ContractError(f"seconds: expected a number of at least {before}, got {printable(repr(seconds))}")
    if not isinstance(listed, list):
        raise ContractError("pages: expected a list")
    ids = np.array([integer("pages: a page", page, 0, pages - 1) for page in listed], np.int64)
    kind = record.get("event")
    if not isinstance(kind, str) or (kind == "copied" and len(ids) != 2):
        raise ContractError(f"event {printable(repr(kind))} of {len(ids)} pages is unknown")
    return float(seconds), kind, record.get("request"), ids


class _Map:
    """The state of pages over time: 0 free, 1 cached, n + 1 owned by n requests. It is painted where a page changes."""

    def __init__(self, pages: int, rows: int, bins: int, end: float) -> None:
        self.owners = np.zeros(pages, np.int64)
        self.stored = np.zeros(pages, bool)
        self.painted = np.zeros((min(rows, pages), bins), np.int64)
        self.used = self.cached = 0
        self._row = np.arange(pages) * len(self.painted) // pages
        self._since = np.zeros(pages, np.int64)  # the bin from which on a page is what it is
        self._end = end

    def apply(self, time: float, kind: str, pages: npt.NDArray[np.int64]) -> None:
        """Changes the pages of one event.

        Raises:
            ContractError: the event is unknown, or takes an owner from a page that has none.
        """
        column = min(int(time / self._end * self.painted.shape[1]), self.painted.shape[1] - 1) if self._end else 0
        for at, page in enumerate(pages.tolist()):
            before = self._value(page)
            self._paint(page, before, column)
            if kind in _GAINS:
                self.owners[page] += 1
            elif kind == "released":
                self.owners[page] -= 1
            elif kind == "copied":
                self.owners[page] += 1 if at else -1
            elif kind in ("stored", "evicted"):
                self.stored[page] = kind == "stored"
            else:
                raise ContractError(f"event {printable(repr(kind))} is unknown")
            if self.owners[page] < 0:
                raise ContractError(f"event {kind!r}: page {page} has no owner to lose")
            after = self._value(page)
            self.used += (after > 1) - (before > 1)
            self.cached += (after == 1) - (before == 1)
            self._since[page] = column

    def finish(self) -> npt.NDArray[np.int64]:
        """`PageHistory.owners`."""
        for page in range(len(self.owners)):
            self._paint(page, self._value(page), self.painted.shape[1] - 1)
        return np.where(self.painted == 1, -1, np.maximum(self.painted - 1, 0))

    def _value(self, page: int) -> int:
        owners = int(self.owners[page])
        return owners + 1 if owners else int(self.stored[page])

    def _paint(self, page: int, value: int, column: int) -> None:
        cells = self.painted[self._row[page], self._since[page] : column + 1]
        np.maximum(cells, value, out=cells)


def _history(pages: int, page_size: int, events: list[_Event], rows: int, bins: int) -> PageHistory:
    page_map = _Map(pages, rows, bins, events[-1][0] if events else 0.0)
    used, cached = np.zeros(len(events), np.int64), np.zeros(len(events), np.int64)
    for at, (time, kind, _, ids) in enumerate(events):
        page_map.apply(time, kind, ids)
        used[at], cached[at] = page_map.used, page_map.cached
    return PageHistory(
        pages=pages,
        page_size=page_size,
        seconds=np.array([time for time, *_ in events]),
        used=used,
        cached=cached,
        owners=page_map.finish(),
        requests=len({request for _, kind, request, _ in events if kind in _GAINS}),
        evicted=_count(events, "evicted"),
        copied=_count(events, "copied") // 2,
        hits=_count(events, "hit"),
    )


def _count(events: Iterable[_Event], kind: str) -> int:
    return sum(len(ids) for _, event, _, ids in events if event == kind)
