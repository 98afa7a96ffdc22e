"""This package on a prefill, as a user of the array API calls it: the wrapper's `run`, planned before."""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_kv.arrays.host import as_numpy
from paged_kv.benchmarks.ours import Ours, fill_pages, page_table, pool
from paged_kv.benchmarks.peers.base import torch_view
from paged_kv.benchmarks.problems import Array, AttentionProblem
from paged_kv.prefill import BatchPrefillWithPagedKVCacheWrapper


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
