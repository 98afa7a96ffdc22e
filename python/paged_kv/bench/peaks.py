"""The arithmetic that torch reaches here, as a job of its own: python -m paged_kv.bench.peaks RESULT.json REPEATS."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paged_kv.bench.job import MIN_REPEATS, take_turns

_SLOW_PRODUCT = 2.0
"""Seconds from which on a product of `measure_peaks` is not repeated."""


def measure_peaks(repeats: int, *, size: int = 2048) -> dict[str, dict[str, float]]:
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


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(measure_peaks(int(sys.argv[2]))))
