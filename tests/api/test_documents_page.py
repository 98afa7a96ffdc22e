"""The examples of FlashInfer's documents for appends and page tables, run with the import and the device changed."""

import numpy as np
import pytest
import torch

import paged_kv as flashinfer
from paged_kv import reference
from paged_kv.errors import PageTableError

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
    # today's form, with the rows spelled out, writes the same
    today = kv_data.clone()

    flashinfer.append_paged_kv_cache(
        k_append, v_append, kv_append_indptr, kv_data, kv_page_indices, kv_page_indptr, kv_last_page_len
    )

    assert torch.equal(kv_data, expected)
    batch_indices, positions = flashinfer.get_batch_indices_positions(
        kv_append_indptr,
        flashinfer.get_seq_lens(kv_page_indptr, kv_last_page_len, page_size),
        nnz_kv,
    )
    flashinfer.append_paged_kv_cache(
        k_append, v_append, batch_indices, positions, today, kv_page_indices, kv_page_indptr, kv_last_page_len
    )
    assert torch.equal(today, expected)


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


def test_the_drawn_pages_of_that_example_may_collide_and_are_refused_then():
    kv_cache = torch.zeros(256, 2, 16, 32, 128, dtype=torch.float16)
    rows = torch.randn(8, 32, 128).half()
    page_table = torch.tensor([[3], [7], [9], [7], [1], [2], [4], [5]]).int()
    with pytest.raises(PageTableError, match=r"rows 1 and 3 \(requests 1 and 3\) both write slot 1 of page 7"):
        flashinfer.append_paged_kv_cache(rows, rows, kv_cache, page_table, torch.ones(8, dtype=torch.int32), 16)
    assert not kv_cache.any()


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


class DocumentedManager:
    """The document's own manager, on our functions: its allocation is right for one request of up to two pages."""

    def __init__(self, max_num_pages, page_size, num_kv_heads, head_dim):
        self.page_size = page_size
        self.kv_cache = torch.zeros(
            max_num_pages, 2, page_size, num_kv_heads, head_dim, dtype=torch.float16, device=DEVICE
        )
        self.page_allocations = {}

    def append(self, request_id, k, v):
        if request_id not in self.page_allocations:
            page_idx = len(self.page_allocations)
            self.page_allocations[request_id] = {"pages": [page_idx], "last_page_len": 0}
        alloc = self.page_allocations[request_id]
        page_table = torch.tensor(alloc["pages"], dtype=torch.int32, device=DEVICE).unsqueeze(0)
        last_page_len = torch.tensor([alloc["last_page_len"]], dtype=torch.int32, device=DEVICE)
        flashinfer.append_paged_kv_cache(
            k.unsqueeze(0), v.unsqueeze(0), self.kv_cache, page_table, last_page_len, self.page_size
        )
        alloc["last_page_len"] += 1
        if alloc["last_page_len"] >= self.page_size:
            new_page = len(self.page_allocations)
            alloc["pages"].append(new_page)
            alloc["last_page_len"] = 0

    def get_page_table(self, request_id):
        if request_id not in self.page_allocations:
            return None
        alloc = self.page_allocations[request_id]
        return torch.tensor(alloc["pages"], dtype=torch.int32, device=DEVICE)

    def get_seq_len(self, request_id):
        if request_id not in self.page_allocations:
            return 0
        alloc = self.page_allocations[request_id]
        page_table = self.get_page_table(request_id).unsqueeze(0)
        last_page_len = torch.tensor([alloc["last_page_len"]], dtype=torch.int32, device=DEVICE)
        seq_lens = flashinfer.get_seq_lens(page_table, last_page_len, self.page_size)
        return seq_lens[0].item()


@pytest.mark.parametrize("manager", [DocumentedManager, flashinfer.PagedKVCacheManager])
def test_manager(manager):
    cache_manager = manager(max_num_pages=256, page_size=16, num_kv_heads=32, head_dim=128)
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


@pytest.mark.parametrize("manager", [DocumentedManager, flashinfer.PagedKVCacheManager])
def test_manager_over_the_end_of_a_page(manager):
    cache_manager = manager(max_num_pages=8, page_size=16, num_kv_heads=2, head_dim=8)
    k, v = torch.randn(2, 20, 2, 8).half()
    for i in range(20):
        assert cache_manager.get_seq_len("a") == i
        cache_manager.append("a", k[i], v[i])
    pages = cache_manager.get_page_table("a").tolist()
    held = cache_manager.kv_cache[pages].transpose(0, 1).reshape(2, -1, 2, 8)[:, :20]
    assert torch.equal(held, torch.stack([k, v]))


def test_our_manager_gives_no_page_to_two_requests():
    cache_manager = flashinfer.PagedKVCacheManager(max_num_pages=256, page_size=16, num_kv_heads=2, head_dim=8)
    k, v = torch.randn(2, 3, 40, 2, 8).half()
    for i in range(40):
        for request_id in range(3):
            cache_manager.append(request_id, k[request_id, i], v[request_id, i])
    tables = [cache_manager.get_page_table(request_id).tolist() for request_id in range(3)]
    assert len({page for table in tables for page in table}) == 9
    for request_id, table in enumerate(tables):
        held = cache_manager.kv_cache[table].transpose(0, 1).reshape(2, -1, 2, 8)[:, :40]
        assert torch.equal(held, torch.stack([k[request_id], v[request_id]]))
