"""The results of servers as a table on the terminal and as a section of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.serve_cases import ServeCase
from benchmarks.serve_results import Row, by_case, systems_of
from benchmarks.servers import SYSTEMS
from paged_kv.bench.other_work import footnote, is_marked

Results = Mapping[str, Any]
"""The results of one CPU family, as its file has them."""
MARK = "serve_cpu"
"""The name of a page's section."""
PAGE_MODEL = "large"
"""The model whose cases the page shows."""


def cell(system: Mapping[str, Any] | None) -> str:
    """`41.2, 0.21 s`: tokens a second, and time to the first token of new prompts."""
    if system is None or system["rate"] is None:
        return ""
    first = "" if system["first_ms"] is None else f", {system['first_ms'] / 1e3:.2g} s"
    return f"{system['rate']:.3g}{first}"


def factors(rows: Sequence[Row]) -> list[str]:
    """`2.1x MAX Serve, built-in, f32 (2)` for each comparison that was measured; the target in brackets."""
    names = {key: system["name"] for row in rows for key, system in row["systems"].items()}
    lines = []
    for row in rows:
        for versus in row["versus"]:
            if versus["ratio"] is not None:
                wanted = "" if versus["at_least"] is None else f" ({versus['at_least']:g})"
                kind = names[versus["ours"]].rpartition(" ")[2]
                lines.append(f"{kind}: {versus['ratio']:.2f}x {names[versus['other']]}{wanted}")
    return lines


def overhead(rows: Sequence[Row]) -> str:
    """`0.8 ms (3 %)`: a step of the server beyond one of the engine."""
    for row in rows:
        if row["overhead"] and row["overhead"]["ms"] is not None:
            return f"{row['overhead']['ms']:.2f} ms ({100 * row['overhead']['share']:.0f} %)"
    return ""


def text(rows: Sequence[Row]) -> str:
    """The rows as lines for a terminal, a system a line."""
    lines = []
    for case, found in by_case(rows).items():
        lines.append(_title(case, found))
        lines += [f"  {system['name']:<30}{system['note'] or cell(system)}" for system in systems_of(found).values()]
        lines += [f"  {line}" for line in factors(found)]
        if cost := overhead(found):
            lines.append(f"  serving costs a step {cost}")
    return "\n".join(filter(None, [*lines, footnote(rows)]))


def newest(families: Sequence[Results]) -> Results:
    """The family that was measured last."""
    return max(families, key=lambda results: max((row["date"] for row in results["rows"]), default=""))


def markdown(results: Results) -> str:
    """The section of docs/performance.md: a family's cases of PAGE_MODEL."""
    shown = {case: rows for case, rows in by_case(results["rows"]).items() if case.model == PAGE_MODEL}
    cases = {case: systems_of(rows) for case, rows in shown.items()}
    keys = [key for key in SYSTEMS if any(_measured(systems, key) for systems in cases.values())]
    names = {key: systems[key]["name"] for systems in cases.values() for key in keys if key in systems}
    lines = [
        _where(results),
        "",
        f"| case | {' | '.join(names[key] for key in keys)} |",
        "|---" * (len(keys) + 1) + "|",
    ]
    lines += [
        f"| {_title(case, shown[case])} | {' | '.join(cell(systems.get(key)) for key in keys)} |"
        for case, systems in cases.items()
    ]
    if note := footnote(row for rows in shown.values() for row in rows):
        lines += ["", f"\\{note}"]
    return "\n".join(lines)


def _title(case: ServeCase, rows: Sequence[Row]) -> str:
    return f"{case.title} *" if any(map(is_marked, rows)) else case.title


def _measured(systems: Mapping[str, Any], key: str) -> bool:
    return key in systems and systems[key]["rate"] is not None


def _where(results: Results) -> str:
    rows = results["rows"]
    machines = "; ".join(dict.fromkeys(row["machine"] for row in rows))
    dates = ", ".join(sorted({row["date"] for row in rows}))
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return f"**{results['family']}**: {machines}; {dates}; {versions}."
