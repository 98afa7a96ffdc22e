"""The other entries to decode attention: one request's contiguous K and V, and the wrapper of captured graphs."""

from typing import Any

import numpy as np
import pytest
import torch

from paged_kv.arrays.host import as_numpy
from paged_kv.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
)
from paged_kv.errors import PageTableError
from support.cases import CacheCase, build, csr, normal
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.decoding import assert_decodes, oracle, paged_cache, plan_sizes, to_kind
from support.kinds import WRITABLE

pytestmark = pytest.mark.usefixtures("decode_variants")

CASE = build(CacheCase((17, 0, 48, 5), rank=5))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_single_decode(layout: str, dtype: str) -> None:
    cache = build(CacheCase((1, 16, 33), dtype=dtype))
    q = normal(np.random.default_rng(3), cache.q.shape, dtype)
    expected = oracle(cache, q, "ALIBI", window_left=20)
    for b, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        if layout == "HND":
            k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
        o, lse = single_decode_with_kv_cache(q[b], k, v, layout, "ALIBI", True, window_left=20, return_lse=True)
        assert o.dtype == q.dtype
        assert_close(o, expected[0][b], rel=1e-2 if dtype == "bfloat16" else 1e-5, what="o")
        assert_lse_close(lse, expected[1][b], tol=1e-5, what="lse")
        alone = single_decode_with_kv_cache(q[b], k, v, layout, "ALIBI", True, window_left=20)
        assert_bits_equal(alone, o, what="o without lse")


def test_single_decode_takes_sixteen_arguments_in_flashinfers_order() -> None:
    q, k, v = CASE.q[2], CASE.keys[2], CASE.values[2]
    found = single_decode_with_kv_cache(
        q, k, v, "NHD", "ROPE_LLAMA", False, 0.5, 2.0, 3.0, 30, 5.0, 0.2, 4.0, 5e5, True
    )  # fmt: skip
    options = {"q_scale": 0.5, "k_scale": 2.0, "v_scale": 3.0, "window_left": 30, "logits_soft_cap": 5.0}
    expected = oracle(CASE, CASE.q, "ROPE_LLAMA", sm_scale=0.2, rope_scale=4.0, rope_theta=5e5, **options)
    assert_close(found[0], expected[0][2], rel=1e-5, what="o")
    assert_lse_close(found[1], expected[1][2], tol=1e-5, what="lse")


def buffers(cache: Any, kind: str = "numpy", spare: int = 3, dtype: str = "int32") -> list[Any]:
    """Buffers for the table of a case, full of nonsense."""
    sizes = [len(array) for array in csr(cache)]
    sizes[1] += spare
    return [to_kind(np.full(size, -99, dtype), kind) for size in sizes]


def graph_wrapper(arrays: list[Any], layout: str = "NHD") -> CUDAGraphBatchDecodeWithPagedKVCacheWrapper:
    return CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, *arrays, kv_layout=layout)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("kind", WRITABLE)
def test_a_graph_wrapper_plans_into_the_users_buffers(kind: str, dtype: str) -> None:
    arrays = buffers(CASE, kind, dtype=dtype)
    wrapper = graph_wrapper(arrays)
    assert wrapper.is_cuda_graph_enabled
    assert "4 requests in the user's buffers, nothing planned" in repr(wrapper)
    wrapper.plan(*csr(CASE), *plan_sizes(CASE), q_data_type="float32")
    for array, expected in zip(arrays, csr(CASE), strict=True):
        found = as_numpy(array, "buffer")
        np.testing.assert_array_equal(found[: len(expected)], expected)
        assert (found[len(expected) :] == -99).all()
    assert_decodes(wrapper.run_return_lse(CASE.q, paged_cache(CASE)), CASE)


@pytest.mark.parametrize("cls", ["flag", "class"])
def test_a_graph_wrapper_reads_the_buffers_at_every_run(cls: str) -> None:
    arrays = buffers(CASE, "torch", spare=0)
    if cls == "class":
        wrapper = graph_wrapper(arrays)
    else:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(None, "NHD", True, False, *arrays)
    wrapper.plan(*csr(CASE), *plan_sizes(CASE), q_data_type="float32", pos_encoding_mode="ALIBI")
    assert_decodes(wrapper.run_return_lse(CASE.q, paged_cache(CASE)), CASE, "ALIBI")
    # Fewer pages by plan, more again by the user's own hands.
    other = build(CacheCase((3, 20, 0, 9), rank=5, seed=7))
    wrapper.plan(*csr(other), *plan_sizes(other), q_data_type="float32", pos_encoding_mode="ALIBI")
    assert_decodes(wrapper.run_return_lse(other.q, paged_cache(other)), other, "ALIBI")
    for array, values in zip(arrays, csr(CASE), strict=True):
        array.copy_(torch.from_numpy(values))
    assert_decodes(wrapper.run_return_lse(CASE.q, paged_cache(CASE)), CASE, "ALIBI")
    arrays[1][2] = 10**6
    with pytest.raises(PageTableError, match="request 2, slot 0 holds page id 1000000"):
        wrapper.run(CASE.q, paged_cache(CASE))
    arrays[2][0] = 17
    with pytest.raises(PageTableError, match="paged_kv_last_page_len_buffer: request 0 has 17"):
        wrapper.run(CASE.q, paged_cache(CASE))


def test_a_graph_wrapper_plans_from_its_own_buffers() -> None:
    arrays = buffers(CASE)
    wrapper = graph_wrapper(arrays)
    for array, values in zip(arrays, csr(CASE), strict=True):
        array[: len(values)] = values
    wrapper.plan(*arrays, *plan_sizes(CASE), q_data_type="float32")
    assert_decodes(wrapper.run_return_lse(CASE.q, paged_cache(CASE)), CASE)
