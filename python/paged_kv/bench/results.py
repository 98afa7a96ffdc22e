"""From a case's jobs to one row of the results: medians, shares and factors."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from paged_kv.bench.case_kinds import Case, Versus

Row = dict[str, Any]
"""One case's results, ready for JSON: see `row_of`."""


def row_of(case: Case, jobs: Mapping[str, Mapping[str, Any]], provenance: Mapping[str, str]) -> Row:
    """The row of `case` from what `job.measure` returned, by peer ("-": alone).

    Ours, the ceiling and the share are of the job without a peer, some of whose threads go on spinning after their work
    (where that job died, medians over the others); every factor is of the job with that peer. Whatever was not measured
    is None. Shares and factors are medians over turns of the ratio within a turn: the memory of some machines changes
    its speed from one second to the next.
    """
    measured = {peer: job for peer, job in jobs.items() if "ours" in job}
    alone = [_ours(case, job) for peer, job in measured.items() if peer == "-" or "-" not in measured]
    errors = [job["ours"]["error"] for job in measured.values()]
    notes = [job["note"] for job in jobs.values() if "note" in job]
    is_right = bool(errors) and all(job["ours"]["right"] for job in measured.values())
    note = None if is_right else _wrong(max(errors)) if errors else "; ".join(dict.fromkeys(notes)) or "not measured"
    seconds = _median([one["seconds"] for one in alone])
    return {
        "case": case.name,
        "title": case.title,
        "bytes": case.bytes,
        "flops": case.flops,
        "ms": _scale(seconds, 1e3),
        "rate": None if seconds is None else case.rate(seconds),
        "gb_per_s": None if seconds is None else case.bytes / seconds / 1e9,
        "ceiling": case.ceiling,
        "ceiling_gb_per_s": _scale(_median([one["ceiling"] for one in alone]), 1e-9),
        "read_gb_per_s": _scale(_median([one["read"] for one in alone]), 1e-9),
        "share": _median([one["share"] for one in alone]) if case.is_memory_bound else None,
        "error": max(errors, default=None),
        "right": is_right,
        "note": note,
        "versus": [_versus(case, versus, jobs) for versus in case.versus],
        **provenance,
        **({"profile": lines} if (lines := jobs.get("-", {}).get("profile")) else {}),
    }


def _ours(case: Case, job: Mapping[str, Any]) -> dict[str, float | None]:
    """Medians over the turns of a job: seconds, bytes a second of its own loops, and the share of them."""
    taken = job["ours"]["seconds"]
    bandwidth = {
        which: [job[which]["bytes"] / seconds for seconds in job[which]["seconds"]]
        for which in ("read", "copy")
        if which in job
    }
    ceiling = bandwidth.get(case.ceiling)
    shares = [case.bytes / one / limit for one, limit in zip(taken, ceiling, strict=True)] if ceiling else []
    return {
        "seconds": statistics.median(taken),
        "read": _median(bandwidth.get("read", [])),
        "ceiling": _median(ceiling or []),
        "share": _median(shares),
    }


def _versus(case: Case, versus: Versus, jobs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    peers = [_peer(case, key, jobs[key]) for key in versus.peers if key in jobs]
    # A wrong answer sets no mark, however fast.
    ratios = [peer["ratio"] for peer in peers if peer["ratio"] is not None and peer["right"]]
    return {
        "label": versus.label,
        "ratio": min(ratios, default=None),
        "peers": peers,
    }


def _peer(case: Case, key: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """One peer's figures; `ratio` is its time over ours in the same turn, the median over the turns."""
    found = job.get("peer", {})
    row: dict[str, Any] = {"key": key, "name": found.get("name", key), "note": found.get("note", job.get("note"))}
    measured = "seconds" in found
    seconds = statistics.median(found["seconds"]) if measured else None
    row["ms"] = _scale(seconds, 1e3)
    row["rate"] = None if seconds is None else case.rate(seconds)
    row["gb_per_s"] = None if seconds is None else case.bytes / seconds / 1e9
    ratios = (
        [theirs / ours for theirs, ours in zip(found["seconds"], job["ours"]["seconds"], strict=True)]
        if measured
        else []
    )
    row["ratio"] = _median(ratios)
    row["error"], row["right"] = found.get("error"), found.get("right")
    if measured and not found["right"]:
        row["note"] = _wrong(found["error"])
    return row


def _wrong(error: float) -> str:
    return f"wrong result: relative error {error:.1e}"


def _median(values: list[Any]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _scale(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
