"""Caches of int8 and int4 codes against the oracle that quantises alike: append, gather, copies of pages, attention."""

import math

import numpy as np
import pytest
from max.dtype import DType

from paged_kv import reference
from paged_kv.kv_formats import CODE_DTYPES, TABLE
from paged_kv.runtime.variants import Variant
from support import harness
from support.attending import LSE_TOL, REL, assert_blocks_change_no_bit, assert_rows_are_alone, options_of, rows_of
from support.cases import STORAGES, CacheCase, emptied
from support.codes import quantised_cache, widened_pages
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.grids import LENGTHS, all_pairs, case_of, setting_id, tokens_of

GRID = all_pairs(
    {
        "pair": harness.CODE_PAIRS,
        "storage": STORAGES,
        "page_size": (1, 5, 16, 128),
        "group": (1, 2, 3, 4, 7, 8, 16),
        "num_kv_heads": (1, 2, 3),
        "head_dim": (8, 24, 40, 64, 72, 128, 256),
        "lengths": LENGTHS,
        "rows": ("decode", "mixed"),
        "window_left": (-1, 6, 127),
        "logits_soft_cap": (0.0, 30.0),
        "scale": (None, 1.7),
        "v_scale": (1.0, -0.5),
        "alibi": (False, True),
        "sinks": (False, True),
    }
)
MOVES = all_pairs(
    {
        "pair": (harness.CODE_PAIRS[0], harness.CODE_PAIRS[-1]),
        "storage": STORAGES,
        "page_size": (1, 5, 16, 128),
        "num_kv_heads": (1, 2, 3),
        "head_dim": (8, 24, 64, 72, 128),
        "lengths": LENGTHS,
    }
)


def built(setting):
    q, kv_format = setting["pair"]
    return quantised_cache(case_of(setting | {"dtype": q}), kv_format), kv_format


def storage_of(cache):
    return (cache.k_blocks, cache.v_blocks, cache.case.layout, cache.case.layer)


def append(cache, k, v, batch, positions):
    variant = Variant("append", DType[k.dtype.name], DType[cache.k_blocks.dtype.name])
    harness.HOST.execute(variant, [k, v, batch, positions], storage_of(cache), cache.lookup_table)


def gather(cache, dtype):
    indptr = np.concatenate([[0], np.cumsum(cache.lengths)]).astype(np.int32)
    shape = np.zeros((indptr[-1], cache.case.num_kv_heads, cache.case.head_dim), np.int8)
    variant = Variant("gather", DType[dtype], DType[cache.k_blocks.dtype.name])
    return harness.HOST.execute(variant, [indptr, shape], storage_of(cache), cache.lookup_table)


def attention_like_oracle(cache, rows, **options):
    q, row_batch, row_lengths = rows
    o, lse = harness.attention(q, *cache.pages, row_batch, row_lengths, **cache.storage, **options)
    pages = widened_pages(cache)
    expected = reference.attention(q, *pages, row_batch, row_lengths, **cache.storage, **options)
    assert_close(o, expected[0], rel=REL[q.dtype.name], what=f"o of {cache.case} {options}")
    assert_lse_close(lse, expected[1], tol=LSE_TOL, what=f"lse of {cache.case} {options}")
    assert_blocks_change_no_bit(harness.attention, cache, rows, sizes=(1, 20), **options)
    return o, lse


@pytest.mark.parametrize("setting", MOVES, ids=setting_id)
def test_append_quantises_and_gather_widens(setting):
    full, kv_format = built(setting)
    tokens = tokens_of(full)
    order = np.random.default_rng(0).permutation(len(tokens[0]))
    actual = quantised_cache(case_of(setting | {"dtype": setting["pair"][0]}), kv_format)
    for blocks, poison in zip(actual.pages[:2], emptied(full).pages[:2], strict=True):
        blocks[:] = reference.quantised(poison[..., : full.case.head_dim], kv_format)
    append(actual, *(column[order] for column in tokens))
    for name, a, e in zip(("k_blocks", "v_blocks"), actual.pages[:2], full.pages[:2], strict=True):
        assert_bits_equal(a, e, what=name)
    k, v = gather(full, setting["pair"][0])
    expected_k, expected_v, _ = reference.gather(*widened_pages(full), full.lengths, **full.storage)
    for name, a, e in (("k", k, expected_k), ("v", v, expected_v)):
        assert_bits_equal(a, e.astype(np.float32).astype(a.dtype), what=name)


@pytest.mark.parametrize("setting", GRID, ids=setting_id)
def test_attention(setting):
    cache, _ = built(setting)
    attention_like_oracle(
        cache, rows_of(cache, setting["rows"]), **options_of(setting | {"rope_theta": None}, cache.case)
    )


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kv_format", CODE_DTYPES)
def test_weights_are_finer_than_bfloat16(kv_format, rows):
    """Values that all but cancel: of weights rounded to bfloat16 nothing would be left. Integers have 15 bits."""
    q = np.zeros((rows, 8, 64), "bfloat16")
    k, v = np.zeros((2, 1, 2, 1, 64), np.float32)
    q[..., 0] = k[0, 1, 0, 0] = v[0, 1] = 1
    v[0, 0] = -0.75
    cache = (reference.quantised(pages, kv_format) for pages in (k, v))
    row_batch, row_lengths = np.zeros(rows, np.int32), np.full(rows, 2, np.int32)
    o, _ = harness.attention(q, *cache, np.zeros((1, 1), np.uint32), row_batch, row_lengths, sm_scale=math.log(0.7517))
    assert np.abs(o.astype(np.float64) - (0.7517 - 0.75) / 1.7517).max() < 4e-5


@pytest.mark.parametrize("kv_format", CODE_DTYPES)
@pytest.mark.parametrize("new", [1, 4, 70])
def test_long_requests_and_prefill(kv_format, new):
    """Requests that are split, several rows of a request, and enough rows of one that the kernel is prefill's."""
    lengths = (2500, 0, 1030, 7) if new < 70 else (70, 400)
    cache = quantised_cache(CacheCase(lengths=lengths, num_q_heads=6, head_dim=72, page_size=16, rank=5), kv_format)
    rows = [(b, length - i) for b, length in enumerate(lengths) for i in range(min(new, length))]
    row_batch, row_lengths = np.array(rows, np.int32).T.copy()
    q = np.random.default_rng(0).standard_normal((len(rows), 6, 72), np.float32)
    attention_like_oracle(cache, (q, row_batch, row_lengths), window_left=1500)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 20])
def test_masks(rows):
    q_dtype, kv_format = harness.CODE_PAIRS[-1]
    cache = quantised_cache(CacheCase(lengths=(45, 130), num_q_heads=4, head_dim=40, page_size=5), kv_format)
    rng = np.random.default_rng(0)
    row_batch = np.repeat(np.arange(2, dtype=np.int32), rows)
    row_lengths = cache.lengths[row_batch]
    q = rng.standard_normal((len(row_batch), 4, 40), np.float32).astype(q_dtype)
    starts = np.concatenate([[0], np.cumsum(8 * ((row_lengths + 7) // 8))])[:-1].astype(np.int64)
    masks = {"mask": rng.integers(0, 256, 17 * len(row_batch) + 40).astype(np.uint8), "mask_starts": starts}
    o, lse = harness.masked_attention(q, *cache.pages, row_batch, row_lengths, **masks)
    expected = reference.masked_attention(q, *widened_pages(cache), row_batch, row_lengths, **masks)
    assert_close(o, expected[0], rel=REL[q_dtype], what="o")
    assert_lse_close(lse, expected[1], tol=LSE_TOL, what="lse")


@pytest.mark.parametrize("kv_format", CODE_DTYPES)
def test_heads_that_are_not_finite_zero_or_tiny(kv_format):
    """NaN and infinity make NaN of the head, for the rows that see it alone; zeros and the tiniest numbers become 0."""
    case = CacheCase(lengths=(40, 33), num_q_heads=4, head_dim=40, page_size=5)
    cache = quantised_cache(case, kv_format)
    k = np.random.default_rng(0).standard_normal((6, 2, 40), np.float32)
    k[0, 0, 39], k[1, 1, 0], k[2, 0, 7] = np.nan, np.inf, -np.inf
    k[3], k[4], k[5] = 0, 1e-40, np.finfo(np.float32).max
    where = np.zeros(6, np.int32), np.arange(30, 36, dtype=np.int32)
    if kv_format == "int8":
        append(cache, k, k, *where)
    else:
        append(cache, k.astype("bfloat16"), k.astype("bfloat16"), *where)
        k = k.astype("bfloat16").astype(np.float32)
    stored = reference.quantised(k, kv_format)
    at = cache.lookup_table[0, where[1] // 5], where[1] % 5
    assert_bits_equal(cache.k_blocks[at], stored, what="k_blocks")
    rows = np.array([0, 0, 0, 1], np.int32), np.array([30, 31, 40, 33], np.int32)
    q = np.random.default_rng(1).standard_normal((4, 4, 40), np.float32)
    o, lse = harness.attention(q, *cache.pages, *rows, sm_scale=1e-3)
    is_finite = np.isfinite(o).all(-1)
    assert is_finite.tolist() == [[True] * 4, [False] * 2 + [True] * 2, [False] * 4, [True] * 4]
    assert (np.isfinite(lse) == is_finite).all()
    assert np.isnan(o[2]).all()


@pytest.mark.parametrize("pair", harness.CODE_PAIRS, ids="-".join)
def test_what_o_loses_of_tiny_v(pair):
    """For each token the greatest code times what counts as 0: as docs/quantised-cache.md states it."""
    q_dtype, kv_format = pair
    case = CacheCase(lengths=(40, 64, 7), num_q_heads=4, head_dim=64, page_size=16, dtype=q_dtype)
    for size in (1e-25, 1e-29, 1e-32, 1e-35, 1e-37):
        cache = quantised_cache(case, kv_format)
        v = np.random.default_rng(1).standard_normal((*cache.v_blocks.shape[:-1], 64), np.float32)
        cache.v_blocks[:] = reference.quantised(v * np.float32(size), kv_format)
        options: dict = {"sm_scale": 0.3, "v_scale": 1 / size}  # weights of many powers of ten; float16 has no 1e-25
        rows = cache.decode_rows
        o, _ = harness.attention(cache.q, *cache.pages, *rows, **cache.storage, **options)
        expected, _ = reference.attention(cache.q, *widened_pages(cache), *rows, **cache.storage, **options)
        least = 2.0**-126 if q_dtype == "float32" else 2e-34
        lost = rows[1][:, None, None] * TABLE[kv_format].greatest * least / size
        error = np.abs(o.astype(np.float64) - expected)
        assert (error <= lost + REL[q_dtype] * np.abs(expected).max()).all(), f"V of {size}"


@pytest.mark.parametrize("kv_format", CODE_DTYPES)
def test_sizes_that_no_head_of_codes_has_are_refused(kv_format):
    cache = quantised_cache(CacheCase(lengths=(9,), head_dim=8), kv_format)
    cut = [np.ascontiguousarray(blocks[..., 1:]) for blocks in cache.pages[:2]]
    with harness.refused("k_blocks", cut[0].shape[-1], "bytes"):
        harness.attention(cache.q, *cut, cache.lookup_table, *cache.decode_rows)


@pytest.mark.parametrize("q_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", ["decode", "prefill"])
def test_the_code_that_no_append_makes(q_dtype, rows):
    """A user's op may write -128: it is -128 times the scale for every kernel, and 0 is 0."""
    lengths = (40, 33)
    cache = quantised_cache(CacheCase(lengths=lengths, num_q_heads=4, head_dim=72, dtype=q_dtype, seed=3), "int8")
    for blocks in cache.pages[:2]:
        blocks[..., :-4] = np.random.default_rng(0).choice(np.array([-128, 0, 1], np.int8), blocks[..., :-4].shape)
    row_batch, row_lengths = cache.decode_rows
    if rows == "prefill":
        row_batch = np.repeat(row_batch, 33)
        row_lengths = np.concatenate([np.arange(n - 32, n + 1, dtype=np.int32) for n in lengths])
    q = np.random.default_rng(1).standard_normal((len(row_batch), 4, 72), np.float32).astype(q_dtype)
    attention_like_oracle(cache, (q, row_batch, row_lengths), sm_scale=0.01)


@pytest.mark.parametrize("kv_format", CODE_DTYPES)
def test_a_row_depends_on_no_other_row(kv_format):
    cache = quantised_cache(CacheCase(lengths=(70, 0, 33, 1), page_size=5, dtype="bfloat16"), kv_format)
    assert_rows_are_alone(harness.attention, cache)
