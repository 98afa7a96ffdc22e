"""What the decode API refuses: a typed error that names argument, request and value, and not a byte written."""

from typing import Any

import numpy as np
import pytest
import torch

from paged_kv.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
)
from paged_kv.errors import ContractError, ContractTypeError, PageTableError, ShapeError
from support.cases import CacheCase, build
from support.decoding import csr, load_variants, paged_cache, plan_sizes
from support.refusing import changed, refuses

CASE = build(CacheCase((17, 0, 48, 5), rank=5))  # 2 + 0 + 3 + 1 pages of 16
PAIR = build(CacheCase((17, 0, 48, 5), rank=4))
TABLE = csr(CASE)
POOL = len(CASE.k_blocks)


@pytest.fixture(autouse=True, scope="module")
def _variants() -> None:
    load_variants()


INDPTR, INDICES, LAST = TABLE

TABLES = [
    ({"indptr": changed(INDPTR, 0, 1)}, PageTableError, "indptr[0] must be 0, not 1"),
    ({"indptr": changed(INDPTR, 1, 7)}, PageTableError, "indptr decreases at request 1: from 7 to 2"),
    ({"indptr": changed(INDPTR, 4, 9)}, PageTableError, "indptr: request 3 ends at 9, indices has 6 entries"),
    ({"indptr": INDPTR[:-1]}, ShapeError, "last_page_len must have B = 3 entries"),
    ({"indptr": INDPTR[:0]}, ShapeError, "indptr must have B + 1 entries"),
    ({"indptr": INDPTR[None]}, ShapeError, "indptr must have 1 dimensions"),
    ({"indptr": INDPTR.astype(np.float32)}, ContractTypeError, "indptr: dtype must be an integer, not float32"),
    ({"indptr": INDPTR.tolist()}, ContractTypeError, "indptr must be an array"),
    ({"indices": INDICES[:-1]}, PageTableError, "indptr: request 3 ends at 6, indices has 5 entries"),
    ({"indices": INDICES.astype(np.int64) + 2**31}, PageTableError, "which does not fit in int32"),
    ({"indices": INDICES.astype(np.uint32) + 2**31}, PageTableError, "which does not fit in int32"),
    ({"last_page_len": changed(LAST, 0, 0)}, PageTableError, "last_page_len: request 0 has 0, outside [1,"),
    ({"last_page_len": changed(LAST, 2, 17)}, PageTableError, "last_page_len: request 2 has 17"),
    ({"last_page_len": changed(LAST, 1, -1)}, PageTableError, "last_page_len: request 1 has -1"),
    ({"last_page_len": LAST[:-1]}, ShapeError, "last_page_len must have B = 4 entries"),
    ({"num_qo_heads": 5}, ShapeError, "num_qo_heads: 5 is no multiple of num_kv_heads, which is 2"),
    ({"num_qo_heads": 0}, ContractError, "num_qo_heads must be at least 1, not 0"),
    ({"num_kv_heads": 0}, ContractError, "num_kv_heads must be at least 1, not 0"),
    ({"num_kv_heads": 2.0}, ContractTypeError, "num_kv_heads must be an integer, not 2.0"),
    ({"head_dim": 36}, ShapeError, "head_dim must be a multiple of 8 from 8 to 512, not 36"),
    ({"head_dim": 520}, ShapeError, "head_dim must be a multiple of 8 from 8 to 512, not 520"),
    ({"head_dim": torch.tensor(30)}, ShapeError, "head_dim must be a multiple of 8 from 8 to 512, not 30"),
    ({"page_size": 0}, ContractError, "page_size must be at least 1, not 0"),
    ({"page_size": True}, ContractTypeError, "page_size must be an integer"),
    ({"pos_encoding_mode": "ROPE"}, ContractError, "one of NONE, ROPE_LLAMA, ALIBI, not 'ROPE'"),
    ({"window_left": -2}, ContractError, "window_left must be at least -1"),
    ({"window_left": 1.5}, ContractTypeError, "window_left must be an integer"),
    ({"logits_soft_cap": -1.0}, ContractError, "logits_soft_cap must be at least 0"),
    ({"logits_soft_cap": np.inf}, ContractError, "logits_soft_cap must be finite"),
    ({"sm_scale": np.nan}, ContractError, "sm_scale must be finite, not nan"),
    ({"sm_scale": "1"}, ContractTypeError, "sm_scale must be a number, not str"),
    ({"sm_scale": 1e39}, ContractError, "sm_scale must be 0 or from 1.2e-38 to 3.4e+38 in magnitude (float32)"),
    ({"sm_scale": 10**400}, ContractError, "sm_scale must be 0 or from 1.2e-38 to 3.4e+38 in magnitude"),
    ({"logits_soft_cap": 1e-46}, ContractError, "logits_soft_cap must be 0 or from 1.2e-38 to 3.4e+38 in magnitude"),
    ({"window_left": None}, ContractTypeError, "window_left must be a number, not NoneType"),
    ({"rope_scale": 1e-46}, ContractError, "rope_scale must be 0 or from 1.2e-38"),
    ({"rope_theta": 1e-30}, ContractError, "rotate by 1e+30 radians a token"),
    ({"rope_scale": 0.0}, ContractError, "rope_scale must be positive, not 0.0"),
    ({"rope_theta": -1.0}, ContractError, "rope_theta must be positive, not -1.0"),
    ({"q_data_type": "int8"}, ContractTypeError, "q_data_type: int8 is none of float32, bfloat16, float16"),
    ({"q_data_type": torch.float8_e5m2}, None, ""),
    ({"q_data_type": torch.float8_e5m2, "kv_data_type": "bfloat16"}, None, ""),
    ({"kv_data_type": "int8"}, ContractTypeError, "kv_data_type: int8 is none of float32, bfloat16, float16, float8"),
    ({"q_data_type": "fp16"}, ContractTypeError, "q_data_type: 'fp16' is none of"),
    ({"q_data_type": None}, ContractTypeError, "q_data_type: None is none of"),
    ({"kv_data_type": "float16"}, ContractTypeError, "kv_data_type: float16 must equal q's float32 or be"),
    ({"data_type": "float"}, None, ""),
    ({"data_type": "int4"}, ContractTypeError, "data_type: 'int4' is none of"),
]  # fmt: skip


def plan_arguments(**changes: Any) -> dict[str, Any]:
    names = ("indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size")
    return dict(zip(names, (*TABLE, *plan_sizes(CASE)), strict=True)) | {"q_data_type": "float32"} | changes


@pytest.mark.parametrize(("changes", "error", "message"), TABLES, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("graph", [False, True])
def test_plan(graph: bool, changes: dict[str, Any], error: type[Exception] | None, message: str) -> None:
    buffers = [np.zeros(n, np.int32) for n in (5, 20, 4)]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None, "NHD", graph, False, *buffers)
    if error is None:
        wrapper.plan(**plan_arguments(**changes))
        return
    refuses(lambda: wrapper.plan(**plan_arguments(**changes)), error, message, *TABLE, *buffers)
    with pytest.raises(ContractError, match="nothing is planned"):
        wrapper.run(CASE.q, paged_cache(CASE))


def test_run_before_plan() -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    out = np.ones_like(CASE.q)
    refuses(lambda: wrapper.run(CASE.q, CASE.k_blocks, out=out), ContractError, "run: nothing is planned", out)
    refuses(lambda: wrapper.forward(CASE.q, CASE.k_blocks), ContractError, "forward: nothing is planned")


def read_only(shape: tuple[int, ...]) -> np.ndarray:
    array = np.ones(shape, np.float32)
    array.setflags(write=False)
    return array


PAGES = CASE.k_blocks  # [pages, 2, 16, 2, 32]
K, V = PAIR.k_blocks, PAIR.v_blocks

RUNS = [
    ({"q": CASE.q[:3]}, ShapeError, "q: shape [3, 4, 32], planned [B, num_qo_heads, head_dim] = [4, 4, 32]"),
    ({"q": CASE.q[:, :2]}, ShapeError, "q: shape [4, 2, 32], planned"),
    ({"q": CASE.q[..., :16]}, ShapeError, "q: shape [4, 4, 16], planned"),
    ({"q": CASE.q[None]}, ShapeError, "q: shape [1, 4, 4, 32], planned"),
    ({"q": CASE.q.astype(np.float16)}, ContractTypeError, "q: dtype float16, planned float32"),
    ({"q": CASE.q.astype(np.float64)}, ContractTypeError, "q: dtype float64, planned float32"),
    ({"q": CASE.q.tolist()}, ContractTypeError, "q must be an array"),
    ({"q": torch.empty(4, 4, 32, device="meta")}, ContractTypeError, "q is on device meta"),
    ({"paged_kv_cache": PAGES[:, :, :8]}, ShapeError, "paged_kv_cache: page_size of k is 8, planned 16"),
    ({"paged_kv_cache": PAGES[:, :, :, :1]}, ShapeError, "paged_kv_cache: num_kv_heads of k is 1, planned 2"),
    ({"paged_kv_cache": PAGES[..., :16]}, ShapeError, "paged_kv_cache: head_dim of k is 16, planned 32"),
    ({"paged_kv_cache": PAGES.swapaxes(2, 3)}, ShapeError, "paged_kv_cache: page_size of k is 2, planned 16"),
    ({"paged_kv_cache": PAGES[:, :1]}, ShapeError, "paged_kv_cache: dimension 1 must be 2"),
    ({"paged_kv_cache": PAGES[:, 0]}, ShapeError, "paged_kv_cache must have 5 dimensions"),
    ({"paged_kv_cache": PAGES.astype(np.float16)}, ContractTypeError, "dtype float16 of k, planned float32"),
    ({"paged_kv_cache": PAGES[..., ::2].repeat(2, -1)[..., ::2]}, ContractError, "their stride is 2"),
    ({"paged_kv_cache": PAGES[:, :, ::-1]}, ContractError, "negative stride"),
    ({"paged_kv_cache": (K, V.astype(np.float16))}, ContractTypeError, "paged_kv_cache[1]: dtype float16 differs"),
    ({"paged_kv_cache": (K, V[:-1])}, ShapeError, "paged_kv_cache[1]: shape"),
    ({"paged_kv_cache": (K, V.swapaxes(1, 2))}, ShapeError, "paged_kv_cache[1]: shape"),
    ({"paged_kv_cache": (K, V, V)}, ShapeError, "must hold K and V, not 3 arrays"),
    ({"paged_kv_cache": (K[:, :, 0], V[:, :, 0])}, ShapeError, "paged_kv_cache[0] must have 4 dimensions"),
    ({"paged_kv_cache": None}, ContractTypeError, "paged_kv_cache must be an array"),
    ({"q_scale": np.nan}, ContractError, "q_scale must be finite"),
    ({"k_scale": "1"}, ContractTypeError, "k_scale must be a number, not str"),
    ({"q_scale": True}, ContractTypeError, "q_scale must be a number, not bool"),
    ({"k_scale": np.ones(2)}, ContractTypeError, "k_scale must be a number, not ndarray"),
    ({"v_scale": np.inf}, ContractError, "v_scale must be finite"),
    ({"v_scale": 1e39}, ContractError, "v_scale must be 0 or from 1.2e-38 to 3.4e+38 in magnitude (float32)"),
    ({"q_scale": 1e30, "k_scale": 1e30}, ContractError, "(float32), not 0.176777 * 1e+30 * 1e+30"),
    ({"q_scale": 1e-30, "k_scale": 1e-30}, ContractError, "(float32), not 0.176777 * 1e-30 * 1e-30"),
    ({"sinks": np.zeros(2, np.float32)}, ShapeError, "sinks: shape [2], expected [num_qo_heads] = [4]"),
    ({"sinks": np.zeros(4, np.int32)}, ContractTypeError, "sinks: dtype int32 is none of"),
    ({"sinks": np.array([0, 1, np.nan, 0], np.float32)}, ContractError, "sinks: head 2 has nan"),
    ({"sinks": np.array([0, np.inf, 0, 0], np.float32)}, ContractError, "sinks: head 1 has inf"),
    ({"out": np.ones((4, 4, 16), np.float32)}, ShapeError, "out: shape [4, 4, 16], planned"),
    ({"out": np.ones((4, 4, 32), np.float16)}, ContractTypeError, "out: dtype float16, planned float32"),
    ({"out": read_only((4, 4, 32))}, ContractError, "out is read-only"),
    ({"lse": np.ones((4, 3), np.float32)}, ShapeError, "lse: shape [4, 3], planned [B, num_qo_heads] = [4, 4]"),
    ({"lse": np.ones((4, 4), np.float64)}, ContractTypeError, "lse: dtype float64, planned float32"),
    ({"lse": read_only((4, 4))}, ContractError, "lse is read-only"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), RUNS, ids=lambda value: str(value)[:40])
def test_run(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(**plan_arguments())
    arguments = {"q": CASE.q, "paged_kv_cache": PAGES, "sinks": np.zeros(4, np.float32)}
    arguments |= {"out": np.ones_like(CASE.q), "lse": np.ones((4, 4), np.float32)} | changes
    arrays = [value for value in arguments.values() if isinstance(value, np.ndarray)]
    refuses(lambda: wrapper.run(**arguments), error, message, *arrays, PAGES, K, V)
    wrapper.run(CASE.q, PAGES)  # what was planned is still there


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("at", "where"), [(0, (0, 0)), (3, (2, 1)), (5, (3, 0))])
@pytest.mark.parametrize("page", [POOL, -1, 2**31 - 1, -(2**31)])
def test_page_ids_outside_the_cache(page: int, at: int, where: tuple[int, int], graph: bool) -> None:
    buffers = [np.zeros(n, np.int32) for n in (5, 6, 4)]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None, "NHD", graph, False, *buffers)
    wrapper.plan(**plan_arguments(indices=changed(INDICES, at, page)))
    out, lse = np.ones_like(CASE.q), np.ones((4, 4), np.float32)
    message = f"indices: request {where[0]}, slot {where[1]} holds page id {page}, outside the cache's [0, {POOL})"
    refuses(lambda: wrapper.run(CASE.q, PAGES, out=out, lse=lse), PageTableError, message, PAGES, out, lse)


@pytest.mark.parametrize("index_dtype", ["int64", "uint32", "int16", "uint8"])
def test_other_integers_are_taken_where_they_fit(index_dtype: str) -> None:
    expected, found = (BatchDecodeWithPagedKVCacheWrapper(None) for _ in range(2))
    expected.plan(**plan_arguments())
    names = ("indptr", "indices", "last_page_len")
    found.plan(**plan_arguments(**{name: array.astype(index_dtype) for name, array in zip(names, TABLE, strict=True)}))
    np.testing.assert_array_equal(found.run(CASE.q, PAGES), expected.run(CASE.q, PAGES))


def test_a_fixed_batch() -> None:
    buffers = [np.zeros(n, np.int32) for n in (5, 6, 4)]
    wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, *buffers)
    wrapper.plan(**plan_arguments())
    planned = wrapper.run(CASE.q, PAGES)
    shorter = {"indptr": INDPTR[:-1], "last_page_len": LAST[:-1]}
    refuses(
        lambda: wrapper.plan(**plan_arguments(**shorter)),
        ShapeError,
        "indptr: a batch of 3, the buffers fix it at 4",
        *buffers,
    )
    longer = {"indptr": INDPTR + np.arange(5, dtype=np.int32), "indices": np.zeros(10, np.int32)}
    refuses(
        lambda: wrapper.plan(**plan_arguments(**longer, window_left=0, last_page_len=LAST.clip(1))),
        ShapeError,
        "indices: 10 page ids, paged_kv_indices_buffer holds 6",
        *buffers,
    )
    refuses(lambda: wrapper.run(CASE.q[:3], PAGES), ShapeError, "q: shape [3, 4, 32], planned", *buffers)
    np.testing.assert_array_equal(wrapper.run(CASE.q, PAGES), planned)


BUFFERS = (np.zeros(5, np.int32), np.zeros(6, np.int32), np.zeros(4, np.int32))
FROZEN = BUFFERS[1].copy()
FROZEN.setflags(write=False)


@pytest.mark.parametrize(
    ("buffers", "error", "message"),
    [
        ((None, *BUFFERS[1:]), ContractError, "paged_kv_indptr_buffer is needed"),
        ((BUFFERS[0], None, BUFFERS[2]), ContractError, "paged_kv_indices_buffer is needed"),
        ((*BUFFERS[:2], None), ContractError, "paged_kv_last_page_len_buffer is needed"),
        ((BUFFERS[0][:4], *BUFFERS[1:]), ShapeError, "paged_kv_indptr_buffer has 4 entries, expected 5"),
        ((BUFFERS[0].astype(np.float32), *BUFFERS[1:]), ContractTypeError, "dtype float32, expected int32 or int64"),
        (
            (BUFFERS[0], BUFFERS[1].astype(np.int8), BUFFERS[2]),
            ContractTypeError,
            "dtype int8, expected int32",
        ),
        ((BUFFERS[0], BUFFERS[1][None], BUFFERS[2]), ShapeError, "paged_kv_indices_buffer: shape [1, 6]"),
        ((BUFFERS[0], FROZEN, BUFFERS[2]), ContractError, "paged_kv_indices_buffer is read-only"),
        (([0], *BUFFERS[1:]), ContractTypeError, "paged_kv_indptr_buffer must be an array"),
    ],
)
def test_buffers_that_do_not_fit(buffers: tuple[Any, ...], error: type[Exception], message: str) -> None:
    refuses(lambda: CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, *buffers), error, message)


def test_layouts() -> None:
    message = "kv_layout must be 'NHD' or 'HND', not 'nhd'"
    refuses(lambda: BatchDecodeWithPagedKVCacheWrapper(None, "nhd"), ContractError, message)
    k = CASE.keys[0]
    refuses(lambda: single_decode_with_kv_cache(CASE.q[0], k, k, "nhd"), ContractError, message)


Q1, K1 = CASE.q[0], CASE.keys[0]  # [4, 32], [17, 2, 32]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((CASE.q, K1, K1), {}, ShapeError, "q: shape [4, 4, 32], expected [num_qo_heads, head_dim]"),
        ((Q1, K1[0], K1[0]), {}, ShapeError, "k must have 3 dimensions"),
        ((Q1, K1, K1[:5]), {}, ShapeError, "v: shape [5, 2, 32] differs from k's [17, 2, 32]"),
        ((Q1, K1, K1.astype(np.float16)), {}, ContractTypeError, "v: dtype float16 differs from k's float32"),
        (
            (Q1, K1.astype(np.float16), K1.astype(np.float16)),
            {},
            ContractTypeError,
            "k: dtype: float16 must equal",
        ),
        ((Q1[:, :16], K1, K1), {}, ShapeError, "k: head_dim is 32, q's is 16"),
        ((Q1[:3], K1, K1), {}, ShapeError, "q: its 3 heads are no multiple of k's 2"),
        ((Q1, K1[..., ::2].repeat(4, -1)[..., ::2], K1), {}, ContractError, "their stride is 2"),
        ((Q1, K1, K1[::-1]), {}, ContractError, "v has a negative stride"),
        ((Q1.astype(np.int32), K1, K1), {}, ContractTypeError, "q: dtype: int32 is none of"),
        ((Q1, K1.tolist(), K1), {}, ContractTypeError, "k must be an array"),
        ((Q1, K1, K1), {"pos_encoding_mode": "rope"}, ContractError, "pos_encoding_mode must be one of"),
        ((Q1, K1, K1), {"v_scale": np.nan}, ContractError, "v_scale must be finite"),
        ((Q1, K1, K1), {"window_left": -5}, ContractError, "window_left must be at least -1"),
    ],
)
def test_single(arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(lambda: single_decode_with_kv_cache(*arguments, **options), error, message, Q1, K1)
