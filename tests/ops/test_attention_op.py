"""The attention op against the oracle, over caches whose tables are shuffled and whose unused memory is NaN."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv import reference
from support import harness, tiers
from support.attending import (
    AXES,
    LSE_TOL,
    REL,
    assert_rows_are_alone,
    compare_with_oracle,
    mixed_rows,
    options_of,
    rows_of,
)
from support.cases import DTYPES, STORAGES, UNUSED_PAGE, CacheCase, build, permuted
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.grids import all_pairs, case_of, setting_id
from support.properties import examples

GRID = all_pairs(AXES)
MIXED_GRID = all_pairs(
    {"pair": [pair for pair in harness.PAIRS if pair[0] != pair[1]]}
    | {name: AXES[name] for name in ("storage", "page_size", "group", "num_kv_heads", "lengths", "rows", "v_scale")}
    | {"head_dim": (8, 40, 64, 80, 128), "window_left": (-1, 6, 127)}
)
compare = partial(compare_with_oracle, harness.attention)


@pytest.mark.parametrize("setting", GRID, ids=setting_id)
def test_grid(setting):
    cache = build(case_of(setting))
    compare(cache, rows_of(cache, setting["rows"]), **options_of(setting, cache.case))


@pytest.mark.parametrize(
    "options",
    [{}, {"window_left": 1500}, {"sinks": np.linspace(-4, 2, 6), "v_scale": 0.5}],
    ids=["plain", "window", "sinks"],
)
@pytest.mark.parametrize("lengths", [(2500, 0, 1030, 7), (1023, 1024, 1025, 2049), (70_001, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_requests_long_enough_to_be_split(dtype, lengths, options):
    """Kernels cut long requests into parts and join their results: at 256 tokens, and in some 32 parts at most."""
    storage = {"page_size": 5 if 1025 in lengths else 64, "layout": "HND", "rank": 5, "dtype": dtype}
    cache = build(CacheCase(lengths=lengths, num_q_heads=6, head_dim=8, **storage))
    compare(cache, mixed_rows(cache), sm_scale=0.6, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)], ids=str)
@pytest.mark.parametrize(("rank", "layout"), STORAGES)
def test_nothing_to_attend_to(dtype, lengths, rank, layout):
    cache = build(CacheCase(lengths=lengths, dtype=dtype, rank=rank, layout=layout))
    for rows in rows_of(cache, "decode"), rows_of(cache, "mixed"):
        o, lse = compare(cache, rows, window_left=3, logits_soft_cap=30.0)
        assert_bits_equal(o, np.zeros_like(o), what="o")
        assert np.isneginf(lse).all()


def test_pool_without_a_page_and_table_without_a_column():
    blocks = np.zeros((0, 16, 2, 8), np.float32)
    table = np.zeros((1, 0), np.uint32)
    q = np.ones((2, 4, 8), np.float32)
    row_batch, row_lengths = np.array([0, -1], np.int32), np.zeros(2, np.int32)
    o, lse = harness.attention(q, blocks, blocks.copy(), table, row_batch, row_lengths)
    assert_bits_equal(o, np.zeros_like(q), what="o")
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "layout"), STORAGES)
def test_pages_and_repetition_change_no_bit(dtype, rank, layout):
    storage = {"page_size": 5, "rank": rank, "layout": layout, "dtype": dtype}
    cache = build(CacheCase(lengths=(70, 0, 33, 1), num_q_heads=6, head_dim=40, **storage))
    rows = mixed_rows(cache)
    once = compare(cache, rows, window_left=40, logits_soft_cap=30.0)
    for again in cache, permuted(cache, np.random.default_rng(1)), permuted(cache, np.random.default_rng(2)):
        results = compare(again, rows, window_left=40, logits_soft_cap=30.0)
        for name, result, expected in zip(("o", "lse"), results, once, strict=True):
            assert_bits_equal(result, expected, what=name)


def test_a_row_depends_on_no_other_row():
    cache = build(CacheCase(lengths=(70, 0, 33, 1), page_size=5, dtype="bfloat16"))
    assert_rows_are_alone(harness.attention, cache)


@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("num_q_heads", [2, 8, 32])
@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e5m2")]
)
def test_nan_stays_with_the_row_that_sees_it(where, num_q_heads, q_dtype, kv_dtype):
    """Beside the tokens of a last tile that are none, and in every tile before."""
    lengths = (3, 31, 33, 2000)
    for request, length in enumerate(lengths):
        cache = build(CacheCase(lengths=lengths, num_q_heads=num_q_heads, num_kv_heads=2, head_dim=64, dtype=kv_dtype))
        q, *rows = rows_of(cache, "decode")
        q = q.astype(np.float32).astype(q_dtype)
        clean_o, clean_lse = harness.attention(q, *cache.pages, *rows)
        seen = np.zeros(clean_lse.shape, bool)
        if where == "q":
            q[request, 1, 3] = np.nan
            seen[request, 1] = True
        else:
            cache.k_blocks[cache.lookup_table[request, 0], 2, 1, 3] = np.nan
            seen[request, num_q_heads // 2 :] = True
        o, lse = harness.attention(q, *cache.pages, *rows)
        what = f"a NaN in {where} of {length} tokens"
        assert np.isnan(o[seen].astype(np.float32)).all(), what
        assert np.isnan(lse[seen]).all(), what
        assert_bits_equal(o[~seen], clean_o[~seen], what=f"o of the others than {what}")
        assert_bits_equal(lse[~seen], clean_lse[~seen], what=f"lse of the others than {what}")


@pytest.mark.parametrize("setting", MIXED_GRID, ids=setting_id)
def test_queries_over_narrower_pages(setting):
    q_dtype, kv_dtype = setting["pair"]
    cache = build(case_of(setting | {"dtype": kv_dtype}))
    q, *rows = rows_of(cache, setting["rows"])
    q = (np.float32(0.7) * q.astype(np.float32)).astype(q_dtype)
    options = {"window_left": setting["window_left"], "k_scale": 0.5, "v_scale": setting["v_scale"]}
    compare(cache, (q, *rows), **options)


def test_pages_before_the_window_are_not_looked_at():
    cache = build(CacheCase(lengths=(40, 9, 24), page_size=8))
    expected = reference.attention(cache.q, *cache.pages, *cache.decode_rows, window_left=8)
    cache.lookup_table[0, :3] = UNUSED_PAGE  # the window of 9 tokens begins at token 31
    cache.lookup_table[2, :1] = UNUSED_PAGE  # ... at token 15
    o, lse = harness.attention(cache.q, *cache.pages, *cache.decode_rows, window_left=8)
    assert_close(o, expected[0], rel=1e-5, what="o")
    assert_lse_close(lse, expected[1], tol=LSE_TOL, what="lse")


@pytest.mark.parametrize("sm_scale", [30.0, -30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits_stay_finite(dtype, sm_scale):
    """Scores near 1000 lie past exp's range; their own rounding, 8 ulp of the greatest, is all that may show in `o`."""
    cache = build(CacheCase(lengths=(200, 1, 33), page_size=16, head_dim=64, num_q_heads=8, dtype=dtype))
    q, row_batch, row_lengths = mixed_rows(cache)
    o, lse = harness.attention(q, *cache.pages, row_batch, row_lengths, sm_scale=sm_scale)
    expected_o, expected_lse = reference.attention(q, *cache.pages, row_batch, row_lengths, sm_scale=sm_scale)
    greatest = np.abs(expected_lse[np.isfinite(expected_lse)]).max()
    assert greatest > 700
    assert_close(o, expected_o, rel=max(REL[dtype], 8 * 2**-23 * greatest), what="o")
    assert_lse_close(lse, expected_lse, tol=LSE_TOL, what="lse")


@pytest.mark.parametrize("score", [-1e5, 1e5])
def test_equal_logits_of_any_size_average_the_values(score):
    cache = build(CacheCase(lengths=(77,), num_q_heads=2, num_kv_heads=1, head_dim=8, page_size=16, rank=5))
    cache.k_blocks[:, 0] = 1
    q = np.ones((1, 2, 8), np.float32)
    compare(cache, (q, *cache.decode_rows), sm_scale=score / 8)


# The accuracy of the functions inside, at their worst


def two_tokens(first, second, cap):
    """Returns o and lse of rows that see two tokens with the given scores (before the cap) and the values 0 and 1."""
    rows = len(first)
    q = np.zeros((rows, 1, 8), np.float32)
    q[:, 0, 0], q[:, 0, 1] = first, second
    k, v = np.zeros((2, 1, 2, 1, 8), np.float32)
    k[0, 0, 0, 0] = k[0, 1, 0, 1] = v[0, 1, 0, 0] = 1
    row_batch, row_lengths = np.zeros(rows, np.int32), np.full(rows, 2, np.int32)
    table = np.zeros((1, 1), np.uint32)
    o, lse = harness.attention(q, k, v, table, row_batch, row_lengths, sm_scale=1.0, logits_soft_cap=cap)
    return o[:, 0, 0], lse[:, 0]


@pytest.mark.parametrize("cap", [0.0, 0.5, 30.0, 50.0])
def test_worst_error_of_exp2_log2_and_tanh(cap):
    """A weight alone in its row, over scores up to 20: 1e-5 is all it may be off. Past 20 a score's rounding shows."""
    first, second = np.random.default_rng(0).uniform(-20, 20, (2, 200_000)).astype(np.float32)
    o, lse = two_tokens(first, second, cap)
    x, y = (cap * np.tanh(s / cap) if cap else s for s in (first.astype(np.float64), second.astype(np.float64)))
    expected = 1 / (1 + np.exp(x - y))
    assert (np.abs(o - expected) / expected).max() < 1e-5
    assert_lse_close(lse, np.logaddexp(x, y) / math.log(2), tol=1e-6, what="lse")


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_weights_are_finer_than_bfloat16(kv_dtype, rows):
    """Values that all but cancel: what a weight loses in rounding to bfloat16 would be as large as the result."""
    q = np.zeros((rows, 8, 64), "bfloat16")
    k, v = np.zeros((2, 1, 2, 1, 64), kv_dtype)
    q[..., 0] = k[0, 1, 0, 0] = v[0, 1] = 1
    v[0, 0] = -0.75
    row_batch, row_lengths = np.zeros(rows, np.int32), np.full(rows, 2, np.int32)
    o, _ = harness.attention(q, k, v, np.zeros((1, 1), np.uint32), row_batch, row_lengths, sm_scale=math.log(0.7517))
    expected = np.full(q.shape, (0.7517 - 0.75) / 1.7517)
    assert_close(o, expected, rel=REL["bfloat16"], what="o")


def test_worst_error_of_lse_over_lengths():
    length = np.arange(1, 5001, dtype=np.int32)
    k = np.zeros((5000, 1, 1, 8), np.float32)
    table = np.arange(5000, dtype=np.uint32)[None]
    _, lse = harness.attention(np.zeros((5000, 1, 8), np.float32), k, k.copy(), table, 0 * length, length)
    assert_lse_close(lse[:, 0], np.log2(length), tol=1e-6, what="lse")


@settings(max_examples=examples(200), derandomize=True, deadline=None)
@given(data=st.data())
def test_any_options(data):
    draw = data.draw
    rank, layout = draw(st.sampled_from(STORAGES))
    page_size = draw(st.integers(1, 40))
    kv_heads = draw(st.integers(1, 4))
    head_dim = 8 * draw(st.integers(1, 20))
    cache = build(
        CacheCase(
            lengths=tuple(draw(st.lists(st.integers(0, 3 * page_size + 1), max_size=5))),
            num_q_heads=kv_heads * draw(st.integers(1, 17)),
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            rank=rank,
            layout=layout,
            layers=draw(st.integers(1, 3)),
            dtype=draw(st.sampled_from(tiers.of(DTYPES))),
            seed=draw(st.integers(0, 2**32 - 1)),
        )
    )
    setting = {
        "scale": draw(st.none() | st.floats(-2, 2)),
        "window_left": draw(st.just(-1) | st.integers(0, 130)),
        "logits_soft_cap": draw(st.just(0.0) | st.floats(0.1, 100)),
        "rope_theta": draw(st.none() | st.floats(100, 1e6)),
        "v_scale": draw(st.floats(0.25, 2)),
        "alibi": draw(st.booleans()),
        "sinks": draw(st.booleans()),
    }
    compare(cache, rows_of(cache, draw(st.sampled_from(["decode", "mixed"]))), **options_of(setting, cache.case))
