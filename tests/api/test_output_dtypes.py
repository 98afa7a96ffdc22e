"""Float8 queries, and outputs of another dtype than the queries."""

import numpy as np
import pytest

from paged_kv import reference
from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper
from paged_kv.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from support.cases import CacheCase, build, csr, normal
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.decoding import LSE_TOLERANCE, paged_cache, plan_sizes
from support.prefilling import causal_masks, expected, offsets, queries

pytestmark = pytest.mark.usefixtures("masked_variants")

# Few families: those of harness.py, and bfloat16 with an output of float32.
CASES = [
    ("float8_e4m3fn", "bfloat16", "bfloat16"),
    ("float8_e4m3fn", "bfloat16", "float32"),
    ("float8_e4m3fn", "bfloat16", None),
    ("float8_e5m2", "float32", "float32"),
    ("float8_e5m2", "float32", None),
    ("float8_e4m3fn", "float8_e4m3fn", "bfloat16"),
]


@pytest.mark.parametrize(("q_dtype", "kv_dtype", "o_dtype"), CASES)
def test_float8_queries(q_dtype: str, kv_dtype: str, o_dtype: str | None) -> None:
    cache = build(CacheCase((17, 0, 48, 5), rank=5, dtype=kv_dtype))
    q = normal(np.random.default_rng(1), cache.q.shape, q_dtype)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*csr(cache), *plan_sizes(cache), q_data_type=q_dtype, kv_data_type=kv_dtype, o_data_type=o_dtype)
    o, lse = wrapper.run_return_lse(q, paged_cache(cache), q_scale=2.0)
    expected, sums = reference.attention(q, *cache.pages, *cache.decode_rows, **cache.storage, q_scale=2.0)
    assert o.dtype.name == (o_dtype or q_dtype)
    # Of float8, half of the last place: 2^-4 of e4m3fn, 2^-3 of e5m2.
    tolerance = {"float32": 1e-5, "bfloat16": 1e-2, "float8_e4m3fn": 0.0626, "float8_e5m2": 0.1251}[o.dtype.name]
    assert_close(o.astype(np.float32), expected, rel=tolerance, what="o")
    assert_lse_close(lse, sums, tol=LSE_TOLERANCE, what="lse")


def test_an_output_of_another_dtype_is_rounded_once() -> None:
    """Results of bfloat16 queries: float32, and float8 and bfloat16 rounded from it."""
    cache = build(CacheCase((17, 0, 48, 5), rank=5, dtype="bfloat16"))
    found = {}
    for dtype in ("float32", "float8_e4m3fn", "bfloat16"):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
        wrapper.plan(*csr(cache), *plan_sizes(cache), q_data_type="bfloat16", o_data_type=dtype)
        out = np.zeros(cache.q.shape, dtype)
        assert wrapper.run(cache.q, paged_cache(cache), out=out) is out
        found[dtype] = out
    expected, _ = reference.attention(cache.q, *cache.pages, *cache.decode_rows, **cache.storage)
    assert_close(found["float32"], expected, rel=1e-5, what="o")
    for dtype in ("float8_e4m3fn", "bfloat16"):
        assert_bits_equal(found[dtype], found["float32"].astype(dtype), what=dtype)


def test_prefill() -> None:
    """A ragged one's o is bfloat16 where nothing is planned, as FlashInfer's."""
    cache = build(CacheCase((37, 20), head_dim=64, dtype="bfloat16"))
    q_lens = (9, 20)
    q = queries(cache, q_lens).astype("float8_e4m3fn")
    wanted, _ = expected(cache, q.astype(np.float32), causal_masks(q_lens, (37, 20)), sinks=None)
    dtypes = {"q_data_type": "float8_e4m3fn", "kv_data_type": "bfloat16", "causal": True}
    paged = BatchPrefillWithPagedKVCacheWrapper(None)
    paged.plan(offsets(q_lens), *csr(cache), *plan_sizes(cache), o_data_type="float32", **dtypes)
    ragged = BatchPrefillWithRaggedKVCacheWrapper(None)
    ragged.plan(offsets(q_lens), offsets((37, 20)), *plan_sizes(cache)[:3], **dtypes)
    tokens = np.concatenate(cache.keys), np.concatenate(cache.values)
    for o, dtype in ((paged.run(q, paged_cache(cache)), "float32"), (ragged.run(q, *tokens), "bfloat16")):
        assert o.dtype.name == dtype
        assert_close(o, wanted, rel=1e-2, what="o")
