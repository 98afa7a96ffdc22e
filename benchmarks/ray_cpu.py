"""The cost of Ray around an engine: time to the first token, time per token, tokens a second of a replica.

    python -m benchmarks.ray_cpu [--turns N]

In the environment of the extra `test-ray`. The demo's model in float32 on one core, alone in a process, and as the one
replica of `paged_kv.ray.app` on a local raylet behind Ray's proxy, with a client that streams over HTTP. Each turn
starts both; the client, the proxy and the ingress share the other cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from statistics import median
from time import perf_counter

PROMPT = "In the beginning God created the heaven and the earth. " * 3
TOKENS, ONE_BY_ONE, AT_ONCE = 100, 12, 32
PORT = 8199

Times = tuple[float, float]
"""Seconds to the first token of a stream, and of each later one."""


def report(name: str, streams: list[Times], rate: float) -> dict[str, str | float]:
    """Return what a process prints."""
    first, later = (1e3 * median(times) for times in zip(*streams, strict=True))
    return {"what": name, "first_token_ms": first, "token_ms": later, f"tokens_s_{AT_ONCE}_streams": rate}


def alone() -> dict[str, str | float]:
    """An engine in this process, on one core."""
    from paged_kv import set_num_threads
    from paged_kv.engine import AsyncEngine, Sampling, load
    from paged_kv.engine.demo_model import FOLDER
    from paged_kv.ray.placement import claim

    cores = claim(1)
    cores.bind()
    set_num_threads(1)
    engine = AsyncEngine(load(FOLDER, num_pages=512, dtype="float32"))

    async def stream(prompt: str, tokens: int = TOKENS) -> Times:
        start = perf_counter()
        times = [perf_counter() async for _ in engine.generate(prompt, Sampling(tokens, ignore_end=True))]
        return times[0] - start, (times[-1] - times[0]) / (len(times) - 1)

    async def run() -> dict[str, str | float]:
        await stream("warm", 20)
        streams = [await stream(f"{i} {PROMPT}") for i in range(ONE_BY_ONE)]
        start = perf_counter()
        await asyncio.gather(*(stream(f"{i} king") for i in range(AT_ONCE)))
        return report("engine alone", streams, AT_ONCE * TOKENS / (perf_counter() - start))

    return asyncio.run(run())


def behind_ray() -> dict[str, str | float]:
    """A replica on one core of a raylet of this machine."""
    import httpx
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from paged_kv.ray import app

    node = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        serve.run(app({"model": "demo", "replicas": 1}), name="app")

        def stream(prompt: str, tokens: int = TOKENS) -> Times:
            asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
            start, times = perf_counter(), []
            with httpx.stream("POST", f"http://127.0.0.1:{PORT}/v1/completions", json=asked, timeout=60) as answer:
                times = [perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
            return times[0] - start, (times[-1] - times[0]) / (tokens - 1)

        stream("warm", 20)
        streams = [stream(f"{i} {PROMPT}") for i in range(ONE_BY_ONE)]
        threads = [threading.Thread(target=stream, args=(f"{i} king",)) for i in range(AT_ONCE)]
        start = perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return report("replica behind Ray", streams, AT_ONCE * TOKENS / (perf_counter() - start))
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


WAYS: dict[str, Callable[[], dict[str, str | float]]] = {"alone": alone, "ray": behind_ray}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--way", choices=[*WAYS], help="one of the two, in this process")
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(WAYS[arguments.way]()))
        return
    for _ in range(arguments.turns):
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.ray_cpu", "--way", way]
            out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout
            print(out.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
