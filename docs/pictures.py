"""Draws the pictures of docs/architecture.md: `python docs/pictures.py` writes flow_*.png and nouns.png to pictures."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

PYTHON, GRAPH, DEVICE, DATA = "#fef3c7", "#dbeafe", "#ffedd5", "#ffffff"
"""Colours: the Python package, the graph that it builds, what runs on the device, data."""
WIDTH, HEIGHT = 2.5, 0.82

Box = tuple[float, float, str, str, str]
"""Column, row, title, what it does or where it is, colour."""
Arrow = tuple[int, int, str]
"""From box to box, by number, and its label."""

MODEL: list[Box] = [
    (0, 0, "prompt", "text", DATA),
    (1, 0, "tokenizer", "engine/tokenizer.py", PYTHON),
    (2, 0, "schedule a step", "engine/", PYTHON),
    (3, 0, "page pool", "pool", PYTHON),
    (2, 1, "DecodeInputs", "graphs/inputs.py", DATA),
    (2, 2, "one model.execute", "graphs/models/", GRAPH),
    (0, 2, "project, rotate", "graphs/layers.py, mojo_ops/linear", GRAPH),
    (0, 3, "append in place", "mojo_ops/transfer", DEVICE),
    (1, 3, "attend over pages", "mojo_ops/attention", DEVICE),
    (2, 3, "logits [B, vocab]", "of each request's last token", DATA),
    (3, 3, "sampler", "engine/sampling.py", PYTHON),
    (3, 1.5, "token", "to the caller", DATA),
]
MODEL_ARROWS: list[Arrow] = [
    (0, 1, ""), (1, 2, ""), (2, 3, "pages"), (2, 4, ""), (4, 5, ""), (5, 6, "each layer"), (6, 7, ""), (7, 8, ""),
    (8, 9, ""), (9, 10, ""), (10, 11, ""), (11, 3, "extend, or free"),
]  # fmt: skip

PROGRAM: list[Box] = [
    (0, 0, "graph of a step", "graphs/models/", GRAPH),
    (1, 0, "read once", "runtime/graph_reading.py", PYTHON),
    (2, 0, "calls of kernels", "runtime/program_ops.py", PYTHON),
    (3, 0, "a slot for each value", "runtime/program.py", PYTHON),
    (1, 1, "constants, weights", "and pages, by address", DATA),
    (2, 1, "a list of numbers", "constant + coefficient * symbol", DATA),
    (3, 1, "arena", "values, by their lifetimes", DATA),
    (1, 2, "sizes, inputs", "T, B, N, DecodeInputs", DATA),
    (2, 2, "one call", "isa/program.mojo", DEVICE),
    (3, 2, "kernel after kernel", "on a team of threads, isa/team.mojo", DEVICE),
    (2, 3, "error", "with the op's name", PYTHON),
    (3, 3, "logits [N, vocab]", "in fresh memory", DATA),
]
PROGRAM_ARROWS: list[Arrow] = [
    (0, 1, ""), (1, 2, "ops"), (2, 3, ""), (1, 4, ""), (2, 5, ""), (3, 6, ""), (4, 5, ""), (6, 5, ""), (5, 8, ""),
    (7, 8, "a step"), (8, 9, ""), (8, 10, "refused"), (9, 11, "done"),
]  # fmt: skip

CALL: list[Box] = [
    (0, 0, "decode.run(q, cache)", "flashinfer/decode.py", PYTHON),
    (1, 0, "check, make operands", "calls/attend.py", PYTHON),
    (2, 0, "runtime of the device", "runtime/session.py", PYTHON),
    (3, 0, "CPU: numbers", "runtime/host_calls.py", PYTHON),
    (3, 1, "library of kernels", "attention/cpu/library.mojo", DEVICE),
    (3, 2, "segments on all threads", "attention/cpu/dispatch.mojo", DEVICE),
    (2, 1, "GPU: compiled graph", "read from disk, or built once", GRAPH),
    (2, 2, "op", "attention_ops.mojo", DEVICE),
    (2, 3, "kernel", "attention/gpu", DEVICE),
    (3, 3, "o, lse", "in the kind of q, on its device", DATA),
]
CALL_ARROWS: list[Arrow] = [
    (0, 1, ""), (1, 2, ""), (2, 3, ""), (3, 4, ""), (4, 5, ""), (5, 9, ""), (2, 6, ""), (6, 7, ""), (7, 8, ""),
    (8, 9, ""),
]  # fmt: skip

NOUNS: list[Box] = [
    (0, 0, "Pool", "pool/page_pool.py", PYTHON),
    (1, 0, "index arrays", "indptr, indices, seq_lens, ...", DATA),
    (2, 0, "Table", "calls/table.py", PYTHON),
    (3, 0, "Rows", "calls/rows.py", PYTHON),
    (1, 1, "arguments", "sm_scale, window_left, ...", DATA),
    (2, 1, "Options", "options.py", PYTHON),
    (3, 1, "one op", "append, gather, attend", DEVICE),
    (1, 2, "arrays of K and V", "of torch, NumPy, JAX, MAX", DATA),
    (2, 2, "Pages", "arrays/pages.py", PYTHON),
]
NOUNS_ARROWS: list[Arrow] = [
    (0, 1, "page ids"), (1, 2, "checked"), (2, 3, ""), (3, 6, ""), (4, 5, "checked"), (5, 6, ""), (7, 8, "viewed"),
    (8, 6, ""),
]  # fmt: skip


def draw(boxes: list[Box], arrows: list[Arrow], path: Path) -> None:
    columns, rows = 1 + max(box[0] for box in boxes), 1 + max(box[1] for box in boxes)
    figure, axes = pyplot.subplots(figsize=(2.55 * columns, 1.25 * rows), dpi=110)
    axes.set(xlim=(-0.1, 3.1 * columns - 0.5), ylim=(1.4 * rows - 0.5, -0.1))
    axes.set_axis_off()
    for column, row, title, text, color in boxes:
        x, y = corner(column, row)
        axes.add_patch(
            FancyBboxPatch(
                (x, y), WIDTH, HEIGHT, "round,pad=0,rounding_size=0.12", facecolor=color, edgecolor="#475569"
            )
        )
        axes.text(x + WIDTH / 2, y + HEIGHT * 0.34, title, ha="center", va="center", fontsize=10, weight="bold")
        axes.text(x + WIDTH / 2, y + HEIGHT * 0.72, text, ha="center", va="center", fontsize=8, color="#334155")
    for start, end, label in arrows:
        connect(axes, boxes[start], boxes[end], label)
    for line, (color, text) in enumerate(((PYTHON, "Python"), (GRAPH, "graph"), (DEVICE, "Mojo, on the device"))):
        y = corner(0, 1)[1] + 0.3 * line  # all pictures have nothing there
        axes.add_patch(FancyBboxPatch((0, y), 0.2, 0.16, "square,pad=0", facecolor=color, edgecolor="#475569"))
        axes.text(0.3, y + 0.08, text, va="center", fontsize=8)
    figure.tight_layout(pad=0.2)
    figure.savefig(path)
    pyplot.close(figure)


def corner(column: float, row: float) -> tuple[float, float]:
    return 3.1 * column, 1.4 * row


def connect(axes: Axes, start: Box, end: Box, label: str) -> None:
    """An arrow from one box's edge to the other's."""
    (x0, y0), (x1, y1) = corner(*start[:2]), corner(*end[:2])
    if start[0] == end[0]:  # one above the other
        down = y1 > y0
        tail, head = (x0 + WIDTH / 2, y0 + HEIGHT * down), (x1 + WIDTH / 2, y1 + HEIGHT * (not down))
    else:
        right = x1 > x0
        tail, head = (x0 + WIDTH * right, y0 + HEIGHT / 2), (x1 + WIDTH * (not right), y1 + HEIGHT / 2)
    axes.annotate("", head, tail, arrowprops={"arrowstyle": "-|>", "color": "#475569", "shrinkA": 0, "shrinkB": 0})
    x, y = (tail[0] + head[0]) / 2, (tail[1] + head[1]) / 2
    if start[0] == end[0]:
        axes.text(x + 0.1, y, label, va="center", fontsize=8)
    else:
        axes.text(x, y - 0.12, label, ha="center", fontsize=8)


if __name__ == "__main__":
    folder = Path(__file__).parent / "pictures"
    draw(MODEL, MODEL_ARROWS, folder / "flow_model.png")
    draw(PROGRAM, PROGRAM_ARROWS, folder / "flow_program.png")
    draw(CALL, CALL_ARROWS, folder / "flow_call.png")
    draw(NOUNS, NOUNS_ARROWS, folder / "nouns.png")
