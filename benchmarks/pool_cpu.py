"""The time of page management: this package's pool and prefix cache against vLLM's block pool and cache manager.

    PAGED_KV_VLLM_PYTHON=VENV/bin/python python -m benchmarks.pool_cpu

Pages of 16 tokens. Both run in processes of their own, in turns; figures are medians. What is timed:

    pages       2048 pages are allocated and freed
    cold        a prompt of 32,768 tokens that is not known: hash it, look for it, allocate its pages, make them known
    hit         the same prompt again: hash it, find all of it, share the pages
    free        its pages are given back and stay known

Without vLLM's interpreter only this package is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

PAGES, PAGE_SIZE, PROMPT, TURNS, REPEATS = 8192, 16, 32768, 9, 5
STEPS = ("pages", "cold", "hit", "free")


def prompts() -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(128000) for _ in range(PROMPT)] for _ in range(REPEATS)]


class Ours:
    """`PagePool` and `PrefixCache`; `run` yields before the first of `STEPS` and after each."""

    def __init__(self) -> None:
        from paged_kv.pool import PagePool, PrefixCache

        self._pool, self._cache = PagePool(PAGES, PAGE_SIZE), PrefixCache

    def run(self, prompt: list[int]) -> Iterator[None]:
        pool, cached = self._pool, self._cache(self._pool)
        yield
        pool.start("pages", 2048 * PAGE_SIZE)
        pool.free("pages")
        yield
        cached.start("cold", prompt)
        cached.store("cold", prompt)
        yield
        hits = cached.start("hit", prompt)
        yield
        pool.free("hit")
        yield
        assert hits == PROMPT - PAGE_SIZE
        pool.free("cold")
        cached.clear()


class Vllm:
    """`BlockPool` and `KVCacheManager`, as vLLM's scheduler calls them."""

    def __init__(self) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        hashing: Any = kv_cache_utils
        hashing.init_none_hash(sha256)
        kind = FullAttentionSpec(block_size=PAGE_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32)
        config = KVCacheConfig(PAGES, [], [KVCacheGroupSpec(["layer"], kind)])
        manager: Any = KVCacheManager
        self._manager: Any = lambda: manager(config, 2 * PROMPT, PAGE_SIZE, PAGE_SIZE)
        self._hasher = hashing.get_request_block_hasher(PAGE_SIZE, sha256)
        self._request, self._sampling = Request, SamplingParams(max_tokens=1)

    def _ask(self, name: str, prompt: list[int]) -> Any:
        make: Any = self._request
        return make(name, prompt, self._sampling, None, block_hasher=self._hasher)

    def run(self, prompt: list[int]) -> Iterator[None]:
        manager = self._manager()
        pool = manager.block_pool
        yield
        pool.free_blocks(pool.get_new_blocks(2048))
        yield
        for name in ("cold", "hit"):
            request = self._ask(name, prompt)
            blocks, count = manager.get_computed_blocks(request)[:2]
            manager.allocate_slots(request, PROMPT - count, count, blocks)
            yield
        manager.free(request)
        yield
        assert count == PROMPT - PAGE_SIZE


def timed(run: Iterator[None]) -> dict[str, float]:
    """The time of each of `STEPS` in ms."""
    times = [time.perf_counter() for _ in run]
    return {step: 1e3 * (end - begin) for step, (begin, end) in zip(STEPS, pairwise(times), strict=True)}


SYSTEMS: dict[str, type[Ours | Vllm]] = {"paged-kv": Ours, "vLLM": Vllm}


def worker(system: str) -> None:
    """Runs a turn for each line on stdin; prints its times in ms."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed
    made, asked = SYSTEMS[system](), prompts()
    for _ in sys.stdin:
        turns = [timed(made.run(prompt)) for prompt in asked]
        answers.write(json.dumps({step: statistics.median(turn[step] for turn in turns) for step in STEPS}) + "\n")


def measure() -> dict[str, dict[str, float]]:
    """Medians of the turns in ms, by system and step."""
    pythons = {"paged-kv": sys.executable, "vLLM": os.environ.get("PAGED_KV_VLLM_PYTHON")}
    workers = {
        system: subprocess.Popen(
            [python, __file__, "--worker", system], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for system, python in pythons.items()
        if python is not None
    }
    turns: dict[str, list[dict[str, float]]] = {system: [] for system in workers}
    for _ in range(TURNS + 1):
        for system, process in workers.items():
            assert process.stdin is not None
            assert process.stdout is not None
            print(file=process.stdin, flush=True)
            turns[system].append(json.loads(process.stdout.readline()))
    for process in workers.values():
        process.communicate()
    return {
        system: {step: statistics.median(turn[step] for turn in each[1:]) for step in STEPS}
        for system, each in turns.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worker", choices=SYSTEMS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    found = measure()
    print("ms".ljust(12) + "".join(step.rjust(9) for step in STEPS))
    for system, times in found.items():
        print(system.ljust(12) + "".join(f"{times[step]:9.3f}" for step in STEPS))


if __name__ == "__main__":
    main()
