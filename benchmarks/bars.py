"""The README's picture: how many times as long as paged-kv other systems take, case by case, on a log scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paged_kv.benchmarks.roofline import OURS, THEIRS


def draw(results: dict[str, Any], path: Path) -> None:
    """Writes a PNG of the cases of `results` (`decode_cpu.py`) that were measured against another system."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = [(row, [one for one in row["versus"] if one["ratio"] is not None]) for row in results["rows"]]
    cases = [(row, versus) for row, versus in cases if row["ms"] is not None and versus]
    lines = sum(1 + len(versus) for _, versus in cases)
    figure, axes = pyplot.subplots(figsize=(9, 0.8 + 0.21 * (lines + len(cases))), dpi=120)
    y, ticks, labels = 0.0, [], []
    for row, versus in cases:
        axes.barh(y, 1, color=OURS, height=0.8)
        axes.annotate(f"{row['ms']:.3g} ms", (1, y), (4, 0), textcoords="offset points", va="center", fontsize=7)
        ticks.append(y)
        labels.append(row["title"])
        for one in versus:
            y += 1
            axes.barh(y, one["ratio"], color=THEIRS, height=0.8)
            text = f"{one['ratio']:.2g}x  {one['label']}"
            axes.annotate(text, (one["ratio"], y), (4, 0), textcoords="offset points", va="center", fontsize=7)
        y += 1.8
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.invert_yaxis()
    axes.set(xscale="log", xlim=(0.5, 4 * max([1, *(one["ratio"] for _, versus in cases for one in versus)])))
    axes.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    axes.set_xlabel("time in units of paged-kv's, in the same run (shorter is faster)")
    if cases:
        axes.set_title(f"{cases[0][0]['machine']}, {cases[0][0]['date']}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.barh(0, 0, color=OURS, label="paged-kv")
    axes.barh(0, 0, color=THEIRS, label="other systems")
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
