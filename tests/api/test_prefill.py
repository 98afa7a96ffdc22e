"""Prefill: what the drawn cases do not say. Chunks, buffers of the user's, threads, hidden tokens, dtypes."""

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from paged_kv.attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper
from paged_kv.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from support.cases import Cache, CacheCase, build, csr, normal
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.decoding import paged_cache, plan_sizes, to_kind
from support.prefilling import (
    assert_prefills,
    causal_masks,
    expected,
    flat,
    full_masks,
    offsets,
    packed,
    queries,
)
from support.prefilling import random_masks as drawn_masks

pytestmark = pytest.mark.usefixtures("masked_variants")

CASE = build(CacheCase((37, 0, 90, 5), num_q_heads=6, num_kv_heads=2, head_dim=64, page_size=16, rank=4))
Q_LENS = (7, 2, 33, 5)
Q = queries(CASE, Q_LENS)
KV_LENS = CASE.case.lengths
assert_agrees = partial(assert_prefills, CASE, Q)


def planned(cache: Cache = CASE, q_lens: tuple[int, ...] = Q_LENS, **options: Any) -> Any:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None, cache.case.layout)
    options = {"q_data_type": cache.case.dtype} | options
    wrapper.plan(offsets(q_lens), *csr(cache), *plan_sizes(cache), **options)
    return wrapper


CHUNKED = [
    {},
    {"window_left": 11},
    {"pos_encoding_mode": "ROPE_LLAMA", "window_left": 40},
    {"pos_encoding_mode": "ALIBI", "logits_soft_cap": 2.0},
]


@pytest.mark.parametrize("options", CHUNKED, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_a_prompt_in_chunks_is_the_prompt_in_one_piece(options: dict[str, Any], masked: bool) -> None:
    """Whatever the chunks, and whether causality is said by a mask or not: each sees the pages that are filled."""
    length = 75
    cache = build(CacheCase((length,), num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=16, rank=4))
    q, rng = queries(cache, (length,)), np.random.default_rng(0)
    _, pages, _ = csr(cache)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None)

    def run(begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        used = -(-end // 16)
        table = (np.array([0, used]), pages[:used], np.array([(end - 1) % 16 + 1]))
        mask = {"custom_mask": flat(causal_masks((end - begin,), (end,)))} if masked else {"causal": True}
        wrapper.plan(np.array([0, end - begin]), *table, *plan_sizes(cache), q_data_type="float32", **mask, **options)
        return wrapper.run(q[begin:end], paged_cache(cache), return_lse=True)

    o, lse = run(0, length)
    wanted = expected(cache, q, causal_masks((length,), (length,)), **options)
    assert_close(o, wanted[0], rel=1e-5, what="o")
    for _ in range(3):
        inner = np.sort(rng.choice(np.arange(1, length), rng.integers(0, 9), replace=False)).tolist()
        cuts = [0, *inner, length]
        parts = [run(*chunk) for chunk in pairwise(cuts)]
        assert_close(np.concatenate([part[0] for part in parts]), o, rel=1e-5, what=f"o in chunks {cuts}")
        assert_lse_close(np.concatenate([part[1] for part in parts]), lse, tol=1e-5, what=f"lse in chunks {cuts}")


def test_tokens_that_a_mask_hides_may_hold_anything() -> None:
    """NaN and infinity in K and V of a token that no row sees change no bit."""
    rng = np.random.default_rng(5)
    masks = drawn_masks(rng, Q_LENS, KV_LENS)
    hidden = rng.random(90) < 0.5
    masks[2][:, hidden] = False
    before = planned(custom_mask=flat(masks)).run(Q, paged_cache(CASE), return_lse=True)
    assert_agrees(before, masks)
    k_blocks, v_blocks = CASE.k_blocks.copy(), CASE.v_blocks.copy()
    for j in np.flatnonzero(hidden):
        at = CASE.lookup_table[2, j // 16], j % 16
        k_blocks[at] = rng.choice([np.nan, np.inf, -np.inf])
        v_blocks[at] = rng.choice([np.nan, np.inf])
    after = planned(custom_mask=flat(masks)).run(Q, (k_blocks, v_blocks), return_lse=True)
    assert_close(after[0], before[0], rel=1e-6, what="o")
    assert_lse_close(after[1], before[1], tol=1e-6, what="lse")


def test_a_mask_counts_instead_of_causal_and_packed_instead_of_dense() -> None:
    masks = drawn_masks(np.random.default_rng(6), Q_LENS, KV_LENS)
    other = flat(full_masks(Q_LENS, KV_LENS))
    wrapper = planned(custom_mask=other, packed_custom_mask=packed(masks), causal=True)
    assert_agrees(wrapper.run(Q, paged_cache(CASE), return_lse=True), masks)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_of_one_token_may_be_without_that_dimension(layout: str) -> None:
    lengths, q_lens = (9, 0, 20), (3, 0, 20)
    cache = build(CacheCase(lengths, num_q_heads=4, num_kv_heads=2, head_dim=32, page_size=1, layout=layout, rank=5))
    wrapper = planned(cache, q_lens, causal=True)
    wanted = wrapper.run(queries(cache, q_lens), cache.k_blocks)
    both = cache.k_blocks.squeeze(2 if layout == "NHD" else 3)
    assert_close(wanted, expected(cache, queries(cache, q_lens), causal_masks(q_lens, lengths))[0], rel=1e-5, what="o")
    for pages in (both, (both[:, 0], both[:, 1])):
        assert_bits_equal(wrapper.run(queries(cache, q_lens), pages), wanted, what="o")


def test_windows_at_run_and_forward() -> None:
    wrapper = planned(causal=True, window_left=50)
    causal = causal_masks(Q_LENS, KV_LENS)
    assert_agrees(wrapper.run(Q, paged_cache(CASE), return_lse=True, window_left=3), causal, window_left=3)
    assert_agrees(wrapper.run(Q, paged_cache(CASE), return_lse=True), causal, window_left=50)
    full = full_masks(Q_LENS, KV_LENS)
    assert_agrees(planned().run(Q, paged_cache(CASE), return_lse=True, window_left=0), full, window_left=0)
    assert_agrees(wrapper.forward_return_lse(Q, paged_cache(CASE), sm_scale=0.3), full, sm_scale=0.3)
    options = {"pos_encoding_mode": "ROPE_LLAMA", "window_left": 9}
    assert_agrees(wrapper.forward_return_lse(Q, paged_cache(CASE), True, **options), causal, **options)
    assert_agrees(wrapper.run_return_lse(Q, paged_cache(CASE)), causal, window_left=50)
    wrapper.end_forward()


@pytest.mark.parametrize("kind", ["numpy", "gpu"])
def test_no_requests_and_no_rows(kind: str) -> None:
    q, pages, tokens = to_kind(Q, kind), paged_cache(CASE, kind), to_kind(np.zeros((0, 2, 64), np.float32), kind)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None)
    none = np.zeros(0, np.int32)
    wrapper.plan(np.zeros(1, np.int32), np.zeros(1, np.int32), none, none, *plan_sizes(CASE), q_data_type="float32")
    o, lse = wrapper.run(q[:0], pages, return_lse=True)
    assert (o.shape, lse.shape) == ((0, 6, 64), (0, 6))
    ragged = BatchPrefillWithRaggedKVCacheWrapper(None)
    for mask in ({}, {"causal": True}, {"custom_mask": np.zeros(0, bool)}):
        ragged.plan(np.array([0, 2]), np.array([0, 0]), 6, 2, 64, q_data_type="float32", **mask)
        o, lse = ragged.run(q[:2], tokens, tokens, return_lse=True)
        assert not o.any()
        assert (lse == -np.inf).all()


def test_mixed_batches_take_lengths_and_soft_caps() -> None:
    """Pages past a request's tokens are not read; a soft cap of a run counts instead of the planned one."""
    indptr, indices, _ = csr(CASE)
    lengths = np.array([20, 0, 64, 1], np.int32)
    wrapper = BatchAttention()
    sizes = (*plan_sizes(CASE)[:3], 64, 16)
    options = {"logits_soft_cap": 5.0, "q_data_type": "float32", "kv_data_type": "float32"}
    q_lens = (7, 0, 20, 1)
    wrapper.plan(offsets(q_lens), indptr, indices, lengths, *sizes, causal=True, **options)
    q = queries(CASE, q_lens)
    for cap in (0.0, 2.0):
        o, lse = wrapper.run(q, paged_cache(CASE), logits_soft_cap=cap)
        masks = causal_masks(q_lens, lengths.tolist())
        assert_prefills(CASE, q, (o, lse), masks, logits_soft_cap=cap or 5.0)


def test_sinks_by_position() -> None:
    """FlashInfer's wrapper with sinks, and the arguments by which its users compile the kernel for others."""
    sinks = np.linspace(-2, 2, 6, dtype=np.float32)
    kernel = ("uri", *[None] * 6, ["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", "")
    causal, pages = causal_masks(Q_LENS, KV_LENS), paged_cache(CASE)
    tokens = [np.concatenate(parts) for parts in (CASE.keys, CASE.values)]
    options = {"causal": True, "q_data_type": "float32", "window_left": 30}
    paged = BatchAttentionWithAttentionSinkWrapper(None, "NHD", window_left=30)
    paged.plan(offsets(Q_LENS), *csr(CASE), *plan_sizes(CASE), **options)
    ragged = BatchPrefillWithRaggedKVCacheWrapper(None, jit_args=kernel, jit_kwargs={})
    ragged.plan(offsets(Q_LENS), offsets(KV_LENS), *plan_sizes(CASE)[:3], **options)
    assert_agrees(paged.run(Q, pages, sinks=sinks, return_lse=True), causal, window_left=30, sinks=sinks)
    for wrapper, cache in ((paged, [pages]), (ragged, tokens)):
        for args, changes in (
            ((), {}),
            ((sinks,), {"sinks": sinks}),
            ((sinks, 0.2), {"sinks": sinks, "sm_scale": 0.2}),
        ):
            assert_agrees(wrapper.run(Q, *cache, *args, return_lse=True), causal, window_left=30, **changes)


@pytest.mark.slow
def test_single_prefill_of_scales_and_widths() -> None:
    rng = np.random.default_rng(12)
    q, k, v = (torch.from_numpy(normal(rng, (n, h, 32), "float32")) for n, h in ((5, 4), (20, 2), (20, 2)))
    plain, lse = single_prefill_with_kv_cache_return_lse(q, k, v, causal=True)
    scaled = single_prefill_with_kv_cache(q, k / 2, v / 4, scale_k=2.0, causal=True, v_scale=torch.tensor([4.0]))
    assert_close(scaled.numpy(), plain.numpy(), rel=1e-5, what="o")
    assert lse.shape == (5, 4)
    half = single_prefill_with_kv_cache(q, k, v, causal=True, o_dtype=torch.float16)
    assert half.dtype == torch.float16
    assert_close(half.numpy(), plain.numpy(), rel=2e-3, what="o")
