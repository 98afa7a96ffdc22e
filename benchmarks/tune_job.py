"""Several builds of the kernels on one case, in turns, in one process and over the same memory.

    python -m benchmarks.tune_job CASE REPEATS RESULT.json TARGET|- FOLDER...

Each FOLDER is a copy of the Mojo package; the first is what the others are held against. TARGET is what they are
compiled for, where that is not this CPU. With REPEATS 0 they are only compiled.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from max.driver import set_virtual_cpu_target

from paged_kv.bench.case_kinds import Case
from paged_kv.bench.cases import CASES
from paged_kv.bench.job import take_turns
from paged_kv.bench.ours import OursAttention, OursLinear, make_ours
from paged_kv.bench.problems import problem_of
from paged_kv.bench.weight_cases import LinearCase
from paged_kv.graphs import ops
from paged_kv.runtime.session import Runtime

TUNE_CASES: dict[str, Case] = {
    **{case.name: case for case in CASES},
    "linear-4": LinearCase("linear-4", "linear bf16, 8192 x 4096, 4 rows", rows=4),
}
"""Cases that may decide a field: the benchmark's, and the most rows for which the linear layer's fields count."""

BLOCK = 0.02
"""Seconds of runs that are timed together."""


def measure(case: Case, folders: Sequence[Path], repeats: int, seed: int) -> list[dict[str, Any]]:
    """A dictionary a folder: `speed` relative to the first, the median over turns; `note` where there is none.

    What is timed are some runs in succession, because one alone varies by 10 %. A ratio within a turn needs no read of
    memory beside it: the same build against itself differed by 0.4 %, in units of a read right after it by up to 5 %.
    """
    problem: Any = problem_of(case, seed)
    first = make_ours(case)
    assert isinstance(first, OursAttention | OursLinear)
    systems: list[OursAttention | OursLinear] = []
    for folder in folders:
        with patch.object(ops, "files", lambda _, folder=folder: folder):  # where `kernels()` looks
            if systems:
                systems.append(recompiled(first))
            else:
                first.prepare(problem, case.copies if repeats else 1)
                systems.append(first)
    if not repeats:
        return [{} for _ in systems]
    count = _block(first.run)
    runs: dict[str, Callable[[int], object]] = {}
    for at, system in enumerate(systems):
        runs[str(at)] = partial(_several, system.run, count)
    times = take_turns(runs, repeats)
    found: list[dict[str, Any]] = []
    for at, system in enumerate(systems):
        right = problem.error(system.output()) <= problem.tolerance
        speed = statistics.median(base / one for base, one in zip(times["0"], times[str(at)], strict=True))
        ms = statistics.median(times[str(at)]) / count * 1e3
        found.append({"speed": speed, "ms": ms} if right else {"note": "wrong result"})
    return found


def recompiled(first: OursAttention | OursLinear) -> OursAttention | OursLinear:
    """The same operands, with kernels from where `ops.kernels` is now."""
    other = copy(first)
    if isinstance(other, OursLinear):
        other.sources = ops.kernels()
    else:
        other.runtime = Runtime(ops.kernels())
    return other


def _block(run: Callable[[int], object]) -> int:
    """Return how many runs take `BLOCK`."""
    times = take_turns({"run": run}, 9)["run"]
    return max(1, round(BLOCK / statistics.median(times)))


def _several(run: Callable[[int], object], count: int, i: int) -> None:
    for at in range(i * count, (i + 1) * count):
        run(at)


def main(arguments: list[str]) -> None:
    name, repeats, path, target, *folders = arguments
    if target != "-":
        set_virtual_cpu_target(target)
    seed = time.time_ns() % 2**32
    Path(path).write_text(json.dumps(measure(TUNE_CASES[name], [Path(one) for one in folders], int(repeats), seed)))


if __name__ == "__main__":
    main(sys.argv[1:])
