"""Caches of int8 and int4 codes on a GPU against the oracle that quantises alike; by the plain kernel alone."""

import numpy as np
import pytest
from max.dtype import DType

from gpu.harness import Gpu
from paged_kv import reference
from paged_kv.runtime.variants import Variant
from support import harness
from support.attending import LSE_TOL, REL, rows_of
from support.cases import STORAGES, CacheCase
from support.codes import quantised_cache, widened_pages
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.grids import tokens_of

LENGTHS = (33, 0, 700, 1, 129)


@pytest.mark.parametrize("group", [1, 5, 8, 16])
@pytest.mark.parametrize("head_dim", [24, 64, 128, 256, 512])
@pytest.mark.parametrize(("q_dtype", "kv_format"), harness.CODE_PAIRS)
def test_attention(q_dtype, kv_format, head_dim, group):
    case = CacheCase(LENGTHS, 2 * group, 2, head_dim, 5, "HND", 5, dtype=q_dtype)
    cache = quantised_cache(case, kv_format)
    rows = rows_of(cache, "mixed")
    o, lse = harness.attention(rows[0], *cache.pages, *rows[1:], **cache.storage, on=Gpu())
    expected = reference.attention(rows[0], *widened_pages(cache), *rows[1:], **cache.storage)
    assert_close(o, expected[0], rel=REL[q_dtype], what="o")
    assert_lse_close(lse, expected[1], tol=LSE_TOL, what="lse")


@pytest.mark.parametrize(("rank", "layout"), STORAGES)
@pytest.mark.parametrize("head_dim", [8, 24, 128, 512])
@pytest.mark.parametrize(("dtype", "kv_format"), [harness.CODE_PAIRS[0], harness.CODE_PAIRS[-1]])
def test_append_and_gather(dtype, kv_format, head_dim, rank, layout):
    case = CacheCase(LENGTHS, 3, 3, head_dim, 5, layout, rank, dtype=dtype)
    cache, empty = (quantised_cache(case, kv_format) for _ in range(2))
    for blocks in empty.pages[:2]:
        blocks[:] = 0
    expected = [blocks.copy() for blocks in empty.pages[:2]]
    if rank > 4:
        expected[1] = expected[0]
    tokens = tokens_of(cache)
    reference.append(*tokens, *expected, cache.lookup_table, **cache.storage)
    stored = DType[cache.k_blocks.dtype.name]
    place, storage = Gpu(), (case.layout, case.layer)
    variant = Variant("append", DType[dtype], stored)
    place.execute(variant, list(tokens), (*empty.pages[:2], *storage), cache.lookup_table)
    for found, wanted in zip(empty.pages[:2], expected, strict=True):
        assert_bits_equal(found, wanted, what="the cache after append")
    indptr = np.concatenate([[0], np.cumsum(cache.lengths)]).astype(np.int32)
    rows = [indptr, np.zeros(tokens[0].shape, np.int8)]
    variant = Variant("gather", DType[dtype], stored)
    k, v = place.execute(variant, rows, (*cache.pages[:2], *storage), cache.lookup_table)
    for found, wanted in zip(
        (k, v), reference.gather(*widened_pages(cache), cache.lengths, **cache.storage), strict=False
    ):
        assert_bits_equal(found, wanted.astype(np.float32).astype(dtype), what="gathered rows")
