"""The attention op where float32 overflows and the result does not, and where some rows see infinity or NaN."""

from dataclasses import replace

import numpy as np
import pytest

from paged_kv import reference
from support import harness
from support.attending import LSE_TOL, REL
from support.cases import Cache, CacheCase, build, causal_rows, permuted
from support.compare import assert_bits_equal, assert_close, assert_lse_close

PAIRS = [("bfloat16", "bfloat16"), ("bfloat16", "float8_e5m2"), ("float32", "float32"), ("float16", "float16")]
NEW_TOKENS = [1, 2, 7, 16, 70]
"""With 4 query heads a KV head: one row, rows that share a block, and prefill blocks."""


def cache_of(dtype: str, length: int = 400, **sizes: int) -> Cache:
    return build(CacheCase(lengths=(length, 77), num_q_heads=8, num_kv_heads=2, head_dim=64, dtype=dtype, **sizes))


def rows_of(cache: Cache, new_tokens: int, q_dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, *rows = causal_rows(cache, [new_tokens, min(new_tokens, 77)])
    return q.astype(np.float32).astype(q_dtype), *rows


def put(cache: Cache, side: str, token: int, head: int, dim: int, value: float) -> None:
    """Changes one element of request 0."""
    blocks = cache.k_blocks if side == "k" else cache.v_blocks
    size = cache.case.page_size
    blocks[cache.lookup_table[0, token // size], token % size, head, dim] = value


def compare(cache: Cache, rows, rel: float, **options) -> tuple[np.ndarray, np.ndarray]:
    """Compares with the oracle, rounded to the dtypes of the results, and returns the op's results."""
    q, *others = rows
    o, lse = harness.attention(q, *cache.pages, *others, **cache.storage, **options)
    with np.errstate(over="ignore", invalid="ignore"):
        expected_o, expected_lse = reference.attention(q, *cache.pages, *others, **cache.storage, **options)
        expected_o, expected_lse = expected_o.astype(o.dtype), expected_lse.astype(np.float32)
    assert_close(o, expected_o.astype(np.float64), rel=rel, what="o")
    assert_lse_close(lse, expected_lse, tol=LSE_TOL, what="lse")
    return o, lse


@pytest.mark.parametrize("new_tokens", NEW_TOKENS)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("window_left", [-1, 90])
def test_what_a_row_does_not_see_does_not_reach_it(pair, new_tokens, window_left):
    """NaN and infinities of V and K in slots that other rows of the block see; each row has its own result."""
    cache = cache_of(pair[1])
    rows = rows_of(cache, new_tokens, pair[0])
    before = harness.attention(rows[0], *cache.pages, *rows[1:], window_left=window_left)
    put(cache, "v", 399, 0, 3, np.nan)  # seen by the last row alone
    put(cache, "v", 398, 1, 5, np.inf)
    put(cache, "v", 397, 1, 6, -np.inf)
    put(cache, "k", 396, 1, 7, np.nan)
    put(cache, "v", 400 - 91 - new_tokens // 2, 0, 40, np.inf)  # behind the window of the later rows
    o, lse = compare(cache, rows, REL[pair[0]], window_left=window_left)
    seen = rows[2] >= 397
    seen |= rows[1] == 1
    assert np.isfinite(o[~seen][:, 4:].astype(np.float32)).all()
    # A row that sees nothing of it keeps its lse to the bit.
    assert_bits_equal(lse[:, :4], before[1][:, :4], what="lse of the KV head whose K is as it was")
    again = permuted(cache, np.random.default_rng(2))
    results = harness.attention(rows[0], *again.pages, *rows[1:], window_left=window_left)
    assert_bits_equal(results[0].view(f"u{o.itemsize}"), o.view(f"u{o.itemsize}"), what="o of other pages")


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_splits_of_rows_that_see_different_tokens(pair):
    """A block that is cut along its tokens, its last split with what the first rows do not see."""
    cache = cache_of(pair[1], length=3000)
    put(cache, "v", 2999, 0, 0, np.nan)
    put(cache, "v", 1500, 1, 9, np.inf)
    for new_tokens in 1, 5, 40:
        o, _ = compare(cache, rows_of(cache, new_tokens, pair[0]), REL[pair[0]])
        assert np.isfinite(o[: new_tokens - 1, :4].astype(np.float32)).all()


@pytest.mark.parametrize("new_tokens", NEW_TOKENS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("length", [400, 3000])
def test_sums_of_values_past_float32(dtype, length, new_tokens):
    """The average of values near the largest number is finite; a sum of a few of them is not."""
    cache = cache_of(dtype, length)
    cache.v_blocks[...] = np.where(np.isnan(cache.v_blocks), np.nan, 3e38)
    put(cache, "v", length - 1, 1, 3, -3e38)
    o, _ = compare(cache, rows_of(cache, new_tokens, dtype), REL[dtype])
    assert np.isfinite(o.astype(np.float32)).all()


@pytest.mark.parametrize("new_tokens", NEW_TOKENS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("size", "sm_scale", "soft_cap"),
    [(1e30, 0.125, 0.0), (1e30, -0.125, 0.0), (1e30, 0.125, 30.0), (1e20, 1e-37, 0.0), (1e20, -3e-38, 0.0)],
)
def test_dot_products_past_float32(dtype, size, sm_scale, soft_cap, new_tokens):
    """Scores of 1e60, whose softmax is one token's value; and such that a small scale makes them ordinary again."""
    cache = cache_of(dtype)
    cache.k_blocks[...] = (cache.k_blocks.astype(np.float32) * np.float32(size)).astype(dtype)
    q, *rows = rows_of(cache, new_tokens, dtype)
    q = (q.astype(np.float32) * np.float32(size)).astype(dtype)
    sm_scale = float(np.float32(sm_scale))
    o, _ = compare(cache, (q, *rows), max(REL[dtype], 1e-4), sm_scale=sm_scale, logits_soft_cap=soft_cap)
    assert np.isfinite(o.astype(np.float32)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_scores_below_float32(dtype):
    """Every score is some -1e60: their softmax is still one, and the lse is -inf only when it is rounded."""
    cache = cache_of(dtype)
    cache.k_blocks[...] = np.where(np.isnan(cache.k_blocks), np.nan, 1e30)
    for new_tokens in NEW_TOKENS:
        q, *rows = rows_of(cache, new_tokens, dtype)
        o, lse = compare(cache, (np.full_like(q, -1e30), *rows), REL[dtype])
        assert np.isneginf(lse).all()
        assert (o.astype(np.float32) != 0).any()


@pytest.mark.parametrize("soft_cap", [0.0, 9.0])
@pytest.mark.parametrize("dot", [-3.3e38, 3.3e38, -3.5e38, 3.5e38, -1e39])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 2, 64])
def test_a_small_scale_makes_it_ordinary(rows, dtype, dot, soft_cap):
    """A dot product on either side of the largest float32, beside one of 0."""
    cache = build(CacheCase(lengths=(2,), num_q_heads=1, num_kv_heads=1, head_dim=8, dtype=dtype))
    page = cache.lookup_table[0, 0]
    cache.k_blocks[page, :2], cache.v_blocks[page, 0], cache.v_blocks[page, 1] = 0, 0, 1
    cache.k_blocks[page, 1, 0, 0] = dot / 1e19
    q = np.zeros((rows, 1, 8), dtype)
    q[..., 0] = 1e19
    compare(
        cache,
        (q, np.zeros(rows, np.int32), np.full(rows, 2, np.int32)),
        REL[dtype],
        sm_scale=float(np.float32(2e-38)),
        logits_soft_cap=soft_cap,
    )


@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 2, 64])
def test_a_partial_sum_that_overflows_to_the_other_side(rows, dtype, soft_cap):
    """The greatest dot product begins with one of -1e39, and no token has one of +inf."""
    cache = build(CacheCase(lengths=(300,), num_q_heads=1, num_kv_heads=1, head_dim=64, dtype=dtype))
    cache.k_blocks[cache.lookup_table[0, 3], 5] = [[-1e20, -1e20, 3e20, *[0] * 61]]
    q = np.full((rows, 1, 64), 1e19, dtype)
    rows = q, np.zeros(rows, np.int32), np.full(rows, 300, np.int32)
    compare(cache, rows, REL[dtype], sm_scale=1.0, logits_soft_cap=soft_cap)


@pytest.mark.parametrize("new_tokens", NEW_TOKENS)
@pytest.mark.parametrize(("value", "v_scale"), [(1e30, 2e-38), (1e-30, 3e38), (1e30, 1e9)])
def test_a_scale_of_v_at_the_ends_of_float32(value, v_scale, new_tokens):
    cache = cache_of("float32")
    cache.v_blocks[...] *= np.float32(value)
    v_scale = float(np.float32(v_scale))
    compare(cache, rows_of(cache, new_tokens, "float32"), REL["float32"], v_scale=v_scale)


@pytest.mark.parametrize("sink", [-3.3e38, -1e38, 1e38, 3.3e38])
@pytest.mark.parametrize("new_tokens", [1, 7, 70])
def test_sinks_at_the_ends_of_float32(new_tokens, sink):
    """In base 2 the greatest of them is past float32."""
    cache = cache_of("float32")
    compare(cache, rows_of(cache, new_tokens, "float32"), REL["float32"], sinks=np.full(8, sink, np.float32))


def test_rotated_keys_past_float32():
    cache = cache_of("float32", page_size=5)
    cache.k_blocks[...] *= np.float32(1e20)
    q, *rows = rows_of(cache, 7, "float32")
    scale = float(np.float32(1e-37))
    compare(cache, (q * np.float32(1e20), *rows), 1e-4, sm_scale=scale, rope_theta=1e4)
    cache = replace(cache, v_blocks=np.where(np.isnan(cache.v_blocks), np.nan, np.float32(3e38)))
    compare(cache, (q * np.float32(1e-20), *rows), REL["float32"], rope_theta=1e4)


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("new_tokens", [7, 70])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_infinity_and_nan_that_some_rows_see(pair, new_tokens, value, where):
    cache = cache_of(pair[1])
    q, *rows = rows_of(cache, new_tokens, pair[0])
    if where == "q":
        q[3, 2, 5] = value
    else:
        put(cache, where, 395, 1, 5, value)
    with np.errstate(invalid="ignore"):
        compare(cache, (q, *rows), REL[pair[0]])


@pytest.mark.parametrize("new_tokens", NEW_TOKENS)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_nan_that_every_row_sees_is_not_computed_again(pair, new_tokens):
    """A model computes nothing but NaN after its first one, and should not take a hundred times as long for it."""
    cache = cache_of(pair[1])
    q, *rows = rows_of(cache, new_tokens, pair[0])
    clean_o, clean_lse = harness.attention(q, *cache.pages, *rows)
    put(cache, "v", 0, 0, 3, np.nan)
    o, lse = harness.attention(q, *cache.pages, *rows)
    is_nan = np.zeros(o.shape, bool)
    is_nan[rows[0] == 0, :4, 3] = True
    assert np.isnan(o[is_nan].astype(np.float32)).all()
    assert_bits_equal(o[~is_nan], clean_o[~is_nan], what="o elsewhere")
    assert_bits_equal(lse, clean_lse, what="lse")
