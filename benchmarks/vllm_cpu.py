"""vLLM's engine on the CPU alone and with the plugin `paged_kv.vllm`: the time of a decode step.

    PAGED_KV_VLLM_PYTHON=.venv-vllm/bin/python python -m benchmarks.vllm_cpu [--batches 1 8] [--contexts 1024 4096]
        [--turns 5] [--steps 6]

The model is that of `benchmarks.transformers_cpu`, a Llama of 1.1 G random parameters in bfloat16, and the engine that
of `paged-kv bench`, compiled as by default. B requests have one prompt, which is computed first. The two processes take
turns, in rotated order; a turn is the median of its steps. Results are the medians of turns, and of the turns' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from importlib import resources
from pathlib import Path
from statistics import median

from benchmarks.transformers_cpu import SIZES, random_model
from paged_kv.bench.peers.vllm_step import PYTHON

SYSTEMS = {"vLLM": "", "with the plugin": "paged_kv"}
"""The values of `VLLM_PLUGINS`."""


class Engine:
    """An engine in a process of its own, ready for its first step."""

    def __init__(self, checkpoint: Path, folder: Path, plugins: str, batch: int, context: int) -> None:
        drawn = random.Random(0)
        prompt = [drawn.randrange(1, SIZES["vocab_size"]) for _ in range(context)]
        settings = {"tokens": [[1]] * batch, "prompt": prompt, "short": prompt[:7], "vocab": SIZES["vocab_size"]}
        for file in checkpoint.iterdir():
            (folder / file.name).symlink_to(file)
        program = str(resources.files("paged_kv.bench.peers") / "vllm_engine.py")
        environment = os.environ | {
            "VLLM_PLUGINS": plugins,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(1 + batch * (context + 1024) * 45 // 2**20),  # GiB; a token takes 44 KiB
        }
        self._process = subprocess.Popen(
            [os.environ.get(PYTHON, sys.executable), program, str(folder), json.dumps(settings)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def step(self) -> float:
        """Milliseconds of a step."""
        assert self._process.stdin is not None
        start = time.perf_counter()
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._answer()
        return (time.perf_counter() - start) * 1e3

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait(timeout=60)

    def _answer(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError("the engine has ended: run its program by hand to see why")


def measure(checkpoint: Path, batch: int, context: int, turns: int, steps: int) -> str:
    """A line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        engines: list[Engine] = []
        try:
            for number, plugins in enumerate(SYSTEMS.values()):
                own = Path(folder, str(number))
                own.mkdir()
                engines.append(Engine(checkpoint, own, plugins, batch, context))
            times: list[list[float]] = [[] for _ in engines]
            for turn in range(turns):
                for place in range(len(engines)):
                    number = (place + turn) % len(engines)
                    times[number].append(median(engines[number].step() for _ in range(steps)))
        finally:
            for engine in engines:
                engine.end()
    gains = [one / other for one, other in zip(*times, strict=True)]
    found = (
        f"{median(times[0]):.0f} | {median(times[1]):.0f} | {median(gains):.2f}x ({min(gains):.2f}, {max(gains):.2f})"
    )
    return f"| B {batch}, {context} | {found} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        random_model().save_pretrained(folder)
        print("| | vLLM, ms | with the plugin, ms | gain (lowest, highest) |\n|---|---|---|---|", flush=True)
        for batch in args.batches:
            for context in args.contexts:
                print(measure(Path(folder), batch, context, args.turns, args.steps), flush=True)


if __name__ == "__main__":
    main()
