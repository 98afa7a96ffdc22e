"""Common parts of the tests of appends: caches that wait for their tokens, and their page tables as CSR."""

from typing import Any

import numpy as np

from paged_kv import reference
from support.cases import Cache, csr


def page_table(cache: Cache, dtype: str = "int32") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """kv_indices, kv_indptr and kv_last_page_len of a cache; the indices end in entries that no request owns."""
    indptr, indices, last = csr(cache, dtype)
    return np.append(indices, np.array([10**6, 10**6], dtype)), indptr, last


def blocks(cache: Cache) -> Any:
    """The cache as FlashInfer takes it: one array of rank 5, or a pair of rank 4."""
    return cache.k_blocks if cache.case.rank == 5 else (cache.k_blocks, cache.v_blocks)


def all_tokens(cache: Cache) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """K and V rows of every token in order, with `batch_indices` and `positions`."""
    offsets = np.concatenate([[0], np.cumsum(cache.lengths)])
    batch, positions = reference.ragged_rows(offsets, np.zeros_like(cache.lengths), int(offsets[-1]))
    shape = (0, cache.case.num_kv_heads, cache.case.head_dim)
    empty = np.empty(shape, cache.k_blocks.dtype)
    return np.concatenate([empty, *cache.keys]), np.concatenate([empty, *cache.values]), batch, positions


def expected_blocks(cache: Cache, k: np.ndarray, v: np.ndarray, batch: np.ndarray, positions: np.ndarray) -> Any:
    """Return what the oracle makes of `blocks(cache)`; the cache itself is unchanged."""
    k_blocks = cache.k_blocks.copy()
    v_blocks = k_blocks if cache.v_blocks is cache.k_blocks else cache.v_blocks.copy()
    reference.append(k, v, batch, positions, k_blocks, v_blocks, cache.lookup_table, layout=cache.case.layout)
    return k_blocks if v_blocks is k_blocks else (k_blocks, v_blocks)
