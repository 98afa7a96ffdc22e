"""The examples of FlashInfer's documents for appends and page tables, run with the import and the device changed."""

import numpy as np
import pytest
import torch

import paged_kv as flashinfer
from paged_kv import reference

DEVICE = "cpu"


@pytest.fixture(autouse=True)
def _the_same_numbers_every_time():
    torch.manual_seed(0)


def appended(kv_data, k, v, page, slot):
    """A copy of an NHD cache with rows at the pages and slots, by the oracle."""
    expected = kv_data.numpy().copy()
    table = np.asarray(page, np.uint32)[:, None]
    rows = np.arange(len(table), dtype=np.int32)
    reference.append(k.numpy(), v.numpy(), rows, np.asarray(slot), expected, expected, table)
    return torch.from_numpy(expected)


def test_append_with_indptr():
    nnz_kv = 100
    num_kv_heads = 32
    head_dim = 128
    k_append = torch.randn(nnz_kv, num_kv_heads, head_dim).half().to(DEVICE)
    v_append = torch.randn(nnz_kv, num_kv_heads, head_dim).half().to(DEVICE)
    # 45 + 8 + 25 + 22 = nnz_kv
    kv_append_length = torch.tensor([45, 8, 25, 22], dtype=torch.int32, device=DEVICE)
    kv_append_indptr = torch.cat([torch.zeros(1).int().to(DEVICE), torch.cumsum(kv_append_length, dim=0)]).int()
    max_num_pages = 1000
    page_size = 16
    kv_data = torch.randn(max_num_pages, 2, page_size, num_kv_heads, head_dim).half().to(DEVICE)
    num_pages_per_req = torch.tensor([3, 1, 2, 2], dtype=torch.int32, device=DEVICE)
    kv_page_indptr = torch.cat([torch.zeros(1).int().to(DEVICE), torch.cumsum(num_pages_per_req, dim=0)]).int()
    # use first 8 pages in the paged-kv
    kv_page_indices = torch.arange(8, dtype=torch.int32, device=DEVICE)
    # 45 = (3 - 1) * 16 + 13
    # 8 = (1 - 1) * 16 + 8
    # 25 = (2 - 1) * 16 + 9
    # 22 = (2 - 1) * 16 + 6
    kv_last_page_len = torch.tensor([13, 8, 9, 6], dtype=torch.int32, device=DEVICE)
    page = [0] * 16 + [1] * 16 + [2] * 13 + [3] * 8 + [4] * 16 + [5] * 9 + [6] * 16 + [7] * 6
    slot = [*range(16), *range(16), *range(13), *range(8), *range(16), *range(9), *range(16), *range(6)]
    expected = appended(kv_data, k_append, v_append, page, slot)

    flashinfer.append_paged_kv_cache(
        k_append, v_append, kv_append_indptr, kv_data, kv_page_indices, kv_page_indptr, kv_last_page_len
    )

    assert torch.equal(kv_data, expected)


def one_token_each(batch_size, max_num_pages):
    page_table = torch.randint(0, max_num_pages, (batch_size, 1)).int().to(DEVICE)
    assert len(set(page_table.flatten().tolist())) == batch_size, "this seed draws one page for two requests"
    return page_table


def test_append_of_one_token_a_request():
    batch_size = 8
    num_kv_heads = 32
    head_dim = 128
    page_size = 16
    max_num_pages = 256
    kv_cache = torch.randn(max_num_pages, 2, page_size, num_kv_heads, head_dim, dtype=torch.float16, device=DEVICE)
    new_k = torch.randn(batch_size, num_kv_heads, head_dim).half().to(DEVICE)
    new_v = torch.randn(batch_size, num_kv_heads, head_dim).half().to(DEVICE)
    page_table = one_token_each(batch_size, max_num_pages)
    last_page_len = torch.ones(batch_size, dtype=torch.int32, device=DEVICE)
    expected = appended(kv_cache, new_k, new_v, page_table[:, 0].tolist(), [1] * batch_size)

    flashinfer.append_paged_kv_cache(new_k, new_v, kv_cache, page_table, last_page_len, page_size)

    assert torch.equal(kv_cache, expected)


def test_mla_append():
    batch_size = 8
    num_kv_heads = 32
    head_dim = 128
    page_size = 16
    max_num_pages = 256
    mla_kv_cache = torch.randn(max_num_pages, page_size, num_kv_heads, head_dim * 2, dtype=torch.float16, device=DEVICE)
    new_k = torch.randn(batch_size, num_kv_heads, head_dim).half().to(DEVICE)
    new_v = torch.randn(batch_size, num_kv_heads, head_dim).half().to(DEVICE)
    page_table = one_token_each(batch_size, max_num_pages)
    last_page_len = torch.ones(batch_size, dtype=torch.int32, device=DEVICE)
    expected = mla_kv_cache.clone()
    for b, (page,) in enumerate(page_table.tolist()):
        expected[page, 1, :, :head_dim] = new_k[b]
        expected[page, 1, :, head_dim:] = new_v[b]

    flashinfer.append_paged_mla_kv_cache(new_k, new_v, mla_kv_cache, page_table, last_page_len, page_size)

    assert torch.equal(mla_kv_cache, expected)


def test_indices_and_positions():
    batch_size = 8
    max_num_pages = 256
    page_size = 16
    page_table = torch.randint(0, max_num_pages, (batch_size, 20)).int().to(DEVICE)
    last_page_len = torch.randint(1, page_size + 1, (batch_size,)).int().to(DEVICE)

    seq_lens = flashinfer.get_seq_lens(page_table, last_page_len, page_size)
    batch_indices, positions = flashinfer.get_batch_indices_positions(page_table, last_page_len, page_size)

    assert torch.equal(seq_lens, 19 * page_size + last_page_len)
    assert (seq_lens.dtype, batch_indices.dtype, positions.dtype) == (torch.int32,) * 3
    offsets = np.concatenate([[0], np.cumsum(seq_lens.numpy())])
    expected = reference.ragged_rows(offsets, np.zeros(batch_size, np.int32), int(offsets[-1]))
    np.testing.assert_array_equal(batch_indices.numpy(), expected[0])
    np.testing.assert_array_equal(positions.numpy(), expected[1])


def test_manager():
    cache_manager = flashinfer.PagedKVCacheManager(max_num_pages=256, page_size=16, num_kv_heads=32, head_dim=128)
    request_id = 0
    k = torch.randn(32, 128).half().to(DEVICE)
    v = torch.randn(32, 128).half().to(DEVICE)
    assert cache_manager.get_seq_len(request_id) == 0
    assert cache_manager.get_page_table(request_id) is None

    cache_manager.append(request_id, k, v)
    seq_len = cache_manager.get_seq_len(request_id)

    assert seq_len == 1
    expected = appended(torch.zeros_like(cache_manager.kv_cache), k[None], v[None], [0], [0])
    assert torch.equal(cache_manager.kv_cache, expected)
