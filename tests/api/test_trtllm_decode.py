"""Decode and prefill over a dense page table: ragged rows, scales, page tables as they come, refusals."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from paged_kv import reference
from paged_kv.arrays.host import as_numpy
from paged_kv.decode import trtllm_batch_decode_with_kv_cache
from paged_kv.errors import ContractError
from paged_kv.prefill import BatchPrefillWithPagedKVCacheWrapper, trtllm_batch_context_with_kv_cache
from support.cases import Cache, CacheCase, build, causal_rows, csr
from support.compare import assert_close, assert_lse_close
from support.decoding import LSE_TOLERANCE, O_TOLERANCE, paged_cache, plan_sizes
from support.kinds import bytes_of

pytestmark = pytest.mark.usefixtures("decode_variants")

HND = build(CacheCase((17, 4, 48, 5), layout="HND", rank=5))
NHD = build(CacheCase((17, 0, 48, 5)))


def blocks(cache: Cache, unused: int = -1) -> np.ndarray:
    """The page table as int32, `unused` where no page is."""
    table = cache.lookup_table.view(np.int32).copy()
    table[cache.lookup_table == 0xFFFFFFFF] = unused
    return table


def decode(cache: Cache, q: np.ndarray, **changes: Any) -> Any:
    given = {
        "query": q,
        "kv_cache": paged_cache(cache),
        "workspace_buffer": None,
        "block_tables": blocks(cache),
        "seq_lens": cache.lengths,
        "max_seq_len": 64,
        "bmm1_scale": 0.2,
        "kv_layout": cache.case.layout,
        "return_lse": True,
    }
    return trtllm_batch_decode_with_kv_cache(**given | changes)


def assert_found(found: tuple[Any, Any], cache: Cache, new_tokens: list[int], **options: Any) -> None:
    """O and lse are the oracle's for the last `new_tokens[b]` tokens of each request."""
    q, *rows = causal_rows(cache, new_tokens)
    o, lse = reference.attention(q, *cache.pages, *rows, **cache.storage, **{"sm_scale": 0.2} | options)
    assert_close(as_numpy(found[0], "o"), o, rel=O_TOLERANCE[cache.case.dtype], what="o")
    assert_lse_close(as_numpy(found[1], "lse"), lse, tol=LSE_TOLERANCE, what="lse")


@pytest.mark.parametrize("cache", [HND, NHD], ids=lambda cache: cache.case.layout)
@pytest.mark.parametrize("unused", [-1, 3, 10**9])
def test_one_token_a_request(cache: Cache, unused: int) -> None:
    q, _, _ = causal_rows(cache, [1, 1, 1, 1])
    found = decode(cache, q, block_tables=blocks(cache, unused), seq_lens=cache.lengths.astype(np.uint32))
    assert_found(found, cache, [1, 1, 1, 1])
    found = decode(cache, q, block_tables=cache.lookup_table, window_left=7, bmm2_scale=0.5, max_seq_len=48)
    assert_found(found, cache, [1, 1, 1, 1], window_left=7, v_scale=0.5)


def test_several_tokens_a_request() -> None:
    q, _, _ = causal_rows(HND, [4, 4, 4, 4])
    sinks = np.linspace(-1, 2, HND.case.num_q_heads).astype(np.float32)
    found = decode(HND, q, q_len_per_req=4, window_left=9, sinks=[sinks], mask=None, max_q_len=4)
    assert_found(found, HND, [4, 4, 4, 4], window_left=9, sinks=sinks)
    causal = np.tril(np.ones((4, 4), np.uint16)) @ np.array([1, 2, 4, 8], np.uint16)
    mask = np.stack([causal, np.full(4, 9, np.uint16)], axis=1)[None].repeat(4, 0)  # what no draft has may be anything
    assert_found(decode(HND, q, q_len_per_req=4, mask=mask), HND, [4, 4, 4, 4])


@pytest.mark.parametrize("ragged", [False, True])
def test_masks_of_drafts(ragged: bool) -> None:
    """Bit j of a draft's row says whether it sees the request's new token j; 33 and more take two words."""
    counts = [3, 0, 40, 2] if ragged else [4, 4, 4, 4]
    q, row_batch, _ = causal_rows(HND, counts)
    words = 2 * -(-max(counts) // 32)
    seen = np.random.default_rng(3).random((len(q), 16 * words)) < 0.5
    mask = np.packbits(seen, axis=1, bitorder="little").view(np.uint16)
    firsts = (HND.lengths - counts)[row_batch]
    o, lse = reference.masked_attention(
        q,
        *HND.pages,
        row_batch,
        HND.lengths[row_batch],
        mask=mask.view(np.uint8).reshape(-1),
        mask_starts=np.arange(len(q)) * 16 * words,
        mask_firsts=firsts,
        sm_scale=0.2,
        **HND.storage,
    )
    rows = {"cum_seq_lens_q": np.concatenate([[0], np.cumsum(counts)])} if ragged else {"q_len_per_req": 4}
    found = decode(HND, q, mask=mask if ragged else mask.reshape(4, 4, words), **rows)
    assert_close(found[0], o, rel=1e-5, what="o")
    assert_lse_close(found[1], lse, tol=LSE_TOLERANCE, what="lse")


def test_ragged_tokens() -> None:
    counts = [3, 0, 5, 1]
    q, _, _ = causal_rows(HND, counts)
    offsets = np.array([0, 3, 3, 8, 9], np.int32)
    for q_len in (1, None):
        found = decode(HND, q, q_len_per_req=q_len, max_q_len=5, cum_seq_lens_q=offsets)
        assert_found(found, HND, counts)


def test_scales_in_arrays() -> None:
    q, _, _ = causal_rows(HND, [1, 1, 1, 1])
    scale = torch.tensor(0.2)
    assert_found(decode(HND, q, bmm1_scale=scale, bmm2_scale=np.array([2.0], np.float32)), HND, [1] * 4, v_scale=2.0)
    log2 = torch.tensor([0.2 * math.log2(math.e)])
    assert_found(decode(HND, q, bmm1_scale=7 * scale, bmm1_scale_log2=log2), HND, [1] * 4)
    found = decode(HND, q, o_scale=3.0, backend="xqa", request_order=[0], bf16q_fp8kv_transform_mode="k_only")
    assert_found(found, HND, [1] * 4)


def test_k_and_v_in_one_array() -> None:
    """With 1 in place of the 2, V is K."""
    q, _, _ = causal_rows(HND, [1, 1, 1, 1])
    both = HND.k_blocks[:, :1]
    o, _ = decode(HND, q, kv_cache=both)
    pair, _ = decode(HND, q, kv_cache=(HND.k_blocks[:, 0], HND.k_blocks[:, 0]))
    np.testing.assert_array_equal(o, pair)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_pages_of_k_and_v_have_ids_of_their_own(order: tuple[int, int]) -> None:
    """TensorRT-LLM's pool: the page of V follows that of K, or the other way round."""
    q, _, _ = causal_rows(HND, [1, 1, 1, 1])
    pool = HND.k_blocks[:, list(order)].reshape(-1, *HND.k_blocks.shape[2:])
    tables = np.stack([2 * blocks(HND) + order[0], 2 * blocks(HND) + order[1]], axis=1)
    found = decode(HND, q, kv_cache=(pool, pool), block_tables=tables, uses_shared_paged_kv_idx=False)
    assert_found(found, HND, [1, 1, 1, 1])
    tables[2, 1, 1] += 2
    with pytest.raises(ContractError, match="block_tables: request 2 has pages of V that are not"):
        decode(HND, q, kv_cache=(pool, pool), block_tables=tables, uses_shared_paged_kv_idx=False)


def test_no_requests() -> None:
    none = build(CacheCase((), layout="HND", rank=5))
    o, lse = decode(none, none.q)
    assert (o.shape, lse.shape) == ((0, 4, 32), (0, 4))


def test_requests_without_pages_are_padding() -> None:
    q = np.concatenate([causal_rows(NHD, [2, 0, 2, 2])[0], np.ones((2, 4, 32), np.float32)])[[0, 1, 6, 7, 2, 3, 4, 5]]
    o, lse = decode(NHD, q, q_len_per_req=2)
    assert (o[2:4] == 0).all()
    assert np.isneginf(lse[2:4]).all()
    kept = [0, 1, 4, 5, 6, 7]
    assert_found((o[kept], lse[kept]), NHD, [2, 0, 2, 2])


@pytest.mark.parametrize("options", [{}, {"window_left": 4, "causal": False}, {"causal": False}, {"sinks": [0.5] * 4}])
@pytest.mark.parametrize("cache", [HND, NHD], ids=lambda cache: cache.case.layout)
def test_contexts_are_the_prefill_wrappers(cache: Cache, options: dict[str, Any]) -> None:
    """As mini-sglang calls it; `cum_seq_lens_kv` counts tokens, or pages as in FlashInfer's own tests."""
    counts, offsets = [3, 0, 5, 1], np.array([0, 3, 3, 8, 9], np.int32)
    q, row_batch, row_lengths = causal_rows(cache, counts)
    options = dict(options)
    sinks = np.array(options.pop("sinks"), np.float32) if "sinks" in options else None
    arguments = {"query": q, "kv_cache": paged_cache(cache), "workspace_buffer": None, "block_tables": blocks(cache),
             "seq_lens": cache.lengths, "max_q_len": 5, "max_kv_len": 48, "bmm1_scale": 0.2, "bmm2_scale": 0.5,
             "batch_size": 4, "cum_seq_lens_q": offsets, "kv_layout": cache.case.layout, "out_dtype": q.dtype,
             "sinks": None if sinks is None else [sinks], "return_lse": True}  # fmt: skip
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None, cache.case.layout)
    types = {"sm_scale": 0.2, "q_data_type": "float32"}
    wrapper.plan(offsets, *csr(cache), *plan_sizes(cache), **types, **{"causal": True} | options)
    expected = wrapper.run(q, paged_cache(cache), v_scale=0.5, sinks=sinks, return_lse=True)
    pages = np.concatenate([[0], np.cumsum(-(-cache.lengths // cache.case.page_size))])
    for of_kv in (np.concatenate([[0], np.cumsum(cache.lengths)]), pages):
        result = trtllm_batch_context_with_kv_cache(**arguments, cum_seq_lens_kv=of_kv, **options)
        assert bytes_of(result) == bytes_of(expected)
    if "window_left" in options:  # a row's own position counts, which the oracle's rows do not have
        return
    if not options.get("causal", True):
        row_lengths = cache.lengths[row_batch]
    o, lse = reference.attention(
        q, *cache.pages, row_batch, row_lengths, **cache.storage, sm_scale=0.2, v_scale=0.5, sinks=sinks
    )
    assert_close(result[0], o, rel=1e-5, what="o")
    assert_lse_close(result[1], lse, tol=LSE_TOLERANCE, what="lse")
