"""Wrappers that several threads share: each run has its own operands, and sees one plan whole."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, Lock
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch
from max.dtype import DType
from max.graph import Module

from paged_kv.arrays.host import as_numpy
from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper, CUDAGraphBatchDecodeWithPagedKVCacheWrapper
from paged_kv.runtime.artefacts import compile_graphs
from paged_kv.runtime.variants import Variant
from support.calls import CALLS, Call
from support.kinds import bytes_of

pytestmark = pytest.mark.usefixtures("all_variants")

THREADS, RUNS = 6, 500
"""Runs of each thread, some 0.1 ms each."""

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 4, 2, 32, 16, 10
SIZES = (HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE)

# Two plans of four requests. A mixture of them gives neither's answer.
PLANS = (
    {"table": ([0, 2, 2, 5, 6], [7, 2, 9, 0, 4, 5], [1, 0, 16, 5]), "sm_scale": 0.3, "window_left": -1},
    {"table": ([0, 3, 4, 4, 8], [1, 6, 0, 4, 9, 2, 8, 7], [8, 3, 0, 16]), "sm_scale": 1.1, "window_left": 20},
)


def plan(wrapper: BatchDecodeWithPagedKVCacheWrapper, which: int) -> None:
    chosen: dict[str, Any] = dict(PLANS[which])
    table = [np.array(values, np.int32) for values in chosen.pop("table")]
    wrapper.plan(*table, *SIZES, q_data_type="float32", **chosen)


class Job:
    """The work that one thread runs: its own query, cache, scales and outputs, and what each plan gives for them."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        cache = rng.standard_normal((PAGES, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM), np.float32)
        cache[3] = np.nan  # no plan's
        q = rng.standard_normal((4, HEADS, HEAD_DIM), np.float32)
        self.scales = {"q_scale": 1 + seed / 8, "k_scale": None if seed % 2 else 0.5, "v_scale": 1.0 + seed}
        self.sinks = rng.standard_normal(HEADS, np.float32) if seed % 3 == 0 else None
        o, lse = np.zeros_like(q), np.zeros(q.shape[:2], np.float32)
        arrays = (q, cache, o, lse)
        self.q, self.cache, self.o, self.lse = map(torch.from_numpy, arrays) if seed % 2 else arrays
        self.gives_outputs = seed % 4 < 2
        self.expected = []
        for which in range(len(PLANS)):
            alone = BatchDecodeWithPagedKVCacheWrapper(None)
            plan(alone, which)
            self.expected.append(self.run(alone))

    def run(self, wrapper: BatchDecodeWithPagedKVCacheWrapper) -> tuple[np.ndarray, np.ndarray]:
        outputs = {"out": self.o, "lse": self.lse} if self.gives_outputs else {}
        found = wrapper.run(self.q, self.cache, **self.scales, return_lse=True, sinks=self.sinks, **outputs)
        return as_numpy(found[0], "o").copy(), as_numpy(found[1], "lse").copy()

    def which(self, found: tuple[np.ndarray, np.ndarray]) -> int | None:
        """The plan that gives these bits; None where no plan does."""
        for number, expected in enumerate(self.expected):
            if all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True)):
                return number
        return None


def in_threads(call: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """`call(i)` in each thread, all of them started at one moment."""
    together = Barrier(threads)

    def begin(i: int) -> Any:
        together.wait(60)
        return call(i)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(begin, range(threads)))


def fixed_buffers() -> CUDAGraphBatchDecodeWithPagedKVCacheWrapper:
    return CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, *(np.zeros(n, np.int32) for n in (5, 8, 4)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [lambda: BatchDecodeWithPagedKVCacheWrapper(None), fixed_buffers], ids=["own", "fixed"]
)
def test_runs_of_many_threads_while_another_plans(make: Callable[[], BatchDecodeWithPagedKVCacheWrapper]) -> None:
    wrapper = make()
    jobs = [Job(seed) for seed in range(THREADS)]
    plan(wrapper, 0)
    done = Event()
    switch = sys.getswitchinterval()

    def turns(i: int) -> Counter[Any]:
        if i == THREADS:
            planned = 0
            while not done.is_set():
                planned += 1
                plan(wrapper, planned % 2)
            return Counter()
        try:
            return Counter(jobs[i].which(jobs[i].run(wrapper)) for _ in range(RUNS))
        finally:
            if i == 0:
                done.set()

    sys.setswitchinterval(1e-5)
    try:
        found = sum(in_threads(turns, THREADS + 1), Counter())
    finally:
        sys.setswitchinterval(switch)
        done.set()
    assert found.pop(None, 0) == 0
    assert found.total() == THREADS * RUNS
    assert set(found) == {0, 1}


def test_every_call_in_many_threads() -> None:
    """Nothing is shared but the compiled kernels: results, and what a call writes to its arguments, are as in one."""

    def outcome(call: Call) -> list[bytes]:
        given = call.arguments()
        return bytes_of([call.make()(*given.pop("args", ()), **given), *given.values()])

    calls = [call for call in CALLS if call.named or call.args]
    expected = [outcome(call) for call in calls]

    def turns(i: int) -> None:
        for turn in range(3 * len(calls)):
            at = (turn + i * len(calls) // THREADS) % len(calls)
            assert outcome(calls[at]) == expected[at], calls[at].name

    in_threads(turns)


FIRST_CALLS = """
import threading, numpy as np
from paged_kv.decode import single_decode_with_kv_cache
from paged_kv.runtime import libraries, session
made, found = [], []
original = session.Runtime.__init__
session.Runtime.__init__ = lambda self, gpu=None: (made.append(gpu), original(self, gpu))[1]
paths = libraries._paths
libraries._paths = lambda wanted, **_: (made.append("load"), paths(wanted))[1]
together = threading.Barrier(8)
def first(i):
    together.wait(60)
    q, kv = np.full((1, 32), i, np.float32), np.full((2, 5, 1, 32), i, np.float32)
    found.append(single_decode_with_kv_cache(q, *kv))
threads = [threading.Thread(target=first, args=(i,)) for i in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(sorted(float(o.mean()) for o in found), made)
"""


def test_the_first_calls_of_a_process() -> None:
    """One session is made, and one kernel loaded, for all threads."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == f"{[float(i) for i in range(8)]} [None, 'load']"


def test_graphs_are_built_in_any_thread() -> None:
    """By one thread at a time. Building alone is tried here: what follows is MAX's compiler."""
    variant = Variant("merge", DType.float16, DType.float16)
    busy = Lock()

    class Session:
        def compile(self, module: Module, **_: Any) -> list[str]:
            assert busy.acquire(blocking=False)
            names = module.top_level_graph_names()
            sleep(0.05)
            busy.release()
            return names

    session: Any = Session()
    built = in_threads(lambda _: compile_graphs(session, [variant.name], lambda module, _: variant.build(module)), 3)
    assert built == [[variant.name]] * 3
