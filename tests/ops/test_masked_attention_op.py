"""The op of attention with masks, positions and offsets, against the float64 oracle."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from paged_kv import reference
from support import harness
from support.attending import LSE_TOL, REL, options_of
from support.cases import STORAGES, Cache, CacheCase, build, causal_rows, normal, permuted
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.grids import all_pairs, case_of, setting_id

SETTINGS = all_pairs(
    {"pair": harness.MASKED_PAIRS, "head_dim": (8, 40, 64, 128), "group": (1, 3, 4, 8, 16), "num_kv_heads": (1, 2)}
    | {"page_size": (1, 5, 16, 64), "storage": STORAGES, "lengths": ((300, 0, 90), (2000,), (31, 33, 64, 1))}
    | {"window_left": (-1, 0, 100), "logits_soft_cap": (0.0, 5.0), "scale": (None, -0.4), "rope_theta": (None, 1e4)}
    | {"alibi": (False, True), "sinks": (False, True), "v_scale": (1.0, -0.5)}
    | {"rows": (1, 7, 40), "positions": (False, True), "offsets": (False, True)}
    | {"mask": ("none", "thin", "dense", "late", "first")}
)
EXAMPLES = [("bfloat16", "bfloat16"), ("float32", "float32")]


class Rows(NamedTuple):
    """The rows of a call, and what the op takes of them beside the plain one's operands."""

    q: np.ndarray
    row_batch: np.ndarray
    row_lengths: np.ndarray
    row_masks: dict[str, np.ndarray]


def pack(masks: list[np.ndarray], bit: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of some rows' masks one after the other, the first at `bit`, and the start of each."""
    starts = bit + np.cumsum([0, *map(len, masks)])
    bits = np.concatenate([np.ones(bit, bool), *masks])
    return np.packbits(bits, bitorder="little"), starts[:-1].astype(np.int64)


def rows_of(cache: Cache, setting: dict, q_dtype: str, seed: int = 0) -> Rows:
    """Rows of random lengths, those of a request adjacent, between rows of padding whose numbers mean nothing."""
    rng = np.random.default_rng(seed)
    row_batch = np.repeat(np.arange(-1, len(cache.lengths)), setting["rows"]).astype(np.int32)
    row_lengths = np.where(row_batch < 0, 10**6, rng.integers(0, cache.lengths[row_batch] + 1)).astype(np.int32)
    q = normal(rng, (len(row_batch), cache.case.num_q_heads, cache.case.head_dim), "float32")
    q[row_batch < 0] = np.nan
    row_masks = {}
    if setting["offsets"]:
        row_masks["token_offsets"] = rng.integers(0, 3000, len(cache.lengths)).astype(np.int32)
    if setting["positions"]:
        shift = row_masks["token_offsets"][row_batch] if setting["offsets"] else 0
        row_masks["row_positions"] = (rng.integers(-40, 400, len(row_batch)) + shift).astype(np.int32)
    if setting["mask"] != "none":
        share = {"thin": 0.05, "dense": 0.98}.get(setting["mask"], 0.5)
        firsts = np.zeros(len(row_batch), np.int32)
        if setting["mask"] in ("late", "first"):
            firsts = rng.integers(0, np.where(row_batch < 0, 9, row_lengths) + 2).astype(np.int32)
            row_masks["mask_firsts"] = firsts
        bits = np.where(row_batch < 0, 0, np.maximum(0, row_lengths - firsts))
        masks = [rng.random(count) < share for count in bits]
        row_masks["mask"], row_masks["mask_starts"] = pack(masks)
        without = rng.random(len(row_batch)) < 0.2
        row_masks["mask_starts"][without] = -1
        row_masks["mask_starts"][row_batch < 0] = 10**9
    return Rows(q.astype(q_dtype), row_batch, row_lengths, row_masks)


def compare(cache: Cache, rows: Rows, *, rel: float | None = None, **options) -> tuple[np.ndarray, np.ndarray]:
    """Runs the op and the oracle, compares, and returns the op's results."""
    q, row_batch, row_lengths, row_masks = rows
    arguments = (q, *cache.pages, row_batch, row_lengths)
    o, lse = harness.masked_attention(*arguments, **row_masks, **cache.storage, **options)
    expected_o, expected_lse = reference.masked_attention(*arguments, **row_masks, **cache.storage, **options)
    assert_close(o, expected_o, rel=rel or REL[q.dtype.name], what=f"o of {cache.case} {options}")
    assert_lse_close(lse, expected_lse, tol=LSE_TOL, what=f"lse of {cache.case} {options}")
    sees_nothing = np.isneginf(expected_lse)
    assert not o[sees_nothing].any()
    return o, lse


@pytest.mark.parametrize("setting", SETTINGS, ids=setting_id)
def test_any_rows(setting):
    q_dtype, kv_dtype = setting["pair"]
    cache = build(replace(case_of(setting | {"dtype": kv_dtype, "lengths": "edges"}), lengths=setting["lengths"]))
    rows = rows_of(cache, setting, q_dtype)
    options = options_of(setting, cache.case)
    if setting["alibi"]:  # scores of some 10, as `options_of` says, where positions begin at thousands
        options["alibi_slopes"] = options["alibi_slopes"] / 10
    o, lse = compare(cache, rows, **options)
    again = permuted(cache, np.random.default_rng(1))
    results = harness.masked_attention(
        rows.q, *again.pages, rows.row_batch, rows.row_lengths, **rows.row_masks, **cache.storage, **options
    )
    for name, result, once in zip(("o", "lse"), results, (o, lse), strict=True):
        assert_bits_equal(result, once, what=f"{name} in another order of pages")


def cache_of(dtype: str, *lengths: int, **sizes: int) -> Cache:
    sizes = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64} | sizes
    return build(CacheCase(lengths=lengths, dtype=dtype, **sizes))


def put(cache: Cache, blocks: np.ndarray, tokens: np.ndarray, value: float) -> None:
    """Changes some elements of some tokens of request 0."""
    size = cache.case.page_size
    blocks[cache.lookup_table[0, tokens // size], tokens % size, :, 3:7] = value


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("pair", harness.MASKED_PAIRS, ids="-".join)
def test_hidden_tokens_may_hold_anything(pair, rows):
    """NaN and infinities in K and V, hidden by masks alone, and some rows see nothing at all."""
    cache = cache_of(pair[1], 200)
    rng = np.random.default_rng(0)
    hidden = rng.random(200) < 0.3
    masks = [~hidden & (rng.random(200) < 0.8) for _ in range(rows)]
    masks[rows // 2][:] = False
    if rows > 2:
        masks[-1] = rng.random(200) < 0.5  # sees some of them
    mask, starts = pack(masks)
    q, _, _ = causal_rows(cache, [rows])
    row_batch, lengths = np.zeros(rows, np.int32), np.full(rows, 200, np.int32)
    row_masks = {"mask": mask, "mask_starts": starts}
    clean = harness.masked_attention(q.astype(pair[0]), *cache.pages, row_batch, lengths, **row_masks)
    tokens = np.flatnonzero(hidden)
    put(cache, cache.k_blocks, tokens, np.nan)
    put(cache, cache.v_blocks, tokens[::2], np.nan)
    if "float8_e4m3fn" not in pair:  # which has no infinity
        put(cache, cache.k_blocks, tokens[1::2], np.inf)
        put(cache, cache.v_blocks, tokens[1::2], -np.inf)
    last = rows - (rows > 2)
    o, lse = harness.masked_attention(q.astype(pair[0]), *cache.pages, row_batch, lengths, **row_masks)
    assert_close(o[:last], clean[0][:last].astype(np.float64), rel=2 * REL[pair[0]], what="o")
    assert_bits_equal(lse[:last], clean[1][:last], what="lse")
    assert not o[rows // 2].any()
    assert np.isneginf(lse[rows // 2]).all()
    assert np.isnan(o[last:].astype(np.float32)).all()
    assert np.isnan(lse[last:]).all()


@pytest.mark.parametrize("pair", EXAMPLES, ids="-".join)
def test_rows_that_see_nothing(pair):
    """By a mask, a window that lies after the tokens, or their length; sinks and NaN beside them change nothing."""
    cache = cache_of(pair[1], 100)
    put(cache, cache.v_blocks, np.array([99]), np.nan)
    q, row_batch, _ = causal_rows(cache, [6])
    q[:5] = np.nan
    mask, starts = pack([np.zeros(100, bool), np.ones(100, bool)])
    row_masks = {"mask": mask, "mask_starts": starts[[0, 1, 1, 0, 0, 1]]}
    row_masks["row_positions"] = np.array([99, 900, 110, 110, 0, 99], np.int32)
    lengths = np.array([100, 100, 99, 100, 0, 100], np.int32)
    options = {"window_left": 10, "sinks": np.full(8, 5.0, np.float32)}
    o, lse = harness.masked_attention(q.astype(pair[0]), *cache.pages, row_batch, lengths, **row_masks, **options)
    assert not o[:5].any()
    assert np.isneginf(lse[:5]).all()
    assert np.isfinite(lse[5]).all()


def test_pages_before_every_window_are_not_looked_at():
    """The window counts back from positions."""
    cache = cache_of("float32", 40)
    row_batch, lengths, positions = np.zeros(2, np.int32), np.full(2, 40, np.int32), np.full(2, 39, np.int32)
    call = (causal_rows(cache, [2])[0], *cache.pages, row_batch, lengths)
    options = {"row_positions": positions, "window_left": 5}
    expected = harness.masked_attention(*call, **options)
    cache.lookup_table[0, :2] = 99  # 16 tokens a page, and the window begins at token 34
    for again, once in zip(harness.masked_attention(*call, **options), expected, strict=True):
        assert_bits_equal(again, once, what="without the pages before")
    positions[1] = 36  # begins at token 31
    with harness.refused("lookup_table", "request 0", "page slot 1", 99):
        harness.masked_attention(*call, **options)


@pytest.mark.parametrize("call", [harness.attention, harness.masked_attention])
@pytest.mark.parametrize(("pair", "o_dtype"), [(("bfloat16", "bfloat16"), "float32")])
def test_an_output_of_another_dtype(call, pair, o_dtype):
    """It is rounded from float32 alone: as exact as its dtype; NaN elsewhere in a block, computed again in float64."""
    cache = cache_of(pair[1], 100)
    put(cache, cache.v_blocks, np.array([99]), np.nan)
    for new_tokens in 1, 5, 40:
        q, row_batch, lengths = causal_rows(cache, [new_tokens])
        lengths -= 1
        lengths[0] = 100
        o, lse = call(q, *cache.pages, row_batch, lengths, o_dtype=o_dtype)
        expected = reference.attention(q, *cache.pages, row_batch, lengths)
        assert (o.dtype, np.isnan(o[0, :, 3:7]).all()) == (o_dtype, True)
        assert_close(o[1:], expected[0][1:], rel=1e-5, what="o")
        assert_lse_close(lse, expected[1], tol=LSE_TOL, what="lse")
