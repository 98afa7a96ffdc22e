"""Draws prefill, cascade and MLA: `python docs/pictures_attention.py` writes docs/pictures/attention_*.png."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

CACHED, NEW, SHARED, OP = "#dbeafe", "#ffedd5", "#dcfce7", "#fef3c7"
HIDDEN, PLAIN, LINE = "#ffffff", "#f1f5f9", "#475569"
"""Colours: cached tokens, new tokens, what is shared or kept, an op; what is not seen, what is none of these, lines."""
CELL = 1.0


def cell(axes: Axes, x: float, y: float, color: str, text: str = "", width: float = CELL, size: float = 8) -> None:
    """A token or a range of tokens, its upper left corner at x, y."""
    axes.add_patch(Rectangle((x, y), width, CELL, facecolor=color, edgecolor=LINE, linewidth=0.8))
    axes.text(x + width / 2, y + CELL / 2, text, ha="center", va="center", fontsize=size)


def label(axes: Axes, x: float, y: float, text: str, size: float = 9, ha: str = "left", weight: str = "normal") -> None:
    axes.text(x, y, text, ha=ha, va="center", fontsize=size, weight=weight, color="#1e293b")


def box(axes: Axes, x: float, y: float, width: float, title: str, text: str, color: str) -> None:
    axes.add_patch(FancyBboxPatch((x, y), width, 1.7, "round,pad=0,rounding_size=0.2", facecolor=color, edgecolor=LINE))
    axes.text(x + width / 2, y + 0.6, title, ha="center", va="center", fontsize=9, weight="bold")
    axes.text(x + width / 2, y + 1.2, text, ha="center", va="center", fontsize=7.5, color="#334155")


def arrow(axes: Axes, tail: tuple[float, float], head: tuple[float, float]) -> None:
    axes.annotate("", head, tail, arrowprops={"arrowstyle": "-|>", "color": LINE, "shrinkA": 0, "shrinkB": 0})


def key(axes: Axes, x: float, y: float, entries: list[tuple[str, str]]) -> None:
    """The meaning of the colours, one line each."""
    for i, (color, text) in enumerate(entries):
        axes.add_patch(Rectangle((x, y + 0.9 * i), 0.6, 0.6, facecolor=color, edgecolor=LINE, linewidth=0.8))
        label(axes, x + 0.9, y + 0.9 * i + 0.3, text, size=8)


def mask_grid(axes: Axes, x: float, y: float, rows: list[set[int]], cached: int, tokens: int, title: str) -> None:
    """Rows of one request by the tokens that they see; tokens from `cached` on are new in this step."""
    label(axes, x, y - 0.7, title, weight="bold")
    for r, seen in enumerate(rows):
        for j in range(tokens):
            color = HIDDEN if j not in seen else CACHED if j < cached else NEW
            cell(axes, x + j, y + r, color)
    label(axes, x + tokens / 2, y + len(rows) + 0.5, "tokens of the request", size=8, ha="center")
    axes.text(x - 0.4, y + len(rows) / 2, "rows of q", rotation=90, ha="center", va="center", fontsize=8)


def prefill(axes: Axes) -> None:
    """Three masks of the same request: 4 rows after 4 cached tokens."""
    causal = [set(range(5 + r)) for r in range(4)]
    every = [set(range(8)) for _ in range(4)]
    custom = [{0, 1, 2, 3, 4}, {0, 1, 2, 3, 5}, {0, 1, 4, 5, 6}, {2, 3, 7}]
    mask_grid(axes, 0.5, 1, causal, 4, 8, "causal: aligned to the end")
    mask_grid(axes, 10.5, 1, every, 4, 8, "not causal")
    mask_grid(axes, 20.5, 1, custom, 4, 8, "custom mask")
    label(axes, 0.1, 8, "Rows of several requests stand one after the other:", weight="bold")
    for first, count, color, text in ((0, 4, PLAIN, "request 0"), (4, 1, HIDDEN, "1"), (5, 7, PLAIN, "request 2")):
        for i in range(count):
            cell(axes, 0.1 + first + i, 8.6, color)
        label(axes, 0.1 + first + count / 2, 10.1, text, size=8, ha="center")
    label(axes, 12.6, 9.1, "q  [12, heads, D],  qo_indptr = [0, 4, 5, 12]", size=8.5)
    key(axes, 23.5, 8.2, [(CACHED, "cached before"), (NEW, "new in this step"), (HIDDEN, "not seen")])


def cascade(axes: Axes) -> None:
    """A prefix of three requests, two of which share more."""
    label(axes, 3.5, 0.3, "level 0: one group", ha="left", weight="bold")
    label(axes, 11.5, 0.3, "level 1: two groups", ha="left", weight="bold")
    label(axes, 18.5, 0.3, "level 2: three groups", ha="left", weight="bold")
    for r in range(3):
        label(axes, 0, 1.5 + 1.5 * r, f"request {r}", size=9)
    axes.add_patch(Rectangle((3.5, 1), 7, 4, facecolor=SHARED, edgecolor=LINE, linewidth=0.8))
    label(axes, 7, 2.7, "8 pages, read once", ha="center")
    label(axes, 7, 3.5, "positions 0 to 127", size=8, ha="center")
    axes.add_patch(Rectangle((11.5, 1), 5, 2.5, facecolor=SHARED, edgecolor=LINE, linewidth=0.8))
    label(axes, 14, 1.9, "2 pages, read once", ha="center")
    label(axes, 14, 2.6, "128 to 159", size=8, ha="center")
    label(axes, 14, 4.5, "none", size=8, ha="center")
    for r, (width, text) in enumerate(((3, "160 to 175"), (4.5, "160 to 200"), (3, "128 to 140"))):
        cell(axes, 18.5, 1 + 1.5 * r, CACHED, text, width)
    for x, text in ((7, "o, lse"), (14, "o, lse"), (20.5, "o, lse")):
        arrow(axes, (x, 5.3), (x, 6.3))
        label(axes, x + 0.3, 5.75, text, size=8)
    axes.add_patch(
        FancyBboxPatch((5.5, 6.4), 16.5, 1.1, "round,pad=0,rounding_size=0.2", facecolor=NEW, edgecolor=LINE)
    )
    label(axes, 13.75, 6.95, "the states of each row are merged: weights 2^(lse - greatest lse)", ha="center")


def mla(axes: Axes) -> None:
    """The cached arrays, and where the up-projections went."""
    label(axes, 0, 0.3, "one slot of the cache, of one layer, for all 128 heads", weight="bold")
    cell(axes, 0, 0.9, CACHED, "ckv: 512, of which K and V are made", 13, size=8.5)
    cell(axes, 13, 0.9, SHARED, "kpe: 64, rotated", 4.5, size=8.5)
    label(axes, 18.2, 1.4, "576 numbers instead of 128 heads x (192 + 128) = 40960", size=8.5)
    box(axes, 0, 3.4, 6, "q_nope  [R, 128, 128]", "times W_UK: [R, 128, 512]", NEW)
    box(axes, 0, 5.9, 6, "q_pe  [R, 128, 64]", "rotated", NEW)
    box(axes, 8.5, 4.6, 7.2, "mla_attention", "scores: q_nope . ckv + q_pe . kpe", OP)
    box(axes, 18, 4.6, 5.6, "o  [R, 128, 512]", "softmax . ckv", NEW)
    box(axes, 26.4, 4.6, 6, "times W_UV", "[R, 128, 128], then o_proj", NEW)
    arrow(axes, (6, 4.25), (8.5, 5.2))
    arrow(axes, (6, 6.75), (8.5, 5.8))
    arrow(axes, (11.6, 1.9), (11.6, 4.6))
    label(axes, 12, 3.2, "read once for all heads", size=8)
    arrow(axes, (15.7, 5.45), (18, 5.45))
    arrow(axes, (23.6, 5.45), (26.4, 5.45))


PICTURES: dict[str, tuple[Callable[[Axes], None], float, float]] = {
    "prefill": (prefill, 29, 11.2),
    "cascade": (cascade, 25, 8),
    "mla": (mla, 33, 8),
}
"""By name: what draws it, and the width and height of its axes."""


def draw(name: str, folder: Path) -> None:
    paint, width, height = PICTURES[name]
    figure, axes = pyplot.subplots(figsize=(width * 0.3, height * 0.3), dpi=110)
    axes.set(xlim=(-0.8, width), ylim=(height, -0.3))
    axes.set_axis_off()
    paint(axes)
    figure.tight_layout(pad=0.2)
    figure.savefig(folder / f"attention_{name}.png")
    pyplot.close(figure)


if __name__ == "__main__":
    for picture in PICTURES:
        draw(picture, Path(__file__).parent / "pictures")
