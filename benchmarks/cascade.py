"""This package on requests that share a prefix, as a user of the array API calls it: as a cascade, and flat."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from paged_kv.benchmarks.ours import Ours, pool
from paged_kv.benchmarks.problems import Array, CascadeProblem, bits
from paged_kv.cascade import MultiLevelCascadeAttentionWrapper
from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper


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
