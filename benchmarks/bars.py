"""The README's picture: how many times as long as paged-kv other systems take, case by case, a panel a CPU family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paged_kv.benchmarks.pages import by_case, ratios
from paged_kv.benchmarks.results import Row
from paged_kv.benchmarks.roofline import OURS, THEIRS

LONGEST = 8.0
"""Longer bars are cut here, and say so: the axis begins at 0, so that lengths can be compared."""


def draw(families: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes a PNG of the cases that were measured against another system, from the results of each family."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = {name: rows for name, rows in by_case(families).items() if any(row and ratios(row) for row in rows)}
    others = {
        name: dict.fromkeys(label for row in rows if row for label in ratios(row)) for name, rows in cases.items()
    }
    bars = sum(1 + len(labels) for labels in others.values())
    figure, panels = pyplot.subplots(
        1, len(families), figsize=(5 + 4 * len(families), 1 + 0.18 * (bars + len(cases))), dpi=100, squeeze=False
    )
    for at, (results, axes) in enumerate(zip(families, panels[0], strict=True)):
        y, ticks = 0.0, []
        for name, rows in cases.items():
            ticks.append(y)
            row = rows[at]
            for label in (None, *others[name]):
                if row is not None:
                    _bar(axes, y, row, label)
                y += 1
            y += 0.8
        titles = (
            [next(row["title"] for row in rows if row) for rows in cases.values()] if at == 0 else [""] * len(cases)
        )
        axes.set_yticks(ticks, titles, fontsize=8)
        axes.set_ylim(y, -1)
        axes.set_xlim(0, LONGEST + 4.5)
        axes.set_xticks(range(int(LONGEST) + 1))
        dates = sorted(row["date"] for rows in cases.values() if (row := rows[at]))
        axes.set_title(f"{results['family']}, {dates[-1] if dates else ''}", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("time in units of paged-kv's in the same run; // = longer than the picture", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _bar(axes: Any, y: float, row: Row, label: str | None) -> None:
    """Ours (None), or the other system of that label where it was measured."""
    found = 1.0 if label is None else ratios(row).get(label)
    if found is None:
        return
    text = f"{row['ms']:.3g} ms  paged-kv" if label is None else f"{found:.2g}x  {label}"
    axes.barh(y, min(found, LONGEST), color=OURS if label is None else THEIRS, height=0.8)
    text = f"// {text}" if found > LONGEST else text
    axes.annotate(text, (min(found, LONGEST), y), (4, 0), textcoords="offset points", va="center", fontsize=7)
