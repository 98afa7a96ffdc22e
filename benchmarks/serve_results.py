"""From the turns of servers to rates, factors and what serving costs; one row a case and group."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serve_cases import CASES, ENGINE, TOGETHER, VERSUS, ServeCase, Versus
from benchmarks.serve_run import Figures
from paged_kv.bench.results import read_records, write_records

Row = dict[str, Any]
Results = dict[str, Any]
"""Those of a CPU family: "family", "versions" by system, and "rows"."""
FACTS = ("case", "group", "machine", "load", "date", "commit")
FIGURES = ("rate", "first_ms", "ratio", "first_ratio", "at_least", "ms", "share")
FLOATS = (*FIGURES, "load", "other_work")
FIELDS = ("family", *FACTS, "key", "other", "name", *FIGURES, "rates", "note")
SERVING = "serving"
"""The `key` of what serving costs a step."""


def row_of(case: ServeCase, group: str, figures: Figures, provenance: Mapping[str, Any]) -> Row:
    """Medians over the turns; every factor is the median of the ratios within a turn."""
    return {
        "case": case.name,
        "group": group,
        "systems": {key: _system(system) for key, system in figures.items()},
        "versus": [_versus(case, one, figures) for one in VERSUS if one.ours in figures and one.other in figures],
        "overhead": _overhead(case, figures),
        **provenance,
    }


def merged(earlier: Sequence[Row], now: Sequence[Row]) -> list[Row]:
    """Both, in the grid's order; a case and group that were measured now replace those of an earlier run."""
    rows = {(row["case"], row["group"]): row for row in [*earlier, *now]}
    order = [(case.name, group) for case in CASES for group in TOGETHER[case.model]]
    return [rows[key] for key in order if key in rows]


def by_case(rows: Iterable[Row]) -> dict[ServeCase, list[Row]]:
    """The groups' rows of each case that has any, in the grid's order."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["case"], []).append(row)
    return {case: by_name[case.name] for case in CASES if case.name in by_name}


def systems_of(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Each system's figures in a case: of the first group that has any."""
    systems: dict[str, dict[str, Any]] = {}
    for row in rows:
        for key, system in row["systems"].items():
            if key not in systems or systems[key]["rate"] is None:
                systems[key] = system
    return systems


def _system(system: Mapping[str, Any]) -> dict[str, Any]:
    turns = system["turns"]
    return {
        "name": system["name"],
        "rate": _median(turn["rate"] for turn in turns),
        "rates": [turn["rate"] for turn in turns],
        "first_ms": _median(1e3 * turn["first"] for turn in turns if turn["first"] is not None),
        "note": system.get("note"),
    }


def _versus(case: ServeCase, versus: Versus, figures: Figures) -> dict[str, Any]:
    turns = list(zip(figures[versus.ours]["turns"], figures[versus.other]["turns"], strict=False))
    fresh = [(ours, other) for ours, other in turns if ours["first"] is not None and other["first"] is not None]
    return {
        "ours": versus.ours,
        "other": versus.other,
        "ratio": _median(ours["rate"] / other["rate"] for ours, other in turns),
        "first_ratio": _median(other["first"] / ours["first"] for ours, other in fresh),
        "at_least": versus.at_least(case),
    }


def _overhead(case: ServeCase, figures: Figures) -> dict[str, float | None] | None:
    """Return what a step of the server costs beyond one of the engine: ms, and its part of the engine's step."""
    if not all(key in figures for key in ENGINE):
        return None
    server, engine = (
        [case.batch / turn["rate"] for turn in figures[key]["turns"]] for key in ENGINE
    )  # seconds of a step
    pairs = list(zip(server, engine, strict=False))
    return {
        "ms": _median(1e3 * (ours - bare) for ours, bare in pairs),
        "share": _median(ours / bare - 1 for ours, bare in pairs),
    }


def _median(values: Iterable[float]) -> float | None:
    measured = list(values)
    return statistics.median(measured) if measured else None


def _other_work(row: Mapping[str, Any]) -> dict[str, Any]:
    """The share of the cores that others used; nothing in files from before it was measured."""
    return {name: row[name] for name in ("other_work",) if name in row}


def write_results(results: Results, path: Path) -> None:
    """Writes the file of a CPU family: a line for each system, comparison and cost of serving in a case and group."""
    records = [{"case": "version", "key": name, "name": version} for name, version in results["versions"].items()]
    for row in results["rows"]:
        facts = {name: row.get(name) for name in FACTS} | _other_work(row)
        for key, system in row["systems"].items():
            rates = " ".join(f"{rate:.6g}" for rate in system["rates"])
            records.append(facts | {"key": key} | system | {"rates": rates})
        records += [facts | {"key": one["ours"]} | one for one in row["versus"]]
        if row["overhead"] is not None:
            records.append(facts | {"key": SERVING} | row["overhead"])
    for record in records:
        record.pop("ours", None)
    write_records(({"family": results["family"]} | record for record in records), path, FIELDS)


def read_results(path: Path) -> Results:
    """A file that `write_results` wrote."""
    records = read_records(path, FLOATS)
    rows: dict[tuple[str, str], Row] = {}
    versions = {record["key"]: record["name"] for record in records if record["case"] == "version"}
    for record in records[len(versions) :]:
        facts = {name: record[name] for name in FACTS} | _other_work(record)
        row = rows.setdefault(
            (record["case"], record["group"]), facts | {"systems": {}, "versus": [], "overhead": None}
        )
        if record["key"] == SERVING:
            row["overhead"] = {name: record[name] for name in ("ms", "share")}
        elif record["other"]:
            names = ("other", "ratio", "first_ratio", "at_least")
            row["versus"].append({"ours": record["key"]} | {name: record[name] for name in names})
        else:
            system = {name: record[name] for name in ("name", "rate", "first_ms", "note")}
            system["rates"] = [float(rate) for rate in (record["rates"] or "").split()]
            row["systems"][record["key"]] = system
    return {"family": records[0]["family"], "versions": versions, "rows": list(rows.values())}
