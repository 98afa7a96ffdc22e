"""What the prefill API refuses: a typed error that names argument, request and value, and not a byte written."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from paged_kv.attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper
from paged_kv.errors import ContractError, ContractTypeError, PageTableError, ShapeError
from paged_kv.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
)
from support.cases import CacheCase, build
from support.decoding import csr, load_variants, plan_sizes
from support.prefilling import flat, full_masks, offsets, packed, queries
from support.refusing import changed, refuses

CASE = build(CacheCase((17, 0, 48, 5), rank=5))  # 2 + 0 + 3 + 1 pages of 16
PAIR = build(CacheCase((17, 0, 48, 5), rank=4))
Q_LENS = (3, 1, 4, 5)
INDPTR, INDICES, LAST = csr(CASE)
QO = offsets(Q_LENS)
KV = offsets(CASE.case.lengths)
MASKS = full_masks(Q_LENS, CASE.case.lengths)
BITS = sum(mask.size for mask in MASKS)
Q = queries(CASE, Q_LENS)
K, V = (np.concatenate(parts) for parts in (CASE.keys, CASE.values))


@pytest.fixture(autouse=True, scope="module")
def _variants() -> None:
    load_variants()


PLANS = [
    ({"qo_indptr": changed(QO, 0, 1)}, PageTableError, "qo_indptr[0] must be 0, not 1"),
    ({"qo_indptr": changed(QO, 1, 9)}, PageTableError, "qo_indptr decreases at request 1: from 9 to 4"),
    ({"qo_indptr": QO[:-1]}, ShapeError, "qo_indptr must have B + 1 = 5 entries, it has 4"),
    ({"qo_indptr": QO.astype(np.float32)}, ContractTypeError, "qo_indptr: dtype must be an integer, not float32"),
    ({"qo_indptr": changed(QO, 4, 2**26)}, ContractError, "qo_indptr ends at 67108864 rows, over 33554432"),
    ({"head_dim_vo": 36}, ShapeError, "head_dim_vo must be a multiple of 8 from 8 to 512, not 36"),
    ({"head_dim_vo": 0}, ContractError, "head_dim_vo must be at least 1, not 0"),
    ({"custom_mask": flat(MASKS)[:-1]}, ShapeError, f"custom_mask: shape [{BITS - 1}], expected [{BITS}]"),
    ({"custom_mask": flat(MASKS)[None]}, ShapeError, f"custom_mask: shape [1, {BITS}], expected [{BITS}]"),
    ({"custom_mask": flat(MASKS).astype(np.float32)}, ContractTypeError, "custom_mask: dtype float32, expected bool"),
    ({"custom_mask": flat(MASKS).tolist()}, ContractTypeError, "custom_mask must be an array"),
    ({"packed_custom_mask": packed(MASKS)[:-1]}, ShapeError, "packed_custom_mask: shape [34], expected [35]"),
    ({"packed_custom_mask": flat(MASKS)}, ContractTypeError, "packed_custom_mask: dtype bool, expected uint8"),
    ({"packed_custom_mask": packed(MASKS), "custom_mask": "no mask"}, None, ""),
    ({"causal": np.ones(2)}, ContractTypeError, "causal must be true or false"),
    ({"pos_encoding_mode": "ROPE"}, ContractError, "one of NONE, ROPE_LLAMA, ALIBI, not 'ROPE'"),
    ({"window_left": -2}, ContractError, "window_left must be at least -1"),
    ({"sm_scale": "1"}, ContractTypeError, "sm_scale must be a number, not str"),
    ({"num_qo_heads": 5}, ShapeError, "num_qo_heads: 5 is no multiple of num_kv_heads, which is 2"),
    ({"q_data_type": "int8"}, ContractTypeError, "q_data_type: int8 is none of"),
    ({"kv_data_type": "float16"}, ContractTypeError, "kv_data_type: float16 must equal q's float32 or be"),
    ({"o_data_type": "int8"}, ContractTypeError, "o_data_type: int8 is none of"),
    ({"prefix_len_ptr": QO}, ContractError, "prefix_len_ptr must be None, not of type ndarray"),
    ({"token_pos_in_items_ptr": QO}, ContractError, "token_pos_in_items_ptr must be None"),
    ({"max_item_len_ptr": QO}, ContractError, "max_item_len_ptr must be None"),
    ({"token_pos_in_items_len": 3}, ContractError, "token_pos_in_items_len must be 0"),
    ({"token_pos_in_items_len": QO}, ContractTypeError, "token_pos_in_items_len must be an integer"),
    ({"seq_lens": np.array([17, 0, 47, 5])}, PageTableError, "seq_lens"),
    ({"seq_lens": np.array(CASE.case.lengths)}, None, ""),
    ({"seq_lens_q": np.array([3, 1, 4, 4])}, PageTableError, "seq_lens_q[3] is 4, qo_indptr says 5"),
    ({"seq_lens_q": np.array(Q_LENS, np.uint32)}, None, ""),
    ({"max_token_per_sequence": 1, "max_sequence_kv": 1, "uniform_q_len": 7}, None, ""),
    ({"fixed_split_size": 4096, "disable_split_kv": True, "use_fp16_qk_reduction": True}, None, ""),
]  # fmt: skip
PAGED = [
    ({"paged_kv_indptr": changed(INDPTR, 1, 7)}, PageTableError, "paged_kv_indptr decreases at request 1"),
    ({"paged_kv_indices": INDICES[:-1]}, PageTableError, "request 3 ends at 6, paged_kv_indices has 5"),
    ({"paged_kv_last_page_len": changed(LAST, 2, 17)}, PageTableError, "paged_kv_last_page_len: request 2 has 17"),
    ({"page_size": 0}, ContractError, "page_size must be at least 1, not 0"),
    ({"head_dim_qk": 36}, ShapeError, "head_dim must be a multiple of 8 from 8 to 512, not 36"),
]  # fmt: skip
RAGGED = [
    ({"kv_indptr": changed(KV, 1, 99)}, PageTableError, "kv_indptr decreases at request 1: from 99 to 17"),
    ({"kv_indptr": changed(KV, 0, -1)}, PageTableError, "kv_indptr[0] must be 0, not -1"),
    ({"kv_indptr": KV[:-1]}, ShapeError, "qo_indptr must have B + 1 = 4 entries, it has 5"),
    ({"v_indptr": changed(KV, 2, 16)}, PageTableError, "v_indptr[2] is 16, kv_indptr says 17"),
    ({"o_indptr": changed(QO, 2, 3)}, PageTableError, "o_indptr[2] is 3, qo_indptr says 4"),
    ({"v_indptr": KV, "o_indptr": QO}, None, ""),
]  # fmt: skip

PAGED_NAMES = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
SIZES = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size")


def paged_arguments(**changes: Any) -> dict[str, Any]:
    given = dict(zip((*PAGED_NAMES, *SIZES), (QO, *csr(CASE), *plan_sizes(CASE)), strict=True))
    return given | {"q_data_type": "float32"} | changes


def ragged_arguments(**changes: Any) -> dict[str, Any]:
    given = dict(zip(("qo_indptr", "kv_indptr", *SIZES[:3]), (QO, KV, *plan_sizes(CASE)[:3]), strict=True))
    return given | {"q_data_type": "float32"} | changes


def paged_buffers() -> list[np.ndarray]:
    return [np.zeros(n, np.int32) for n in (5, 5, 9, 4)] + [np.zeros(50, np.uint8), np.zeros(5, np.int32)]


def ragged_buffers() -> list[np.ndarray]:
    return [np.zeros(5, np.int32), np.zeros(5, np.int32), np.zeros(50, np.uint8), np.zeros(5, np.int32)]


def check_plan(
    wrapper: Any,
    good: dict[str, Any],
    bad: dict[str, Any],
    error: type[Exception] | None,
    message: str,
    run: Callable[[], Any],
    buffers: list[np.ndarray],
) -> None:
    """A refused plan leaves the former one, and the user's buffers, as they were."""
    wrapper.plan(**good)
    before = run()
    if error is None:
        wrapper.plan(**bad)
        return
    refuses(lambda: wrapper.plan(**bad), error, message, *buffers, *bad.values())
    assert np.array_equal(run(), before)


@pytest.mark.parametrize(("changes", "error", "message"), PLANS + PAGED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("graph", [False, True])
def test_plan_over_pages(graph: bool, changes: dict[str, Any], error: type[Exception] | None, message: str) -> None:
    buffers = paged_buffers() if graph else []
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None, "NHD", graph, *buffers)
    good, bad = paged_arguments(causal=True), paged_arguments(**changes)
    check_plan(wrapper, good, bad, error, message, lambda: wrapper.run(Q, CASE.k_blocks), buffers)


@pytest.mark.parametrize(("changes", "error", "message"), PLANS + RAGGED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("graph", [False, True])
def test_plan_over_tokens(graph: bool, changes: dict[str, Any], error: type[Exception] | None, message: str) -> None:
    buffers = ragged_buffers() if graph else []
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(None, "NHD", graph, *buffers)
    good, bad = ragged_arguments(causal=True), ragged_arguments(**changes)
    message = message.replace(": request 3 has", "[3] is")
    check_plan(wrapper, good, bad, error, message, lambda: wrapper.run(Q, K, V), buffers)


CONSTRUCTORS = [
    ({"kv_layout": "HDN"}, ContractError, "kv_layout must be 'NHD' or 'HND', not 'HDN'"),
    ({"backend": 3}, ContractTypeError, "backend must be a str, not 3"),
    ({"jit_args": ["uri"]}, ContractError, "jit_args must be None, not of type list"),
    ({"variant_owns_mask": True}, ContractError, "variant_owns_mask must be False"),
    ({"use_cuda_graph": True}, ContractError, "qo_indptr_buf is needed where the requests live in buffers"),
    ({"backend": "fa2", "jit_kwargs": {}}, None, ""),
]  # fmt: skip


@pytest.mark.parametrize("kind", [BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper])
@pytest.mark.parametrize(("changes", "error", "message"), CONSTRUCTORS, ids=lambda value: str(value)[:40])
def test_constructors(kind: Any, changes: dict[str, Any], error: type[Exception] | None, message: str) -> None:
    if error is None:
        kind(None, **changes)
    else:
        refuses(lambda: kind(None, **changes), error, message)


RUNS = [
    ({"q": Q[:-1]}, ShapeError, "q: shape [12, 4, 32], planned [qo_indptr[B], num_qo_heads, head_dim] = [13, 4, 32]"),
    ({"q": Q.astype(np.float16)}, ContractTypeError, "q: dtype float16, planned float32"),
    ({"q": Q.tolist()}, ContractTypeError, "q must be an array"),
    ({"q_scale": "1"}, ContractTypeError, "q_scale must be a number, not str"),
    ({"q_scale": np.ones(4, np.float32)}, ContractTypeError, "q_scale must be a number, not ndarray"),
    ({"k_scale": True}, ContractTypeError, "k_scale must be a number, not bool"),
    ({"v_scale": np.inf}, ContractError, "v_scale must be finite"),
    ({"out": np.zeros_like(Q)[:-1]}, ShapeError, "out: shape [12, 4, 32], planned"),
    ({"out": Q}, ContractError, "out shares memory with q"),
    ({"lse": np.zeros((4, 13), np.float32)}, ShapeError, "lse: shape [4, 13], planned [qo_indptr[B], num_qo_heads]"),
    ({"lse": np.zeros((13, 4), np.float32), "lse_layout": "HN"}, ShapeError, "lse: shape [13, 4], planned"),
    ({"lse_base": "e"}, ContractError, "lse_base must be one of log2, ln, not 'e'"),
    ({"lse_layout": "HND"}, ContractError, "lse_layout must be one of NH, HN, not 'HND'"),
    ({"return_lse": np.ones(2)}, ContractTypeError, "return_lse must be true or false"),
    ({"kv_cache_sf": (Q, Q)}, ContractError, "kv_cache_sf must be None, not of type tuple"),
]  # fmt: skip
RUNS_PAGED = [
    ({"sinks": np.zeros(3, np.float32)}, ShapeError, "sinks: shape [3], expected [num_qo_heads] = [4]"),
    ({"sinks": np.full(4, np.nan, np.float32)}, ContractError, "sinks: head 0 has nan"),
    ({"window_left": -2}, ContractError, "window_left must be at least -1"),
    ({"skip_softmax_threshold_scale_factor": 1.0}, ContractError, "skip_softmax_threshold_scale_factor"),
    ({"paged_kv_cache": CASE.k_blocks[:, :, :5]}, ShapeError, "paged_kv_cache: page_size of k is 5, planned 16"),
    ({"paged_kv_cache": CASE.k_blocks[..., :16]}, ShapeError, "paged_kv_cache: head_dim of k is 16, planned 32"),
    ({"paged_kv_cache": CASE.k_blocks[:2]}, PageTableError, "outside the cache's [0, 2)"),
    ({"out": CASE.k_blocks.reshape(-1)[: Q.size].reshape(Q.shape)}, ContractError, "shares memory with paged_kv_cache"),
    ({"paged_kv_cache": (PAIR.k_blocks, PAIR.v_blocks[..., :16])}, ShapeError, "shape"),
]  # fmt: skip
RUNS_RAGGED = [
    ({"k": K[:-1], "v": V[:-1]}, ShapeError, "k: 69 tokens, the requests have 70"),
    ({"k": K[:, :1], "v": V[:, :1]}, ShapeError, "k: heads [1, 32], planned [2, 32]"),
    ({"v": V[..., :16]}, ShapeError, "v: shape [70, 2, 16] differs from k's [70, 2, 32]"),
    ({"v": V.astype(np.float16)}, ContractTypeError, "v: dtype float16 differs from k's float32"),
    ({"k": K[None]}, ShapeError, "k must have 3 dimensions"),
    ({"out": K.reshape(-1)[: Q.size].reshape(Q.shape)}, ContractError, "out shares memory with k"),
    ({"o_scale": 0.5}, ContractError, "o_scale must be None or 1, not 0.5"),
    ({"o_scale": np.ones(2)}, ContractError, "o_scale must be None or 1, not an object of type ndarray"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), RUNS + RUNS_PAGED, ids=lambda value: str(value)[:40])
def test_run_over_pages(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None)
    refuses(lambda: wrapper.run(Q, CASE.k_blocks), ContractError, "run: nothing is planned")
    wrapper.plan(**paged_arguments(custom_mask=flat(MASKS)))
    given: dict[str, Any] = {"q": Q, "paged_kv_cache": CASE.k_blocks} | changes
    outputs = {"out": np.ones_like(Q), "lse": np.ones((13, 4), np.float32)} | given
    refuses(lambda: wrapper.run(**(given | {"lse": outputs["lse"]})), error, message, *outputs.values())


@pytest.mark.parametrize(("changes", "error", "message"), RUNS + RUNS_RAGGED, ids=lambda value: str(value)[:40])
def test_run_over_tokens(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(None)
    wrapper.plan(**ragged_arguments(custom_mask=flat(MASKS)))
    given: dict[str, Any] = {"q": Q, "k": K, "v": V} | changes
    outputs = {"out": np.ones_like(Q), "lse": np.ones((13, 4), np.float32)} | given
    refuses(lambda: wrapper.run(**(given | {"lse": outputs["lse"]})), error, message, *outputs.values())


def test_further_arguments() -> None:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None)
    wrapper.plan(**paged_arguments())
    refuses(lambda: wrapper.run(Q, CASE.k_blocks, 1.0), ContractError, "args must be None, not of type tuple")
    with_sinks = BatchAttentionWithAttentionSinkWrapper(None)
    with_sinks.plan(**paged_arguments())
    sinks = np.zeros(4, np.float32)
    refuses(
        lambda: with_sinks.run(Q, CASE.k_blocks, sinks, 1.0, 2.0), ContractError, "args must be None, not of type tuple"
    )
    refuses(lambda: with_sinks.run(Q, CASE.k_blocks, sinks, sinks=sinks), ContractTypeError, "sinks are given twice")


SINGLE = [
    ({"q": Q[0]}, ShapeError, "q: shape [4, 32], expected [qo_len, num_qo_heads, head_dim]"),
    ({"q": Q[:, :3]}, ShapeError, "q: its 3 heads are no multiple of k's 2"),
    ({"k": K[..., :16]}, ShapeError, "k: head_dim is 16, q's is 32"),
    ({"custom_mask": np.ones((70, 13), bool)}, ShapeError, "custom_mask: shape [70, 13], expected [910] or [13, 70]"),
    ({"packed_custom_mask": np.zeros(113, np.uint8)}, ShapeError, "packed_custom_mask: shape [113], expected [114]"),
    ({"scale_k": np.array([1.0, 2.0])}, ContractError, "scale_k must be one number for all heads, not an array of"),
    ({"scale_q": "1"}, ContractTypeError, "q_scale must be a number, not str"),
    ({"scale_k": 2.0, "k_scale": "1"}, ContractTypeError, "k_scale must be a number, not '1'"),
    ({"scale_k": np.full(2, 2.0, np.float32), "k_scale": torch.tensor([0.5])}, None, ""),
    ({"kv_cache_sf": (K, V)}, ContractError, "kv_cache_sf must be None"),
    ({"kv_layout": "HND"}, ShapeError, "heads are no multiple"),
    ({"o_dtype": "int8"}, ContractTypeError, "o_data_type: int8 is none of"),
    ({"backend": None}, ContractTypeError, "backend must be a str, not None"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), SINGLE, ids=lambda value: str(value)[:40])
def test_single(changes: dict[str, Any], error: type[Exception] | None, message: str) -> None:
    given: dict[str, Any] = {"q": Q, "k": K, "v": V} | changes
    if error is None:
        single_prefill_with_kv_cache(**given)
    else:
        refuses(lambda: single_prefill_with_kv_cache(**given), error, message, *given.values())


MIXED = [
    ({"kv_len_arr": np.array([17, 0, 49, 5])}, PageTableError, "kv_len_arr: request 2 has 49 tokens, its 3 pages of"),
    ({"kv_len_arr": np.array([17, 0, -1, 5])}, PageTableError, "kv_len_arr: request 2 has -1 tokens"),
    ({"kv_len_arr": np.array([17, 0, 48])}, ShapeError, "kv_indptr must have B + 1 = 4 entries"),
    ({"kv_indices": INDICES[:-1]}, ShapeError, "kv_indices has 5 entries, kv_indptr ends at 6"),
    ({"use_profiler": True}, ContractError, "use_profiler must be False"),
    ({"head_dim_vo": 3}, ShapeError, "head_dim_vo must be a multiple of 8"),
    ({"kv_len_arr": np.array([1, 0, 16, 5])}, None, ""),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), MIXED, ids=lambda value: str(value)[:40])
def test_mixed_batches(changes: dict[str, Any], error: type[Exception] | None, message: str) -> None:
    wrapper = BatchAttention()
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", *SIZES[:3], "head_dim_vo", "page_size")
    heads = plan_sizes(CASE)[:3]
    good = dict(zip(names, (QO, INDPTR, INDICES, CASE.lengths, *heads, 32, 16), strict=True))
    good |= {"q_data_type": "float32", "kv_data_type": "float32"}
    wrapper.plan(**good)
    if error is None:
        wrapper.plan(**(good | changes))
        return
    refuses(lambda: wrapper.plan(**(good | changes)), error, message)
    refuses(lambda: wrapper.run(Q, CASE.k_blocks, logits_soft_cap=3.0), ContractError, "none was planned")
    refuses(lambda: wrapper.run(Q, CASE.k_blocks, logits_soft_cap=Q), ContractTypeError, "logits_soft_cap must be")
    refuses(lambda: wrapper.run(Q, CASE.k_blocks, profiler_buffer=Q), ContractError, "profiler_buffer must be None")
