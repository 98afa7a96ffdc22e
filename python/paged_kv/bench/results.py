"""From a case's jobs to one row of the results: medians, shares, factors, and whether they reach their targets."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from paged_kv.bench.case_kinds import AppendCase, AttentionCase, CascadeCase, Case, StepCase

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
    errors = [job["ours"]["error"] for job in jobs.values() if "ours" in job]
    notes = [job["note"] for job in jobs.values() if "note" in job]
    seconds = _median([one["seconds"] for one in alone])
    return {
        "case": case.name,
        "title": case.title,
        "bytes": case.bytes,
        "flops": case.flops,
        "ms": _scale(seconds, 1e3),
        "rate": None if seconds is None else rate(case, seconds),
        "gb_per_s": None if seconds is None else case.bytes / seconds / 1e9,
        "ceiling": "copy" if isinstance(case, AppendCase) else "read",
        "ceiling_gb_per_s": _scale(_median([one["ceiling"] for one in alone]), 1e-9),
        "read_gb_per_s": _scale(_median([one["read"] for one in alone]), 1e-9),
        "share": _median([one["share"] for one in alone]) if _memory_bound(case) else None,
        "share_target": case.share,
        "either": case.either,
        "error": max(errors, default=None),
        "right": bool(errors) and all(job["ours"]["right"] for job in jobs.values() if "ours" in job),
        "note": None if alone else "; ".join(dict.fromkeys(notes)) or "not measured",
        "overhead_us": _scale(
            _median([statistics.median(job["overhead"]["seconds"]) for job in jobs.values() if "overhead" in job]), 1e6
        ),
        "versus": [_versus(case, versus, jobs) for versus in case.versus],
        **provenance,
    }


def met(row: Row) -> bool | None:
    """Return whether a row reaches all it should; None where it has no target."""
    pairs = [] if row["share_target"] is None else [(row["share"], row["share_target"])]
    pairs += [(one["ratio"], one["at_least"]) for one in row["versus"] if one["at_least"] is not None]
    reached = [found >= least for found, least in pairs if found is not None]
    if not reached:
        return None
    return (any(reached) if row.get("either") else all(reached)) and bool(row["right"])


def rate(case: Case, seconds: float) -> str:
    """Return what a user would count: bytes, tokens or arithmetic a second."""
    if isinstance(case, StepCase):
        return f"{case.batch * case.tokens / seconds:.1f} tokens/s"
    if isinstance(case, CascadeCase) or (isinstance(case, AttentionCase) and case.new_tokens > 1):
        return f"{case.flops / seconds / 1e9:.0f} GFLOP/s"
    return f"{case.bytes / seconds / 1e9:.1f} GB/s"


def _ours(case: Case, job: Mapping[str, Any]) -> dict[str, float | None]:
    """Medians over the turns of a job: seconds, bytes a second of its own loops, and the share of them."""
    taken = job["ours"]["seconds"]
    bandwidth = {
        which: [job[which]["bytes"] / seconds for seconds in job[which]["seconds"]]
        for which in ("read", "copy")
        if which in job
    }
    ceiling = bandwidth.get("copy" if isinstance(case, AppendCase) else "read")
    shares = [case.bytes / one / limit for one, limit in zip(taken, ceiling, strict=True)] if ceiling else []
    return {
        "seconds": statistics.median(taken),
        "read": _median(bandwidth.get("read", [])),
        "ceiling": _median(ceiling or []),
        "share": _median(shares),
    }


def _memory_bound(case: Case) -> bool:
    if isinstance(case, CascadeCase):  # each token that is read is multiplied with every request's query
        return False
    new = case.new_tokens if isinstance(case, AttentionCase) else case.tokens if isinstance(case, StepCase) else 1
    return new == 1


def _versus(case: Case, versus: Any, jobs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    peers = [_peer(case, key, jobs[key]) for key in versus.peers if key in jobs]
    # A wrong answer sets no mark, however fast.
    ratios = [peer["ratio"] for peer in peers if peer["ratio"] is not None and peer["right"]]
    return {
        "label": versus.label,
        "at_least": versus.at_least,
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
    row["rate"] = None if seconds is None else rate(case, seconds)
    row["gb_per_s"] = None if seconds is None else case.bytes / seconds / 1e9
    ratios = (
        [theirs / ours for theirs, ours in zip(found["seconds"], job["ours"]["seconds"], strict=True)]
        if measured
        else []
    )
    row["ratio"] = _median(ratios)
    row["error"], row["right"] = found.get("error"), found.get("right")
    if measured and not found["right"]:
        row["note"] = f"wrong result: relative error {found['error']:.1e}"
    return row


def _median(values: list[Any]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _scale(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
