"""The results of servers as a table on the terminal, as a section of a page, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import OURS, THEIRS, save
from benchmarks.serve_cases import MODELS, ServeCase
from benchmarks.serve_results import Row, by_case, systems_of
from benchmarks.servers import SYSTEMS

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
        lines.append(case.title)
        lines += [f"  {system['name']:<30}{system['note'] or cell(system)}" for system in systems_of(found).values()]
        lines += [f"  {line}" for line in factors(found)]
        if cost := overhead(found):
            lines.append(f"  serving costs a step {cost}")
    return "\n".join(lines)


def newest(families: Sequence[Results]) -> Results:
    """The family that was measured last."""
    return max(families, key=lambda results: max((row["date"] for row in results["rows"]), default=""))


def markdown(results: Results) -> str:
    """The section of docs/performance.md: a family's cases of PAGE_MODEL."""
    cases = {case: systems_of(rows) for case, rows in by_case(results["rows"]).items() if case.model == PAGE_MODEL}
    keys = [key for key in SYSTEMS if any(_measured(systems, key) for systems in cases.values())]
    names = {key: systems[key]["name"] for systems in cases.values() for key in keys if key in systems}
    lines = [
        _where(results),
        "",
        f"| case | {' | '.join(names[key] for key in keys)} |",
        "|---" * (len(keys) + 1) + "|",
    ]
    lines += [f"| {case.title} | {' | '.join(cell(cases[case].get(key)) for key in keys)} |" for case in cases]
    return "\n".join(lines)


def draw(results: Results, path: Path) -> None:
    """Writes a PNG: tokens a second of every system, a panel a model and batch size, of one family."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = by_case(results["rows"])
    every = {case: systems_of(found) for case, found in cases.items()}
    models = [model for model in MODELS if any(case.model == model for case in cases)]
    heights = [_bars(every, model) for model in models]
    figure, axes = pyplot.subplots(
        len(models), 2, figsize=(12, 1.5 + 0.17 * sum(heights)), dpi=100, height_ratios=heights, squeeze=False
    )
    for model, row in zip(models, axes, strict=True):
        for batch, panel in zip((1, 8), row, strict=True):
            _panel(panel, [case for case in cases if (case.model, case.batch) == (model, batch)], every)
            title = f"{MODELS[model].title}, {batch} request{'s' if batch > 1 else ''}"
            panel.set_title(title, fontsize=9, loc="left")
    where = f"{rows[0]['machine']}, {rows[-1]['date']}" if (rows := results["rows"]) else ""
    figure.supxlabel(f"tokens a second while decoding, all requests together; {where}", fontsize=8)
    figure.tight_layout()
    save(figure, path)
    pyplot.close(figure)


def _bars(every: Mapping[ServeCase, Mapping[str, Any]], model: str) -> int:
    counts = [
        sum(
            1 + sum(one["rate"] is not None for one in systems.values())
            for case, systems in every.items()
            if (case.model, case.batch) == (model, batch)
        )
        for batch in (1, 8)
    ]
    return max(counts)


def _panel(axes: Any, cases: Sequence[ServeCase], every: Mapping[ServeCase, Mapping[str, Any]]) -> None:
    y, ticks, labels = 0.0, [], []
    for case in cases:
        ticks.append(y)
        labels.append(f"context {case.context}")
        for key in SYSTEMS:
            if key.startswith("engine") or not _measured(every[case], key):
                continue
            system = every[case][key]
            axes.barh(y, system["rate"], color=OURS if key.startswith("ours") else THEIRS, height=0.8)
            where = (system["rate"], y)
            label = f"{system['rate']:.3g}  {system['name']}"
            axes.annotate(label, where, (4, 0), textcoords="offset points", va="center", fontsize=7)
            y += 1
        y += 0.8
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.set_ylim(max(y, 1), -1)
    axes.margins(x=0.45)
    axes.spines[["top", "right"]].set_visible(False)


def _measured(systems: Mapping[str, Any], key: str) -> bool:
    return key in systems and systems[key]["rate"] is not None


def _where(results: Results) -> str:
    rows = results["rows"]
    machines = "; ".join(dict.fromkeys(row["machine"] for row in rows))
    dates = ", ".join(sorted({row["date"] for row in rows}))
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return f"**{results['family']}**: {machines}; {dates}; {versions}."
