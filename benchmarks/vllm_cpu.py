"""vLLM's engine on the CPU alone and with the plugin `paged_kv.vllm`: the time of a decode step.

    PAGED_KV_VLLM_PYTHON=.venv-vllm/bin/python python -m benchmarks.vllm_cpu [--batches 1 8] [--contexts 1024 4096]
        [--turns 31]

The model is that of `benchmarks.transformers_cpu`, a Llama of 1.1 G random parameters in bfloat16, and the engine that
of `paged-kv bench`, compiled as by default. B requests have one prompt, which is computed first. The two
processes take turns, a step each. Results are the medians of steps, and of the ratios within a turn.
Turns of one step were tried with stand-ins for the two engines, not yet with vLLM.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.transformers_cpu import SIZES, random_model
from paged_kv.bench.job import take_turns
from paged_kv.bench.peers.vllm_step import EngineProcess

SYSTEMS = {"vLLM": "", "with the plugin": "paged_kv"}
"""The values of `VLLM_PLUGINS`."""


def engine(checkpoint: Path, folder: Path, plugins: str, batch: int, context: int) -> EngineProcess:
    """An engine in a process of its own, ready for its first step."""
    drawn = random.Random(0)
    prompt = [drawn.randrange(1, SIZES["vocab_size"]) for _ in range(context)]
    settings = {"tokens": [[1]] * batch, "prompt": prompt, "short": prompt[:7], "vocab": SIZES["vocab_size"]}
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    environment = os.environ | {
        "VLLM_PLUGINS": plugins,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(1 + batch * (context + 1024) * 45 // 2**20),  # GiB; a token takes 44 KiB
    }
    return EngineProcess(folder, settings, environment)


def steps_of(engine: EngineProcess) -> Callable[[int], None]:
    return lambda _: engine.step()


def measure(checkpoint: Path, batch: int, context: int, turns: int) -> str:
    """A line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        engines: dict[str, EngineProcess] = {}
        try:
            for name, plugins in SYSTEMS.items():
                own = Path(folder, name)
                own.mkdir()
                engines[name] = engine(checkpoint, own, plugins, batch, context)
            times = take_turns({name: steps_of(each) for name, each in engines.items()}, turns)
        finally:
            for each in engines.values():
                each.process.kill()
                each.process.wait(timeout=60)
    gains = [one / other for one, other in zip(*times.values(), strict=True)]
    steps = " | ".join(f"{1e3 * median(taken):.0f}" for taken in times.values())
    return f"| B {batch}, {context} | {steps} | {median(gains):.2f}x ({min(gains):.2f}, {max(gains):.2f}) |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--turns", type=int, default=31)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        random_model().save_pretrained(folder)
        print("| | vLLM, ms | with the plugin, ms | gain (lowest, highest) |\n|---|---|---|---|", flush=True)
        for batch in args.batches:
            for context in args.contexts:
                print(measure(Path(folder), batch, context, args.turns), flush=True)


if __name__ == "__main__":
    main()
