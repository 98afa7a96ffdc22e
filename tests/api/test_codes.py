"""Caches of int8 and int4 codes through the public calls: append, decode, prefill, the functional cache."""

import ml_dtypes
import numpy as np
import pytest

import paged_kv
from paged_kv import reference
from paged_kv.errors import ContractTypeError, ShapeError
from support import harness
from support.cases import CacheCase
from support.codes import quantised_cache, widened_pages
from support.compare import assert_bits_equal, assert_close

DTYPES = {"int8": "float32", "int4": "bfloat16"}
REL = {"float32": 1e-5, "bfloat16": 1e-2}
HEADS = (6, 2, 40)


@pytest.fixture(autouse=True)
def compiled():
    harness.codes_runtime()


def case_of(kv_format):
    """A cache, and its table in CSR."""
    case = CacheCase(lengths=(23, 41), num_q_heads=6, head_dim=40, page_size=5, rank=5, dtype=DTYPES[kv_format])
    cache = quantised_cache(case, kv_format)
    counts = [-(-length // 5) for length in case.lengths]
    indptr = np.cumsum([0, *counts], dtype=np.int32)
    indices = np.concatenate([row[:n] for row, n in zip(cache.lookup_table, counts, strict=True)]).astype(np.int32)
    return cache, (indptr, indices, np.array([3, 1], np.int32))


@pytest.mark.parametrize("kv_format", DTYPES)
def test_decode(kv_format):
    cache, table = case_of(kv_format)
    wrapper = paged_kv.BatchDecodeWithPagedKVCacheWrapper(None, "NHD")
    wrapper.plan(*table, *HEADS, 5, q_data_type=DTYPES[kv_format], kv_data_type=kv_format)
    o = wrapper.run(cache.q, cache.k_blocks)
    expected, _ = reference.attention(cache.q, *widened_pages(cache), *cache.decode_rows)
    assert_close(o, expected, rel=REL[DTYPES[kv_format]], what="o")
    with pytest.raises(ShapeError, match="head_dim of k is"):
        wrapper.run(cache.q, np.ascontiguousarray(cache.k_blocks[..., :-4]))
    with pytest.raises(ContractTypeError, match=f"planned {kv_format}"):
        wrapper.run(cache.q, cache.k_blocks.view({"int8": np.uint8, "int4": np.int8}[kv_format]))


@pytest.mark.parametrize("kv_format", DTYPES)
def test_append(kv_format):
    cache, table = case_of(kv_format)
    before, dtype = cache.k_blocks.copy(), DTYPES[kv_format]
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, 2, 40), np.float32).astype(dtype) for _ in range(2))
    where = np.array([0, 1], np.int32), np.array([22, 7], np.int32)
    paged_kv.append_paged_kv_cache(k, v, *where, cache.k_blocks, table[1], table[0], table[2])
    reference.append(k, v, *where, before, before, cache.lookup_table)
    assert_bits_equal(cache.k_blocks, before, what="the cache")
    with pytest.raises(ShapeError, match=r"append_key must be \[N, 2, 40\]"):
        paged_kv.append_paged_kv_cache(k[..., :32], v[..., :32], *where, cache.k_blocks, table[1], table[0], table[2])


def test_functional_cache():
    cache = paged_kv.init_paged_kv_cache(
        num_blocks=4, block_size=4, num_kv_heads=2, head_dim=24, batch_size=1, max_blocks_per_seq=3, dtype="int8"
    )
    cache, _ = paged_kv.allocate_blocks(cache, sequence_idx=0, num_new_tokens=9, free_block_ids=np.array([2, 0, 3]))
    k = np.random.default_rng(0).standard_normal((9, 2, 24)).astype(ml_dtypes.bfloat16)
    cache = paged_kv.append_kv(cache, 0, k, -k)
    keys, values, length = paged_kv.gather_kv(cache, 0)
    assert (length, keys.dtype) == (9, np.float32)
    for name, rows, tokens in (("keys", keys, k), ("values", values, -k)):
        expected = reference.widened(reference.quantised(tokens, "int8"))
        assert_bits_equal(rows, expected.astype(np.float32), what=name)
