"""The README's picture: how many times as long as paged-kv other systems take, case by case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paged_kv.benchmarks.roofline import OURS, THEIRS

LONGEST = 8.0
"""Longer bars are cut here, and say so: the axis begins at 0, so that lengths can be compared."""


def draw(results: dict[str, Any], path: Path) -> None:
    """Writes a PNG of the cases of `results` (`decode_cpu.py`) that were measured against another system."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = [(row, [one for one in row["versus"] if _is_measured(one)]) for row in results["rows"]]
    cases = [(row, versus) for row, versus in cases if row["ms"] is not None and versus]
    bars = sum(1 + len(versus) for _, versus in cases)
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.18 * (bars + len(cases))), dpi=100)
    y, ticks, labels = 0.0, [], []
    for row, versus in cases:
        ticks.append(y)
        labels.append(row["title"])
        bars_of_case = [(1.0, f"{row['ms']:.3g} ms  paged-kv", OURS)]
        bars_of_case += [(one["ratio"], f"{one['ratio']:.2g}x  {one['label']}", THEIRS) for one in versus]
        for ratio, text, color in bars_of_case:
            axes.barh(y, min(ratio, LONGEST), color=color, height=0.8)
            text = f"// {text}" if ratio > LONGEST else text
            at = (min(ratio, LONGEST), y)
            axes.annotate(text, at, (4, 0), textcoords="offset points", va="center", fontsize=7)
            y += 1
        y += 0.8
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlim(0, LONGEST + 3.5)
    axes.set_xticks(range(int(LONGEST) + 1))
    axes.set_xlabel("time in units of paged-kv's in the same run; // = longer than the picture", fontsize=8)
    if cases:
        axes.set_title(f"{cases[0][0]['machine']}, {cases[0][0]['date']}", fontsize=8, loc="left", x=-0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _is_measured(versus: dict[str, Any]) -> bool:
    """Whether there is a figure, and of another system."""
    return versus["ratio"] is not None and not all(peer["key"].startswith("ours") for peer in versus["peers"])
