"""The picture: arithmetic a second over arithmetic per byte, ours and the others', under the machine's own roof.

    python -m benchmarks.decode_cpu.roofline RESULT.json REPEATS

measures that roof, in a process of its own as every job (`paged_kv.bench.run.run_job`).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paged_kv.bench.job import MIN_REPEATS, take_turns

OURS, THEIRS = "#c2410c", "#64748b"
_SLOW_PRODUCT = 2.0
"""Seconds from which on a product of `measure_peaks` is not repeated."""


def measure_peaks(repeats: int, *, size: int = 2048) -> dict[str, Any]:
    """FLOP/s of products of two matrices `[size, size]` of torch, by dtype: where the roofline's roof turns flat."""
    import torch

    peaks = {}
    for dtype in (torch.float32, torch.bfloat16):
        pair = torch.randn(2, size, size).to(dtype)
        start = time.perf_counter()
        pair[0] @ pair[1]
        seconds = time.perf_counter() - start
        # torch that is kept to AVX2 takes half a minute for one of bfloat16.
        if seconds < _SLOW_PRODUCT:
            times = take_turns({"mm": partial(_product, pair)}, max(repeats, MIN_REPEATS))["mm"]
            seconds = float(np.median(times))
        peaks[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds
    return {"peaks": peaks}


def _product(pair: Any, _: int) -> None:
    pair[0] @ pair[1]


def draw(results: dict[str, Any], path: Path) -> bool:
    """Writes a PNG of `results` (`run.merged`) but for cases without arithmetic or figure; False if none is left."""
    rows = [row for row in results["rows"] if row["flops"] and row["ms"]]
    if not rows:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    figure, axes = pyplot.subplots(figsize=(9, 5.4), dpi=120)
    bandwidth = statistics.median([row["read_gb_per_s"] for row in rows])
    peaks = {name: flops / 1e9 for name, flops in results.get("peaks", {}).items()}
    intensities = [row["flops"] / row["bytes"] for row in rows]
    left, right = min(intensities) / 2, max([*intensities, max(peaks.values(), default=0) / bandwidth]) * 2
    top = max(peaks.values(), default=bandwidth * right)
    axes.plot([left, top / bandwidth], [left * bandwidth, top], color="black", linewidth=1.5)
    axes.annotate(f"read bandwidth {bandwidth:.0f} GB/s", (left * 1.1, left * bandwidth * 1.9), rotation=37, fontsize=9)
    for name, peak in peaks.items():
        axes.plot([peak / bandwidth, right], [peak, peak], color="black", linewidth=1, linestyle="--")
        axes.annotate(f"{name} matrix product of torch", (right, peak * 1.08), ha="right", fontsize=8)

    for row, x in zip(rows, intensities, strict=True):
        for versus in row["versus"]:
            for peer in versus["peers"]:
                if peer["ms"]:
                    axes.plot(x, row["flops"] / peer["ms"] / 1e6, "x", color=THEIRS, markersize=6)
        axes.plot(x, row["flops"] / row["ms"] / 1e6, "o", color=OURS, markersize=6)
    # Cases of one intensity share a label.
    named: dict[float, list[Any]] = {}
    for row, x in zip(rows, intensities, strict=True):
        named.setdefault(float(f"{x:.1e}"), []).append(row)
    for x, group in named.items():
        low = min(row["flops"] / row["ms"] / 1e6 for row in group)
        label = ", ".join(row["case"] for row in group[:2]) + (" ..." if len(group) > 2 else "")
        axes.annotate(label, (x, low), (7, -5), textcoords="offset points", fontsize=7, color=OURS)

    axes.plot([], [], "o", color=OURS, label="paged-kv")
    axes.plot([], [], "x", color=THEIRS, label="other systems")
    axes.set(xscale="log", yscale="log", xlim=(left, right))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("FLOP per byte that must be read")
    axes.set_ylabel("GFLOP/s")
    axes.set_title(f"{results['family']}: {rows[0]['machine']}, {rows[0]['date']}", fontsize=9)
    axes.grid(True, which="both", color="#e5e7eb", linewidth=0.6)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    save(figure, path)
    pyplot.close(figure)
    return True


def save(figure: Any, path: Path) -> None:
    """Writes a PNG of 64 colours, a quarter of the bytes: pictures are in the repository."""
    from PIL import Image  # matplotlib's own

    figure.savefig(path)
    with Image.open(path) as drawn:
        small = drawn.convert("RGB").quantize(64)
    small.save(path, optimize=True)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(measure_peaks(int(sys.argv[2]))))
