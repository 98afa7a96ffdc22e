"""The examples of FlashInfer's documentation, with the import, the device and the sizes changed."""

import numpy as np
import pytest
import torch

import paged_kv as flashinfer
from paged_kv import reference
from paged_kv.arrays.host import as_numpy
from support.compare import assert_close

pytestmark = pytest.mark.usefixtures("masked_variants")

NUM_LAYERS, NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 16, 4, 128
MAX_NUM_PAGES, PAGE_SIZE, BATCH_SIZE = 128, 16, 7
KV_INDICES = torch.arange(MAX_NUM_PAGES).int()
KV_INDPTR = torch.tensor([0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32)
LAST_PAGE_LEN = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32)
KV_LEN = ((KV_INDPTR.diff() - 1) * PAGE_SIZE + LAST_PAGE_LEN).tolist()
QO_INDPTR = torch.tensor([0, 33, 44, 55, 66, 77, 88, 100], dtype=torch.int32)
QO_LEN = QO_INDPTR.diff().tolist()
SIZES = (NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM)


@pytest.fixture(autouse=True)
def _the_same_numbers_every_time():
    torch.manual_seed(0)


def layers(*shape):
    return [torch.randn(*shape).half() for _ in range(NUM_LAYERS)]


def attended(q, blocks, batch, lengths):
    """The oracle's o of rows `q` over the tables above."""
    counts = KV_INDPTR.diff().numpy()
    table = np.zeros((BATCH_SIZE, counts.max()), np.uint32)
    table[np.arange(counts.max()) < counts[:, None]] = KV_INDICES.numpy()
    q, blocks = as_numpy(q, "q"), as_numpy(blocks, "blocks")
    return reference.attention(q, blocks, blocks, table, np.array(batch), np.array(lengths))[0]


def causal_mask(qo_len, kv_len):
    masks = [torch.tril(torch.full((n, m), True), m - n).flatten() for n, m in zip(qo_len, kv_len, strict=True)]
    return torch.cat(masks)


@pytest.mark.slow
def test_batch_decode():
    workspace_buffer = torch.empty(1024, dtype=torch.uint8)
    decode_wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace_buffer, "NHD")
    decode_wrapper.plan(
        KV_INDPTR, KV_INDICES, LAST_PAGE_LEN, *SIZES, PAGE_SIZE, pos_encoding_mode="NONE", data_type=torch.float16
    )
    for kv_cache in layers(MAX_NUM_PAGES, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM):
        q = torch.randn(BATCH_SIZE, NUM_QO_HEADS, HEAD_DIM).half()
        o = decode_wrapper.run(q, kv_cache)
        assert o.dtype == torch.float16
        assert_close(as_numpy(o, "o"), attended(q, kv_cache, np.arange(BATCH_SIZE), KV_LEN), rel=2e-3, what="o")


@pytest.mark.slow
def test_single_prefill():
    q = torch.randn(32, NUM_QO_HEADS, HEAD_DIM).half()
    k, v = torch.randn(2, 256, NUM_KV_HEADS, HEAD_DIM).half()
    o = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, use_fp16_qk_reduction=True)
    mask = torch.tril(torch.full((32, 256), True), diagonal=(256 - 32))
    o_custom = flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask)
    assert torch.allclose(o, o_custom, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_batch_prefill_over_pages():
    prefill_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(1024, dtype=torch.uint8), "NHD")
    arguments = (QO_INDPTR, KV_INDPTR, KV_INDICES, LAST_PAGE_LEN, *SIZES, PAGE_SIZE)
    batch = np.repeat(np.arange(BATCH_SIZE), QO_LEN)
    lengths = np.concatenate([np.arange(kv - n, kv) + 1 for n, kv in zip(QO_LEN, KV_LEN, strict=True)])
    q = torch.randn(100, NUM_QO_HEADS, HEAD_DIM).half()
    for kv_cache in layers(MAX_NUM_PAGES, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM):
        prefill_wrapper.plan(*arguments, causal=True)
        o = prefill_wrapper.run(q, kv_cache)
        assert_close(as_numpy(o, "o"), attended(q, kv_cache, batch, lengths), rel=2e-3, what="o")
        prefill_wrapper.plan(*arguments, custom_mask=causal_mask(QO_LEN, KV_LEN))
        assert torch.allclose(prefill_wrapper.run(q, kv_cache), o, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_batch_prefill_over_ragged_tokens():
    prefill_wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1024, dtype=torch.uint8), "NHD")
    kv_indptr = QO_INDPTR.clone()
    q = torch.randn(100, NUM_QO_HEADS, HEAD_DIM).half()
    k, v = torch.randn(2, 100, NUM_KV_HEADS, HEAD_DIM).half()
    prefill_wrapper.plan(QO_INDPTR, kv_indptr, *SIZES, causal=True)
    o = prefill_wrapper.run(q, k, v)
    prefill_wrapper.plan(QO_INDPTR, kv_indptr, *SIZES, custom_mask=causal_mask(QO_LEN, QO_LEN))
    assert torch.allclose(prefill_wrapper.run(q, k, v), o, rtol=1e-3, atol=1e-3)
    alone = flashinfer.single_prefill_with_kv_cache(q[33:44], k[33:44], v[33:44], causal=True)
    assert torch.allclose(o[33:44], alone, rtol=1e-3, atol=1e-3)


def appended(kv_data, k, v, page, slot):
    """A copy of an NHD cache with rows at the pages and slots, by the oracle."""
    expected = kv_data.numpy().copy()
    table = np.asarray(page, np.uint32)[:, None]
    rows = np.arange(len(table), dtype=np.int32)
    reference.append(k.numpy(), v.numpy(), rows, np.asarray(slot), expected, expected, table)
    return torch.from_numpy(expected)


def test_append_with_indptr():
    nnz_kv = 100
    k_append, v_append = torch.randn(2, nnz_kv, NUM_KV_HEADS, HEAD_DIM).half()
    # 45 + 8 + 25 + 22 = nnz_kv
    kv_append_length = torch.tensor([45, 8, 25, 22], dtype=torch.int32)
    kv_append_indptr = torch.cat([torch.zeros(1).int(), torch.cumsum(kv_append_length, dim=0)]).int()
    kv_data = torch.randn(20, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM).half()
    num_pages_per_req = torch.tensor([3, 1, 2, 2], dtype=torch.int32)
    kv_page_indptr = torch.cat([torch.zeros(1).int(), torch.cumsum(num_pages_per_req, dim=0)]).int()
    # use first 8 pages in the paged-kv
    kv_page_indices = torch.arange(8, dtype=torch.int32)
    kv_last_page_len = torch.tensor([13, 8, 9, 6], dtype=torch.int32)
    counts = [16, 16, 13, 8, 16, 9, 16, 6]
    slots = np.concatenate([np.arange(count) for count in counts])
    expected = appended(kv_data, k_append, v_append, np.repeat(np.arange(8), counts), slots)
    flashinfer.append_paged_kv_cache(
        k_append, v_append, kv_append_indptr, kv_data, kv_page_indices, kv_page_indptr, kv_last_page_len
    )
    assert torch.equal(kv_data, expected)


def test_append_of_one_token_a_request():
    kv_cache = torch.randn(20, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM).half()
    mla_kv_cache = torch.randn(20, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM * 2).half()
    new_k, new_v = torch.randn(2, 8, NUM_KV_HEADS, HEAD_DIM).half()
    page_table, last_page_len = torch.randperm(20)[:8, None].int(), torch.ones(8, dtype=torch.int32)
    expected = appended(kv_cache, new_k, new_v, page_table[:, 0], [1] * 8)
    of_latents = mla_kv_cache.clone()
    of_latents[page_table[:, 0], 1] = torch.cat([new_k, new_v], dim=-1)
    flashinfer.append_paged_kv_cache(new_k, new_v, kv_cache, page_table, last_page_len, PAGE_SIZE)
    flashinfer.append_paged_mla_kv_cache(new_k, new_v, mla_kv_cache, page_table, last_page_len, PAGE_SIZE)
    assert torch.equal(kv_cache, expected)
    assert torch.equal(mla_kv_cache, of_latents)


def test_indices_and_positions():
    page_table = torch.randint(0, 256, (8, 20)).int()
    last_page_len = torch.randint(1, PAGE_SIZE + 1, (8,)).int()
    seq_lens = flashinfer.get_seq_lens(page_table, last_page_len, PAGE_SIZE)
    batch_indices, positions = flashinfer.get_batch_indices_positions(page_table, last_page_len, PAGE_SIZE)
    assert torch.equal(seq_lens, 19 * PAGE_SIZE + last_page_len)
    assert (seq_lens.dtype, batch_indices.dtype, positions.dtype) == (torch.int32,) * 3
    assert torch.equal(batch_indices, torch.arange(8).repeat_interleave(seq_lens).int())
    assert torch.equal(positions, torch.cat([torch.arange(n) for n in seq_lens]).int())


def test_manager():
    cache_manager = flashinfer.PagedKVCacheManager(max_num_pages=256, page_size=16, num_kv_heads=32, head_dim=128)
    k, v = torch.randn(2, 32, 128).half()
    assert cache_manager.get_seq_len(0) == 0
    assert cache_manager.get_page_table(0) is None
    cache_manager.append(0, k, v)
    assert cache_manager.get_seq_len(0) == 1
    expected = appended(torch.zeros_like(cache_manager.kv_cache), k[None], v[None], [0], [0])
    assert torch.equal(cache_manager.kv_cache, expected)
