"""The decode API's own behaviour: defaults, spellings, rows, what it keeps and when, the user's buffers.

That the numbers are right over the whole space of options is the business of test_drawn.py.
"""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from max.dtype import DType

from paged_kv import reference
from paged_kv.arrays.host import as_numpy
from paged_kv.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
    single_decode_with_kv_cache,
)
from paged_kv.errors import ContractTypeError, PageTableError, ShapeError
from support.cases import Cache, CacheCase, build, causal_rows, csr, permuted
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.decoding import (
    LSE_TOLERANCE,
    O_TOLERANCE,
    assert_decodes,
    oracle,
    paged_cache,
    plan_sizes,
    planned,
    to_kind,
)
from support.kinds import WRITABLE

pytestmark = pytest.mark.usefixtures("decode_variants")

CASE = build(CacheCase((17, 0, 48, 5), rank=5))
EMPTY_TABLE = [np.zeros(n, np.int32) for n in (1, 0, 0)]


@pytest.mark.slow
def test_defaults_are_flashinfers() -> None:
    """Spelled out here, so that a default that changes in the code does not change in the test as well."""
    explicit = {"sm_scale": 1 / math.sqrt(32), "window_left": -1, "logits_soft_cap": 0.0}
    assert_decodes(planned(CASE).run_return_lse(CASE.q, paged_cache(CASE)), CASE, **explicit)
    rope = planned(CASE, pos_encoding_mode="ROPE_LLAMA").run_return_lse(CASE.q, paged_cache(CASE))
    assert_decodes(rope, CASE, "ROPE_LLAMA", rope_theta=1e4, rope_scale=1.0, **explicit)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*csr(CASE), *plan_sizes(CASE))
    assert wrapper.run(CASE.q.astype(np.float16), CASE.k_blocks.astype(np.float16)).dtype == np.float16


@pytest.mark.parametrize("kind", ["numpy", "gpu"])
def test_nothing_to_do(kind: str) -> None:
    q, cache = to_kind(CASE.q, kind), paged_cache(CASE, kind)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*EMPTY_TABLE, *plan_sizes(CASE), q_data_type="float32")
    o, lse = wrapper.run_return_lse(q[:0], cache)
    assert (o.shape, lse.shape) == ((0, 4, 32), (0, 4))
    wrapper.plan(*(np.zeros(n, np.int32) for n in (4, 0, 3)), *plan_sizes(CASE), q_data_type="float32")
    for pool in (cache, cache[:0]):
        o, lse = wrapper.run_return_lse(q[:3], pool)
        assert not o.any()
        assert np.isneginf(lse).all()
    k = cache[0, 0, :0]
    for layout, empty in (("NHD", k), ("HND", k.swapaxes(0, 1))):
        o, lse = single_decode_with_kv_cache(q[0], empty, empty, layout, return_lse=True)
        assert not o.any()
        assert np.isneginf(lse).all()


def test_queries_of_any_strides() -> None:
    wide = np.zeros((4, 8, 33), np.float32)
    q = wide[:, ::2, 1:]
    q[...] = CASE.q
    assert_decodes(planned(CASE).run_return_lse(q, paged_cache(CASE)), CASE)
    q.setflags(write=False)
    assert_decodes(planned(CASE).run_return_lse(q, paged_cache(CASE)), CASE)
    assert_decodes(planned(CASE).run_return_lse(torch.from_numpy(CASE.q).requires_grad_(), paged_cache(CASE)), CASE)


def test_a_permutation_of_the_pages_changes_no_bit() -> None:
    moved = permuted(CASE, np.random.default_rng(1))
    first = planned(CASE).run_return_lse(CASE.q, paged_cache(CASE))
    second = planned(moved).run_return_lse(CASE.q, paged_cache(moved))
    for a, b, what in zip(first, second, ("o", "lse"), strict=True):
        assert_bits_equal(a, b, what=what)


def build_scaled(factor: float) -> Any:
    """CASE with all of K and V multiplied, in memory of its own."""
    cache = build(CASE.case)
    cache.k_blocks[...] *= factor
    return cache


def test_one_plan_serves_many_caches() -> None:
    """Other memory, other strides, other contents of the same memory, and memory that was freed in between."""
    wrapper = planned(CASE)
    pages = CASE.k_blocks.copy()
    assert_decodes(wrapper.run_return_lse(CASE.q, pages), CASE)
    pages *= 2
    doubled = wrapper.run_return_lse(CASE.q, pages)
    assert_decodes(doubled, build_scaled(2.0))
    assert_decodes(wrapper.run_return_lse(CASE.q, CASE.k_blocks), CASE)
    assert_decodes(wrapper.run_return_lse(CASE.q, (pages[:, 0] / 2, pages[:, 1] / 2)), CASE)
    assert_decodes(wrapper.run_return_lse(CASE.q, (CASE.k_blocks[:, 0], CASE.k_blocks[:, 1].copy())), CASE)
    # One fact of the memory changes at a time: where V lies, then how far apart the pages are.
    k, v, larger = CASE.k_blocks[:, 0].copy(), CASE.k_blocks[:, 1].copy(), 2 * CASE.k_blocks[:, 1]
    o = wrapper.run(CASE.q, (k, v))
    assert_bits_equal(wrapper.run(CASE.q, (k, larger)), 2 * o, what="o of a doubled V")
    spare = np.zeros((2 * len(pages), *pages.shape[1:]), np.float32)
    wrapper.run(CASE.q, spare[: len(pages)])
    spare[::2] = CASE.k_blocks
    assert_decodes(wrapper.run_return_lse(CASE.q, spare[::2]), CASE)
    for factor in (1.0, 3.0, 0.5):
        assert_decodes(wrapper.run_return_lse(CASE.q, build_scaled(factor).k_blocks), build_scaled(factor))


def test_scales_belong_to_one_run() -> None:
    wrapper = planned(CASE)
    for scales in ({"k_scale": 0.5}, {}, {"q_scale": 2.0, "v_scale": 3.0}, {"v_scale": 3.0}, {}):
        assert_decodes(wrapper.run_return_lse(CASE.q, paged_cache(CASE), **scales), CASE, **scales)


@pytest.mark.parametrize(
    "names",
    [
        {"q_data_type": "float32"},
        {"q_data_type": torch.float32},
        {"q_data_type": np.float32, "kv_data_type": DType.float32},
        {"data_type": "float32"},
        {"data_type": torch.float32, "kv_data_type": np.dtype("float32")},
        {"q_data_type": None, "data_type": "float32"},
    ],
)
def test_spellings_of_data_types(names: dict[str, Any]) -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*csr(CASE), *plan_sizes(CASE), **names)
    assert_decodes(wrapper.run_return_lse(CASE.q, paged_cache(CASE)), CASE)


def test_replanning() -> None:
    wrapper = planned(CASE, window_left=3, pos_encoding_mode="ALIBI")
    other = build(CacheCase((3, 40), num_q_heads=6, head_dim=64, page_size=5, rank=4))
    wrapper.plan(*csr(other), *plan_sizes(other), data_type="float32")
    assert_decodes(wrapper.run_return_lse(other.q, paged_cache(other)), other)


def test_the_older_names() -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.begin_forward(*csr(CASE), *plan_sizes(CASE), window_left=9, q_data_type="float32")
    o = wrapper.forward(CASE.q, paged_cache(CASE))
    assert_bits_equal(o, wrapper.run(CASE.q, paged_cache(CASE)), what="o")
    options = {"window_left": 3, "rope_theta": 5e5, "logits_soft_cap": 4.0, "sm_scale": 0.3, "rope_scale": 2.0}
    found = wrapper.forward_return_lse(CASE.q, paged_cache(CASE), "ROPE_LLAMA", 0.5, **options)
    assert_decodes(found, CASE, "ROPE_LLAMA", q_scale=0.5, **options)
    assert_decodes(wrapper.run_return_lse(CASE.q, paged_cache(CASE)), CASE, window_left=9)
    wrapper.end_forward()
    wrapper.reset_workspace_buffer(None, None)
    assert_bits_equal(wrapper.run(CASE.q, paged_cache(CASE)), o, what="o after end_forward")


def test_repr_says_what_is_planned() -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None, "HND", use_tensor_cores=True)
    assert repr(wrapper) == "BatchDecodeWithPagedKVCacheWrapper(HND, nothing planned)"
    assert wrapper.use_tensor_cores
    assert not wrapper.is_cuda_graph_enabled
    assert repr(planned(CASE, pos_encoding_mode="ALIBI")) == (
        "BatchDecodeWithPagedKVCacheWrapper(NHD, 4 requests of up to 48 tokens, 4 query and 2 KV heads of 32, "
        "pages of 16, q float32, kv float32, ALIBI)"
    )


def test_single_decode_takes_sixteen_arguments_in_flashinfers_order() -> None:
    q, k, v = CASE.q[2], CASE.keys[2], CASE.values[2]
    found = single_decode_with_kv_cache(
        q, k, v, "NHD", "ROPE_LLAMA", False, 0.5, 2.0, 3.0, 30, 5.0, 0.2, 4.0, 5e5, True
    )  # fmt: skip
    options = {"q_scale": 0.5, "k_scale": 2.0, "v_scale": 3.0, "window_left": 30, "logits_soft_cap": 5.0}
    expected = oracle(CASE, CASE.q, "ROPE_LLAMA", sm_scale=0.2, rope_scale=4.0, rope_theta=5e5, **options)
    assert_close(found[0], expected[0][2], rel=1e-5, what="o")
    assert_lse_close(found[1], expected[1][2], tol=1e-5, what="lse")


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


def test_a_run_may_have_another_number_of_rows() -> None:
    """As FlashInfer's kernels for it take it: the plan says nothing of it."""
    wrapper = planned(CASE)
    found = wrapper.run_return_lse(new_rows(CASE, 3)[0], paged_cache(CASE), q_len_per_req=3)
    assert_rows(found, CASE, 3)
    assert_rows(wrapper.run_return_lse(new_rows(CASE, 1)[0], paged_cache(CASE)), CASE, 1)
    both = planned(CASE, q_len_per_req=2)
    assert_rows(both.run_return_lse(new_rows(CASE, 1)[0], paged_cache(CASE), q_len_per_req=1), CASE, 1)
    assert_rows(both.forward_return_lse(new_rows(CASE, 2)[0], paged_cache(CASE)), CASE, 2)


def test_a_run_may_have_another_window() -> None:
    wrapper = planned(CASE, window_left=9)
    for window in (None, 3, 3, -1, np.int64(4)):
        found = wrapper.run_return_lse(new_rows(CASE, 1)[0], paged_cache(CASE), window_left=window)
        assert_rows(found, CASE, 1, window_left=9 if window is None else int(window))


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
    with pytest.raises(ContractTypeError, match="q: expected the planned dtype float16, got float32"):
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
    with pytest.raises(
        PageTableError, match="paged_kv_last_page_len_buffer: request 0: expected 1 to page_size = 16, got 17"
    ):
        wrapper.run(CASE.q, paged_cache(CASE))


def test_rows_of_a_captured_graph_are_read_again() -> None:
    buffers = [np.zeros(n, np.int32) for n in (5, 20, 4)]
    wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, *buffers, use_tensor_cores=True)
    q = new_rows(CASE, 2)[0]

    def plan(number: int) -> None:
        wrapper.plan(*csr(CASE), *plan_sizes(CASE), q_data_type="float32", q_len_per_req=number)

    plan(2)
    plan(2)
    with pytest.raises(ShapeError, match="q_len_per_req: expected the first plan's 2, got 3"):
        plan(3)
    shorter = build(CacheCase((15, 0, 41, 3), rank=5))
    assert_rows(wrapper.run_return_lse(q, paged_cache(CASE)), CASE, 2)
    for buffer, array in zip(buffers, csr(shorter), strict=True):
        buffer[: len(array)] = array
    assert_rows(wrapper.run_return_lse(new_rows(shorter, 2)[0], paged_cache(shorter)), shorter, 2)
    buffers[2][3] = 1
    with pytest.raises(PageTableError, match="request 3 has 2 query rows and 1 tokens"):
        wrapper.run(q, paged_cache(shorter))
