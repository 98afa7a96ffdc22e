"""From a case's jobs to one row of the results: medians, shares and factors; and rows as a CSV file.

The file of a CPU family has a line a measurement, ours or a peer's (`key`), with its case, machine, load, date and
commit. `title`, `bytes` and `flops` are the case's. `ratio` is a peer's time over ours, `target` the share or factor
that is aimed at, `either` whether one target of the case is enough. A line of the case "version" has a system's version
as its `name`; one of "peak" has the FLOP/s of a matrix product of torch as its `flops`. `other_work` is the share of
the cores that other processes used during the turns, in our line the largest of all jobs; older files do not have it.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paged_kv.bench.case_kinds import Case, Versus
from paged_kv.bench.other_work import worst
from paged_kv.errors import ContractError

Row = dict[str, Any]
"""One case's results: see `row_of`."""
Results = dict[str, Any]
"""Those of a CPU family: "family", "versions" and "peaks" by name, and "rows"."""

INTEGERS = ("bytes", "flops")
_OF_BANDWIDTH = ("gb_per_s", "ceiling_gb_per_s", "read_gb_per_s", "share")
FLOATS = ("ms", *_OF_BANDWIDTH, "ratio", "target", "error", "load", "other_work")
FLAGS = ("either", "right")
OF_CASE = ("case", "title", "bytes", "flops", "ceiling", "either", "machine", "load", "date", "commit")
OF_SYSTEM = ("key", "name", "label", "ms", "rate", *_OF_BANDWIDTH, "ratio")
FIELDS = ("family", *OF_CASE, *OF_SYSTEM, "target", "error", "right", "note", "profile")


def row_of(case: Case, jobs: Mapping[str, Mapping[str, Any]], provenance: Mapping[str, Any]) -> Row:
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
        "other_work": worst(job.get("other_work") for job in jobs.values()),
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
    return {"label": versus.label, "ratio": _fastest(peers), "peers": peers}


def _fastest(peers: Sequence[Mapping[str, Any]]) -> float | None:
    """The least factor. A wrong answer sets no mark, however fast."""
    ratios = [peer["ratio"] for peer in peers if peer["ratio"] is not None and peer["right"]]
    return min(ratios, default=None)


def _peer(case: Case, key: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """One peer's figures; `ratio` is its time over ours in the same turn, the median over the turns."""
    peer = job.get("peer", {})
    row: dict[str, Any] = {"key": key, "name": peer.get("name", key), "note": peer.get("note", job.get("note"))}
    measured = "seconds" in peer
    seconds = statistics.median(peer["seconds"]) if measured else None
    row["ms"] = _scale(seconds, 1e3)
    row["rate"] = None if seconds is None else case.rate(seconds)
    row["gb_per_s"] = None if seconds is None else case.bytes / seconds / 1e9
    ratios = (
        [theirs / ours for theirs, ours in zip(peer["seconds"], job["ours"]["seconds"], strict=True)]
        if measured
        else []
    )
    row["ratio"] = _median(ratios)
    row["error"], row["right"] = peer.get("error"), peer.get("right")
    if measured and not peer["right"]:
        row["note"] = _wrong(peer["error"])
    return row | {"other_work": job.get("other_work")}


def _wrong(error: float) -> str:
    return f"wrong result: relative error {error:.1e}"


def _median(values: list[Any]) -> float | None:
    measured = [value for value in values if value is not None]
    return statistics.median(measured) if measured else None


def _scale(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def write_results(results: Results, path: Path) -> None:
    """Writes the file of a CPU family."""
    write_records(({"family": results["family"]} | record for record in _records(results)), path, FIELDS)


def write_records(lines: Iterable[dict[str, Any]], path: Path, fields: Iterable[str]) -> None:
    """Writes a CSV file with these fields first."""
    records = list(lines)
    fields = dict.fromkeys([*fields, *(name for record in records for name in record)])
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _text(value) for name, value in record.items()} for record in records)


def _records(results: Results) -> Iterator[dict[str, Any]]:
    for name, version in results["versions"].items():
        yield {"case": "version", "key": name, "name": version}
    for name, flops in results["peaks"].items():
        yield {"case": "peak", "key": name, "flops": int(float(f"{flops:.6g}"))}
    for row in results["rows"]:
        ours = {name: value for name, value in row.items() if name not in ("versus", "share_target")}
        yield ours | {"key": "ours", "target": row["share_target"], "profile": "\n".join(row.get("profile", ()))}
        shared = {name: row.get(name) for name in OF_CASE}
        for versus in row["versus"]:
            label = {"label": versus["label"], "target": versus["at_least"]}
            yield from (shared | peer | label for peer in versus["peers"])


def _text(value: Any) -> Any:
    """Six digits are more than any of these figures has."""
    return f"{value:.6g}" if isinstance(value, float) else value


def read_results(path: Path) -> Results:
    """A file that `paged-kv bench` wrote.

    Raises:
        ContractError: there is no such file, or it holds something else.
    """
    try:
        records = read_records(path)
        results: Results = {"family": records[0]["family"], "versions": {}, "peaks": {}, "rows": []}
        for record in records:
            _add(results, record)
        return results
    except OSError as error:
        raise ContractError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        pass
    raise ContractError(f"{path}: expected a CSV file of results that paged-kv bench wrote, got another one")


def read_records(path: Path, floats: Iterable[str] = FLOATS) -> list[dict[str, Any]]:
    """The lines of a CSV file, with numbers and flags by their fields; None where a field is empty."""
    with path.open(newline="") as file:
        records: list[dict[str, Any]] = [
            {name: text or None for name, text in record.items()} for record in csv.DictReader(file)
        ]
    of_type: dict[str, Callable[[str], Any]] = (
        dict.fromkeys(INTEGERS, int) | dict.fromkeys(floats, float) | dict.fromkeys(FLAGS, _is_true)
    )
    for record in records:
        record |= {name: of_type[name](text) for name, text in record.items() if name in of_type and text}
    return records


def _is_true(text: str) -> bool:
    return text == "True"


def _add(results: Results, record: dict[str, Any]) -> None:
    """Adds a record to the results; the lines of a case begin with ours."""
    target, key, rows = record.pop("target"), record["key"], results["rows"]
    if record["case"] == "version":
        results["versions"][key] = record["name"]
    elif record["case"] == "peak":
        results["peaks"][key] = record["flops"]
    elif key == "ours":
        of_peers = ("family", "key", "name", "label", "ratio", "profile")
        profile = {"profile": record["profile"].split("\n")} if record["profile"] else {}
        row = {name: value for name, value in record.items() if name not in of_peers}
        rows.append(row | {"share_target": target, "either": bool(row["either"]), "versus": []} | profile)
    else:
        versus = rows[-1]["versus"]
        if not versus or versus[-1]["label"] != record["label"]:
            versus.append({"label": record["label"], "ratio": None, "peers": [], "at_least": target})
        names = ("key", "name", "note", "ms", "rate", "gb_per_s", "ratio", "error", "right")
        others = {name: record[name] for name in ("other_work",) if name in record}
        versus[-1]["peers"].append({name: record[name] for name in names} | others)
        versus[-1]["ratio"] = _fastest(versus[-1]["peers"])


def merged(path: Path, results: Results, cases: Sequence[Case]) -> Results:
    """`results`, and those of an earlier file for what was not measured now, in the order of `cases`."""
    if not path.exists():
        return results
    earlier = read_results(path)
    rows = {row["case"]: row for row in [*earlier["rows"], *results["rows"]]}
    order = [name for name in dict.fromkeys([*(case.name for case in cases), *rows]) if name in rows]
    systems = {name: earlier[name] | results[name] for name in ("versions", "peaks")}
    return results | systems | {"rows": [rows[name] for name in order]}
