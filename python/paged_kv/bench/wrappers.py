"""The package as a user of the array API calls it, planned before: a prefill, and requests that share a prefix."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from paged_kv.arrays.host import as_numpy
from paged_kv.bench.case_kinds import CascadeCase
from paged_kv.bench.ours import Ours, fill_pages, page_table, pool
from paged_kv.bench.peer import torch_view
from paged_kv.bench.problems import Array, AttentionProblem, bits
from paged_kv.cascade import MultiLevelCascadeAttentionWrapper
from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper
from paged_kv.prefill import BatchPrefillWithPagedKVCacheWrapper


class CascadeProblem(AttentionProblem):
    """Requests whose first tokens are the same."""

    def __init__(self, case: CascadeCase, seed: int) -> None:
        super().__init__(case.flat, seed)
        self.cascade = case
        for tokens in (self.k, self.v):
            by_request = tokens.reshape(case.batch, -1, *tokens.shape[1:])
            by_request[1:, : case.shared] = by_request[0, : case.shared]


class _OverSharedPages(Ours):
    """Caches that hold the pages of the shared prefix once, for all requests."""

    def prepare(self, problem: CascadeProblem, copies: int) -> None:
        flat, case = problem.case, problem.cascade
        size = flat.page_size
        self._sizes = flat.heads, flat.kv_heads, flat.head_dim, size
        self._q = problem.q
        shared, own = case.shared // size, case.own // size
        pages = shared + case.batch * own
        blocks, views = pool("NHD", copies, pages, (size, flat.kv_heads, flat.head_dim), problem.k.dtype)
        self.memory = blocks
        self._caches = list(blocks)
        self._wrappers = []
        rng = np.random.default_rng(1)
        for cache in views:
            order = rng.permutation(pages).astype(np.int32)
            prefix, rest = order[:shared], order[shared:].reshape(case.batch, own)
            for view, tokens in zip(cache, (problem.k, problem.v), strict=True):
                by_page = bits(tokens).reshape(case.batch, shared + own, size, flat.kv_heads, flat.head_dim)
                bits(view)[prefix] = by_page[0, :shared]
                bits(view)[rest] = by_page[:, shared:]
            self._wrappers.append(self._planned(prefix, rest))

    @abstractmethod
    def _planned(self, shared: Array, own: Array) -> Any:
        """A wrapper that planned the requests' pages: `shared [n]` of all, `own [B, m]` of each."""

    def run(self, i: int) -> None:
        i %= len(self._wrappers)
        self._o = self._wrappers[i].run(self._q, self._caches[i])

    def output(self) -> Array:
        return self._o


class OursCascade(_OverSharedPages):
    """Two levels: the shared tokens are read once."""

    def _planned(self, shared: Array, own: Array) -> Any:
        batch, size = len(own), self._sizes[-1]
        wrapper = MultiLevelCascadeAttentionWrapper(2, None)
        steps = np.arange(batch + 1, dtype=np.int32)
        indptr: list[Any] = [np.array([0, len(shared)], np.int32), steps * np.int32(own.shape[1])]
        last: list[Any] = [np.full(1, size, np.int32), np.full(batch, size, np.int32)]
        heads, kv_heads, head_dim, _ = self._sizes
        wrapper.plan(
            [steps[[0, -1]], steps],
            indptr,
            [shared, own.reshape(-1)],
            last,
            heads,
            kv_heads,
            head_dim,
            size,
            q_data_type="bfloat16",
        )
        return wrapper


class OursFlat(_OverSharedPages):
    """Each request reads all its tokens."""

    name = "our own flat decode"

    def _planned(self, shared: Array, own: Array) -> Any:
        batch, size = len(own), self._sizes[-1]
        tables = np.concatenate([np.broadcast_to(shared, (batch, len(shared))), own], axis=1)
        indptr = np.arange(batch + 1, dtype=np.int32) * np.int32(tables.shape[1])
        wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
        wrapper.plan(indptr, tables.reshape(-1), np.full(batch, size, np.int32), *self._sizes, q_data_type="bfloat16")
        return wrapper


class OursPrefill(Ours):
    """`BatchPrefillWithPagedKVCacheWrapper.run` on torch tensors, causal."""

    def prepare(self, problem: AttentionProblem, copies: int) -> None:
        case = problem.case
        owned = [-(-length // case.page_size) for length in case.lengths]
        page = (case.page_size, case.kv_heads, case.head_dim)
        blocks, views = pool(case.layout, copies, sum(owned), page, problem.k.dtype)
        self.memory = blocks
        self._q, self._caches = torch_view(problem.q), [torch_view(cache) for cache in blocks]
        qo_indptr = np.arange(len(owned) + 1, dtype=np.int32) * np.int32(case.new_tokens)
        indptr = np.concatenate([[0], np.cumsum(owned)]).astype(np.int32)
        last = np.array([(length - 1) % case.page_size + 1 for length in case.lengths], np.int32)
        sizes = case.heads, case.kv_heads, case.head_dim, case.page_size
        dtypes: dict[str, Any] = {"q_data_type": case.dtype, "kv_data_type": case.kv_dtype}
        rng = np.random.default_rng(1)
        self._wrappers = []
        for k_view, v_view in views:
            table = page_table(owned, rng)
            fill_pages(problem, table, k_view, v_view)
            indices = np.concatenate([row[:own] for row, own in zip(table, owned, strict=True)])
            wrapper = BatchPrefillWithPagedKVCacheWrapper(None, case.layout)
            wrapper.plan(qo_indptr, indptr, indices, last, *sizes, causal=True, **dtypes)
            self._wrappers.append(wrapper)

    def run(self, i: int) -> None:
        i %= len(self._wrappers)
        self._o = self._wrappers[i].run(self._q, self._caches[i])

    def output(self) -> Array:
        return as_numpy(self._o, "o")
