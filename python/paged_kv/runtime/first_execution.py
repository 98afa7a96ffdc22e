"""The first execution of a process, which starts a thread of MAX's that never rests.

MAX 26.7 starts it whatever the model, on the CPU too; from then on it wakes some 5,000 times a second, as long as the
process lives. On two CPUs torch's products of 512 rows took 1.17 to 1.25 times as long beside it, and this package's
linear layers of 8 rows 1.05 to 1.15 (Zen 4, 2026-11-24). It waits with a timeout each time. How late a timeout may end,
its "timer slack", a thread on Linux inherits from the one that starts it: 50 us as a rule, and here 5 ms, so that it
wakes 200 times a second.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from max.driver import accelerator_count

T = TypeVar("T")

SLACK_NS = 5_000_000
_SET_TIMERSLACK, _GET_TIMERSLACK = 29, 30
"""Options of prctl(2)."""

_has_run = False


def execute(run: Callable[..., T], *inputs: Any) -> T:
    """`run(*inputs)`, an execution of a model; what the process's first one starts gets a long timer slack.

    Not where there is a GPU: whether something there waits for that thread is not known.
    """
    return run(*inputs) if _has_run else _first(run, *inputs)


def _first(run: Callable[..., T], *inputs: Any) -> T:
    global _has_run
    if sys.platform != "linux" or accelerator_count():
        _has_run = True
        return run(*inputs)
    prctl = ctypes.CDLL(None).prctl
    before = prctl(_GET_TIMERSLACK, 0, 0, 0, 0)
    prctl(_SET_TIMERSLACK, ctypes.c_ulong(SLACK_NS), 0, 0, 0)
    try:
        outputs = run(*inputs)
    finally:
        prctl(_SET_TIMERSLACK, ctypes.c_ulong(max(before, 0)), 0, 0, 0)  # 0: what the thread began with
    _has_run = True
    return outputs
