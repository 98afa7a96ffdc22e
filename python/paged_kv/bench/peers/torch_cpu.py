"""PyTorch: attention over contiguous K and V, attention after gathering pages, and its linear layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_kv.arrays.host import as_numpy
from paged_kv.bench.case_kinds import AttentionCase, Case
from paged_kv.bench.peer import Peer, batched, repeat, torch_view, unequal
from paged_kv.bench.problems import Array, AttentionProblem, LinearProblem, bits


class TorchAttention(Peer):
    """`scaled_dot_product_attention` over `[B, Hk, L, D]`: what it costs without pages."""

    name, packages = "torch SDPA, contiguous", ("torch",)

    def available(self, case: Case) -> str | None:
        assert isinstance(case, AttentionCase)
        return super().available(case) or ("no float8" if case.kv_dtype != case.dtype else unequal(case))

    def prepare(self, problem: AttentionProblem, copies: int) -> None:
        import torch

        case = problem.case
        self._case = case
        self._k, self._v = (torch_view(repeat(array, copies)) for array in batched(problem))
        q = torch_view(problem.q).reshape(len(case.lengths), case.new_tokens, case.heads, case.head_dim)
        self._q = q.transpose(1, 2).contiguous()  # [B, Hq, T, D]
        new, length = case.new_tokens, case.lengths[0]
        # Its is_causal counts from the first token, which suits a prompt without a context alone.
        self._mask = torch.ones(new, length, dtype=torch.bool).tril(length - new) if 1 < new < length else None

    def run(self, i: int) -> None:
        at = i % len(self._k)
        self._o = self._attend(self._k[at], self._v[at])

    def _attend(self, k: Any, v: Any) -> Any:
        import torch

        return torch.nn.functional.scaled_dot_product_attention(
            self._q,
            k,
            v,
            attn_mask=self._mask,
            is_causal=self._mask is None and self._case.new_tokens > 1,
            enable_gqa=True,
        )

    def output(self) -> Array:
        return as_numpy(self._o.transpose(1, 2).reshape(-1, self._case.heads, self._case.head_dim), "output")


class TorchGather(TorchAttention):
    """Pages gathered into contiguous K and V by an index, then attention: what one does without a paged kernel."""

    name = "torch gather + SDPA"

    def prepare(self, problem: AttentionProblem, copies: int) -> None:
        super().prepare(problem, 1)
        case = problem.case
        batch, pages = len(case.lengths), case.lengths[0] // case.page_size
        shape = (batch * pages, case.page_size, case.kv_heads, case.head_dim)
        caches = np.empty((copies, shape[0], 2, *shape[1:]), problem.k.dtype)
        tables = np.empty((copies, batch, pages), np.int64)
        for cache, table in zip(caches, tables, strict=True):
            table[:] = np.random.default_rng(len(cache)).permutation(shape[0]).reshape(table.shape)
            for i, array in enumerate((problem.k, problem.v)):
                bits(cache)[table.reshape(-1), i] = bits(array).reshape(shape)
        self._caches, self._tables = torch_view(caches), torch_view(tables)

    def run(self, i: int) -> None:
        case, at = self._case, i % len(self._caches)
        gathered = self._caches[at][self._tables[at]]  # [B, pages, 2, page_size, Hk, D]
        shape = (len(case.lengths), case.lengths[0], case.kv_heads, case.head_dim)
        k, v = (gathered[:, :, which].reshape(shape).transpose(1, 2) for which in (0, 1))
        self._o = self._attend(k, v)


class TorchLinear(Peer):
    """`torch.nn.functional.linear`."""

    name, packages = "torch linear", ("torch",)

    def prepare(self, problem: LinearProblem, copies: int) -> None:
        self._x, self._w = torch_view(problem.x), torch_view(repeat(problem.w, copies))

    def run(self, i: int) -> None:
        import torch

        self._y = torch.nn.functional.linear(self._x, self._w[i % len(self._w)])

    def output(self) -> Array:
        return as_numpy(self._y, "output")
