"""The refusals of attention calls, written once for all of them: a typed error of one line that names argument, request
and value, not a byte written, and the former plan as it was.

A row breaks arguments of one kind, and holds for every call that has an argument of one of these names; `of` are the
calls that alone say it so. A message's {name} is the argument, {indptr}, {indices} and {last} the call's page table.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided

from paged_kv import page
from paged_kv.errors import ContractError, ContractTypeError, PageTableError, ShapeError
from support.calls import CACHE, CALLS, IN_BUFFERS, Call, f32, i32
from support.decoding import to_kind
from support.kinds import WRITABLE, bytes_of
from support.refusing import changed, refuses

pytestmark = pytest.mark.usefixtures("all_variants")


ROLES = {
    "indptr": "indptr paged_kv_indptr kv_indptr unique_kv_indptr paged_kv_indptr_arr".split(),
    "indices": "indices paged_kv_indices kv_indices unique_kv_indices paged_kv_indices_arr".split(),
    "last": "last_page_len paged_kv_last_page_len unique_kv_last_page_len kv_last_page_len".split(),
    "qo": "qo_indptr qo_indptr_arr append_indptr".split(),
    "mode": ["pos_encoding_mode"],
    "width": "head_dim head_dim_qk head_dim_vo head_dim_ckv head_dim_kpe".split(),
    "cache": "paged_kv_cache kv_cache unique_kv_cache kv_data".split(),
    "state": ["v_a", "v"],
    "sums": ["s_a", "s"],
    "other state": ["v_b", "v_other"],
    "other sums": ["s_b", "s_other"],
    "new k": "append_key append_ckv k".split(),
    "new v": "append_value append_kpe v".split(),
    "dtype": "q_data_type kv_data_type o_data_type output_dtype".split(),
}
"""Arguments that go by several names; any other goes by its own."""

Change = Callable[[Any], Any] | Any


@dataclass(frozen=True)
class Row:
    role: str
    change: Change
    """A function of the valid value, or what stands in its place."""
    error: type[Exception]
    said: str
    of: str = ""
    """A regular expression of the calls' names; empty: all that have the argument."""

    def __str__(self) -> str:
        """Return the words of a test's id."""
        return fault(self.said)


def fault(said: str) -> str:
    return re.sub(r"[^\w ,.=+-]+", "", said).strip(" ,")


def at(place: Any, value: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: changed(array, place, value)


def dtype(name: str) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: array.astype(name)


def part(*index: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: array[index]


def as_list(array: np.ndarray) -> list[Any]:
    return array.tolist()  # type: ignore[no-any-return]


def read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def differentiable(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).requires_grad_()


GRADIENT = "{name} requires a gradient, and paged_kv's operators compute none: call them under torch.inference_mode()"
RESULTS = ("out", "lse")
ITSELF = "is to be written, but some of its elements share memory"

BY_LENGTHS = r"^BatchAttention\.|MLA"
"""Whose plans have the tokens of each request in place of a page's."""
PAGED = r"^(?!BatchAttention\.|BatchMLA|BatchPrefillWithRagged)"
NOT_MLA = r"^(?!BatchMLA)"
NOT_DENSE = r"^(?!append.*dense)"
NO_LATENT_DECODE = r"^(?!BatchDecodeMla)"
DECODE = r"(Decode\w*Wrapper( in buffers)?\.(plan|begin)|fast_decode)"
PREFILL = r"^BatchPrefillWith(Paged|Ragged)|^BatchAttentionWith"
RAGGED = r"^BatchPrefillWithRagged"
MLA = r"^BatchMLA"
PLANNED = r"^(?!BatchPrefillWithShared)"
"""Whose plans say the dtype of q."""
NUMBER = "expected 0 or from 1.2e-38 to 3.4e+38 in magnitude"

TABLES = [
    # The page table: 1 and 2 pages of 4, of 3 and 6 tokens.
    Row("indptr", at(0, 1), PageTableError, "{name}[0]: expected 0, got 1"),
    Row("indptr", at(1, 99), PageTableError, "{name} decreases at request 1: from 99 to "),
    Row("indptr", at(2, 4), PageTableError, "{name}: request 1 ends at 4, {indices} has 3 entries", PAGED),
    Row("indptr", part(slice(-1)), ShapeError, "{last}: expected B = 1 entries, as {name} has 2, got 2", PAGED),
    Row("indptr", part(slice(-1)), ShapeError, "kv_indptr: expected B + 1 = 3 entries", BY_LENGTHS),
    Row("indptr", part(slice(-1)), ShapeError, "qo_indptr: expected B + 1 = 2 entries, got 3", RAGGED),
    Row("indptr", part(slice(0)), ShapeError, "{name}: expected B + 1"),
    Row("indices", part(slice(2)), PageTableError, "{indptr}: request 1 ends at 3, {name} has 2 entries", PAGED),
    Row("indices", part(slice(2)), ShapeError, "kv_indices: expected at least 3 entries", BY_LENGTHS),
    Row("indices", lambda a: a.astype("int64") + 2**31, PageTableError, "which does not fit in int32"),
    Row("last", at(0, 0), PageTableError, "{name}: request 0: expected 1 to page_size = ", NOT_DENSE),
    Row("last", at(1, 5), PageTableError, "{name}: request 1: expected 1 to page_size = 4, got 5", NOT_DENSE),
    Row("last", part(slice(1)), ShapeError, "{name}: expected B = 2 entries", NOT_DENSE),
    # Rows of each request: 2 and 3.
    Row("qo", at(0, 1), PageTableError, "{name}[0]: expected 0, got 1"),
    Row("qo", at(1, 9), PageTableError, "{name} decreases at request 1: from 9 to 5"),
    Row("qo", part(slice(-1)), ShapeError, "{name}: expected B + 1 = 3 entries, got 2"),
]  # fmt: skip

PLANS = [
    Row("kv_len_arr", at(1, 9), PageTableError, "kv_len_arr: request 1 has 9 tokens, its 2 pages of"),
    Row("kv_len_arr", at(1, -1), PageTableError, "kv_len_arr: request 1 has -1 tokens"),
    Row("kv_len_arr", part(slice(1)), ShapeError, "_indptr: expected B + 1 = 2 entries"),
    Row("kv_len_arr", i32(3, 6, 1), ShapeError, "kv_indptr: expected B + 1 = 4 entries"),
    Row("qo", at(2, 2**26), ContractError, "{name}: expected at most "),
    # Sizes.
    Row("num_qo_heads", 5, ShapeError, "num_qo_heads: expected a multiple of num_kv_heads = 2, got 5",
        NO_LATENT_DECODE),
    Row("num_qo_heads", 0, ContractError, "num_qo_heads: expected at least 1, got 0"),
    Row("num_heads", 0, ContractError, "num_heads: expected at least 1"),
    Row("width", 36, ShapeError, "{name}: expected a multiple of 8 from 8 to 512, got 36"),
    Row("width", 520, ShapeError, "{name}: expected a multiple of 8 from 8 to 512, got 520"),
    Row("page_size", 0, ContractError, "page_size: expected at least 1, got 0"),
    # Options.
    Row("mode", "ROPE", ContractError, "expected 'NONE' or 'ROPE_LLAMA' or 'ALIBI', got 'ROPE'"),
    Row("logits_soft_cap", -1.0, ContractError, "logits_soft_cap: expected at least 0", NO_LATENT_DECODE),
    Row("logits_soft_cap", 1e-46, ContractError, f"logits_soft_cap: {NUMBER}"),
    Row("sm_scale", 1e39, ContractError, f"sm_scale: {NUMBER} (float32)"),
    Row("sm_scale", None, ContractError, "sm_scale: expected a value, got None", MLA),
    Row("rope_scale", 0.0, ContractError, "rope_scale: expected a positive number, got 0.0", NO_LATENT_DECODE),
    Row("rope_theta", 1e-30, ContractError, "rotate by 1e+30 radians a token", NO_LATENT_DECODE),
    Row("rope_theta", 5e5, ContractError, "rope_theta: expected None or 10000.0, got 500000.0", "^BatchDecodeMla"),
    Row("logits_soft_cap", 30.0, ContractError, "logits_soft_cap: expected None or 0, got 30.0", "^BatchDecodeMla"),
    Row("window_left", 5, ContractError, "window_left: expected -1, got 5: the latent kernels", "^BatchDecodeMla"),
    Row("head_dim_compressed_kv", 36, ShapeError, "head_dim_compressed_kv: expected a multiple of 8"),
    Row("causal", None, ContractError, "causal: expected a value, got None", MLA),
    # Dtypes; all are float32.
    Row("dtype", "int16", ContractTypeError, "{name}: int16 is none of "),
    Row("dtype", "fp16", ContractTypeError, "{name}: 'fp16' is none of "),
    Row("q_data_type", None, ContractTypeError, "q_data_type: None is none of",
        r"^BatchDecodeWith\w*( in buffers)?\.plan"),
    Row("kv_data_type", "float16", ContractTypeError, "kv_data_type: float16 must equal q's float32 or be", r"\.plan$"),
    Row("data_type", "int4", ContractTypeError, "data_type: 'int4' is none of"),
    # Rows of a decode.
    Row("q_len_per_req", 0, ContractError, "q_len_per_req: expected at least 1, got 0"),
    Row("q_len_per_req", 4, PageTableError, "q_len_per_req: request 0 has 4 query rows and 3 tokens"),
    Row("window_right", 1, ContractError, "window_right: expected 0, got 1"),
    Row("block_tables", i32(2, 0), ShapeError, "block_tables: expected 2 dimensions", DECODE),
    Row("block_tables", i32(2, 0)[None], ShapeError,
        "block_tables: expected a row for each of 2 requests, got shape [1, 2]", DECODE),
    Row("block_tables", i32(2, 0)[:, None], ShapeError, "block_tables: 1 entries a request, request 1 has 2", DECODE),
    Row("block_tables", np.array([[2, -1], [0, 3]]), PageTableError,
        "block_tables: request 1, slot 1 holds page id 3, indices has 1", DECODE),
    Row("seq_lens", i32(3), ShapeError, "seq_lens: expected shape [B] = [2], got [1]", DECODE),
    Row("seq_lens", i32(4, 6), PageTableError, "seq_lens: request 0: expected 3 tokens by its pages, got 4", DECODE),
    Row("seq_lens", i32(3, 5), PageTableError, "seq_lens: request 1: expected 6 tokens by its pages, got 5", DECODE),
    Row("seq_lens", i32(3, -6), PageTableError, "seq_lens: request 1: expected at least 0 tokens, got -6", DECODE),
    # Masks of 2 * 3 + 3 * 6 bits, 1 + 3 bytes; what else a prefill's plan may say of its requests.
    Row("custom_mask", np.ones(23, bool), ShapeError, "custom_mask: expected shape [24]"),
    Row("custom_mask", np.ones((1, 24), bool), ShapeError, "custom_mask: expected shape [24]"),
    Row("custom_mask", f32(24), ContractTypeError, "custom_mask: expected dtype bool"),
    Row("packed_custom_mask", np.zeros(3, np.uint8), ShapeError, "packed_custom_mask: shape [3], expected [4]"),
    Row("packed_custom_mask", np.ones(4, bool), ContractTypeError,
        "packed_custom_mask: expected dtype uint8, got bool"),
    Row("prefix_len_ptr", i32(0), ContractError, "prefix_len_ptr: expected None, got an object of type ndarray"),
    Row("token_pos_in_items_ptr", i32(0), ContractError, "token_pos_in_items_ptr: expected None"),
    Row("max_item_len_ptr", i32(0), ContractError, "max_item_len_ptr: expected None"),
    Row("token_pos_in_items_len", 3, ContractError, "token_pos_in_items_len: expected 0"),
    Row("seq_lens", i32(3, 5), PageTableError, "seq_lens", PREFILL),
    Row("seq_lens_q", i32(2, 2), PageTableError, "seq_lens_q[1]: expected 3 as in qo_indptr, got 2"),
    Row("v_indptr", i32(0, 2, 9), PageTableError, "v_indptr[1]: expected 3 as in kv_indptr, got 2"),
    Row("o_indptr", i32(0, 3, 5), PageTableError, "o_indptr[1]: expected 2 as in qo_indptr, got 3"),
    Row("use_profiler", True, ContractError, "use_profiler: expected False"),
    # MLA's.
    Row("qo_indptr", None, ContractError, "qo_indptr: expected an array, got None", MLA),
    Row("kv_indices", None, ContractError, "kv_indices: expected an array, got None", MLA),
    Row("cum_seq_lens_q", i32(0), ContractError, ": expected None with "),
    Row("block_tables", i32(0)[None], ContractError, ": expected None with ", MLA),
    Row("lse_mode", "e", ContractError, "lse_mode: expected 'none' or "),
    Row("skip_softmax", True, ContractError, "skip_softmax: expected False"),
    Row("metadata", 1, ContractTypeError, "metadata: expected an MLAPlanMetadata, got int"),
    # A cascade's; its levels have 1 and 2 groups.
    Row("qo_indptr_arr", lambda one: one[:1], ShapeError,
        "qo_indptr_arr: expected an entry for each of 2 levels, got 1"),
    Row("paged_kv_indices_arr", lambda one: [*one, one[0]], ShapeError,
        "paged_kv_indices_arr: expected an entry for each of 2 levels, got 3"),
    Row("paged_kv_indptr_arr", lambda one: one[0], ContractTypeError, "paged_kv_indptr_arr: expected a list of arrays"),
    Row("paged_kv_last_page_len", None, ContractTypeError, "paged_kv_last_page_len: expected a list of arrays",
        "Cascade"),
    Row("qo_indptr_arr", lambda one: [one[1], one[0]], ShapeError, "qo_indptr_arr[0]: expected B + 1 = 2"),
    Row("qo_indptr_arr", lambda one: [one[0], i32(0, 2, 6)], ShapeError,
        "qo_indptr_arr[1]: expected an end at qo_indptr_arr[0]'s 5 rows, got 6"),
]  # fmt: skip

CACHES = [
    # 4 pages of 4, 2 heads of 8.
    Row("cache", part(slice(None), slice(1)), ShapeError, "{name}: expected 2 (K and V) in dimension 1"),
    Row("cache", part(slice(None), 0), ShapeError, "{name}: expected 5 dimensions"),
    Row("cache", lambda a: a.repeat(2, -1)[..., ::2], ContractError, "their stride is 2"),
    Row("cache", part(slice(None), slice(None), slice(None, None, -1)), ContractError, "negative stride"),
    Row("cache", lambda a: (a[:, 0], a[:, 1].astype("f2")), ContractTypeError,
        "[0]'s dtype float32, got float16"),
    Row("cache", lambda a: (a[:, 0], a[:-1, 1]), ShapeError, "[0]'s shape [4, 4, 2, 8], got ["),
    Row("cache", lambda a: (a[:, 0], a[:, 1].swapaxes(1, 2)), ShapeError,
        "[0]'s shape [4, 4, 2, 8], got ["),
    Row("cache", lambda a: (a[:, 0], a[:, 1, ..., :4]), ShapeError, "shape"),
    Row("cache", lambda a: (a[:, 0], a[:, 1], a[:, 1]), ShapeError, "expected a tuple of K and V, got 3 arrays"),
]  # fmt: skip

RUNS = [
    # Queries: 5 rows, a decode's 2, of 4 heads of 8.
    Row("q", part(slice(-1)), ShapeError,
        "q: expected the planned [{rows}, num_qo_heads, head_dim] = [{all}, 4, 8], got [{fewer}, 4, 8]"),
    Row("q", part(slice(None), slice(3)), ShapeError,
        "q: expected the planned [{rows}, num_qo_heads, head_dim] = [{all}, 4, 8], got [{all}, 3, 8]"),
    Row("q", part(..., slice(4)), ShapeError,
        "q: expected the planned [{rows}, num_qo_heads, head_dim] = [{all}, 4, 8], got [{all}, 4, 4]"),
    Row("q", dtype("float16"), ContractTypeError, "q: expected the planned dtype float32, got float16", PLANNED),
    Row("q_nope", part(slice(-1)), ShapeError, ", num_qo_heads, head_dim] = [{all}, 4, 8], got [{fewer}, 4, 8]"),
    Row("q_pe", part(..., slice(4)), ShapeError, ", num_qo_heads, head_dim] = [5, 4, 8], got [5, 4, 4]", MLA),
    Row("q_pe", part(..., slice(4)), ShapeError, "q_pe: head_dim: expected a multiple of 8", "^BatchDecodeMla"),
    Row("q_pe", dtype("float64"), ContractTypeError, "q_pe: expected the planned dtype float32, got float64"),
    Row("cache", part(..., slice(2), slice(None), slice(None)), ShapeError,
        "{name}: expected the planned page_size 4 of k"),
    Row("cache", part(..., slice(1), slice(None)), ShapeError, "{name}: expected the planned num_kv_heads 2 of k"),
    Row("cache", part(..., slice(4)), ShapeError, "{name}: expected the planned head_dim 8 of k, got 4"),
    Row("cache", lambda a: a.swapaxes(2, 3), ShapeError, "{name}: expected the planned page_size 4 of k"),
    Row("cache", dtype("float16"), ContractTypeError, "{name}: expected the planned dtype float32 (kv_data_type) of k"),
    Row("cache", part(slice(2)), PageTableError, "outside the cache's [0, 2)"),
    Row("ckv_cache", part(..., slice(4)), ShapeError, "ckv_cache: expected the planned width 8, got 4"),
    Row("ckv_cache", dtype("float16"), ContractTypeError, "ckv_cache: expected the planned dtype float32"),
    Row("kpe_cache", part(slice(None), slice(3)), ShapeError, "kpe_cache: expected the planned page_size 4, got 3"),
    Row("kpe_cache", part(slice(3)), ShapeError, "kpe_cache: expected ckv_cache's 4 pages, got 3"),
    Row("paged_ckv_cache", part(..., slice(4)), ShapeError, "paged_ckv_cache: expected the planned width 8, got 4"),
    Row("paged_kpe_cache", part(slice(3)), ShapeError, "paged_kpe_cache: expected paged_ckv_cache's 4 pages, got 3"),
    # Tokens of a ragged call, 3 and 6, and of a shared prefix, 7.
    Row("v", part(..., slice(4)), ShapeError, "v: expected k's shape [9, 2, 8], got [9, 2, 4]"),
    Row("v", dtype("float16"), ContractTypeError, "v: expected k's dtype float32, got float16"),
    Row("v_shared", part(slice(3)), ShapeError, "v_shared: expected k_shared's shape [7, 2, 8], got [3, 2, 8]"),
    Row("v_shared", dtype("float16"), ContractTypeError, "v_shared: expected k_shared's dtype float32, got float16"),
    # Scales.
    Row("q_scale", True, ContractTypeError, "q_scale: expected a number, got bool"),
    Row("k_scale", np.ones(2), ContractTypeError, "k_scale: expected a number, got ndarray"),
    Row("v_scale", math.inf, ContractError, "v_scale: expected a finite number"),
    Row("sinks", np.zeros(3, np.float32), ShapeError, "sinks: expected shape [num_{qo_}heads] = [4], got [3]"),
    Row("sinks", i32(0, 0, 0, 0), ContractTypeError, "sinks: dtype int32 is none of"),
    Row("sinks", np.array([0, 1, np.nan, 0], np.float32), ContractError,
        "sinks: head 2: expected a finite logit or -inf, got nan"),
    Row("sinks", np.array([0, np.inf, 0, 0], np.float32), ContractError,
        "sinks: head 1: expected a finite logit or -inf, got inf"),
    # Results.
    Row("out", part(..., slice(4)), ShapeError, "num_qo_heads, head_dim] = [{all}, 4, 8], got [{all}, 4, 4]"),
    Row("out", part(slice(-1)), ShapeError, "num_qo_heads, head_dim] = [{all}, 4, 8], got [{fewer}, 4, 8]"),
    Row("out", dtype("float16"), ContractTypeError, "out: expected the planned dtype float32, got float16"),
    Row("out", read_only, ContractError, "out is read-only"),
    Row("out", differentiable, ContractTypeError, GRADIENT),
    Row("lse", part(slice(None), slice(3)), ShapeError, "] = [{all}, 4], got [{all}, 3]"),
    Row("lse", dtype("float64"), ContractTypeError, "lse: expected the planned dtype float32, got float64"),
    Row("lse", read_only, ContractError, "lse is read-only"),
    Row("lse", differentiable, ContractTypeError, GRADIENT),
    Row("lse_layout", "HND", ContractError, "lse_layout: expected 'NH' or 'HN', got 'HND'"),
    Row("lse_layout", "HN", ShapeError, "] = [4, 5], got [5, 4]"),
    # Options of a run.
    Row("q_len_per_req", 2, ShapeError, "out: expected the planned [B * q_len_per_req, num_qo_heads, "),
    Row("q_len_per_req", 4, PageTableError, "q_len_per_req: request 0 has 4 query rows and 3 tokens"),
    Row("q_len_per_req", 2**24 + 1, ShapeError, "are over 2^25 rows"),
    Row("skip_softmax_threshold_scale_factor", 0.5, ContractError, "skip_softmax_threshold_scale_factor: expected "),
    Row("kv_cache_sf", CACHE, ContractError, "kv_cache_sf: expected None, got an object of type ndarray"),
    Row("o_scale", 0.5, ContractError, "o_scale: expected None"),
    Row("logits_soft_cap", 3.0, ContractError, "as none was planned", r"^BatchAttention\."),
    Row("profiler_buffer", CACHE, ContractError, "profiler_buffer: expected None"),
    Row("ckv_scale", 1.0, ContractError, "ckv_scale belongs to a cache of float8"),
    Row("query", CACHE, ContractError, "query, kv_cache: expected None with q_nope", MLA),
    Row("kv_len", i32(1, 1), ContractError, "kv_len, page_table: expected None without"),
    Row("bmm1_scale", 1.0, ContractError, "bmm1_scale: expected None", MLA),
]  # fmt: skip

SINGLE = [
    Row("q", part(None), ShapeError, "q: expected [num_qo_heads, head_dim], got shape [1, 4, 8]", "decode"),
    Row("q", part(0), ShapeError, "q: expected [qo_len, num_qo_heads, head_dim], got shape [4, 8]", "prefill"),
    Row("q", part(..., slice(3), slice(None)), ShapeError, "q: expected a multiple of k's 2 heads, got 3"),
    Row("q", part(..., slice(4)), ShapeError, "k: expected q's head_dim 4, got 8"),
    Row("q", dtype("int32"), ContractTypeError, "q: dtype: int32 is none of"),
    Row("q", dtype("float16"), ContractTypeError, "k: dtype: float32 must equal"),
    Row("k", lambda a: a.repeat(2, -1)[..., ::2], ContractError, "their stride is 2"),
    Row("v", part(slice(2)), ShapeError, "v: expected k's shape [3, 2, 8], got [2, 2, 8]"),
    Row("v", dtype("float16"), ContractTypeError, "v: expected k's dtype float32, got float16"),
    Row("v", part(slice(None, None, -1)), ContractError, "v has a negative stride"),
    Row("mode", "rope", ContractError, "pos_encoding_mode: expected"),
    Row("kv_layout", "HND", ShapeError, "q: expected a multiple of k's "),
    Row("custom_mask", np.ones((3, 2), bool), ShapeError, "custom_mask: expected shape [6] or [2, 3]"),
    Row("packed_custom_mask", np.zeros(2, np.uint8), ShapeError, "packed_custom_mask: shape [2], expected [1]"),
    Row("scale_k", np.array([1.0, 2.0]), ContractError, "scale_k: expected one number for all heads, got an array of"),
    Row("kv_cache_sf", (CACHE, CACHE), ContractError, "kv_cache_sf: expected None"),
    Row("o_dtype", "int8", ContractTypeError, "o_data_type: int8 is none of"),
]  # fmt: skip

DENSE = [
    # 2 requests of 3 and 6 tokens, one row each, in 1 and 2 pages of 4.
    Row("query", part(0), ShapeError, "query: expected [R, num_qo_heads, head_dim], got shape [4, 8]"),
    Row("query", part(slice(1)), ShapeError, "seq_lens: expected shape [B] = [1], got [2]"),
    Row("query", part(..., slice(4)), ShapeError, "query: expected kv_cache's head_dim 8, got 4"),
    Row("query", part(slice(None), slice(3)), ShapeError,
        "num_qo_heads: expected a multiple of num_kv_heads = 2, got 3"),
    Row("query", dtype("float16"), ContractTypeError, "kv_cache: dtype: float32 must equal q's float16"),
    Row("query", dtype("int32"), ContractTypeError, "query: dtype: int32 is none of"),
    Row("q_len_per_req", 3, ShapeError, "query: expected a multiple of q_len_per_req = 3 rows, got 2"),
    Row("q_len_per_req", None, ContractError, "q_len_per_req: expected an integer where cum_seq_lens_q is None"),
    Row("max_q_len", 0, ContractError, "max_q_len: expected at least 1, the rows of request 0, got 0"),
    Row("cum_seq_lens_q", i32(0, 1), ShapeError, "cum_seq_lens_q: expected an end at query's 2 rows, got 1"),
    Row("cum_seq_lens_q", i32(1, 1, 2), PageTableError, "cum_seq_lens_q[0]: expected 0, got 1"),
    Row("cum_seq_lens_q", i32(0, 3, 2), PageTableError, "cum_seq_lens_q decreases at request 1"),
    Row("block_tables", part(slice(None), slice(1)), PageTableError, "seq_lens: request 1 has 6 tokens, over its 1 "),
    Row("block_tables", lambda a: a + 100, PageTableError, "block_tables: request 0, slot 0 holds page id 102"),
    Row("uses_shared_paged_kv_idx", False, ShapeError, "block_tables: expected [B, 2, n], "),
    Row("seq_lens", part(slice(1)), ShapeError, "seq_lens: expected shape [B] = [2], got [1]"),
    Row("seq_lens", at(1, -1), PageTableError, "seq_lens: request 1: expected at least 0 tokens, got -1"),
    Row("max_seq_len", 5, ContractError, "max_seq_len: expected at least 6, the tokens of request 1 (seq_lens), got 5"),
    Row("out_dtype", "nvfp4", ContractTypeError, "out_dtype: 'nvfp4' is none of"),
    Row("out", part(..., slice(4)), ShapeError, "num_qo_heads, head_dim] = [2, 4, 8], got [2, 4, 4]"),
    Row("lse", dtype("float64"), ContractTypeError, "lse: expected the planned dtype float32, got float64"),
    Row("o_sf_scale", 1.0, ContractError, "o_sf_scale: expected None, got"),
    Row("o_sf_vec_size", 16, ContractError, "o_sf_vec_size: expected None"),
    Row("sinks", [CACHE, CACHE], ContractTypeError, "sinks: expected an array"),
    Row("sinks", np.zeros(3, np.float32), ShapeError, "sinks: expected shape [num_qo_heads] = [4], got [3]"),
    Row("kv_layout", "HND", PageTableError, "seq_lens: request 1 has 6 tokens, over its 2 block_tables entries of 2"),
    Row("mask", np.zeros((2, 1, 2), np.uint8), ContractTypeError, "mask: expected dtype uint16, got uint8"),
    Row("mask", np.zeros((2, 1, 1), np.uint16), ShapeError, "mask: expected shape [2, 2] or [2, 1, 2]"),
    Row("skip_softmax_threshold_scale_factor", 1.0, ContractError, "skip_softmax_threshold_scale_factor: expected "),
    Row("enable_block_sparse_attention", True, ContractError, "enable_block_sparse_attention: expected False"),
    Row("cp_world", 2, ContractError, "cp_world: expected 1, got 2: contexts of several devices"),
    Row("cp_rank", 1, ContractError, "cp_rank: expected 0, got 1"),
    Row("causal_seqlens_kv_global", i32(3, 6), ContractError, "causal_seqlens_kv_global: expected None"),
]  # fmt: skip

APPENDS = [
    # 2 and 3 new tokens at 1, 2 and 3, 4, 5 of requests in pages 2 and 0, 1; by a dense table one each, at 3 and 6.
    Row("new k", dtype("float16"), ContractTypeError, "{name}: expected the cache's dtype float32, got float16"),
    Row("new v", part(slice(-1)), ShapeError, "rows, got {fewer}"),
    Row("new k", part(slice(None), slice(1)), ShapeError, "{name}: expected [N, "),
    Row("new k", part(..., slice(2)), ShapeError, ": expected [N, "),
    Row("positions", at(1, 4), PageTableError, "positions: row 1 (request 0) has position 4, outside the request's 1 "),
    Row("positions", at(4, 8), PageTableError, "positions: row 4 (request 1) has position 8, outside the request's 2 "),
    Row("positions", at(4, -1), PageTableError, "positions: row 4 (request 1) has position -1"),
    Row("positions", at(0, 2), PageTableError, "rows 0 and 1 (requests 0 and 0) both write slot 2 of page 2"),
    Row("positions", part(slice(-1)), ShapeError, "positions: expected an entry for each of 5 rows, got 4"),
    Row("positions", lambda a: a.astype("int64") + 2**31, PageTableError,
        "positions[0] is 2147483649, which does not fit in int32"),
    Row("batch_indices", at(1, 2), PageTableError, "batch_indices: row 1: expected -1 to 1, got 2"),
    Row("batch_indices", at(4, -2), PageTableError, "batch_indices: row 4: expected -1 to 1, got -2"),
    Row("batch_indices", part(slice(-1)), ShapeError, "batch_indices: expected an entry for each of 5 rows, got 4"),
    Row("kv_indices", at(2, 4), PageTableError, "kv_indices: request 1, slot 1 holds page id 4, outside"),
    Row("kv_indices", at(0, -1), PageTableError, "kv_indices: request 0, slot 0 holds page id -1"),
    Row("kv_indices", at(2, 2), PageTableError, "(requests 0 and 1) both write slot 1 of page 2"),
    Row("append_indptr", at(2, 4), ShapeError, "append_indptr: expected an end at append_key's 5 rows, got 4"),
    Row("append_indptr", at(2, 6), ShapeError, "append_indptr: expected an end at append_key's 5 rows, got 6"),
    Row("append_indptr", at(1, 4), PageTableError, "request 0 appends 4 tokens, kv_last_page_len says 3"),
    Row("page_table", at((1, 0), 4), PageTableError, "page_table: request 1, slot 0 holds page id 4"),
    Row("page_table", part(slice(1)), ShapeError, "last_page_len: expected B = 1 entries"),
    Row("page_table", part(slice(None), slice(1, None)), PageTableError, "row 0 (request 0) has position "),
    Row("last_page_len", at(0, 4), PageTableError, "row 0 (request 0) has position 4, outside the request's 1 pages"),
    Row("last_page_len", at(1, 5), PageTableError, "last_page_len: request 1: expected 0 to page_size = 4, got 5"),
    Row("page_size", 2, ShapeError, "cache's 4, got 2"),
    Row("cache", read_only, ContractError, "{name} is read-only"),
    Row("cache", differentiable, ContractTypeError, GRADIENT),
    Row("cache", part(..., slice(0), slice(None), slice(None)), ContractError, "page_size: expected at least 1, got 0",
        NOT_DENSE),
    Row("kpe_cache", part(slice(None), slice(2)), ShapeError,
        "kpe_cache: expected ckv_cache's [pages, page_size] [4, 4], got [4, 2]"),
    Row("kpe_cache", dtype("float16"), ContractTypeError, "kpe_cache: expected ckv_cache's dtype float32, got float16"),
    Row("mla_kv_cache", CACHE, ShapeError, "mla_kv_cache: expected 3 or 4 dimensions"),
    Row("mla_kv_cache", part(..., slice(7)), ShapeError, "v: expected [N, 2, 2]"),
    Row("mla_kv_cache", part(slice(None), slice(None), 0), ShapeError, "k: expected [N, 5]"),
    Row("kv_layout", "HND", ShapeError, "append_key: expected [N, 4, 8] for this cache", NOT_DENSE),
]  # fmt: skip

MERGES = [
    # 3 rows of 2 heads of 8.
    Row("state", part(0), ShapeError, "expected [S, "),
    Row("state", dtype("int32"), ContractTypeError, "{name}: dtype int32 is none of"),
    Row("state", dtype("float8_e5m2"), ContractTypeError, "{name}: dtype float8_e5m2 is none of"),
    Row("state", np.broadcast_to(np.float32(0), (3, 2, 2**16 + 8)), ShapeError,
        "{name}: expected a head_dim of at most 65536, got 65544",
        "merge_state(_|$)"),
    Row("state", read_only, ContractError, "{name} is read-only", "in_place"),
    Row("state", differentiable, ContractTypeError, GRADIENT, "in_place"),
    Row("sums", part(slice(2)), ShapeError, "{name}: shape [2, 2"),
    Row("sums", dtype("float64"), ContractTypeError, "{name}: expected dtype float32, got float64"),
    Row("sums", read_only, ContractError, "{name} is read-only", "in_place"),
    Row("sums", differentiable, ContractTypeError, GRADIENT, "in_place"),
    Row("other state", dtype("float16"), ContractTypeError, "'s dtype float32, got float16"),
    Row("other sums", part(..., None), ShapeError, "{name}: shape [3, 2, 1], expected [3, 2]"),
    Row("mask", np.ones(3, np.int32), ContractTypeError, "mask: expected dtype bool, got int32"),
    Row("mask", np.ones(2, np.bool_), ShapeError, "mask: expected shape [3]"),
]  # fmt: skip

CONTEXT = [
    # 2 requests of 3 and 6 tokens in 1 and 2 pages, with 2 and 3 rows.
    Row("max_q_len", 2, ContractError, "max_q_len: expected at least 3, the rows of request 1, got 2"),
    Row("max_kv_len", 5, ContractError, "max_kv_len: expected at least 6, the tokens of request 1 (seq_lens), got 5"),
    Row("batch_size", 3, ShapeError, "batch_size: expected cum_seq_lens_q's 2, got 3"),
    Row("cum_seq_lens_q", at(2, 4), ShapeError, "cum_seq_lens_q: expected an end at query's 5 rows, got 4"),
    Row("cum_seq_lens_kv", at(1, 4), PageTableError, "cum_seq_lens_kv[1]: expected 3 as in seq_lens, got 4"),
    Row("cum_seq_lens_kv", part(slice(2)), ShapeError, "cum_seq_lens_kv: expected 3 entries, got 2"),
    Row("block_tables", at((1, 1), 4), PageTableError, "block_tables: request 1, slot 1 holds page id 4"),
    Row("kv_cache_sf", (CACHE, CACHE), ContractError, "kv_cache_sf: expected None"),
    Row("o_sf_vec_size", 16, ContractError, "o_sf_vec_size: expected None"),
    Row("skip_softmax_threshold_scale_factor", 1.0, ContractError, "skip_softmax_threshold_scale_factor: expected "),
    Row("out", read_only, ContractError, "out is read-only"),
]  # fmt: skip

SMALL = [
    # Calls without a plan: 5 rows, 4 and 2 heads of 8, positions 1 to 5 of a table of 6; 4 rows of 8 tokens.
    Row("slot_mapping", at(0, 16), PageTableError, "slot_mapping: row 0: expected -1 to 15, got 16"),
    Row("slot_mapping", at(1, 9), PageTableError, "slot_mapping: rows 0 and 1 both write slot 9"),
    Row("slot_mapping", lambda a: i32(*a, 0), ShapeError, "slot_mapping: expected at most key's 5 entries, got 6"),
    Row("kv_cache_dtype", "fp8", ContractError, "kv_cache_dtype: expected 'auto', got 'fp8'"),
    Row("value_cache", part(..., slice(4)), ShapeError, "value_cache: expected key_cache's shape [4, 4, 2, 8], got"),
    Row("key_cache", read_only, ContractError, "key_cache is read-only"),
    Row("indptr", at(2, 4), ShapeError, "indptr: expected an end at q's 5 rows, got 4", "rope$"),
    Row("rotary_dim", 7, ShapeError, "rotary_dim: expected an even number up to q's head_dim 8, got 7"),
    Row("high_freq_factor", 1.0, ContractError, "high_freq_factor: expected above low_freq_factor 1.0, got 1.0"),
    Row("rope_scale", 0.0, ContractError, "rope_scale: expected a positive number, got 0.0", "rope"),
    Row("k", part(slice(1)), ShapeError, "k: expected shape [5, 'any', 8], got [1, 2, 8]", "rope"),
    Row("q", read_only, ContractError, "q is read-only", "inplace"),
    Row("positions", at(2, 6), ContractError, "positions: row 2: expected 0 to 5, got 6", "cos_sin"),
    Row("cos_sin_cache", dtype("float16"), ContractTypeError, "cos_sin_cache: dtype float16 is none of float32"),
    Row("pos_ids", at(2, -1), ContractError, "pos_ids: row 2: expected 0 to 5, got -1", "quantize"),
    Row("quantize_dtype", "int8", ContractTypeError, "quantize_dtype: dtype int8 is none of float8"),
    Row("v", None, ContractError, "v: expected an array with k_rope of 3 axes", "quantize"),
    Row("page_size", 5, ShapeError, "page_size: expected paged_kv_cache's 4, got 5", "quantize"),
    Row("quantize_dtype", "float8_e5m2", ContractTypeError, "k_rope: expected the cache's dtype float8_e4m3fn",
        "append"),
    Row("positions", at(4, 8), PageTableError, "positions: row 4 (request 1) has position 8", "quantize"),
    Row("temperature", 0.0, ContractError, "temperature: expected a positive number, got 0.0"),
    Row("temperature", np.ones(3, np.float32), ShapeError, "temperature: expected shape [4], got [3]"),
    Row("top_k", 0, ContractError, "top_k: expected at least 1, got 0"),
    Row("top_k", np.array([1, 2, 3, 0]), ContractError, "top_k: expected at least 1, got 0"),
    Row("top_p", 1.5, ContractError, "top_p: expected a number above 0 and at most 1, got 1.5"),
    Row("min_p", -0.1, ContractError, "min_p: expected a number from 0 to 1, got -0.1"),
    Row("filter_apply_order", "top_p_first", ContractError, "filter_apply_order: expected 'top_k_first' or 'joint'"),
    Row("indices", i32(4), ContractError, "indices: expected 0 to 3, got 4", "^top"),
    Row("logits", at((2, 1), np.nan), ContractError, "logits: row 2: expected logits, got NaN or +inf, or all of them"),
    Row("probs", at((1, 1), -1), ContractError, "probs: row 1: expected probabilities, got NaN, negative", "renorm"),
    Row("draft_token_ids", at((0, 0), 8), ContractError, "draft_token_ids: expected 0 to 7, got 8"),
    Row("target_probs", part(slice(None), slice(2)), ShapeError, "target_probs: expected shape [2, 3, 8], got [2, 2"),
]  # fmt: skip

BUFFERS = "paged_kv_indptr_buffer qo_indptr_buf paged_kv_indptr_buf kv_indptr_buf qo_indptr kv_indptr".split()
ROLES |= {
    "offsets": [*BUFFERS, "qo_indptr_buf_arr", "paged_kv_indptr_buf_arr"],
    "ids": ["paged_kv_indices_buffer", "paged_kv_indices_buf", "kv_indices", "paged_kv_indices_buf_arr"],
    "buffer": [*BUFFERS, "paged_kv_indices_buffer", "paged_kv_indices_buf", "kv_indices", "kv_len_arr",
               "paged_kv_last_page_len_buffer", "paged_kv_last_page_len_buf"],
    "lists": [f"{name}_buf_arr" for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_indices")],
}  # fmt: skip
HELD = r" in buffers(\.run)?$"

WRAPPERS = [
    Row("kv_layout", "HDN", ContractError, "kv_layout: expected 'NHD' or 'HND', got 'HDN'"),
    Row("jit_args", ["uri"], ContractError, "jit_args: expected None, got ["),
    Row("variant_owns_mask", True, ContractError, "variant_owns_mask: expected False"),
    Row("num_levels", 0, ContractError, "num_levels: expected at least 1"),
    # Arrays of the user's, for 2 requests of 3 pages.
    Row("buffer", None, ContractError, "{name}: expected an array where the ", HELD),
    Row("lists", None, ContractError, "expected a list of arrays where the levels live in buffers", HELD),
    Row("ids", lambda _: None, ContractError, "{name}: expected an array, got None", "Cascade.*" + HELD),
    Row("offsets", part(slice(2)), ShapeError, "{name} has 2 entries, expected 3", "^(?!.*Ragged).*" + HELD),
    Row("kv_indptr_buf", part(slice(2)), ShapeError, "kv_indptr_buf has 2 entries, expected 3", HELD),
    Row("offsets", dtype("float32"), ContractTypeError, "{name}: dtype float32, expected int32 or int64", HELD),
    Row("ids", dtype("int8"), ContractTypeError, "{name}: dtype int8, expected int32", HELD),
    Row("ids", part(None), ShapeError, "{name}: shape [1, 3], expected one dimension", HELD),
    Row("ids", read_only, ContractError, "{name} is read-only", HELD),
    Row("buffer", lambda a: as_strided(a, a.shape, (0,)), ContractError, f"{{name}} {ITSELF}", HELD),
    Row("paged_kv_indptr_buf_arr", lambda one: one[:1], ShapeError,
        "paged_kv_indptr_buf_arr: expected an entry for each of 2 levels, got 1", HELD),
]  # fmt: skip

ROWS = {"Decode.*Paged": "B", "Prefill|Sink|^BatchAttention": "qo_indptr[B]", "Shared|Cascade": "T"}
"""The names that messages have for the number of rows of a call; the last that fits counts."""


ON_THE_HOST = r"array|device meta|negative stride|read-only|float8|cache's dtype|head \d: expected a finite|most 65536"
"""Faults that a GPU's tensors cannot have, that stay unread there, or that are said there in torch's words."""


def places(call: Call, said: str) -> tuple[str, ...]:
    return ("",) if re.search(HELD, call.name) or re.search(ON_THE_HOST, said) else ("", "gpu")


def placed(place: str, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments where the call is to find them; index arrays stay on the host, where they are checked."""
    return {name: on_gpu(one) for name, one in given.items()} if place else given


def on_gpu(one: Any) -> Any:
    """Tensors over the same memory."""
    if isinstance(one, tuple):
        return tuple(map(on_gpu, one))
    return torch.from_numpy(one) if isinstance(one, np.ndarray) and one.dtype.kind in "fb" else one


def cells(rows: list[Row], calls: list[Call], *, gpu: bool = True) -> list[Any]:
    """A test for each row and call that has such an argument, and a valid value of it where the row changes that.

    With `gpu` another one over tensors on a GPU, for which the CPU stands in.
    """
    return [
        pytest.param(call, name, row, *[place] * gpu, id=f"{place} {call.name}-{name}-{row}".strip())
        for call in calls
        for given in [call.arguments() | dict.fromkeys(RESULTS)]
        for name in call.parameters()
        for row in rows
        if name in ROLES.get(row.role, [row.role]) and re.search(row.of, call.name)
        if name in given or not callable(row.change)
        for place in (places(call, row.said) if gpu else [""])
    ]


def words_of(call: Call, given: dict[str, Any], name: str) -> dict[str, Any]:
    words: dict[str, Any] = {"name": name, "qo_": "" if "MLA" in call.name else "qo_"}
    for role in ("indptr", "indices", "last"):
        words[role] = next((name for name in ROLES[role] if name in given), "")
    words |= {key: f"{value}[1]" for key, value in words.items() if isinstance(given.get(value), list)}
    q = first(given)
    if isinstance(q, np.ndarray):
        words |= {"all": len(q), "fewer": len(q) - 1}
    rows = [rows for of, rows in ROWS.items() if re.search(of, call.name)]
    return words | {"rows": rows[-1] if rows else ""}


def first(given: dict[str, Any]) -> np.ndarray:
    return next(iter(given.values()))  # type: ignore[no-any-return]


def broken(value: Any, row: Row) -> Any:
    if not callable(row.change):
        return row.change
    of_levels = isinstance(value, list) and row.role in ROLES
    return [value[0], row.change(value[1])] if of_levels else row.change(value)


def arrays_of(*arguments: Any) -> list[Any]:
    return [array for one in arguments for array in one.values() if isinstance(array, np.ndarray | tuple)]


def plans(calls: list[Call]) -> list[Call]:
    """Each once: `begin_forward` is `plan` where both are."""
    named = {call.name: call for call in calls if re.search(r"plan$|Shared.*begin_forward$", call.name)}
    return [*named.values()]


def runs(calls: list[Call]) -> list[Call]:
    return [call for call in calls if re.search(r"\.run$|Shared.*\.forward$", call.name)]


@pytest.mark.parametrize(("call", "name", "row"), cells(TABLES + PLANS, plans(CALLS + IN_BUFFERS), gpu=False))
def test_plan(call: Call, name: str, row: Row) -> None:
    """The former plan and the user's buffers stay as they are."""
    plan, given = call.make(), call.arguments()
    plan(**given)
    wrapper = getattr(plan, "__self__", None)
    before = call.runs(wrapper) if call.runs else None
    changes = {name: broken(given.get(name), row)}
    said = row.said.format(**words_of(call, given, name))
    held = getattr(wrapper, "users_buffers", [])
    refuses(lambda: plan(**given | changes), row.error, said, *arrays_of(given, changes), *held)
    if call.runs:
        assert bytes_of(call.runs(wrapper)) == bytes_of(before)


def results(call: Call, given: dict[str, Any]) -> dict[str, np.ndarray]:
    if "out" not in call.parameters():
        return {}
    q = first(given)
    return {"out": np.ones_like(q), "lse": np.ones(q.shape[:2], np.float32)}


@pytest.mark.parametrize(("call", "name", "row", "place"), cells(CACHES + RUNS, runs(CALLS + IN_BUFFERS)))
def test_run(call: Call, name: str, row: Row, place: str) -> None:
    """The plan is still there."""
    run, given = call.make(), call.arguments()
    run(**placed(place, given))
    written = results(call, given)
    changes = {name: broken((given | written).get(name), row)}
    said = row.said.format(**words_of(call, given, name))
    refuses(
        lambda: run(**placed(place, given | written | changes)), row.error, said, *arrays_of(given, written, changes)
    )
    run(**placed(place, given))


@pytest.mark.parametrize(
    ("call", "name", "row"),
    cells(WRAPPERS, [call for call in CALLS + IN_BUFFERS if re.search(r"Wrapper[^.]*$", call.name)], gpu=False),
)
def test_wrapper(call: Call, name: str, row: Row) -> None:
    given = call.arguments()
    changes = {name: broken(given.get(name), row)}
    said = row.said.format(name=f"{name}[1]" if isinstance(given.get(name), list) else name)
    refuses(lambda: call(**changes), row.error, said)


def function(name: str) -> Call:
    return next(call for call in CALLS if call.name == name)


SINGLES = [function("single_decode_with_kv_cache"), function("single_prefill_with_kv_cache")]


@pytest.mark.parametrize(
    ("call", "name", "row", "place"),
    [*cells(SINGLE, SINGLES), *cells(DENSE, [function("trtllm_batch_decode_with_kv_cache")]),
     *cells(TABLES + CACHES + APPENDS, [call for call in CALLS if call.name.startswith("append")]),
     *cells(CONTEXT, [function("trtllm_batch_context_with_kv_cache")]),
     *cells(MERGES, [call for call in CALLS if call.name.startswith("merge")])],
)  # fmt: skip
def test_function(call: Call, name: str, row: Row, place: str) -> None:
    given = call.arguments()
    call(**placed(place, given))
    given = call.arguments()
    given |= results(call, given)
    changes = {name: broken(given.get(name), row)}
    said = row.said.format(**words_of(call, given, name))
    refuses(lambda: call(**placed(place, given | changes)), row.error, said, *arrays_of(given, changes))


@pytest.mark.parametrize(
    ("call", "name", "row"),
    cells(
        SMALL, [call for call in CALLS if re.search("^reshape|rope|softmax|^top_|^min_p|^chain", call.name)], gpu=False
    ),
)
def test_a_call_without_a_plan(call: Call, name: str, row: Row) -> None:
    test_function(call, name, row, "")


def twice(*names: str) -> Callable[[Change], Callable[[dict[str, Any]], dict[str, Any]]]:
    return lambda change: lambda given: {name: change(given[name]) for name in names}


TOKENS, SHARED, LATENT = twice("k", "v"), twice("k_shared", "v_shared"), twice("ckv_cache", "kpe_cache")
ARENA = np.ones(160, np.float32)
MERGED = "merge_state_in_place"


def like_lse(given: dict[str, Any], memory: np.ndarray) -> np.ndarray:
    """The beginning of some memory as the lse of a run."""
    rows, heads = first(given).shape[:2]
    return memory.reshape(-1)[: rows * heads].reshape(rows, heads)


def overlapping_buffers(given: dict[str, Any]) -> dict[str, Any]:
    """The first two arrays of a wrapper in buffers, which have one element in common."""
    a, b = [name for name, one in given.items() if isinstance(one, np.ndarray)][:2]
    memory = np.zeros(len(given[a]) + len(given[b]) - 1, np.int32)
    return {a: memory[: len(given[a])], b: memory[len(given[a]) - 1 :]}


OVER_PAGES = r"^(?!BatchDecodeMla).*PagedKVCacheWrapper\.run$"
SEVERAL = [
    # Several arguments at once, each of which may be right.
    (r"KVCacheWrapper\.run", lambda _: {"q_scale": 1e30, "k_scale": 1e30}, ContractError, "* 1e+30 * 1e+30"),
    (r"KVCacheWrapper\.run", lambda _: {"q_scale": 1e-30, "k_scale": 1e-30}, ContractError, "* 1e-30 * 1e-30"),
    (r"Ragged.*\.run", TOKENS(part(slice(-1))), ShapeError, "k: expected 9 tokens (kv_indptr), got 8"),
    (r"Ragged.*\.run", TOKENS(part(slice(None), slice(1))), ShapeError,
     "k: expected the planned heads [2, 8], got [1, 8]"),
    # What is written may be nothing else.
    (r"Ragged.*\.run", lambda _: {"out": ARENA.reshape(5, 4, 8), "k": ARENA[16:].reshape(9, 2, 8)}, ContractError,
     "out shares memory with k"),
    (r"\.run$", lambda given: {"out": first(given)}, ContractError, "out shares memory with q"),
    (r"\.run$", lambda given: {"out": as_strided(ARENA, first(given).shape, (0, 32, 4))}, ContractError,
     f"out {ITSELF}"),
    (r"\.run$", lambda given: {"out": as_strided(ARENA, first(given).shape, (64, 16, 4))}, ContractError,
     f"out {ITSELF}"),
    (r"\.run$", lambda given: {"lse": as_strided(ARENA, first(given).shape[:2], (4, 4))}, ContractError,
     f"lse {ITSELF}"),
    (r"\.run$", lambda given: {"lse": like_lse(given, first(given))}, ContractError, "lse shares memory with q"),
    (r"\.run$", lambda given: {"out": given["out"], "lse": like_lse(given, given["out"])}, ContractError,
     "out shares memory with lse"),
    (OVER_PAGES, lambda given: {"out": given["paged_kv_cache"].reshape(-1)[: given["q"].size]
     .reshape(given["q"].shape)}, ContractError, "out shares memory with paged_kv_cache"),
    (OVER_PAGES, lambda given: {"lse": like_lse(given, given["paged_kv_cache"])}, ContractError,
     "lse shares memory with paged_kv_cache"),
    (r"^Batch(Decode|Prefill)WithPaged.*\.run$", lambda given: {"lse": like_lse(given, ARENA), "sinks": ARENA[:4]},
     ContractError, "lse shares memory with sinks"),
    (r"^(?!Multi).* in buffers$", overlapping_buffers, ContractError, " shares memory with "),
    ("^append_paged_kv_cache$", lambda _: {"paged_kv_cache": (CACHE[:, 0], CACHE[:, 0])}, ContractError,
     "paged_kv_cache[1] shares memory with paged_kv_cache[0]"),
    ("^append_paged_kv_cache$", lambda _: {"paged_kv_cache": as_strided(ARENA, CACHE.shape, (0, 0, 64, 32, 4))},
     ContractError, f"paged_kv_cache {ITSELF}"),
    ("^append_paged_kv_cache$", lambda _: {"paged_kv_cache": (CACHE[:, 0], as_strided(ARENA, CACHE[:, 0].shape,
     (0, 64, 32, 4)))}, ContractError, f"paged_kv_cache[1] {ITSELF}"),
    ("append_paged_mla_kv_cache$", lambda _: {"ckv_cache": as_strided(ARENA, (4, 4, 8), (64, 16, 4))},
     ContractError, f"ckv_cache {ITSELF}"),
    ("append_paged_mla_kv_cache$", lambda given: {"kpe_cache": given["ckv_cache"][..., 4:]}, ContractError,
     "kpe_cache shares memory with ckv_cache"),
    (MERGED, lambda given: {"v_other": given["v"]}, ContractError, "v shares memory with v_other"),
    (MERGED, lambda _: {"v": ARENA[:48].reshape(3, 2, 8), "v_other": ARENA[40:88].reshape(3, 2, 8)}, ContractError,
     "v shares memory with v_other"),
    (MERGED, lambda given: {"s_other": given["s"]}, ContractError, "s shares memory with s_other"),
    (MERGED, lambda given: {"s": given["v"].reshape(-1)[42:].reshape(3, 2)}, ContractError, "v shares memory with s"),
    (MERGED, lambda given: {"s": given["v_other"].reshape(-1)[:6].reshape(3, 2)}, ContractError,
     "s shares memory with v_other"),
    (MERGED, lambda _: {"v": as_strided(ARENA, (3, 2, 8), (32, 32, 4))}, ContractError, f"v {ITSELF}"),
    (MERGED, lambda _: {"s": as_strided(ARENA, (3, 2), (0, 4))}, ContractError, f"s {ITSELF}"),
    (MERGED, lambda given: {"mask": given["v"].reshape(-1).view(np.bool_)[:3]}, ContractError,
     "v shares memory with mask"),
    (MERGED, lambda given: {"mask": given["s"].reshape(-1).view(np.bool_)[:3]}, ContractError,
     "s shares memory with mask"),
    (r"merge_state(_|$)", lambda given: {name: one[:2] for name, one in [*given.items()][2:4]}, ShapeError,
     "'s shape [3, 2, 8], got [2, 2, 8]"),
    # Appends.
    ("append.*dense", twice("k", "v")(part(slice(1))), ShapeError, "k: expected a row for each of 2 requests, got 1"),
    ("append.*dense", lambda _: {"page_table": i32(2, 2)[:, None], "last_page_len": i32(2, 2)}, PageTableError,
     "rows 0 and 1 (requests 0 and 1) both write slot 2 of page 2"),
    ("^append.*cache$", lambda _: {"kv_indptr": i32(0, 0, 3), "kv_last_page_len": i32(0, 2)}, PageTableError,
     "positions: row 0 (request 0) has position 1, outside the request's 0 pages of 4"),
    ("append.*last tokens", lambda _: {"kv_indptr": i32(0, 0, 3), "kv_last_page_len": i32(0, 2)}, PageTableError,
     "append_indptr: request 0 appends 2 tokens, kv_last_page_len says 0"),
    ("^append_paged_kv_cache$", lambda _: {"paged_kv_cache": jnp.ones(CACHE.shape)}, ContractError,
     "paged_kv_cache is read-only"),
    (r"Shared.*\.forward", SHARED(part(slice(None), slice(1))), ShapeError,
     "k_shared: expected the planned num_kv_heads 2"),
    (r"Shared.*\.forward", SHARED(part(..., slice(4))), ShapeError, "k_shared: expected the planned head_dim 8, got 4"),
    (r"Shared.*\.forward", SHARED(part(..., slice(None, None, 2))), ContractError,
     "k_shared: the elements of a head must lie"),
    (r"DecodeWithShared.*\.forward", SHARED(dtype("float16")), ContractTypeError,
     "k_shared: expected the planned dtype float32, got float16"),
    (r"PrefillWithShared.*\.forward", SHARED(dtype("float16")), ContractTypeError,
     "k_shared: dtype: float16 must equal q's float32"),
    (r"MLA.*\.run", LATENT(part(slice(2))), PageTableError, "kv_indices: request 0, slot 0 holds page id 2"),
    ("trtllm_batch_decode", lambda _: {"cum_seq_lens_q": i32(0, 0, 2), "seq_lens": i32(3, 1)}, PageTableError,
     "request 1 has 2 query rows and 1 tokens"),
    ("trtllm_batch_decode", lambda _: {"out": np.ones((2, 4, 8), np.float16), "out_dtype": "float32"},
     ContractTypeError, "out: expected the planned dtype"),
    ("single_prefill", lambda _: {"scale_k": 2.0, "k_scale": "1"}, ContractTypeError, "k_scale: expected a number"),
    ("Decode.* in buffers.plan", lambda _: {"indptr": i32(0, 1), "last_page_len": i32(3)}, ShapeError,
     "indptr: a batch of 1, the buffers fix it at 2"),
    ("Decode.* in buffers.plan", lambda _: {"indptr": i32(0, 1, 4), "indices": i32(0, 0, 0, 0)}, ShapeError,
     "indices: 4 page ids, paged_kv_indices_buffer holds 3"),
    ("Cascade.*plan$", lambda _: {"qo_indptr_arr": [i32(0, 1, 5), i32(0, 2, 5)],
     "paged_kv_indptr_arr": [i32(0, 1, 1), i32(0, 1, 3)], "paged_kv_last_page_len": [i32(4, 0), i32(3, 2)]},
     PageTableError, "[0]: group 0 ends at row 1, where no group of qo_indptr_arr[1] ends: levels must nest"),
    ("Cascade.* in buffers$", lambda given: {"paged_kv_indptr_buf_arr": given["qo_indptr_buf_arr"]}, ContractError,
     "shares memory with"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "change", "error", "said", "place"),
    [pytest.param(call, *row, place, id=f"{place} {call.name}-{fault(row[-1])}".strip())
     for of, *row in SEVERAL for call in CALLS + IN_BUFFERS for place in places(call, row[-1])
     if re.search(of, call.name) and not (row[-1].startswith(RESULTS) and "out" not in call.parameters())],
)  # fmt: skip
def test_several(call: Call, change: Any, error: type[Exception], said: str, place: str) -> None:
    given, function = call.arguments(), call.make()
    changes = change(given | results(call, given))
    refuses(lambda: function(**placed(place, given | changes)), error, said, *arrays_of(given, changes))


@pytest.mark.parametrize(
    ("function", "names"),
    [
        ("append_paged_kv_cache", "append_key append_value batch_indices paged_kv_cache kv_indices kv_indptr"),
        ("append_paged_kv_cache", "append_key append_value append_indptr paged_kv_cache kv_indices kv_indptr"
                                  " kv_last_page_len"),
        ("append_paged_kv_cache", "append_key v kv_cache page_table last_page_len page_size"),
        ("append_paged_kv_cache", ""),
        ("append_paged_mla_kv_cache", "append_ckv append_kpe batch_indices positions ckv_cache kpe_cache kv_indices"
                                      " kv_indptr kv_last_page_len kv_layout"),
        ("get_seq_lens", "kv_indptr last_page_len page_size"),
        ("get_batch_indices_positions", "append_indptr seq_lens"),
    ],
)  # fmt: skip
def test_arguments_of_no_signature(function: str, names: str) -> None:
    said = f"{function}: its arguments (0 positional"
    refuses(lambda: getattr(page, function)(**dict.fromkeys(names.split(), 1)), ContractTypeError, said)


@pytest.mark.parametrize("page", [4, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("call", [call for call in plans(CALLS + IN_BUFFERS) if call.runs], ids=lambda call: call.name)
def test_page_ids_outside_the_cache(call: Call, page: int) -> None:
    given, plan = call.arguments(), call.make()
    name = next((name for name in ROLES["indices"] if name in given), None)
    if name is None:  # tokens side by side
        return
    levels = isinstance(given[name], list)
    given[name] = [given[name][0], changed(given[name][1], 2, page)] if levels else changed(given[name], 2, page)
    plan(**given)
    buffers = {"BatchDecode": "indices_buffer", "BatchPrefill": "indices_buf"} if " in buffers" in call.name else {}
    name = "[1]" if levels else buffers.get(call.name.partition("With")[0].removesuffix("Mla"), "indices")
    said = f"{name}: request 1, slot 1 holds page id {page}, outside the cache's [0, 4)"
    refuses(lambda: call.runs(plan.__self__), PageTableError, said, CACHE)


@pytest.mark.parametrize("call", runs(CALLS), ids=lambda call: call.name)
def test_a_run_before_its_plan(call: Call) -> None:
    given = call.arguments()
    made = next(plan for plan in plans(CALLS) if plan.name.partition(".")[0] == call.name.partition(".")[0]).make()
    run = getattr(made.__self__, call.name.rpartition(".")[2])
    refuses(lambda: run(**given), ContractError, ": nothing is planned", *arrays_of(given))


@pytest.mark.parametrize("index", ["int64", "uint32", "int16", "uint8", "torch", "max"])
@pytest.mark.parametrize("call", [call for call in plans(CALLS) if call.runs], ids=lambda call: call.name)
def test_index_arrays_of_other_kinds_and_integers_that_fit(call: Call, index: str) -> None:
    made = (lambda one: to_kind(one, index)) if index in WRITABLE else dtype(index)
    found = []
    for cast in (lambda one: one, made):
        plan, given = call.make(), call.arguments()
        for name, one in given.items():
            if isinstance(one, np.ndarray | list):
                given[name] = cast(one) if isinstance(one, np.ndarray) else [cast(array) for array in one]
        plan(**given)
        found.append(bytes_of(call.runs(plan.__self__)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("of", "changes"),
    [
        ("Decode", {"q_data_type": torch.float8_e5m2, "kv_data_type": None}),
        ("Decode", {"q_data_type": torch.float8_e5m2, "kv_data_type": "bfloat16"}),
        ("BatchDecodeWithPaged", {"data_type": "float", "kv_data_type": None}),
        (PREFILL, {"packed_custom_mask": np.zeros(4, np.uint8), "custom_mask": "no mask"}),
        (PREFILL, {"seq_lens": i32(3, 6)}),
        (PREFILL, {"seq_lens_q": np.array([2, 3], np.uint32)}),
        (PREFILL, {"max_token_per_sequence": 1, "max_sequence_kv": 1, "uniform_q_len": 7}),
        (PREFILL, {"fixed_split_size": 4096, "disable_split_kv": True, "use_fp16_qk_reduction": True}),
        (RAGGED, {"v_indptr": i32(0, 3, 9), "o_indptr": i32(0, 2, 5)}),
        (r"^BatchAttention\.", {"kv_len_arr": i32(1, 6)}),
    ],
)
def test_what_a_plan_takes(of: str, changes: dict[str, Any]) -> None:
    for call in plans(CALLS + IN_BUFFERS):
        if re.search(of, call.name) and changes.keys() <= set(call.parameters()):
            call(**changes)


def test_further_arguments() -> None:
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        call = function(f"{name}.run")
        refuses(lambda call=call: call.make()(*call.args, 1.0), ContractError, "args: expected (), got (")
    call, sinks = function("BatchAttentionWithAttentionSinkWrapper.run"), np.zeros(4, np.float32)
    run = call.make()
    refuses(lambda: run(*call.args, sinks, 1.0, 2.0), ContractError, "args: expected (), got (")
    refuses(lambda: run(*call.args, sinks, sinks=sinks), ContractTypeError, "sinks: expected once")
