"""Arguments that share memory and are right: what is read is copied first. What is refused is in test_contract.py."""

from typing import Any

import numpy as np
import pytest

from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper, CUDAGraphBatchDecodeWithPagedKVCacheWrapper
from paged_kv.errors import ContractError
from paged_kv.page import append_paged_mla_kv_cache
from support.cases import CacheCase, build, csr
from support.compare import assert_bits_equal, assert_close
from support.decoding import oracle, plan_sizes, planned
from support.refusing import refuses

pytestmark = pytest.mark.usefixtures("decode_variants")

CASE = build(CacheCase((17, 0, 48, 5), rank=5))  # 4 requests, 4 query heads and 2 KV heads of 32
SHAPE = CASE.q.shape


def test_neighbours_in_one_memory_are_no_overlap() -> None:
    """q, out and lse are columns of one array, and interleaved."""
    columns = np.zeros((*SHAPE[:2], 2, SHAPE[2]), np.float32)
    q, out = columns[:, :, 0], columns[:, :, 1]
    q[...] = CASE.q
    both = np.zeros((*SHAPE[:2], 2), np.float32)
    expected, lse = oracle(CASE, CASE.q)
    found = planned(CASE).run(q, CASE.k_blocks, out=out, lse=both[..., 1], return_lse=True)
    assert_close(found[0], expected, rel=1e-5, what="out")
    assert_bits_equal(columns[:, :, 0], CASE.q, what="q")
    assert np.allclose(both[..., 1], lse)
    assert not both[..., 0].any()


def buffers() -> list[np.ndarray]:
    return [np.zeros(n, np.int32) for n in (5, 20, 4)]


def in_buffers(arrays: list[Any]) -> BatchDecodeWithPagedKVCacheWrapper:
    return CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, *arrays)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_fixed_buffers_given_to_plan(dtype: type) -> None:
    """As they are, and with the new table in the wrong ones: plan reads all of it before it writes."""
    table = [array.astype(dtype) for array in csr(CASE)]
    sizes = {"q_data_type": "float32"}
    expected = planned(CASE).run(CASE.q, CASE.k_blocks)
    arrays = [np.zeros(n, dtype) for n in (5, 20, 4)]
    wrapper = in_buffers(arrays)
    for array, values in zip(arrays, table, strict=True):
        array[: len(values)] = values
    wrapper.plan(*arrays, *plan_sizes(CASE), **sizes)
    assert_bits_equal(wrapper.run(CASE.q, CASE.k_blocks), expected, what="o")

    indptr, indices, last = table
    arrays[1][:] = 0
    arrays[1][3:9], arrays[1][10:14], arrays[1][14:19] = indices, last, indptr
    wrapper.plan(arrays[1][14:19], arrays[1][3:9], arrays[1][10:14], *plan_sizes(CASE), **sizes)
    for array, values in zip(arrays, table, strict=True):
        np.testing.assert_array_equal(array[: len(values)], values)
    assert_bits_equal(wrapper.run(CASE.q, CASE.k_blocks), expected, what="o")


def test_run_does_not_write_over_the_page_table() -> None:
    memory = np.zeros(600, np.int32)
    arrays = [memory[:5], memory[5:25], memory[25:29]]
    wrapper = in_buffers(arrays)
    wrapper.plan(*csr(CASE), *plan_sizes(CASE), q_data_type="float32")
    out = memory[: CASE.q.size].view(np.float32).reshape(SHAPE)
    said = "out shares memory with paged_kv_indptr_buffer"
    refuses(lambda: wrapper.run(CASE.q, CASE.k_blocks, out=out), ContractError, said, memory)
    wrapper.run(CASE.q, CASE.k_blocks, lse=memory[32:48].view(np.float32).reshape(4, 4))


# Appends. Pages of 4 slots, 2 heads of 8.
TABLE = (np.array([5, 3, 0], np.int32), np.array([0, 2, 2, 3], np.int32), np.array([2, 0, 1], np.int32))
AT = (np.array([0, 0, 2], np.int32), np.array([4, 5, 0], np.int32))


def test_latent_rows_in_the_other_cache() -> None:
    """The widths differ, so the op writes one cache after the other: rows of the second lie in the first."""
    rng = np.random.default_rng(0)
    ckv, kpe = (rng.standard_normal((6, 4, width)).astype(np.float16) for width in (16, 4))
    new_ckv, new_kpe = rng.standard_normal((3, 16)).astype(np.float16), ckv[3, :3, :4]
    expected_ckv, expected_kpe = ckv.copy(), kpe.copy()
    for row, (page, slot) in enumerate(((3, 0), (3, 1), (0, 0))):
        expected_ckv[page, slot], expected_kpe[page, slot] = new_ckv[row], new_kpe[row]
    append_paged_mla_kv_cache(new_ckv, new_kpe, *AT, ckv, kpe, *TABLE)
    assert_bits_equal(ckv, expected_ckv, what="ckv")
    assert_bits_equal(kpe, expected_kpe, what="kpe")
