"""The sampler's time for the rows of a step, against sorting each row.

    python -m benchmarks.sampling_cpu

Rows of 151,936 logits, the vocabulary of Qwen2. `peaked` are normal logits of standard deviation 8, of which few tokens
hold all; `wide` ones of 3; `flat` ones of 0.1, of which nearly all count. `sorted` is what a row took before: it is
sorted in float64. Both run in turns; figures are milliseconds, the best and the median of the turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from paged_kv.bench.job import take_turns
from paged_kv.engine.sampling import History, Sampling, choose

ROWS, VOCAB, TURNS = 8, 151_936, 9
SPREADS = {"peaked": 8.0, "wide": 3.0, "flat": 0.1}
OPTIONS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.8),
    "top_p 0.95": Sampling(temperature=0.8, top_p=0.95),
    "top_k 50": Sampling(temperature=0.8, top_k=50),
    "min_p 0.05": Sampling(temperature=0.8, min_p=0.05),
    "penalties, top_p": Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.1),
    "top_p, logprobs 5": Sampling(temperature=0.8, top_p=0.95, logprobs=5),
}


def by_sorting(logits: npt.NDArray[np.float32], sampling: Sampling, uniform: float) -> int:
    """A token of a row `[V]` by temperature and `top_p`."""
    scores = logits.astype(np.float64)
    weights = np.exp((scores - scores.max()) / sampling.temperature)
    order = np.argsort(-weights, kind="stable")
    sums = np.cumsum(weights[order])
    nucleus = sums[: np.searchsorted(sums, sampling.top_p * sums[-1]) + 1]
    return int(order[np.searchsorted(nucleus, uniform * nucleus[-1], side="right")])


def main() -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(VOCAB, size=1000).tolist()
    print(f"{'rows':8} {'sampling':18} {'ours':>14} {'sorted':>16}")
    for spread, deviation in SPREADS.items():
        logits = (deviation * random.standard_normal((ROWS, VOCAB))).astype(np.float32)
        for name, sampling in OPTIONS.items():
            histories = [History(sampling, seed, 0, tokens, 500) for seed in range(ROWS)]
            runs: dict[str, Callable[[int], object]] = {"ours": lambda _: choose(logits, range(ROWS), histories)}  # noqa: B023
            if name in ("temperature", "top_p 0.95"):
                runs["sorted"] = lambda _: [by_sorting(row, sampling, 0.5) for row in logits]  # noqa: B023
            times = {key: [1e3 * seconds for seconds in each] for key, each in take_turns(runs, TURNS).items()}
            best = {key: f"{min(each):.2f} ({statistics.median(each):.2f})" for key, each in times.items()}
            print(f"{spread:8} {name:18} {best['ours']:>14} {best.get('sorted', ''):>16}", flush=True)


if __name__ == "__main__":
    main()
