"""Prefill wrappers over buffers of the user's."""

from functools import partial

import numpy as np
import pytest

from paged_kv.errors import ContractError, PageTableError, ShapeError
from paged_kv.prefill import BatchPrefillWithPagedKVCacheWrapper
from support.cases import CacheCase, build, csr
from support.compare import assert_bits_equal
from support.decoding import plan_sizes
from support.prefilling import assert_prefills, causal_masks, flat, full_masks, offsets, packed, queries
from support.prefilling import random_masks as drawn_masks

pytestmark = pytest.mark.usefixtures("masked_variants")

CASE = build(CacheCase((37, 0, 90, 5), num_q_heads=6, num_kv_heads=2, head_dim=64, page_size=16, rank=4))
Q_LENS = (7, 2, 33, 5)
Q = queries(CASE, Q_LENS)
KV_LENS = CASE.case.lengths
PAGES = (CASE.k_blocks, CASE.v_blocks)
assert_agrees = partial(assert_prefills, CASE, Q)


def paged_buffers(most_bytes: int = 3000) -> list[np.ndarray]:
    return [np.zeros(n, np.int32) for n in (5, 5, 12, 4)] + [np.zeros(most_bytes, np.uint8), np.zeros(5, np.int64)]


def test_buffers_of_the_users_are_read_by_each_run() -> None:
    buffers = paged_buffers()
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None, "NHD", True, *buffers)
    masks = drawn_masks(np.random.default_rng(8), Q_LENS, KV_LENS)
    wrapper.plan(offsets(Q_LENS), *csr(CASE), *plan_sizes(CASE), custom_mask=flat(masks), q_data_type="float32")
    assert buffers[0].tolist() == offsets(Q_LENS).tolist()
    assert_bits_equal(buffers[4][: len(packed(masks))], packed(masks), what="custom_mask_buf")
    assert_agrees(wrapper.run(Q, PAGES, return_lse=True), masks)
    others = drawn_masks(np.random.default_rng(9), Q_LENS, KV_LENS)
    buffers[4][: len(packed(others))] = packed(others)
    assert_agrees(wrapper.run(Q, PAGES, return_lse=True), others)
    # Inconsistent contents are refused by the run.
    buffers[5][2] += 2990
    with pytest.raises(ContractError, match="mask_indptr_buf: the bits of request 2 are bytes"):
        wrapper.run(Q, PAGES)
    buffers[5][2] -= 2990
    buffers[3][0] = 17
    with pytest.raises(
        PageTableError, match="paged_kv_last_page_len_buf: request 0: expected 1 to page_size = 16, got 17"
    ):
        wrapper.run(Q, PAGES)
    # A plan without a mask reads none.
    wrapper.plan(offsets(Q_LENS), *csr(CASE), *plan_sizes(CASE), causal=True, q_data_type="float32")
    assert_agrees(wrapper.run(Q, PAGES, return_lse=True), causal_masks(Q_LENS, KV_LENS))
    assert "4 requests in the user's buffers" in repr(wrapper)


def test_buffers_of_the_users_bound_the_plans() -> None:
    buffers = paged_buffers(100)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None, "NHD", True, *buffers)
    with pytest.raises(ContractError, match="run: nothing is planned"):
        wrapper.run(Q, PAGES)
    table, sizes = csr(CASE), plan_sizes(CASE)
    wrapper.plan(offsets(Q_LENS), *table, *sizes, q_data_type="float32")
    before = [buffer.copy() for buffer in buffers]
    bits = flat(full_masks(Q_LENS, KV_LENS))
    with pytest.raises(ShapeError, match="custom_mask_buf holds 100 entries, the plan has"):
        wrapper.plan(offsets(Q_LENS), *table, *sizes, custom_mask=bits, q_data_type="float32")
    with pytest.raises(ContractError, match="qo_indptr: expected at most the first plan's 47 rows, got 48"):
        wrapper.plan(offsets((8, 2, 33, 5)), *table, *sizes, q_data_type="float32")
    one = (offsets((7,)), np.array([0, 3]), table[1][:3], np.array([5]))
    with pytest.raises(ShapeError, match="qo_indptr: a batch of 1, the buffers fix it at 4"):
        wrapper.plan(*one, *sizes, q_data_type="float32")
    without = BatchPrefillWithPagedKVCacheWrapper(None, "NHD", True, *paged_buffers()[:4])
    with pytest.raises(ContractError, match="custom_mask_buf: expected an array for a mask"):
        without.plan(offsets(Q_LENS), *table, *sizes, custom_mask=bits, q_data_type="float32")
    for buffer, copy in zip(buffers, before, strict=True):
        assert_bits_equal(buffer, copy, what="buffer")
    out = np.zeros(4 * Q.size + 100, np.uint8)
    shared = BatchPrefillWithPagedKVCacheWrapper(None, "NHD", True, *buffers[:4], out[:100], buffers[5])
    shared.plan(offsets(Q_LENS), *table, *sizes, causal=True, q_data_type="float32")
    with pytest.raises(ContractError, match="out shares memory with custom_mask_buf"):
        shared.run(Q, PAGES, out=out[: 4 * Q.size].view(np.float32).reshape(Q.shape))
