"""Times what a device does, from cold caches: by CUDA events on a GPU, by the clock on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

FLUSH_BYTES = 512 << 20
"""More than any L2 cache holds."""
WARM_UP = 3
LEAST_DELAY = 200e-6
"""Seconds."""
_CYCLES = 2e9
"""A second of the GPU's clock, which is a little slower."""


@dataclass
class System:
    """Something to time: what it does, the stream it does it on (None: the CPU), and the result of its last run."""

    name: str
    run: Callable[[], Any]
    stream: Any
    result: Callable[[Any], torch.Tensor]


class Clock(Protocol):
    """A way to time one run."""

    def milliseconds(self, system: System) -> float:
        """One run from cold caches; nothing is under way when it returns."""
        ...


class GpuClock:
    """CUDA events around the run alone.

    L2 is emptied by a read: lines that a write leaves would be written back inside the timed run. A kernel that only
    waits comes before the first event, for twice the time that the host took to enqueue the run when it did last: so
    all of the run is enqueued when the GPU begins with it.
    """

    def __init__(self) -> None:
        self._flush = torch.ones(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._host_seconds: dict[int, float] = {}

    def milliseconds(self, system: System) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        delay = max(LEAST_DELAY, 2 * self._host_seconds.get(id(system), 0.0))
        with torch.cuda.stream(system.stream):
            read = self._flush.max()
            torch.cuda._sleep(int(delay * _CYCLES))  # type: ignore[no-untyped-call]
            begin.record()
            started = time.perf_counter()
            kept = system.run()
            self._host_seconds[id(system)] = time.perf_counter() - started
            end.record()
        torch.cuda.synchronize()
        del kept, read
        return float(begin.elapsed_time(end))


class CpuClock:
    """The wall clock around the run, after a read of more than the caches hold."""

    def __init__(self) -> None:
        self._flush = torch.ones(FLUSH_BYTES // 4, dtype=torch.int32)

    def milliseconds(self, system: System) -> float:
        self._flush.max()
        started = time.perf_counter()
        system.run()
        return 1e3 * (time.perf_counter() - started)


def clock_of(device: str) -> Clock:
    """The clock of "cuda" or "cpu"."""
    return GpuClock() if device == "cuda" else CpuClock()


def medians_ms(systems: Sequence[System], repeats: int, clock: Clock) -> list[float | Exception]:
    """Return each system's median time of `repeats` runs after three that do not count, forwards and backwards by
    turns; the first error of a system that cannot go on, whose turns the others keep.
    """
    times: list[list[float]] = [[] for _ in systems]
    errors: list[Exception | None] = [None] * len(systems)
    for turn in range(repeats + WARM_UP):
        order = range(len(systems)) if turn % 2 else reversed(range(len(systems)))
        for i in order:
            if errors[i] is not None:
                continue
            try:
                elapsed = clock.milliseconds(systems[i])
            except Exception as error:  # other libraries' errors, of any type: they end one system, not the table
                errors[i] = error
                continue
            if turn >= WARM_UP:
                times[i].append(elapsed)
    return [error or statistics.median(of) for error, of in zip(errors, times, strict=True)]
