"""Decode over a dense page table: FlashInfer's function, as `decode.py` says; import it from there.

Letters in shapes: B requests, R rows (query tokens), n the most pages of a request, Hq query heads, Hk KV heads, D head
dimension.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paged_kv.arguments import LARGEST_INDEX, flag, integer, shown
from paged_kv.arrays import devices
from paged_kv.arrays.cache_storage import check_layout, paged_views
from paged_kv.arrays.dtypes import dtype_of
from paged_kv.arrays.types import ArrayDevice, ArrayT, DTypeLike, PagedCache, SupportsDLPack
from paged_kv.calls.attend import Attention
from paged_kv.calls.dense_tables import block_entries, checked_lengths, dense_table, one_table
from paged_kv.calls.draft_rows import draft_counts, draft_rows
from paged_kv.calls.kernel_arguments import check_backend, check_skipped_softmax, refuse_given
from paged_kv.calls.paged_call import attend_views
from paged_kv.calls.plan import AttentionPlan, attention_options
from paged_kv.calls.scalars import one_number
from paged_kv.errors import ContractError, ContractTypeError, ShapeError

_NOT_HERE = {
    "enable_block_sparse_attention": "pages that differ between KV heads are not supported",
    "cp_world": "contexts that several devices share are not supported",
    "cp_rank": "contexts that several devices share are not supported",
}


def trtllm_batch_decode_with_kv_cache(
    query: ArrayT,
    kv_cache: PagedCache,
    workspace_buffer: Any,
    block_tables: SupportsDLPack,
    seq_lens: SupportsDLPack,
    max_seq_len: int,
    bmm1_scale: float | SupportsDLPack = 1.0,
    bmm2_scale: float | SupportsDLPack = 1.0,
    window_left: int = -1,
    out: ArrayT | None = None,
    out_dtype: DTypeLike | None = None,
    o_sf_scale: None = None,
    o_sf_vec_size: None = None,
    sinks: Any = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: SupportsDLPack | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: SupportsDLPack | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: None = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: ArrayT | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: SupportsDLPack | None = None,
    multi_ctas_kv_counter_buffer: Any = None,
    enable_block_sparse_attention: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: None = None,
    bf16q_fp8kv_transform_mode: str | None = None,
    request_order: Any = None,
    request_order_plan: Any = None,
) -> Any:
    """Attention of each request's last tokens over a paged cache with a dense page table, as FlashInfer's function.

    Nothing is planned: the page table is checked in each call.

    Args:
        query: `[R, Hq, D]`, request after request: float32, float16 or bfloat16, or either float8, which is widened.
        kv_cache: `[pages, 2, Hk, page_size, D]` (HND) or `[pages, 2, page_size, Hk, D]` (NHD), or a tuple (k, v) of
            such arrays without the 2; with 1 in place of the 2, K and V are the same. Of the dtype of `query`, or
            float8; of any dtype under float8 queries.
        workspace_buffer, multi_ctas_kv_counter_buffer: Accepted, not kept. May be None.
        block_tables: `[B, n]` page ids on the host; what follows a request's last page may be anything, -1 included.
        seq_lens: `[B]` tokens of each request, the new ones included, on the host.
        max_seq_len: At least the longest of them.
        bmm1_scale: Multiplies q . k: sm_scale and the calibration scales of q and k. A number, or a float array of one
            element on the host, as the scales below.
        bmm2_scale: Multiplies o: the calibration scale of v, over that of o.
        window_left: Keeps the last `window_left + 1` tokens; -1 keeps all.
        out: `[R, Hq, D]`: written, and returned as o.
        out_dtype: Of o; None: the dtype of `out`, else of `query`. It is rounded once, from float32.
        o_sf_scale, o_sf_vec_size, kv_cache_sf: None: there is no NVFP4.
        sinks: `[Hq]` natural-log logits that join the denominator, and the lse; or a list of one such array.
        kv_layout: "HND" or "NHD".
        enable_pdl, backend, bf16q_fp8kv_transform_mode, request_order, request_order_plan: Accepted, without effect.
        q_len_per_req: Query rows of each request: row i of n sees `seq_lens[b] - n + i + 1` tokens. Without effect
            where `cum_seq_lens_q` is given.
        o_scale: Accepted, without effect: `bmm2_scale` has it already.
        mask: `[B, q_len_per_req, 2 * ceil(q_len_per_req / 32)]` uint16, or `[R, ...]` with `cum_seq_lens_q`: bit j of a
            row, the lowest of its first entry first, says whether it sees the request's new token j; older tokens are
            seen. None: row i sees j <= i.
        max_q_len: At least the most rows of a request.
        cum_seq_lens_q: `[B + 1]`, from 0: request b has rows `cum_seq_lens_q[b]` to `cum_seq_lens_q[b + 1]` of `query`.
        skip_softmax_threshold_scale_factor: None, or from 0 to 2^-25, without effect: no token is left out.
        uses_shared_paged_kv_idx: False: `block_tables` is `[B, 2, n]`, the pages of K and those of V, whose ids differ
            by one number for all.
        lse: `[R, Hq]` float32: written, and returned as lse. It may be given without `return_lse`.
        return_lse: Whether to return the lse as well.
        bmm1_scale_log2: `bmm1_scale * log2(e)`, in its place, as an array of one element.
        enable_block_sparse_attention, cp_world, cp_rank, causal_seqlens_kv_global: False, 1, 0 and None.

    Returns:
        o `[R, Hq, D]`, or o and the base-2 lse `[R, Hq]` float32. A request without tokens has o = 0 and lse = -inf.

    Raises:
        ContractTypeError: an argument has a type or dtype that is not supported.
        ShapeError: a rank, shape, head count or head_dim does not fit.
        PageTableError: a page id is not one of the cache's; a length is negative, or over the request's entries; a
            request has fewer tokens than rows.
        ContractError: another value is out of range, or would need another kernel; `out` or `lse` cannot be written, or
            shares memory with itself or another argument.
    """
    del workspace_buffer, multi_ctas_kv_counter_buffer, enable_pdl, o_scale, bf16q_fp8kv_transform_mode
    del request_order, request_order_plan
    check_backend(backend)
    check_layout(kv_layout)
    check_skipped_softmax(skip_softmax_threshold_scale_factor)
    refuse_given(o_sf_scale=o_sf_scale, o_sf_vec_size=o_sf_vec_size, kv_cache_sf=kv_cache_sf)
    refuse_given(causal_seqlens_kv_global=causal_seqlens_kv_global)
    neutral = (("enable_block_sparse_attention", enable_block_sparse_attention, 0), ("cp_world", cp_world, 1))
    for name, value, expected in (*neutral, ("cp_rank", cp_rank, 0)):
        if value != expected:
            raise ContractError(f"{name} must be {expected}, not {shown(value)}: {_NOT_HERE[name]}")

    sinks = sinks[0] if isinstance(sinks, list | tuple) and len(sinks) == 1 else sinks
    device = devices.device_of(query=query, kv_cache=kv_cache, out=out, lse=lse, sinks=sinks)
    q = device.view(query, "query")
    if q.ndim != 3:
        raise ShapeError(f"query: shape {list(q.shape)}, expected [R, num_qo_heads, head_dim]")
    k, v = _cache_views(device, kv_cache, kv_layout)
    if k.shape[3] != q.shape[2]:
        raise ShapeError(f"query: head_dim is {q.shape[2]}, kv_cache's is {k.shape[3]}")
    counts, batch = draft_counts(len(q), q_len_per_req, max_q_len, cum_seq_lens_q)
    lengths = checked_lengths(seq_lens, batch, integer("max_seq_len", max_seq_len, 0, LARGEST_INDEX))
    if flag("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx):
        entries = block_entries(block_tables, batch)
    else:
        entries, k_shift, v_shift = one_table(block_tables, lengths, k.shape[1])
        k, v = k[k_shift : len(k) - v_shift], v[v_shift : len(v) - k_shift]
    rows = draft_rows(dense_table(entries, lengths, k.shape[1]), lengths, counts, mask)

    o_dtype = device.dtype(q) if out is None else device.dtype(device.view(out, "out"))
    plan = AttentionPlan(
        num_qo_heads=q.shape[1],
        num_kv_heads=k.shape[2],
        head_dim=q.shape[2],
        page_size=k.shape[1],
        q_dtype=device.dtype(q),
        kv_dtype=device.dtype(k),
        pos_encoding_mode="NONE",
        options=attention_options(window_left, None, _scale(bmm1_scale, bmm1_scale_log2), None, None),
        o_dtype=o_dtype if out_dtype is None else dtype_of(out_dtype, "out_dtype"),
        dtype_names=("query: dtype", "kv_cache: dtype"),
        cache_name="kv_cache",
    )
    scales = (None, None, _number(bmm2_scale, "bmm2_scale"))
    results: dict[str, Any] = {"return_lse": return_lse, "out": out, "lse": lse}
    names = ("query", "kv_cache")
    return attend_views(Attention(plan), rows, device, query, (k, v), scales, **results, sinks=sinks, names=names)


def _cache_views(device: ArrayDevice, kv_cache: PagedCache, kv_layout: str) -> tuple[Any, Any]:
    """K and V `[page, slot, Hk, D]`; one array of both where dimension 1 is 1."""
    if not isinstance(kv_cache, tuple | list):
        view = device.view(kv_cache, "kv_cache")
        if view.ndim == 5 and view.shape[1] == 1:
            kv_cache = view[:, 0], view[:, 0]
    return paged_views(kv_cache, kv_layout, "kv_cache", device=device)


def _scale(bmm1_scale: Any, bmm1_scale_log2: Any) -> float:
    """What multiplies q . k."""
    if bmm1_scale_log2 is None:
        return _number(bmm1_scale, "bmm1_scale")
    return _number(bmm1_scale_log2, "bmm1_scale_log2") * math.log(2)


def _number(value: Any, name: str) -> float:
    """A finite number, or the one in an array."""
    number = one_number(value, name)
    if isinstance(number, bool) or not isinstance(number, int | float | np.integer | np.floating):
        raise ContractTypeError(f"{name} must be a number, not {shown(value)}")
    try:
        number = float(number)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ContractError(f"{name} must be finite, not {shown(value)}")
    return number
