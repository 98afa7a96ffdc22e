"""A model of the CPU schedule: a simulated clock that hands the segments of a real plan to threads.

The plan is that of `plan_segments` (tests/mojo/print_schedule.mojo). The unit of time is that of one token of one row,
all KV heads; threads are equally fast.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SEGMENT_TOKENS = 1.0
"""Time to begin a segment."""
MERGE_TOKENS = 1.0
"""Time to merge two results. A call in 160 splits took 1.003 to 1.007 times as long as in 32, so a split took that of
one to two tokens of 4 KB in all (Zen 5, two threads, 2026-11-22)."""


@dataclass(frozen=True)
class Segment:
    """A line of `print_schedule.mojo`."""

    tokens: int
    rows: int
    heads: int
    """KV heads: one in prefill, all, or a part of them."""
    block: int
    """The first split result of its block; -1 where it is not split."""
    split: int
    """The number of its first split in the block."""
    splits: int
    num_splits: int
    """Splits of the block."""

    def work(self, kv_heads: int) -> float:
        """The time to compute it, without merges, of a call of `kv_heads` KV heads."""
        return SEGMENT_TOKENS + self.tokens * self.rows * self.heads / kv_heads


@dataclass(frozen=True)
class Schedule:
    """The time at which the last thread ends, and the time that all threads work."""

    end: float
    busy: float
    threads: int

    @property
    def idle_share(self) -> float:
        return 1 - self.busy / (self.end * self.threads)


def run_plan(segments: Sequence[Segment], threads: int, kv_heads: int) -> Schedule:
    """The next idle thread takes the next segment; who finishes the later half of a pair of splits merges it."""
    finished: dict[tuple[int, int], int] = defaultdict(int)
    running: list[tuple[float, int, Segment]] = []
    started = [0.0] * threads
    busy = end = 0.0
    queue = iter(segments)

    def start(thread: int) -> None:
        segment = next(queue, None)
        if segment is not None:
            heapq.heappush(running, (started[thread] + segment.work(kv_heads), thread, segment))

    for thread in range(threads):
        start(thread)
    while running:
        now, thread, segment = heapq.heappop(running)
        merges = merges_now(segment, finished) if segment.block >= 0 else 0
        weight = segment.rows * segment.heads / kv_heads
        now += merges * MERGE_TOKENS * weight
        busy += now - started[thread]
        started[thread] = now
        end = max(end, now)
        start(thread)
    return Schedule(end, busy, threads)


def merges_now(segment: Segment, finished: dict[tuple[int, int], int]) -> int:
    """Return how many merges the thread does that finishes these splits: as `SplitResults.merge_finished`."""
    merges = 0
    for first in range(segment.split, segment.split + segment.splits):
        split, width = first, 1
        while width < segment.num_splits:
            left = split // (2 * width) * (2 * width)
            if left + width < segment.num_splits:
                finished[segment.block, left + width] += 1
                if finished[segment.block, left + width] == 1:
                    break
                merges += 1
            split, width = left, 2 * width
    return merges


def run_tasks(costs: Iterable[float], threads: int) -> Schedule:
    """Tasks of known costs, each taken by the next idle thread."""
    clock = [0.0] * threads
    busy = 0.0
    for cost in costs:
        heapq.heapreplace(clock, clock[0] + cost)
        busy += cost
    return Schedule(max(clock), busy, threads)
