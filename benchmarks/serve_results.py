"""From the turns of servers to rates, factors and what serving costs; one row a case and group."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serve_cases import CASES, ENGINE, TOGETHER, VERSUS, ServeCase, Versus
from benchmarks.serve_run import Figures

Row = dict[str, Any]


def row_of(case: ServeCase, group: str, figures: Figures, provenance: Mapping[str, str]) -> Row:
    """Medians over the turns; every factor is the median of the ratios within a turn."""
    return {
        "case": case.name,
        "group": group,
        "systems": {key: _system(found) for key, found in figures.items()},
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
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["case"], []).append(row)
    return {case: found[case.name] for case in CASES if case.name in found}


def systems_of(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Each system's figures in a case: of the first group that has any."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        for key, system in row["systems"].items():
            if key not in found or found[key]["rate"] is None:
                found[key] = system
    return found


def _system(found: Mapping[str, Any]) -> dict[str, Any]:
    turns = found["turns"]
    return {
        "name": found["name"],
        "rate": _median(turn["rate"] for turn in turns),
        "rates": [turn["rate"] for turn in turns],
        "first_ms": _median(1e3 * turn["first"] for turn in turns if turn["first"] is not None),
        "note": found.get("note"),
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
    found = list(values)
    return statistics.median(found) if found else None


def write_json(results: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(_rounded(results), indent=1) + "\n")


def _rounded(value: Any) -> Any:
    """Six digits are more than any of these figures has."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
