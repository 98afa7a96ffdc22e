"""Decode of several new tokens a request, other windows at `run`, and arguments that name an NVIDIA kernel."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged_kv import reference
from paged_kv.arrays.host import as_numpy
from paged_kv.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from paged_kv.errors import ContractError, ContractTypeError, PageTableError, ShapeError
from support.cases import Cache, CacheCase, build, causal_rows
from support.compare import assert_close, assert_lse_close
from support.decoding import LSE_TOLERANCE, O_TOLERANCE, csr, load_variants, paged_cache, plan_sizes
from support.properties import examples

CASE = build(CacheCase((17, 0, 48, 5), rank=5))


@pytest.fixture(autouse=True, scope="module")
def _variants() -> None:
    load_variants()


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


@st.composite
def drawn_cases(draw: st.DrawFn) -> tuple[CacheCase, int, str, dict[str, Any]]:
    page_size = draw(st.sampled_from((1, 5, 16, 64)))
    number = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.just(0) | st.integers(number, 150), min_size=1, max_size=4))
    kv_heads, group = draw(st.sampled_from(((1, 1), (2, 4), (1, 7), (1, 16), (3, 2))))
    layout = draw(st.sampled_from(("NHD", "HND")))
    dim = draw(st.sampled_from((32, 64, 128)))
    case = CacheCase(tuple(lengths), kv_heads * group, kv_heads, dim, page_size, layout, draw(st.sampled_from((4, 5))))
    options = {
        "window_left": draw(st.sampled_from((-1, 0, 2, 40))),
        "logits_soft_cap": draw(st.sampled_from((0.0, 20.0))),
        "v_scale": draw(st.sampled_from((1.0, 0.5))),
    }
    return case, number, draw(st.sampled_from(("NONE", "ROPE_LLAMA", "ALIBI"))), options


@settings(
    max_examples=examples(60), derandomize=True, deadline=None, database=None, suppress_health_check=[*HealthCheck]
)
@given(drawn_cases())
def test_several_tokens_a_request(drawn: tuple[CacheCase, int, str, dict[str, Any]]) -> None:
    case, number, mode, options = drawn
    cache = build(case)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None, case.layout)
    planned = {name: options[name] for name in ("window_left", "logits_soft_cap")}
    wrapper.plan(*csr(cache), *plan_sizes(cache), mode, q_data_type="float32", q_len_per_req=number, **planned)
    found = wrapper.run_return_lse(new_rows(cache, number)[0], paged_cache(cache), v_scale=options["v_scale"])
    extra = {"ROPE_LLAMA": {"rope_theta": 1e4}, "ALIBI": {"alibi_slopes": reference.alibi_slopes(case.num_q_heads)}}
    assert_rows(found, cache, number, **options, **extra.get(mode, {}))


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


SHORT = np.array([0, 2, 2, 5, 6], np.int32)

REFUSED_PLANS = [
    ({"q_len_per_req": 0}, ContractError, "q_len_per_req must be at least 1, not 0"),
    ({"q_len_per_req": 1.5}, ContractTypeError, "q_len_per_req must be an integer"),
    ({"q_len_per_req": 6}, PageTableError, "q_len_per_req: request 3 has 6 query rows and 5 tokens"),
    ({"o_data_type": "int8"}, ContractTypeError, "o_data_type: int8 is none of"),
    ({"o_data_type": "bf16"}, ContractTypeError, "o_data_type: 'bf16' is none of"),
    ({"window_right": 1}, ContractError, "window_right must be 0, not 1"),
    ({"seq_lens": CASE.lengths[:3]}, ShapeError, "seq_lens: shape [3], expected [B] = [4]"),
    ({"seq_lens": CASE.lengths + 1}, PageTableError, "seq_lens: request 0 has 18 tokens, 17 by its pages"),
    ({"seq_lens": CASE.lengths - 6}, PageTableError, "seq_lens: request 1 has -6 tokens"),
    ({"block_tables": CASE.lookup_table[:3]}, ShapeError, "block_tables: shape [3, 4], expected a row for each"),
    ({"block_tables": CASE.lookup_table[:, :2]}, ShapeError, "block_tables: 2 entries a request, request 2 has 3"),
    ({"block_tables": CASE.lookup_table + 1}, PageTableError, "block_tables: request 0, slot 0 holds page id"),
    ({"block_tables": CASE.lookup_table[0]}, ShapeError, "block_tables must have 2 dimensions"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED_PLANS, ids=lambda value: str(value)[:30])
def test_what_plan_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    wrapper = planned()
    with pytest.raises(error) as raised:
        wrapper.plan(*csr(CASE), *plan_sizes(CASE), **{"q_data_type": "float32"} | changes)
    assert message in str(raised.value)
    assert_rows(wrapper.run_return_lse(new_rows(CASE, 1)[0], paged_cache(CASE)), CASE, 1)  # as planned before


Q = new_rows(CASE, 2)[0]

REFUSED_RUNS = [
    ({"q": Q[:7]}, ShapeError, "q: shape [7, 4, 32], planned [B * q_len_per_req, num_qo_heads, head_dim] = [8, 4, 32]"),
    ({"q_len_per_req": 3}, ShapeError, "out: shape [8, 4, 32], planned [B * q_len_per_req"),
    ({"q_len_per_req": 0}, ContractError, "q_len_per_req must be at least 1"),
    ({"q_len_per_req": 9}, PageTableError, "q_len_per_req: request 3 has 9 query rows and 5 tokens"),
    ({"q_len_per_req": 2**24}, ShapeError, "are over 2^25 rows"),
    ({"window_left": -2}, ContractError, "window_left must be at least -1"),
    ({"window_left": 1.5}, ContractTypeError, "window_left must be an integer"),
    ({"window_left": True}, ContractTypeError, "window_left must be a number, not bool"),
    ({"skip_softmax_threshold_scale_factor": 0.5}, ContractError, "must be None or from 0 to 2^-25, not 0.5"),
    ({"skip_softmax_threshold_scale_factor": "0"}, ContractTypeError, "must be a number, not '0'"),
    ({"kv_cache_sf": Q}, ContractError, "kv_cache_sf must be None, not of type ndarray"),
    ({"out": np.ones((4, 4, 32), np.float32)}, ShapeError, "out: shape [4, 4, 32], planned"),
    ({"lse": np.ones((4, 4), np.float32)}, ShapeError, "lse: shape [4, 4], planned"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED_RUNS, ids=lambda value: str(value)[:30])
def test_what_run_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    wrapper = planned(q_len_per_req=2)
    out, lse = np.ones_like(Q), np.ones(Q.shape[:2], np.float32)
    given: dict[str, Any] = {"q": Q, "paged_kv_cache": paged_cache(CASE), "out": out, "lse": lse} | changes
    with pytest.raises(error) as raised:
        wrapper.run(**given)
    assert message in str(raised.value)
    assert (out == 1).all()
    assert (lse == 1).all()


def test_arguments_of_a_kernel_of_ones_own() -> None:
    with pytest.raises(ContractError, match="args must be None, not of type tuple"):
        planned().run(CASE.q, paged_cache(CASE), 0.5)
    with pytest.raises(ContractError, match="jit_args must be None, not of type list"):
        BatchDecodeWithPagedKVCacheWrapper(None, jit_args=["name"])  # type: ignore[arg-type]
    with pytest.raises(ContractTypeError, match="backend must be a str, not None"):
        BatchDecodeWithPagedKVCacheWrapper(None, backend=None)  # type: ignore[arg-type]
