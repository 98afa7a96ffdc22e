"""The quality of caches of few bits: float8, int8 and int4 against unquantised, with and without rotation.

    python -m benchmarks.cache_quality [--context 2000]

The model is the one of `paged-kv demo`, the text one that it was not trained on: the Book of Tobit of the King James
Apocrypha (`benchmarks/texts/tobit.txt`, public domain), 10,000 tokens. All of it is NumPy in float64, without the
kernels: K (after its rotary embedding) and V of each token are quantised once, as an append does it, and every later
token reads the quantised ones. It takes some five minutes, and needs no more than the package itself.

* error of o: `rms(o - exact) / rms(exact)` of the attention in each layer, the q, K and V of the exact run in both.
* perplexity: of the whole model, all of whose layers read the quantised cache; with the standard error of its change.
* KL: mean divergence of the next token's distribution from the exact one, nats a token. It has no sign to cancel, so it
  orders formats that perplexity cannot tell apart.

A small model has no outlier channels. `--outliers 20` makes two channels of 32 in each K head that many times larger
and those of q smaller: the same function, with keys as large models have them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from max.dtype import DType

from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.engine.uncached_forward import causal_attention, recompute

TEXT = Path(__file__).parent / "texts" / "tobit.txt"
OUTLIERS = [3, 19]
"""A rotary pair of head_dim 32: scaled alike, it stays the same function."""
Quantise = Callable[[np.ndarray], np.ndarray]


def exact(x: np.ndarray) -> np.ndarray:
    return x


def float8(x: np.ndarray) -> np.ndarray:
    """One scale a layer, which takes its greatest magnitude to float8_e4m3fn's."""
    scale = np.abs(x).max() / 448
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def _codes(x: np.ndarray, scale: np.ndarray, low: int, high: int, zero: np.ndarray | float = 0.0) -> np.ndarray:
    scale = np.where(scale == 0, 1, scale.astype(np.float32)).astype(np.float64)
    return np.clip(np.round((x - zero) / scale), low, high) * scale + zero


def symmetric(greatest: int) -> Quantise:
    return lambda x: _codes(x, np.abs(x).max(-1, keepdims=True) / greatest, -greatest, greatest)


def all_codes(x: np.ndarray) -> np.ndarray:
    """Int4 of which the element of largest magnitude is -8: the scale has a sign."""
    largest = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)
    return _codes(x, largest / -8, -8, 7)


def with_zero(x: np.ndarray) -> np.ndarray:
    """Int4 from the least element to the greatest: a scale and a zero."""
    low = x.min(-1, keepdims=True)
    return _codes(x, (x.max(-1, keepdims=True) - low) / 15, 0, 15, low)


FORMATS: dict[str, tuple[Quantise, Quantise]] = {
    "float8_e4m3fn, a scale a layer": (float8, float8),
    "int8": (symmetric(127), symmetric(127)),
    "int4, codes -7 to 7": (symmetric(7), symmetric(7)),
    "int4, codes -8 to 7": (all_codes, all_codes),
    "int4, codes -8 to 7, V with a zero": (all_codes, with_zero),
    "int4, K and V with a zero": (with_zero, with_zero),
}
ROTATIONS = {"none": (False, False), "q, k": (True, False), "q, k, v": (True, True)}


def hadamard(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


@dataclass(frozen=True)
class Cache:
    """A way to keep K and V."""

    of_k: Quantise = exact
    of_v: Quantise = exact
    rotates_k: bool = False
    rotates_v: bool = False

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Causal attention of q `[T, Hq, D]` over k, v `[T, Hk, D]` as the cache gives them back."""
        matrix = hadamard(q.shape[-1])
        if self.rotates_k:
            q, k = q @ matrix, k @ matrix
        k, v = self.of_k(k), self.of_v(v @ matrix if self.rotates_v else v)
        o = causal_attention(q, k, v)
        return o @ matrix if self.rotates_v else o


class Model:
    """The demo's Llama in float64."""

    def __init__(self, outliers: float) -> None:
        source = open_source(FOLDER)
        self.config = source.config
        self.tokenizer = Tokenizer(source, source.config)
        self.weights = source.load(DType.float32)
        self.gain = np.ones(self.config.head_dim)
        self.gain[OUTLIERS] = outliers

    def run(self, tokens: np.ndarray, cache: Cache) -> tuple[np.ndarray, list[tuple[np.ndarray, ...]]]:
        """Log-probabilities `[T, vocab]`, and q, k, v and o of each layer."""
        kept: list[tuple[np.ndarray, ...]] = []

        def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
            q, k = q / self.gain, k * self.gain
            o = cache.attend(q, k, v)
            kept.append((q, k, v, o))
            return o

        logits = recompute(self.config, self.weights, tokens, attend=attend)
        logits -= logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True)), kept


def relative_rms(found: np.ndarray, right: np.ndarray) -> float:
    return float(np.sqrt(((found - right) ** 2).mean() / (right**2).mean()))


def study(model: Model, contexts: list[np.ndarray]) -> dict[str, Any]:
    """The perplexity without quantisation, and a row for each format and rotation."""
    plain = [model.run(tokens, Cache()) for tokens in contexts]

    def losses(found: list[np.ndarray]) -> np.ndarray:
        pairs = zip(found, contexts, strict=True)
        return np.concatenate([-logs[np.arange(len(tokens) - 1), tokens[1:]] for logs, tokens in pairs])

    right = losses([logs for logs, _ in plain])
    rows = []
    for name, (of_k, of_v) in FORMATS.items():
        for rotation, rotates in ROTATIONS.items():
            cache = Cache(of_k, of_v, *rotates)
            errors = [[relative_rms(cache.attend(q, k, v), o) for q, k, v, o in kept] for _, kept in plain]
            found = [model.run(tokens, cache)[0] for tokens in contexts]
            change = losses(found) - right
            divergence = [(np.exp(a) * (a - b)).sum(-1) for (a, _), b in zip(plain, found, strict=True)]
            row = {
                "format": name,
                "rotated": rotation,
                "error_of_o": np.sqrt(np.square(errors).mean(0)).tolist(),
                "perplexity_change": float(np.expm1(change.mean())),
                "standard_error": float(change.std() / np.sqrt(len(change))),
                "kl": float(np.concatenate(divergence).mean()),
            }
            rows.append(row)
            print(table_row(row), flush=True)
    return {"perplexity": float(np.exp(right.mean())), "rows": rows}


def table_row(row: dict[str, Any]) -> str:
    errors = ", ".join(f"{100 * error:.3g}" for error in row["error_of_o"])
    change = f"{100 * row['perplexity_change']:+.2f} ± {100 * row['standard_error']:.2f}"
    return f"| {row['format']} | {row['rotated']} | {errors} | {change} | {1e3 * row['kl']:.3g} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--context", type=int, default=2000, help="tokens that see each other")
    parser.add_argument("--outliers", type=float, default=1.0, help="the factor of two channels of K")
    options = parser.parse_args()

    model, length = Model(options.outliers), options.context
    tokens = np.array(model.tokenizer.encode(TEXT.read_text()))
    contexts = [tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)]
    print("| cache | rotated | error of o by layer, % | perplexity, % | KL, 10^-3 |\n|---|---|---|---|---|")
    found = study(model, contexts)
    print(f"{len(contexts)} contexts of {length} tokens, perplexity {found['perplexity']:.2f} unquantised")


if __name__ == "__main__":
    main()
