"""The time to the first token of a prompt that is not known, and of one whose prefix is.

    python -m benchmarks.prefix_cpu --model DIR [--length 2000] [--out FILE.json]

Each turn takes a prompt of its own: first nothing of it is known, then all but its last tokens, then it is read from a
file into an engine that has forgotten it. Medians of the turns, after one that is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

TURNS, PAGE_SIZE = 9, 16
STEPS = ("not known", "known", "read from a file, then known", "reading alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    from paged_kv.engine import Engine, Sampling, load

    engine = load(options.model, num_pages=4 * options.length // PAGE_SIZE, page_size=PAGE_SIZE)
    vocabulary = engine.model.config.vocab_size
    one = Sampling(1, ignore_end=True)

    def first_token(engine: Engine, prompt: list[int]) -> float:
        began = time.perf_counter()
        next(iter(engine.stream(prompt, one)))
        return time.perf_counter() - began

    turns = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prefix"
        for turn in range(TURNS + 1):
            prompt = np.random.default_rng(turn).integers(0, vocabulary, options.length).tolist()
            engine.pool.forget()
            times = [first_token(engine, prompt), first_token(engine, prompt)]
            assert engine.save_prefix(file, prompt) >= options.length - PAGE_SIZE
            engine.pool.forget()
            began = time.perf_counter()
            engine.load_prefix(file)
            reading = time.perf_counter() - began
            turns.append([*times, reading + first_token(engine, prompt), reading])
    found = {step: statistics.median(turn[i] for turn in turns[1:]) for i, step in enumerate(STEPS)}
    for step, seconds in found.items():
        print(f"{step:32} {1e3 * seconds:9.1f} ms  {found[STEPS[0]] / seconds:6.1f}x")
    if options.out:
        from paged_kv.bench.provenance import provenance

        record = {"provenance": provenance(), "length": options.length, "seconds": found}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
