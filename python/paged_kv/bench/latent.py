"""Latent attention (MLA) of a decode step: the problem, and this package."""

from __future__ import annotations

import numpy as np
from max.dtype import DType

from paged_kv import reference
from paged_kv.arrays.pages import Pages
from paged_kv.bench.case_kinds import LatentCase
from paged_kv.bench.ours import Ours, page_table
from paged_kv.bench.problems import TOLERANCE, Array, Problem, bits, normal, relative_error
from paged_kv.options import LatentOptions
from paged_kv.runtime.session import default_runtime
from paged_kv.runtime.variants import Variant

LATENT_SCALE = (128 + 64) ** -0.5
"""The scale of latent attention's logits."""
_SAMPLED_REQUESTS = 4


class LatentProblem(Problem):
    """The same of latent attention (MLA); queries went through the up-projection of K before, for all systems."""

    def __init__(self, case: LatentCase, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.case = case
        self.tolerance = TOLERANCE[case.dtype]
        width = case.ckv + case.kpe
        self.q = normal(rng, (case.batch, case.heads, width), case.dtype)  # [B, H, Dckv + Dkpe]
        self.tokens = normal(rng, (case.batch, case.length, width), case.dtype)  # [B, L, Dckv + Dkpe]

    def error(self, output: Array) -> float:
        case = self.case
        if output.shape != (case.batch, case.heads, case.ckv):
            return float("inf")
        some = min(_SAMPLED_REQUESTS, case.batch)
        q, tokens = self.q[:some], self.tokens[:some]  # a page a request
        (nope, pe), (ckv, kpe) = (np.split(array, [case.ckv], -1) for array in (q, tokens))
        pages, lengths = np.arange(some), np.full(some, case.length)
        expected, _ = reference.mla_attention(nope, pe, ckv, kpe, pages[:, None], pages, lengths, sm_scale=LATENT_SCALE)
        return max(map(relative_error, output[:some], expected))


class OursLatent(Ours):
    def prepare(self, problem: LatentProblem, copies: int) -> None:
        case = problem.case
        self._variant = Variant("mla_attention", DType[case.dtype], DType[case.dtype])
        self._runtime = default_runtime()
        self._runtime.load([self._variant])
        owned = [case.length // case.page_size] * case.batch
        slots = np.empty((copies, sum(owned), case.page_size, case.ckv + case.kpe), problem.q.dtype)
        self.memory = slots
        lengths = np.full(case.batch, case.length, np.int32)
        rows = [
            np.ascontiguousarray(array)
            for array in (problem.q[..., : case.ckv], problem.q[..., case.ckv :], np.arange(case.batch, dtype=np.int32))
        ]
        rows.append(lengths)
        options = [np.zeros(0, np.float32), LatentOptions(LATENT_SCALE).numbers()]
        rng = np.random.default_rng(1)
        self._inputs = []
        for cache in slots:
            table = page_table(owned, rng)
            bits(cache)[table.reshape(-1)] = bits(problem.tokens).reshape(cache.shape)
            kpe, ckv = cache[:, :, None, case.ckv :], cache[:, :, None, : case.ckv]
            k, v, view = Pages(kpe, ckv).operands()
            self._inputs.append([*rows, k, v, table, view, *options])

    def run(self, i: int) -> None:
        self._o = self._runtime.execute(self._variant, *self._inputs[i % len(self._inputs)])[0]

    def output(self) -> Array:
        return self._o
