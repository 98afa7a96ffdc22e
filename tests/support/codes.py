"""Caches of int8 and int4 codes for the op tests: built from a case of floats by the oracle's own quantisation."""

from dataclasses import replace

import numpy as np

from paged_kv import reference
from support.cases import Cache, CacheCase, build


def quantised_cache(case: CacheCase, kv_format: str) -> Cache:
    """A built case whose pages hold codes. Where no token lives, codes are 0 and scales NaN."""
    cache = build(case)
    k_blocks = reference.quantised(cache.k_blocks, kv_format)
    v_blocks = k_blocks if cache.v_blocks is cache.k_blocks else reference.quantised(cache.v_blocks, kv_format)
    return replace(cache, k_blocks=k_blocks, v_blocks=v_blocks)


def poisoned_head(shape: tuple[int, ...], kv_format: str) -> np.ndarray:
    """Stored heads `[..., D]` of NaN."""
    return reference.quantised(np.full(shape, np.nan, np.float32), kv_format)


def widened_pages(cache: Cache) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pages as the oracle of attention takes them: the numbers that their codes stand for."""
    k_blocks = reference.widened(cache.k_blocks)
    v_blocks = k_blocks if cache.v_blocks is cache.k_blocks else reference.widened(cache.v_blocks)
    return k_blocks, v_blocks, cache.lookup_table
