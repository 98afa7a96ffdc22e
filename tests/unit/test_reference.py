"""The oracle against an independent implementation: torch float64, dense and masked, on the tokens in `Cache.keys`.

The NaN poison of `cases.py` is in every cache here, so each comparison also proves that unused memory is not read.
"""

import math

import numpy as np
import pytest
import torch

from paged_kv import reference
from paged_kv.errors import ContractError, ShapeError
from support.cases import (
    DTYPES,
    GROUPS,
    PAGE_SIZES,
    STORAGES,
    CacheCase,
    build,
    causal_rows,
    edge_lengths,
    emptied,
    ragged_lengths,
)
from support.compare import assert_bits_equal, assert_close, assert_lse_close

REL = 1e-12
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625])
SINKS = np.array([0.3, -2.0, 4.0, 0.0], np.float32)
OPTIONS = {
    "plain": {},
    "scales": {"sm_scale": 0.3, "q_scale": 1.5, "k_scale": 0.7, "v_scale": 2.5},
    "window": {"window_left": 6},
    "own token only": {"window_left": 0},
    "soft cap": {"logits_soft_cap": 0.8},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi, capped": {"alibi_slopes": SLOPES, "logits_soft_cap": 2.0},
    "rope": {"rope_theta": 1e4},
    "rope, scaled": {"rope_theta": 500.0, "rope_scale": 4.0},
    "sinks": {"sinks": SINKS},
    "sinks past exp's range": {"sinks": np.array([900.0, -900.0, 30.0, -np.inf])},
    "logits past exp's range": {"sm_scale": 60.0},
    "all": {"sm_scale": 0.2, "window_left": 9, "logits_soft_cap": 1.5, "q_scale": 0.9, "k_scale": 1.1, "v_scale": 0.5}
    | {"alibi_slopes": -SLOPES, "sinks": SINKS, "rope_theta": 1e3},
}


def dense_row(q, k, v, *, sm_scale=None, window_left=-1, logits_soft_cap=0.0, q_scale=1.0, k_scale=1.0, v_scale=1.0,
              alibi_slopes=None, sinks=None, rope_theta=None, rope_scale=1.0):  # fmt: skip
    """One row, the textbook way: q [Hq, D] sees all of k, v [L, Hk, D]. Masks instead of slices; a sink is a column."""
    q, k, v = (torch.from_numpy(x.astype(np.float64)) for x in (q, k, v))
    (q_heads, head_dim), length = q.shape, len(k)
    k, v = (x.repeat_interleave(q_heads // x.shape[1], dim=1).transpose(0, 1) for x in (k, v))  # [Hq, L, D]
    j = torch.arange(length, dtype=torch.float64)
    if rope_theta is not None:
        q, k = rotate(q, j[-1:], rope_theta, rope_scale), rotate(k, j, rope_theta, rope_scale)
    x = (k @ q[:, :, None])[..., 0] * q_scale * k_scale * (1 / math.sqrt(head_dim) if sm_scale is None else sm_scale)
    if alibi_slopes is not None:
        x = x + torch.outer(torch.from_numpy(alibi_slopes), j)
    if logits_soft_cap > 0:
        x = torch.tanh(x / logits_soft_cap) * logits_soft_cap
    if window_left >= 0:
        x = x.masked_fill(length - 1 - j > window_left, -torch.inf)
    if sinks is not None:
        x = torch.cat([x, torch.from_numpy(sinks).double()[:, None]], dim=1)
    weights = torch.softmax(x, dim=1)[:, :length]
    o = (weights[:, :, None] * v).sum(dim=1) * v_scale
    return o.numpy(), torch.logsumexp(x, dim=1).numpy() / math.log(2)


def rotate(x, positions, theta, scale):
    """Half-split rotary embedding of x [..., T or 1, D] at `positions` [T or 1], as complex multiplication."""
    half = x.shape[-1] // 2
    frequency = torch.tensor([1 / (theta ** (i / half) * scale) for i in range(half)], dtype=torch.float64)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * positions[:, None] * frequency)
    return torch.cat([turned.real, turned.imag], dim=-1)


def dense_rows(cache, q, row_batch, row_lengths, **options):
    """`dense_row` for every row, from the cache's truth; rows that see nothing stay 0 and -inf."""
    o, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for r, (b, length) in enumerate(zip(row_batch, row_lengths, strict=True)):
        if b >= 0 and length > 0:
            o[r], lse[r] = dense_row(q[r], cache.keys[b][:length], cache.values[b][:length], **options)
    return o, lse


def check_attention(cache, q, row_batch, row_lengths, **options):
    o, lse = reference.attention(q, *cache.pages, row_batch, row_lengths, **cache.storage, **options)
    expected_o, expected_lse = dense_rows(cache, q, row_batch, row_lengths, **options)
    assert o.dtype == lse.dtype == np.float64
    assert_close(o, expected_o, rel=REL, what=f"o of {cache.case}")
    assert_lse_close(lse, expected_lse, tol=REL, what=f"lse of {cache.case}")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_attention_options(options):
    cache = build(CacheCase(lengths=(0, 1, 6, 7, 8, 33), page_size=5))
    check_attention(cache, cache.q, *cache.decode_rows, **options)
    cache = build(CacheCase(lengths=(3, 0, 21), page_size=4, seed=1))
    check_attention(cache, *causal_rows(cache, (3, 0, 13)), **options)


CASES = [
    *(CacheCase((9, 20), num_q_heads=3 * group, num_kv_heads=3, head_dim=8, page_size=5) for group in GROUPS),
    *(CacheCase(edge_lengths(page_size), page_size=page_size, head_dim=16) for page_size in PAGE_SIZES),
    *(CacheCase((4, 19), dtype=dtype) for dtype in (*DTYPES, "float8_e4m3fn", "float8_e5m2")),
    *(
        CacheCase(lengths, page_size=5, rank=rank, layout=layout, head_dim=16)
        for rank, layout in STORAGES
        for lengths in ragged_lengths(5)
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_of_any_cache(case):
    cache = build(case)
    check_attention(cache, cache.q, *cache.decode_rows)


def test_attention_plain_agrees_with_torch_sdpa():
    cache = build(CacheCase(lengths=(37,), num_q_heads=6, num_kv_heads=2))
    q, k, v = (torch.from_numpy(x).double() for x in (cache.q, cache.keys[0][None], cache.values[0][None]))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, None], k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True
    )
    o, _ = reference.attention(cache.q, *cache.pages, *cache.decode_rows)
    assert_close(o, expected[:, :, 0].numpy(), rel=REL, what="o")


def test_masks_keep_the_tokens_whose_bits_are_set():
    cache, bits = build(CacheCase(lengths=(20, 9), page_size=5)), np.random.default_rng(3).random(40) < 0.5
    starts, firsts = (3, 19), (4, 0)
    o, lse = reference.masked_attention(
        *(cache.q, *cache.pages, *cache.decode_rows),
        mask=np.packbits(bits, bitorder="little"),
        mask_starts=np.array(starts),
        mask_firsts=np.array(firsts),
    )
    for r, (length, start, first) in enumerate(zip((20, 9), starts, firsts, strict=True)):
        keep = np.concatenate([np.ones(first, bool), bits[start : start + length - first]])
        expected = dense_row(cache.q[r], cache.keys[r][keep], cache.values[r][keep])
        assert_close(o[r], expected[0], rel=REL, what="o")
        assert_lse_close(lse[r], expected[1], tol=REL, what="lse")


def test_padding_rows_are_zero_even_with_sinks():
    cache = build(CacheCase(lengths=(5, 0)))
    q = np.concatenate([cache.q, cache.q[:1]])
    o, lse = reference.attention(
        q, *cache.pages, np.array([0, 1, -1], np.int32), np.array([5, 0, 5], np.int32), sinks=SINKS
    )
    assert np.isfinite(lse[0]).all()
    assert (o[1:] == 0).all()
    assert (lse[1:] == -np.inf).all()


def test_query_heads_must_be_a_multiple_of_kv_heads():
    cache = build(CacheCase(lengths=(3,), num_q_heads=4, num_kv_heads=3))
    with pytest.raises(ShapeError, match="q: expected a multiple of the cache's 3 KV heads, got 4"):
        reference.attention(cache.q, *cache.pages, *cache.decode_rows)


@pytest.mark.parametrize(("rank", "layout"), STORAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_append_then_gather_returns_the_tokens(rank, layout, dtype):
    built = build(CacheCase(lengths=(11, 0, 5, 21), page_size=5, rank=rank, layout=layout, dtype=dtype))
    cache = emptied(built)
    k_new, v_new = np.concatenate(built.keys), np.concatenate(built.values)
    offsets = np.array([0, 11, 11, 16, 37], np.int32)
    batch, positions = reference.ragged_rows(offsets, np.zeros(4, np.uint32), len(k_new))
    shuffled = np.random.default_rng(0).permutation(len(batch))  # tokens may come in any order
    reference.append(
        k_new[shuffled], v_new[shuffled], batch[shuffled], positions[shuffled], *cache.pages, **cache.storage
    )
    # The blocks were built token by token from written-out addresses: equal blocks mean no byte elsewhere was touched.
    assert_bits_equal(cache.k_blocks, built.k_blocks, what="k_blocks")
    assert_bits_equal(cache.v_blocks, built.v_blocks, what="v_blocks")
    k, v, indptr = reference.gather(*cache.pages, built.lengths, **cache.storage)
    assert_bits_equal(k, k_new, what="gathered K")
    assert_bits_equal(v, v_new, what="gathered V")
    assert_bits_equal(indptr, offsets, what="indptr")


def test_append_skips_padding():
    cache = emptied(build(CacheCase(lengths=(2,))))
    token = np.ones((1, 2, 32), np.float32)
    reference.append(token, token, np.array([-1], np.int32), np.array([0], np.int32), *cache.pages)
    assert np.isnan(cache.k_blocks).all()
    assert np.isnan(cache.v_blocks).all()


def test_append_past_the_pages_writes_nothing():
    cache = emptied(build(CacheCase(lengths=(16,))))
    token = np.ones((2, 2, 32), np.float32)
    with pytest.raises(IndexError):  # position 16 would be on the unused entry of the table
        reference.append(token, token, np.zeros(2, np.int32), np.array([0, 16], np.int32), *cache.pages)
    assert np.isnan(cache.k_blocks).all()
    assert np.isnan(cache.v_blocks).all()


def test_gather_of_an_empty_batch():
    cache = build(CacheCase(lengths=(), num_kv_heads=3))
    k, v, indptr = reference.gather(*cache.pages, cache.lengths)
    assert k.shape == v.shape == (0, 3, 32)
    assert_bits_equal(indptr, np.zeros(1, np.int32), what="indptr")


def test_cache_views_select_the_layer():
    blocks = np.arange(2 * 2 * 3 * 4 * 5 * 6).reshape(2, 2, 3, 4, 5, 6)  # [pages, 2, layers, page_size, Hk, D]
    for layer in range(3):
        k, v = reference.cache_views(blocks, blocks, "NHD", layer)
        assert_bits_equal(k, blocks[:, 0, layer], what="K")
        assert_bits_equal(v, blocks[:, 1, layer], what="V")
        assert np.shares_memory(k, blocks)


@pytest.mark.parametrize(
    ("rank", "layout", "layer", "error"),
    [
        (4, "DHN", 0, ContractError),
        (6, "HND", 0, ContractError),
        (6, "NHD", 2, ContractError),
        (6, "NHD", -1, ContractError),
        (5, "NHD", 1, ContractError),
        (3, "NHD", 0, ShapeError),
    ],
)
def test_cache_views_refuse(rank, layout, layer, error):
    blocks = np.zeros((2,) * rank)
    with pytest.raises(error, match="got"):
        reference.cache_views(blocks, blocks, layout, layer)


def test_ragged_rows():
    batch, positions = reference.ragged_rows(np.array([0, 2, 2, 5], np.uint32), np.array([7, 9, 0], np.uint32), 7)
    assert_bits_equal(batch, np.array([0, 0, 2, 2, 2, -1, -1], np.int32), what="batch")
    assert_bits_equal(positions, np.array([7, 8, 0, 1, 2, 0, 0], np.int32), what="positions")


def test_ragged_rows_of_an_empty_batch():
    for rows in reference.ragged_rows(np.array([0]), np.array([], np.int64), 2):
        assert rows.shape == (2,)


@pytest.mark.parametrize("split", [0, 1, 5, 19, 20])
def test_merge_of_two_parts_is_the_whole(split):
    cache = build(CacheCase(lengths=(20,), page_size=5))
    parts = []
    for keys in (slice(0, split), slice(split, 20)):
        part = build(CacheCase(lengths=(len(range(20)[keys]),), page_size=5))
        k, v = cache.keys[0][keys], cache.values[0][keys]
        zeros = np.zeros(len(k), np.int32)
        reference.append(k, v, zeros, np.arange(len(k), dtype=np.int32), *part.pages)
        parts += reference.attention(cache.q, *part.pages, *part.decode_rows)
    whole_o, whole_lse = reference.attention(cache.q, *cache.pages, *cache.decode_rows)
    o, lse = reference.merge(*parts)
    assert_close(o, whole_o, rel=REL, what="merged o")
    assert_lse_close(lse, whole_lse, tol=REL, what="merged lse")


def test_merge_ignores_what_an_empty_side_holds():
    o, lse = np.array([[1.0, 2.0]]), np.array([3.0])
    nothing, empty = np.array([[np.nan, np.inf]]), np.array([-np.inf])
    for merged in (reference.merge(o, lse, nothing, empty), reference.merge(nothing, empty, o, lse)):
        assert_bits_equal(merged[0], o, what="o")
        assert_bits_equal(merged[1], lse, what="lse")
    both_o, both_lse = reference.merge(nothing, empty, nothing, empty)
    assert_bits_equal(both_o, np.zeros((1, 2)), what="o of two empty sides")
    assert_bits_equal(both_lse, empty, what="lse of two empty sides")


def test_merge_keeps_far_apart_states_finite():
    o, lse = reference.merge(np.array([1.0]), np.array(5000.0), np.array([9.0]), np.array(-5000.0))
    assert (o, lse) == (1.0, 5000.0)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 8, 12, 20, 32])
def test_alibi_slopes_follow_the_paper(num_heads):
    def slopes(n):  # the recursion of the ALiBi authors' code
        if math.log2(n).is_integer():
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**i for i in range(n)]
        closest = 2 ** math.floor(math.log2(n))
        return slopes(closest) + slopes(2 * closest)[0::2][: n - closest]

    np.testing.assert_allclose(reference.alibi_slopes(num_heads), slopes(num_heads), rtol=1e-14)


def test_rope_takes_pairs():
    with pytest.raises(ShapeError, match="15"):
        reference.rope(np.zeros((1, 3, 15)), [0])
