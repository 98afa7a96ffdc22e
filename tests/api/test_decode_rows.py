"""Decode of several new tokens a request, other windows at `run`, and arguments that name an NVIDIA kernel."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from paged_kv import reference
from paged_kv.arrays.host import as_numpy
from paged_kv.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from paged_kv.errors import ContractTypeError, PageTableError, ShapeError
from support.cases import Cache, CacheCase, build, causal_rows, csr
from support.compare import assert_close, assert_lse_close
from support.decoding import LSE_TOLERANCE, O_TOLERANCE, paged_cache, plan_sizes

pytestmark = pytest.mark.usefixtures("decode_variants")

CASE = build(CacheCase((17, 0, 48, 5), rank=5))


def new_rows(cache: Cache, number: int, dtype: str | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Q `[B * number, Hq, D]`, row_batch and row_lengths: the last `number` tokens of each request; 0 of empty ones."""
    q, _, _ = causal_rows(cache, [number] * len(cache.case.lengths))
    lengths = cache.lengths[:, None] + np.arange(1 - number, 1)
    batch = np.repeat(np.arange(len(lengths)), number)
    return q.astype(dtype or q.dtype), batch.astype(np.int32), lengths.reshape(-1).astype(np.int32)


def assert_rows(found: tuple[Any, Any], cache: Cache, number: int, **options: Any) -> None:
    q, row_batch, row_lengths = new_rows(cache, number)
    o, lse = reference.attention(q, *cache.pages, row_batch, row_lengths, **cache.storage, **options)
    assert_close(as_numpy(found[0], "o"), o, rel=O_TOLERANCE[cache.case.dtype], what="o")
    assert_lse_close(as_numpy(found[1], "lse"), lse, tol=LSE_TOLERANCE, what="lse")


def planned(**options: Any) -> BatchDecodeWithPagedKVCacheWrapper:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None, "NHD")
    wrapper.plan(*csr(CASE), *plan_sizes(CASE), **{"q_data_type": "float32"} | options)
    return wrapper


def test_a_run_may_have_another_number_of_rows() -> None:
    """As FlashInfer's kernels for it take it: the plan says nothing of it."""
    wrapper = planned()
    found = wrapper.run_return_lse(new_rows(CASE, 3)[0], paged_cache(CASE), q_len_per_req=3)
    assert_rows(found, CASE, 3)
    assert_rows(wrapper.run_return_lse(new_rows(CASE, 1)[0], paged_cache(CASE)), CASE, 1)
    both = planned(q_len_per_req=2)
    assert_rows(both.run_return_lse(new_rows(CASE, 1)[0], paged_cache(CASE), q_len_per_req=1), CASE, 1)
    assert_rows(both.forward_return_lse(new_rows(CASE, 2)[0], paged_cache(CASE)), CASE, 2)


def test_a_run_may_have_another_window() -> None:
    wrapper = planned(window_left=9)
    for window in (None, 3, 3, -1, np.int64(4)):
        found = wrapper.run_return_lse(new_rows(CASE, 1)[0], paged_cache(CASE), window_left=window)
        assert_rows(found, CASE, 1, window_left=9 if window is None else int(window))


def test_rows_of_a_captured_graph_are_read_again() -> None:
    buffers = [np.zeros(n, np.int32) for n in (5, 20, 4)]
    wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, *buffers, use_tensor_cores=True)
    q = new_rows(CASE, 2)[0]

    def plan(number: int) -> None:
        wrapper.plan(*csr(CASE), *plan_sizes(CASE), q_data_type="float32", q_len_per_req=number)

    plan(2)
    plan(2)
    with pytest.raises(ShapeError, match="q_len_per_req: 3, the first plan has frozen it at 2"):
        plan(3)
    shorter = build(CacheCase((15, 0, 41, 3), rank=5))
    assert_rows(wrapper.run_return_lse(q, paged_cache(CASE)), CASE, 2)
    for buffer, array in zip(buffers, csr(shorter), strict=True):
        buffer[: len(array)] = array
    assert_rows(wrapper.run_return_lse(new_rows(shorter, 2)[0], paged_cache(shorter)), shorter, 2)
    buffers[2][3] = 1
    with pytest.raises(PageTableError, match="request 3 has 2 query rows and 1 tokens"):
        wrapper.run(q, paged_cache(shorter))


def test_the_fast_plan_in_place_of_plan() -> None:
    """As FlashInfer's users put it there; `global_override_indptr_cpu` may be longer than the batch."""
    wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan = partial(fast_decode_plan, wrapper)
    indptr, indices, last = csr(CASE)
    override = np.concatenate([indptr, [-1, -1]])
    wrapper.plan(
        np.zeros_like(indptr), indices, last, *plan_sizes(CASE), data_type="float32", q_len_per_req=2,
        non_blocking=True, global_override_indptr_cpu=override,
    )  # fmt: skip
    assert_rows(wrapper.run_return_lse(new_rows(CASE, 2)[0], paged_cache(CASE)), CASE, 2)
    fast_decode_plan(wrapper, indptr, indices, last, *plan_sizes(CASE))
    with pytest.raises(ContractTypeError, match="q: dtype float32, planned float16"):
        wrapper.run(CASE.q, paged_cache(CASE))


def test_a_workspace_of_any_size_suffices() -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    sizes = wrapper.workspace_size(*csr(CASE), *plan_sizes(CASE), q_data_type="float32", kv_data_type="float32")
    wrapper.reset_workspace_buffer(*(torch.empty(size, dtype=torch.uint8) for size in sizes))
    assert all(size > 0 for size in sizes)


def test_kernel_arguments_without_effect() -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None, backend="trtllm-gen", jit_args=None)
    indptr, indices, last = csr(CASE)
    blocks = np.where(CASE.lookup_table == 0xFFFFFFFF, 7, CASE.lookup_table).astype(np.int32)
    wrapper.plan(
        indptr, indices, last, *plan_sizes(CASE), "NONE", -1, None, "float32", None, None, None, None, None, None, True,
        blocks, CASE.lengths, 64, True, 1, window_right=0,
    )  # fmt: skip
    options: dict[str, Any] = {"enable_pdl": True, "skip_softmax_threshold_scale_factor": 1e-30}
    assert_rows(wrapper.run_return_lse(new_rows(CASE, 1)[0], paged_cache(CASE), **options), CASE, 1)
    one = torch.tensor([0.5])
    found = wrapper.run_return_lse(new_rows(CASE, 1)[0], paged_cache(CASE), v_scale=one, k_scale=np.array(1.0))
    assert_rows(found, CASE, 1, v_scale=0.5)
