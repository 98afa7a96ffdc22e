"""The operands of a case, from a seed, and what a right answer is: the oracle's, in float64, over a sample of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy the names bfloat16, float8_e4m3fn and float8_e5m2)
import numpy as np
import numpy.typing as npt

from paged_kv import reference
from paged_kv.bench.case_kinds import AppendCase, AttentionCase, Case, named
from paged_kv.bench.weight_cases import LinearCase
from paged_kv.kv_formats import CODE_DTYPES, FORMATS
from paged_kv.options import stored_dtype, stored_head

Array = npt.NDArray[Any]

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2, "float8_e4m3fn": 2e-2}
TOLERANCE |= dict.fromkeys(CODE_DTYPES, 0.0)
"""Largest error of a result, relative to the norm of what it should be; of codes relative to what they stand for."""
_SAMPLED = 48  # (row, KV head) pairs of an attention result
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Problem(ABC):
    """One case with its operands."""

    tolerance: float

    @abstractmethod
    def error(self, output: Array) -> float:
        """Return the relative error of a run's output; infinite where the shape is wrong or a number is not finite."""


def problem_of(case: Case, seed: int = 0) -> Problem:
    """The operands of a case."""
    problem: Problem = named(case.problem)(case, seed)
    return problem


def bits(array: Array) -> Array:
    """The same memory as unsigned integers: NumPy copies those much faster than `ml_dtypes` elements."""
    return array.view(_BITS[array.itemsize])


def normal(rng: np.random.Generator, shape: Iterable[int], dtype: str, scale: float = 1.0) -> Array:
    """Normal numbers, drawn in blocks so that no large float32 array is needed."""
    out = np.empty(tuple(shape), np.dtype(dtype))
    flat = out.reshape(-1)
    for start in range(0, flat.size, 2**22):
        part = flat[start : start + 2**22]
        part[:] = (rng.standard_normal(part.size, dtype=np.float32) * np.float32(scale)).astype(out.dtype)
    return out


def stored_tokens(rng: np.random.Generator, shape: tuple[int, int, int], dtype: str) -> Array:
    """Normal tokens `[N, Hk, D]` as a cache stores them."""
    if dtype not in CODE_DTYPES:
        return normal(rng, shape, dtype)
    out = np.empty((*shape[:2], stored_head(dtype, shape[2])), np.dtype(stored_dtype(dtype)))
    for start in range(0, shape[0], 2**13):
        part = out[start : start + 2**13]
        part[:] = reference.quantised(normal(rng, (len(part), *shape[1:]), "float32"), dtype)
    return out


def numbers(tokens: Array) -> Array:
    """Return what stored tokens stand for."""
    return reference.widened(tokens) if tokens.dtype.name in FORMATS else tokens


def relative_error(got: Array, expected: Array) -> float:
    """Return the error relative to the norm; infinite for another shape, NaN or infinity."""
    if got.shape != expected.shape:
        return float("inf")
    error = float(np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected))
    return error if np.isfinite(error) else float("inf")


class AttentionProblem(Problem):
    """Contiguous tokens, from which every system builds its own storage."""

    def __init__(self, case: AttentionCase, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.case = case
        self.tolerance = max(TOLERANCE[case.dtype], TOLERANCE[case.kv_dtype])
        kv = (sum(case.lengths), case.kv_heads, case.head_dim)
        self.q = normal(rng, (len(case.lengths) * case.new_tokens, case.heads, case.head_dim), case.dtype)  # [R, Hq, D]
        self.k = stored_tokens(rng, kv, case.kv_dtype)  # [N, Hk, D], request after request
        self.v = stored_tokens(rng, kv, case.kv_dtype)
        self.indptr = np.concatenate([[0], np.cumsum(case.lengths)])  # [B + 1]
        self._rng = rng

    @property
    def row_lengths(self) -> npt.NDArray[np.int32]:
        """`[R]`: the tokens that each row sees."""
        n = self.case.new_tokens
        return (np.repeat(self.case.lengths, n) - np.tile(np.arange(n)[::-1], len(self.case.lengths))).astype(np.int32)

    @property
    def row_batch(self) -> npt.NDArray[np.int32]:
        """`[R]`: the request of each row."""
        return np.repeat(np.arange(len(self.case.lengths)), self.case.new_tokens).astype(np.int32)

    @cached_property
    def _expected(self) -> tuple[Array, Array, Array]:
        """Sampled rows, KV heads, and for each pair the output of the head's group `[group, D]` float64."""
        case = self.case
        chosen = self._rng.choice(
            len(self.q) * case.kv_heads, min(_SAMPLED, len(self.q) * case.kv_heads), replace=False
        )
        rows, heads = np.divmod(np.sort(chosen), case.kv_heads)
        q = self.q.reshape(len(self.q), case.kv_heads, -1, case.head_dim)  # [R, Hk, group, D]
        # Pages of one token, in their order.
        table = self.indptr[:-1, None] + np.arange(max(case.lengths))
        outputs = []
        for row, head in zip(rows, heads, strict=True):
            one, own = slice(row, row + 1), slice(head, head + 1)
            o, _ = reference.attention(
                *(q[one, head], numbers(self.k[:, None, own]), numbers(self.v[:, None, own]), table),
                *(self.row_batch[one], self.row_lengths[one]),
                rope_theta=case.rope_theta,
            )
            outputs.append(o[0])
        return rows, heads, np.stack(outputs)

    def error(self, output: Array) -> float:
        """`output` `[R, Hq, D]`."""
        if output.shape != self.q.shape:
            return float("inf")
        rows, heads, expected = self._expected
        grouped = output.reshape(len(self.q), self.case.kv_heads, -1, self.case.head_dim)
        return relative_error(grouped[rows, heads], expected)


class AppendProblem(Problem):
    """New tokens, `[N, Hk, D]` each of k and v, N = batch * tokens."""

    tolerance = 0.0

    def __init__(self, case: AppendCase, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.case = case
        shape = (case.batch * case.tokens, case.kv_heads, case.head_dim)
        self.k, self.v = normal(rng, shape, case.dtype), normal(rng, shape, case.dtype)
        self.batch_indices = np.repeat(np.arange(case.batch), case.tokens).astype(np.int32)
        self.positions = np.tile(case.context + np.arange(case.tokens), case.batch).astype(np.int32)

    def error(self, output: Array) -> float:
        """`output` `[2, N, Hk, D]`: what the cache holds where the tokens belong."""
        expected = np.stack([self.k, self.v])
        if self.case.kv_dtype in CODE_DTYPES:
            expected = reference.quantised(expected, self.case.kv_dtype)
        return relative_error(output.astype(np.float64), expected.astype(np.float64))


class LinearProblem(Problem):
    def __init__(self, case: LinearCase, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.case = case
        self.tolerance = TOLERANCE[case.dtype]
        self.x = normal(rng, (case.rows, case.inner), case.dtype)
        self.w = normal(rng, (case.outer, case.inner), case.dtype, case.inner**-0.5)
        self._sample = np.sort(rng.choice(case.outer, min(512, case.outer), replace=False))

    @cached_property
    def _expected(self) -> Array:
        return self.x.astype(np.float64) @ self.w[self._sample].astype(np.float64).T

    def error(self, output: Array) -> float:
        """`output` `[rows, outer]`."""
        if output.shape != (self.case.rows, self.case.outer):
            return float("inf")
        return relative_error(output[:, self._sample], self._expected)
