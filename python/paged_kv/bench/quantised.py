"""Linear layers and experts with weights in blocks: the problems, and this package."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from paged_kv.bench.blocks import random_blocks
from paged_kv.bench.ours import Ours, OursLinear
from paged_kv.bench.peer import repeat
from paged_kv.bench.problems import TOLERANCE, Array, LinearProblem, Problem, bits, normal, relative_error
from paged_kv.bench.weight_cases import ExpertCase, QuantisedCase
from paged_kv.graphs.encodings import ENCODINGS
from paged_kv.runtime.host_calls import LayerWeight, multiply


class QuantisedProblem(LinearProblem):
    """w in GGUF's blocks. What int8 costs x is within the tolerance."""

    case: QuantisedCase

    def __init__(self, case: QuantisedCase, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.case = case
        self.tolerance = 2e-2
        self.x = normal(rng, (case.rows, case.inner), case.dtype)
        self.w, values = random_blocks(case.encoding, rng, case.outer, case.inner)
        self._sample = np.sort(rng.choice(case.outer, min(512, case.outer), replace=False))
        self._values = values[self._sample]

    @cached_property
    def _expected(self) -> Array:
        return self.x.astype(np.float64) @ self._values.astype(np.float64).T


class ExpertProblem(Problem):
    """Expert `e` has the rows of the first one, `31 e` further on: as large as others, and made in no time."""

    STEP = 31

    def __init__(self, case: ExpertCase, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.case = case
        self.tolerance = TOLERANCE[case.dtype] if case.encoding is None else 2e-2
        self.x = normal(rng, (1, case.inner), case.dtype)
        if case.encoding is None:
            first = values = normal(rng, (case.outer, case.inner), case.dtype, case.inner**-0.5)
        else:
            first, values = random_blocks(case.encoding, rng, case.outer, case.inner)
        self.w = np.empty((case.experts, *first.shape), first.dtype)
        for expert in range(case.experts):
            bits(self.w)[expert] = np.roll(bits(first), -self.STEP * expert, axis=0)
        self._y = self.x.astype(np.float64) @ values.astype(np.float64).T

    def experts(self, run: int) -> Array:
        """Those that a run chooses, `[1, chosen]` int32: each run has others, until all had their turn."""
        order = np.random.default_rng(7).permutation(self.case.experts).reshape(-1, self.case.chosen)
        return order[run % len(order) : run % len(order) + 1].astype(np.int32)

    def error(self, output: Array) -> float:
        """`output` `[1, chosen, outer]`: of run 0."""
        each = [np.roll(self._y, -self.STEP * expert, axis=1) for expert in self.experts(0)[0]]
        return relative_error(output, np.stack(each, axis=1))


class OursQuantised(OursLinear):
    def prepare(self, problem: QuantisedProblem, copies: int) -> None:  # type: ignore[override]
        super().prepare(problem, copies)
        encoding = ENCODINGS.index(problem.case.encoding)
        self._weights = [[LayerWeight(w, encoding)] for w in self.memory]
        self._mask = 1 << encoding

    def run(self, i: int) -> None:
        weights = self._weights[i % len(self._weights)]
        (self._y,) = multiply("quantised_linear", self._x, weights, mask=self._mask, sources=self.sources)


class OursExperts(Ours):
    def prepare(self, problem: ExpertProblem, copies: int) -> None:
        case = problem.case
        self.memory = repeat(problem.w, copies)
        encoding = 0 if case.encoding is None else ENCODINGS.index(case.encoding)
        self._mask = 0 if case.encoding is None else 1 << encoding
        self._x, self._stacks = problem.x, [[LayerWeight(w, encoding)] for w in self.memory]
        self._experts = [problem.experts(run).reshape(-1) for run in range(case.experts // case.chosen)]

    def run(self, i: int) -> None:
        turn, chosen = divmod(i, len(self._experts))
        w = self._stacks[turn % len(self._stacks)]
        kind = "quantised_experts" if self._mask else "experts"
        (self._y,) = multiply(kind, self._x, w, self._experts[chosen], mask=self._mask)

    def output(self) -> Array:
        self.run(0)
        return self._y


class OursBfloat16Experts(OursExperts):
    """As many experts of the same sizes, in bfloat16."""

    name = "our own bf16 experts"

    def prepare(self, problem: ExpertProblem, copies: int) -> None:  # noqa: ARG002
        case = replace(problem.case, dtype="bfloat16", encoding=None)
        self._other = ExpertProblem(case, 0)
        super().prepare(self._other, case.copies)

    def error(self, problem: Any) -> float:  # noqa: ARG002
        return self._other.error(self.output())
