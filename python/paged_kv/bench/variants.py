"""The package in place of another system: the same tokens kept in another way, for what a case's own way costs."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import numpy as np

from paged_kv import reference
from paged_kv.bench.ours import OursAppend, OursAttention
from paged_kv.bench.problems import AppendProblem, Array, AttentionProblem, numbers


class OursBfloat16(OursAttention):
    """The same tokens in a bfloat16 cache, for what a float8 one or one of codes gains."""

    name = "our own bf16 KV"

    def prepare(self, problem: AttentionProblem, copies: int) -> None:
        wide = AttentionProblem.__new__(AttentionProblem)
        wide.__dict__ |= problem.__dict__
        wide.case = replace(problem.case, kv_dtype="bfloat16")
        wide.k, wide.v = (_in_bfloat16(array) for array in (problem.k, problem.v))
        super().prepare(wide, copies)


def _in_bfloat16(tokens: Array) -> Array:
    out = np.empty((*tokens.shape[:2], numbers(tokens[:1]).shape[2]), np.dtype("bfloat16"))
    for start in range(0, len(tokens), 2**13):
        out[start : start + 2**13] = numbers(tokens[start : start + 2**13]).astype(np.float32)
    return out


class OursOneToken(OursAttention):
    """A decode step over the same tokens: the last row of each request alone, for what further new tokens cost."""

    name = "our own, 1 new token"

    def prepare(self, problem: AttentionProblem, copies: int) -> None:
        super().prepare(problem, copies)
        self._shape = problem.q.shape
        rows = (problem.q, problem.row_batch, problem.row_lengths)
        new = problem.case.new_tokens
        self._steps = [[np.ascontiguousarray(array[i::new]) for array in rows] for i in range(new)]

    def run(self, i: int) -> None:
        self._attend(self._steps[-1], i)

    def _attend(self, rows: list[Array], i: int) -> Array:
        return self.runtime.execute(self._variant, *rows, *self._inputs[i % len(self._inputs)][3:])[0]

    def output(self) -> Array:
        """Return the output of all rows, in a call for each new token."""
        steps = [self._attend(rows, 0) for rows in self._steps]
        return np.stack(steps, axis=1).reshape(self._shape)


class OursRotated(OursAttention):
    """Keys that were rotated before they were stored, for what it costs to rotate them when they are read."""

    name = "our own, rotated in the cache"

    def prepare(self, problem: AttentionProblem, copies: int) -> None:
        stored = AttentionProblem.__new__(AttentionProblem)
        stored.__dict__ |= problem.__dict__
        stored.case = replace(problem.case, rope_theta=None)
        theta, dtype = problem.case.rope_theta, problem.q.dtype
        assert theta is not None
        positions = np.concatenate([np.arange(length) for length in problem.case.lengths])
        stored.q = reference.rope(problem.q, problem.row_lengths - 1, theta).astype(dtype)
        stored.k = reference.rope(problem.k, positions, theta).astype(dtype)
        super().prepare(stored, copies)


class OursBfloat16Append(OursAppend):
    """The same tokens into a bfloat16 cache, for what quantising costs."""

    name = "our own bf16 append"

    def prepare(self, problem: AppendProblem, copies: int) -> None:
        wide = copy(problem)
        wide.case = replace(problem.case, kv_dtype="bfloat16")
        self._kv_dtype = problem.case.kv_dtype
        super().prepare(wide, copies)

    def output(self) -> Array:
        """As the codes that these tokens become."""
        return reference.quantised(super().output(), self._kv_dtype)
