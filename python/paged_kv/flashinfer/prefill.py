"""Prefill attention: the names, argument order and meaning of FlashInfer's `prefill` module.

Letters in shapes: B requests, R query rows, Hq query heads, Hk KV heads, D head dimension (Dv: V's), N tokens.

The query rows of a request are its last tokens, whose K and V are there already: row i of q_len over kv_len tokens
stands at position `kv_len - q_len + i`. A row sees every token, those up to its own (`causal`), or those of a mask; a
window keeps the tokens from `window_left` before its position on, also under a mask.

Arrays, dtypes, options and errors are those of `decode.py`; so is what overflows, and what a fork may do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paged_kv.arguments import LARGEST_INDEX, flag, integer, one_of, shown
from paged_kv.arrays import devices
from paged_kv.arrays.dtypes import DTYPES, dtype_of, is_float8
from paged_kv.arrays.pages import token_views
from paged_kv.arrays.types import ArrayT, CacheArrays, DTypeLike, SupportsDLPack
from paged_kv.calls.attend import Attention
from paged_kv.calls.block_tables import checked_lengths, one_table
from paged_kv.calls.buffers import Buffer, FixedBuffers
from paged_kv.calls.draft_rows import draft_counts
from paged_kv.calls.masks import packed_mask
from paged_kv.calls.offsets import MAX_ROWS, offsets_of
from paged_kv.calls.plan import AttentionPlan, attention_options, plan_dtypes
from paged_kv.calls.planned import LastPlan
from paged_kv.calls.ragged import RaggedBatch, check_equals, row_offsets
from paged_kv.calls.results import Results
from paged_kv.calls.rows import Rows
from paged_kv.calls.scalars import checked_number, one_number, one_scale
from paged_kv.calls.table import Table
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.flashinfer.decode import check_query, dense_pages, dense_plan, one_sink, softmax_scale
from paged_kv.flashinfer.kernel_arguments import (
    check_backend,
    check_skipped_softmax,
    is_sink_kernel,
    refuse_unsupported,
)
from paged_kv.flashinfer.wrapper import PlannedWrapper

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_batch_context_with_kv_cache",
]

_CSR_NAMES = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
_MASK_BUFFERS = (
    Buffer("custom_mask_buf", extra=None, optional=True, is_mask=True),
    Buffer("mask_indptr_buf", extra=1, optional=True),
)
_PAGED_BUFFERS = (
    Buffer("qo_indptr_buf", "qo_indptr", extra=1),
    Buffer("paged_kv_indptr_buf", "paged_kv_indptr", extra=1),
    Buffer("paged_kv_indices_buf", "paged_kv_indices", extra=None),
    Buffer("paged_kv_last_page_len_buf", "paged_kv_last_page_len"),
    *_MASK_BUFFERS,
)
_RAGGED_BUFFERS = (
    Buffer("qo_indptr_buf", "qo_indptr", extra=1),
    Buffer("kv_indptr_buf", "kv_indptr", extra=1),
    *_MASK_BUFFERS,
)


class PrefillWrapper(PlannedWrapper[Attention, RaggedBatch, RaggedBatch]):
    """Attention of ragged query rows: what does not depend on where K and V lie."""

    def __init__(
        self,
        kv_layout: str,
        use_cuda_graph: bool = False,
        buffers: Sequence[Buffer] = (),
        arrays: Sequence[SupportsDLPack | None] = (),
        *,
        backend: str = "auto",
        jit_args: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        check_backend(backend)
        self._takes_sinks = is_sink_kernel(jit_args)
        refuse_unsupported(variant_owns_mask=variant_owns_mask)
        fixed: FixedBuffers[RaggedBatch, RaggedBatch] | None = None
        if flag("use_cuda_graph", use_cuda_graph):
            fixed = FixedBuffers([buffers], arrays, "the requests live")
        super().__init__(kv_layout, LastPlan(fixed))

    def _replace_plan(
        self,
        plan: AttentionPlan,
        qo_indptr: Any,
        table: Table,
        masks: tuple[Any, Any],
        causal: bool,
        seq_lens_q: Any,
        o_indptr: Any = None,
    ) -> None:
        """Plans anew what was not refused."""
        batch = RaggedBatch(row_offsets(qo_indptr, "qo_indptr"), table, None, flag("causal", causal))
        check_equals("seq_lens_q", seq_lens_q, batch.q_lengths, "qo_indptr")
        check_equals("o_indptr", o_indptr, batch.qo_indptr, "qo_indptr")
        mask = packed_mask(*masks, batch.q_lengths, table.lengths)
        self._last_plan.replace(Attention(plan), replace(batch, mask=mask))

    def _of_run(self, args: tuple[Any, ...], sinks: Any) -> tuple[Attention, Rows, Any]:
        """The plan, its rows and the sinks of a run; `args` are what it got by position after K and V."""
        positional: Any = None
        sm_scale: Any = None
        if self._takes_sinks and len(args) <= 2:
            positional, sm_scale, *_ = (*args, None, None)
        else:
            refuse_unsupported(args=args)
        if sinks is not None and positional is not None:
            raise ContractTypeError("sinks: expected once, got them by position and by name")
        attention, requests = self._last_plan.of_call("run")
        if sm_scale is not None:
            sm_scale = one_number(sm_scale, "sm_scale")
            options = replace(attention.plan.options, sm_scale=sm_scale)
            if options != attention.plan.options:
                attention = Attention(replace(attention.plan, options=options))
        return attention, requests.rows, positional if sinks is None else sinks

    def _of_forward(
        self,
        causal: bool,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
    ) -> tuple[Attention, Rows]:
        """The plan, with the options of one call instead of its own."""
        attention, requests = self._last_plan.of_call("forward")
        options = attention_options(window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        plan = replace(attention.plan, options=options, pos_encoding_mode=pos_encoding_mode)
        return Attention(plan), replace(requests, causal=flag("causal", causal)).rows


class BatchPrefillWithPagedKVCacheWrapper(PrefillWrapper):
    """Attention of any number of query tokens a request over a paged KV cache: `plan` once, `run` for every layer.

    The query tokens are a request's last ones, and their K and V are in its pages: a prompt, a chunk of one, or one
    token, in any mixture. Threads may share a wrapper, but for buffers of the user's.

    Args:
        float_workspace_buffer: Accepted, not kept: the kernels take what they need from MAX. May be None.
        kv_layout: "NHD" or "HND", of the caches that `run` gets.
        use_cuda_graph: Keeps the requests in the buffers below, of whatever kind: the batch is then fixed, and the
            number of query rows at most that of the first plan; `plan` copies into them and `run` reads them again each
            time, so that changes made to them in place count.
        qo_indptr_buf, paged_kv_indptr_buf: `[B + 1]` int32 or int64.
        paged_kv_indices_buf: int32 or int64, long enough for the most page indices ever planned.
        paged_kv_last_page_len_buf: `[B]` int32 or int64.
        custom_mask_buf: uint8, for the most bytes of packed masks ever planned; may be None, as the next one, where no
            plan has a mask.
        mask_indptr_buf: `[B + 1]` int32 or int64: where each request's bytes begin.
        backend: Accepted; the name of one of FlashInfer's, without effect.
        jit_args: None, or those of FlashInfer's attention with sinks: `run` then takes sinks and sm_scale after the
            cache. With `jit_kwargs`, which are accepted.
        variant_owns_mask: Must be False.

    Raises:
        ContractError: the layout is unknown; a buffer is missing, cannot be written, or shares memory with itself or
            another one; `jit_args` are others, or `variant_owns_mask` is given.
        ContractTypeError: a buffer is no array of these dtypes.
        ShapeError: a buffer is not 1-D, or the lengths of the buffers do not fit each other.

    Examples:
        >>> import numpy as np
        >>> wrapper = BatchPrefillWithPagedKVCacheWrapper(None, "NHD")
        >>> rows, indptr, pages, last = (np.array(x, np.int32) for x in ([0, 3], [0, 2], [6, 3], [2]))
        >>> wrapper.plan(rows, indptr, pages, last, 4, 2, 8, 4, causal=True, q_data_type="float32")
        >>> cache = np.ones((8, 2, 4, 2, 8), np.float32)
        >>> o, lse = wrapper.run(np.zeros((3, 4, 8), np.float32), cache, return_lse=True)
        >>> np.exp2(lse[:, 0]).round().tolist()  # each row sees the tokens up to its own
        [4.0, 5.0, 6.0]
    """

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: SupportsDLPack | None = None,
        paged_kv_indptr_buf: SupportsDLPack | None = None,
        paged_kv_indices_buf: SupportsDLPack | None = None,
        paged_kv_last_page_len_buf: SupportsDLPack | None = None,
        custom_mask_buf: SupportsDLPack | None = None,
        mask_indptr_buf: SupportsDLPack | None = None,
        backend: str = "auto",
        jit_args: None = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        del float_workspace_buffer, jit_kwargs
        arrays = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        super().__init__(
            kv_layout,
            use_cuda_graph,
            _PAGED_BUFFERS,
            (*arrays, custom_mask_buf, mask_indptr_buf),
            backend=backend,
            jit_args=jit_args,
            variant_owns_mask=variant_owns_mask,
        )

    def plan(
        self,
        qo_indptr: SupportsDLPack,
        paged_kv_indptr: SupportsDLPack,
        paged_kv_indices: SupportsDLPack,
        paged_kv_last_page_len: SupportsDLPack,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: SupportsDLPack | None = None,
        packed_custom_mask: SupportsDLPack | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DTypeLike = "float16",
        kv_data_type: DTypeLike | None = None,
        o_data_type: DTypeLike | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: None = None,
        token_pos_in_items_ptr: None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: None = None,
        seq_lens: SupportsDLPack | None = None,
        seq_lens_q: SupportsDLPack | None = None,
        block_tables: SupportsDLPack | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        """Fixes the requests and everything else that the runs to come share. The arrays are copied; they may be the
        user's buffers of `use_cuda_graph` themselves, and lie on the host, for a cache on a GPU too.

        Args:
            qo_indptr: `[B + 1]`, from 0: the query rows of request b are `q[qo_indptr[b]:qo_indptr[b + 1]]`, its last
                tokens: row i of q_len stands at position `kv_len - q_len + i`. Any integer dtype.
            paged_kv_indptr: `[B + 1]`, from 0: request b owns the pages
                `paged_kv_indices[paged_kv_indptr[b]:paged_kv_indptr[b + 1]]`.
            paged_kv_indices: `[paged_kv_indptr[B]]` page ids.
            paged_kv_last_page_len: `[B]`: tokens in each request's last page, from 1 to page_size; of a request without
                pages, 0 or anything else up to page_size.
            num_qo_heads, num_kv_heads: Hq and Hk; Hq is a multiple of Hk.
            head_dim_qk: D, a multiple of 8 up to 512.
            page_size: Tokens of a page.
            head_dim_vo: Dv, of V and o, a multiple of 8 up to 512; None is D, and so is it of int8 and int4 codes.
            custom_mask: bool: which tokens each row sees, `[q_len, kv_len]` of each request, flattened, one request
                after the other. It counts instead of `causal`; a window still holds.
            packed_custom_mask: The same as `[bytes]` uint8, the lowest bit of a byte first, each request from a new
                byte on, as `segment_packbits(..., bitorder="little")` makes it. It counts instead of `custom_mask`.
            causal: Whether a row sees no token behind its own. With fewer tokens than rows, a request's first rows see
                nothing.
            pos_encoding_mode, sm_scale, logits_soft_cap, rope_scale, rope_theta: As in decode's `plan`.
            window_left: Keeps the tokens from `window_left` before a row's own on; -1 keeps all.
            q_data_type, kv_data_type, o_data_type: The dtypes of q, of the cache and of o, as in decode's `plan`; None
                is q's.
            prefix_len_ptr, token_pos_in_items_ptr, max_item_len_ptr: Must be None, and `token_pos_in_items_len` 0:
                multi-item scoring is not supported.
            seq_lens, seq_lens_q: `[B]` tokens and query rows of each request. They and `block_tables` `[B, n]` may be
                left out: they repeat the other arrays.
            use_fp16_qk_reduction, non_blocking, fixed_split_size, disable_split_kv, max_token_per_sequence,
                max_sequence_kv, uniform_q_len: Accepted, without effect.

        Raises:
            PageTableError: offsets or the page table are inconsistent. `run` refuses a page id that the cache has not.
            ShapeError: a mask has not a bit for each row and token.
            ContractTypeError, ShapeError, ContractError: as `AttentionPlan` (`calls/plan.py`); an argument above is
                given that must not be; or, where the requests live in the user's buffers, they do not fit.

        Options are float32: 0, or from 1.2e-38 to 3.4e38 in magnitude; so is the product of sm_scale and a run's
        q_scale and k_scale. Nothing changes, the former plan included, if an error is raised.
        """
        del use_fp16_qk_reduction, non_blocking, max_token_per_sequence, max_sequence_kv
        del fixed_split_size, disable_split_kv, uniform_q_len
        refuse_unsupported(prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr)
        refuse_unsupported(token_pos_in_items_len=token_pos_in_items_len, max_item_len_ptr=max_item_len_ptr)
        plan = AttentionPlan(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            head_dim_name="head_dim_qk",
            head_dim_vo=head_dim_vo,
            page_size=page_size,
            pos_encoding_mode=pos_encoding_mode,
            options=attention_options(window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
            **plan_dtypes(q_data_type, kv_data_type, o_data_type),
        )
        table = Table.csr(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, _CSR_NAMES)
        table.check_same(block_tables, seq_lens)
        self._replace_plan(plan, qo_indptr, table, (custom_mask, packed_custom_mask), causal, seq_lens_q)

    begin_forward = plan

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Accepted, without effect: one compiled graph takes K and V of any strides.

        Raises:
            ContractError: nothing was planned, or the variant is another one than "independent".
        """
        one_of("variant", variant, ("independent",))
        self._last_plan.of_call("prewarm_paged_kv_stride_variant")

    def run(
        self,
        q: ArrayT,
        paged_kv_cache: CacheArrays,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: ArrayT | None = None,
        lse: ArrayT | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: SupportsDLPack | None = None,
        kv_cache_sf: None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """Attention of the planned requests' query tokens.

        Args:
            q: `[R, Hq, D]`, R = `qo_indptr[B]`, of the planned dtype.
            paged_kv_cache: `[pages, 2, page_size, Hk, D]` (NHD) or `[pages, 2, Hk, page_size, D]` (HND), or a tuple
                (k, v) of such arrays without the 2, of the planned dtype, v's with Dv. It need not be contiguous, but
                its last stride is 1. Slots that no request uses may hold anything, NaN included. The wrapper keeps the
                last run's cache alive until it runs over another or plans again.
            args: Empty, or sinks and sm_scale: see `jit_args`.
            q_scale, k_scale, v_scale: Calibration scales: a stored value times its scale is the meant one; None is 1.
            out: `[R, Hq, Dv]` in the planned dtype of o: written, and returned as o.
            lse: As returned: written, and returned as lse. It may be given without `return_lse`.
            return_lse: Whether to return the lse as well.
            lse_base: "log2", or "ln" for a natural logarithm.
            lse_layout: "NH", or "HN" for a transposed lse.
            window_left: Instead of the planned one, for this call; None is the planned one.
            sinks: `[Hq]` float32, float16 or bfloat16: natural-log logits that join the denominator, and the lse.
            kv_cache_sf: Must be None.
            skip_softmax_threshold_scale_factor: None, or so small that it has no effect.
            enable_pdl, use_fp16_softmax, uses_spcompress: Accepted, without effect.

        Returns:
            o `[R, Hq, Dv]` in the kind of `q`, or o and the lse `[R, Hq]` ("NH") or `[Hq, R]` ("HN") float32. A row
            that sees no token has o = 0 and lse = -inf.

        Raises:
            ContractError: nothing was planned, a number is out of range, an argument above is given that must not be,
                or `out` or `lse` cannot be written or shares memory with itself or another argument (`q` too).
            PageTableError: a page id is not one of the cache's, or the user's buffers hold inconsistent requests.
            ContractTypeError, ShapeError: an array is not as planned.
        """
        del enable_pdl, use_fp16_softmax, uses_spcompress
        refuse_unsupported(kv_cache_sf=kv_cache_sf)
        check_skipped_softmax(skip_softmax_threshold_scale_factor)
        attention, rows, all_sinks = self._of_run(args, sinks)
        return attention.over_pages(
            rows,
            q,
            paged_kv_cache,
            self._kv_layout,
            (q_scale, k_scale, v_scale),
            Results(return_lse, out, lse, lse_base, lse_layout),
            sinks=all_sinks,
            window_left=window_left,
            buffers=self._last_plan.buffers,
        )

    def run_return_lse(self, q: ArrayT, paged_kv_cache: CacheArrays, *args: Any, **options: Any) -> tuple[Any, Any]:
        """`run` with `return_lse=True`."""
        return self.run(q, paged_kv_cache, *args, **options | {"return_lse": True})

    def forward(
        self,
        q: ArrayT,
        paged_kv_cache: CacheArrays,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """FlashInfer's older `run`: its options count instead of the planned ones, for this call alone.

        A planned mask counts still. Raises as `run`.
        """
        del use_fp16_qk_reduction
        options = (window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        attention, rows = self._of_forward(causal, pos_encoding_mode, *options)
        scales, results = (None, k_scale, v_scale), Results(return_lse)
        return attention.over_pages(rows, q, paged_kv_cache, self._kv_layout, scales, results)

    def forward_return_lse(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """`forward` with `return_lse=True`."""
        return self.forward(*args, **kwargs | {"return_lse": True})


class BatchPrefillWithRaggedKVCacheWrapper(PrefillWrapper):
    """Attention of any number of query tokens a request over K and V that lie request after request in one array each.

    `plan` once, `run` for every layer. No pages are made and nothing is copied: the kernels see pages that overlap.
    Threads may share a wrapper, as the decode wrapper; buffers of the user's are the exception.

    Args:
        float_workspace_buffer: Accepted, not kept: the kernels take what they need from MAX. May be None.
        kv_layout: "NHD" or "HND", of the K and V that `run` gets.
        use_cuda_graph: Keeps the requests in the buffers below, as the wrapper over pages.
        qo_indptr_buf, kv_indptr_buf: `[B + 1]` int32 or int64.
        custom_mask_buf, mask_indptr_buf, backend, jit_args, jit_kwargs, variant_owns_mask: As in the wrapper over
            pages.

    Raises:
        ContractError, ContractTypeError, ShapeError: as the wrapper over pages.
    """

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: SupportsDLPack | None = None,
        kv_indptr_buf: SupportsDLPack | None = None,
        custom_mask_buf: SupportsDLPack | None = None,
        mask_indptr_buf: SupportsDLPack | None = None,
        backend: str = "auto",
        jit_args: None = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        del float_workspace_buffer, jit_kwargs
        super().__init__(
            kv_layout,
            use_cuda_graph,
            _RAGGED_BUFFERS,
            (qo_indptr_buf, kv_indptr_buf, custom_mask_buf, mask_indptr_buf),
            backend=backend,
            jit_args=jit_args,
            variant_owns_mask=variant_owns_mask,
        )

    def plan(
        self,
        qo_indptr: SupportsDLPack,
        kv_indptr: SupportsDLPack,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: SupportsDLPack | None = None,
        packed_custom_mask: SupportsDLPack | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DTypeLike = "float16",
        kv_data_type: DTypeLike | None = None,
        o_data_type: DTypeLike | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: None = None,
        token_pos_in_items_ptr: None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: SupportsDLPack | None = None,
        seq_lens_q: SupportsDLPack | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: SupportsDLPack | None = None,
        o_indptr: SupportsDLPack | None = None,
        uniform_q_len: int | None = None,
    ) -> None:
        """Fixes the requests and everything else that the runs to come share, as the wrapper over pages.

        Args:
            qo_indptr: `[B + 1]`, from 0: the query rows of request b are `q[qo_indptr[b]:qo_indptr[b + 1]]`, its last
                tokens. Any integer dtype.
            kv_indptr: `[B + 1]`, from 0: its tokens are `k[kv_indptr[b]:kv_indptr[b + 1]]`.
            o_data_type: The dtype of o; None is q's, or bfloat16 for float8 queries.
            v_indptr, o_indptr: None, or what `kv_indptr` and `qo_indptr` say.

        The other arguments and errors are those of the wrapper over pages.
        """
        del use_fp16_qk_reduction, non_blocking, max_token_per_sequence, max_sequence_kv
        del fixed_split_size, disable_split_kv, uniform_q_len
        refuse_unsupported(prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr)
        refuse_unsupported(token_pos_in_items_len=token_pos_in_items_len, max_item_len_ptr=max_item_len_ptr)
        dtypes = plan_dtypes(q_data_type, kv_data_type, o_data_type)
        if o_data_type is None and is_float8(dtypes["q_dtype"]):
            dtypes["o_dtype"] = DTYPES["bfloat16"]
        plan = AttentionPlan(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            head_dim_name="head_dim_qk",
            head_dim_vo=head_dim_vo,
            page_size=None,
            pos_encoding_mode=pos_encoding_mode,
            options=attention_options(window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
            **dtypes,
        )
        table = Table.of_tokens(kv_indptr, ("kv_indptr",))
        check_equals("seq_lens", seq_lens, table.lengths, "kv_indptr")
        check_equals("v_indptr", v_indptr, table.arrays[0], "kv_indptr")
        self._replace_plan(plan, qo_indptr, table, (custom_mask, packed_custom_mask), causal, seq_lens_q, o_indptr)

    begin_forward = plan

    def run(
        self,
        q: ArrayT,
        k: SupportsDLPack,
        v: SupportsDLPack,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: ArrayT | None = None,
        lse: ArrayT | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: None = None,
    ) -> Any:
        """Attention of the planned requests' query tokens.

        Args:
            q: `[R, Hq, D]`, R = `qo_indptr[B]`, of the planned dtype.
            k: `[N, Hk, D]` (NHD) or `[Hk, N, D]` (HND) of the planned dtype, N at least `kv_indptr[B]`.
            v: The same with Dv. Neither need be contiguous, but their last stride is 1.
            args: Empty, or sinks and sm_scale: see `jit_args` of the wrapper over pages.
            q_scale, k_scale, v_scale: Calibration scales: a stored value times its scale is the meant one; None is 1.
            o_scale: Must be None or 1: o is not quantised.
            out, lse, return_lse, lse_base, lse_layout, enable_pdl, kv_cache_sf: As over pages.

        Returns:
            o `[R, Hq, Dv]` in the kind of `q`, or o and the lse `[R, Hq]` ("NH") or `[Hq, R]` ("HN") float32. A row
            that sees no token has o = 0 and lse = -inf.

        Raises:
            ContractError: nothing was planned, a number is out of range, an argument above is given that must not be,
                or `out` or `lse` cannot be written or shares memory with itself or another argument (`q` too).
            PageTableError: the user's buffers hold inconsistent requests.
            ContractTypeError, ShapeError: an array is not as planned.
        """
        del enable_pdl
        refuse_unsupported(kv_cache_sf=kv_cache_sf)
        scale = one_number(o_scale, "o_scale")
        if scale is not None and not (isinstance(scale, int | float) and scale == 1):
            raise ContractError(f"o_scale: expected None or 1, got {shown(scale)}: the output is not quantised")
        attention, rows, sinks = self._of_run(args, None)
        return attention.over_tokens(
            rows,
            q,
            (k, v),
            self._kv_layout,
            (q_scale, k_scale, v_scale),
            Results(return_lse, out, lse, lse_base, lse_layout),
            sinks=sinks,
            buffers=self._last_plan.buffers,
        )

    def run_return_lse(
        self, q: ArrayT, k: SupportsDLPack, v: SupportsDLPack, *args: Any, **options: Any
    ) -> tuple[Any, Any]:
        """`run` with `return_lse=True`."""
        return self.run(q, k, v, *args, **options | {"return_lse": True})

    def forward(
        self,
        q: ArrayT,
        k: SupportsDLPack,
        v: SupportsDLPack,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """FlashInfer's older `run`: its options count instead of the planned ones, for this call alone.

        A planned mask counts still. Raises as `run`.
        """
        del use_fp16_qk_reduction
        options = (window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        attention, rows = self._of_forward(causal, pos_encoding_mode, *options)
        return attention.over_tokens(rows, q, (k, v), self._kv_layout, (None, None, None), Results(return_lse))

    def forward_return_lse(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """`forward` with `return_lse=True`."""
        return self.forward(*args, **kwargs | {"return_lse": True})


def single_prefill_with_kv_cache(
    q: ArrayT,
    k: SupportsDLPack,
    v: SupportsDLPack,
    scale_q: SupportsDLPack | float | None = None,
    scale_k: SupportsDLPack | float | None = None,
    scale_v: SupportsDLPack | float | None = None,
    o_dtype: DTypeLike | None = None,
    custom_mask: SupportsDLPack | None = None,
    packed_custom_mask: SupportsDLPack | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Any:
    """Attention of one request's last tokens over its contiguous K and V, as FlashInfer's function of this name.

    Args:
        q: `[R, Hq, D]`.
        k: `[N, Hk, D]` (NHD) or `[Hk, N, D]` (HND); it need not be contiguous, but its last stride is 1.
        v: The same with Dv.
        scale_q, scale_k, scale_v: Calibration scales of quantised q, k and v: a number, or an array `[Hq]` or `[Hk]`
            of one number; None is 1.
        o_dtype: The dtype of o; None is q's.
        custom_mask: `[R, N]` bool: which tokens each row sees. It counts instead of `causal`; a window still holds.
        packed_custom_mask: The same as bytes, `packbits(custom_mask.reshape(-1), "little")`; it counts instead of
            `custom_mask`.
        causal: Whether a row sees no token behind its own.
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE", "ROPE_LLAMA" (q and the un-rotated k are rotated on the fly) or "ALIBI".
        use_fp16_qk_reduction: Accepted, without effect.
        sm_scale: Multiplies q . k; None is `1 / sqrt(D)`.
        window_left: Keeps the tokens from `window_left` before a row's own on; -1 keeps all.
        logits_soft_cap: Makes a score x into `cap * tanh(x / cap)`; None and 0 are off.
        rope_scale: Divides the rotary frequencies; None is 1.
        rope_theta: Base of the rotary embedding; None is 1e4.
        backend: Accepted; the name of one of FlashInfer's, without effect.
        return_lse: Whether to return the lse as well.
        kv_cache_sf: Must be None.
        k_scale, v_scale: Further factors of k and v; None is 1.

    Returns:
        o `[R, Hq, Dv]` in the kind of `q`, or o and the base-2 lse `[R, Hq]` float32. A row that sees no token has
        o = 0 and lse = -inf.

    Raises:
        ContractTypeError: a dtype or a pair of dtypes is not supported, or an argument has the wrong type.
        ShapeError: a rank, shape, head count or head_dim does not fit, or a mask has not a bit for each row and token.
        ContractError: another value is out of range.
    """
    del use_fp16_qk_reduction
    check_backend(backend)
    refuse_unsupported(kv_cache_sf=kv_cache_sf)
    results, is_causal = Results(return_lse), flag("causal", causal)
    device = devices.device_of(q=q, k=k, v=v)
    query = device.view(q, "q")
    if query.ndim != 3:
        raise ShapeError(f"q: expected [qo_len, num_qo_heads, head_dim], got shape {list(query.shape)}")
    keys, values = token_views(device, (k, v), kv_layout, same_width=False)
    if query.shape[1] % max(keys.shape[1], 1):
        raise ShapeError(f"q: expected a multiple of k's {keys.shape[1]} heads, got {query.shape[1]}")
    if keys.shape[2] != query.shape[2]:
        raise ShapeError(f"k: expected q's head_dim {query.shape[2]}, got {keys.shape[2]}")
    for name, view, most in (("q", query, MAX_ROWS), ("k", keys, LARGEST_INDEX)):
        if len(view) > most:
            raise ShapeError(f"{name}: expected at most {most} tokens, got {len(view)}")
    plan = AttentionPlan(
        num_qo_heads=query.shape[1],
        num_kv_heads=keys.shape[1],
        head_dim=query.shape[2],
        head_dim_vo=values.shape[2],
        page_size=None,
        q_dtype=device.dtype(query),
        kv_dtype=device.dtype(keys),
        pos_encoding_mode=pos_encoding_mode,
        options=attention_options(window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
        o_dtype=None if o_dtype is None else dtype_of(o_dtype, "o_dtype"),
        dtype_names=("q: dtype", "k: dtype"),
    )
    scales = (
        one_scale(scale_q, "scale_q", plan.num_qo_heads),
        one_scale(scale_k, "scale_k", plan.num_kv_heads, k_scale, "k_scale"),
        one_scale(scale_v, "scale_v", plan.num_kv_heads, v_scale, "v_scale"),
    )
    batch = RaggedBatch(np.array([0, len(query)], np.int32), Table.of_one(len(keys)), None, is_causal, "q")
    mask = packed_mask(custom_mask, packed_custom_mask, batch.q_lengths, batch.table.lengths)
    rows = replace(batch, mask=mask).rows
    return Attention(plan).over_tokens(rows, q, (k, v), kv_layout, scales, results)


def single_prefill_with_kv_cache_return_lse(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """`single_prefill_with_kv_cache` with `return_lse=True`."""
    o, lse = single_prefill_with_kv_cache(*args, **kwargs | {"return_lse": True})
    return o, lse


def trtllm_batch_context_with_kv_cache(
    query: ArrayT,
    kv_cache: CacheArrays,
    workspace_buffer: Any,
    block_tables: SupportsDLPack,
    seq_lens: SupportsDLPack,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | SupportsDLPack,
    bmm2_scale: float | SupportsDLPack,
    batch_size: int,
    cum_seq_lens_q: SupportsDLPack,
    cum_seq_lens_kv: SupportsDLPack,
    window_left: int = -1,
    out: ArrayT | None = None,
    out_dtype: DTypeLike | None = None,
    o_sf_scale: None = None,
    o_sf_vec_size: None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: Any = None,
    kv_cache_sf: None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: ArrayT | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: Any = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    backend: str = "trtllm-gen",
) -> Any:
    """Attention of the last query tokens of each request over a paged cache with a dense page table.

    Args:
        query: `[R, Hq, D]`, request after request, as `decode.trtllm_batch_decode_with_kv_cache` takes it; so are
            `kv_cache`, `block_tables`, `seq_lens`, `bmm1_scale`, `bmm2_scale`, `window_left`, `out`, `out_dtype`,
            `sinks`, `kv_layout`, `uses_shared_paged_kv_idx`, `lse`, `return_lse` and the arguments without effect.
        max_q_len, max_kv_len: At least the most rows and the most tokens of a request.
        batch_size: B.
        cum_seq_lens_q: `[B + 1]`, from 0: request b has rows `cum_seq_lens_q[b]` to `cum_seq_lens_q[b + 1]` of `query`,
            its last tokens.
        cum_seq_lens_kv: `[B + 1]`, from 0: offsets of the requests' tokens, or of their pages. It repeats `seq_lens`.
        causal: Whether a row sees no token behind its own. With fewer tokens than rows, a request's first rows see
            nothing.

    Returns:
        o `[R, Hq, D]`, or o and the base-2 lse `[R, Hq]` float32. A row that sees no token has o = 0 and lse = -inf.

    Raises: as `trtllm_batch_decode_with_kv_cache`; a `ShapeError` or `PageTableError` where `batch_size` or
        `cum_seq_lens_kv` says something else than `seq_lens`.
    """
    del workspace_buffer, enable_pdl, multi_ctas_kv_counter_buffer, use_fp16_softmax, uses_spcompress
    check_backend(backend)
    check_skipped_softmax(skip_softmax_threshold_scale_factor)
    refuse_unsupported(o_sf_scale=o_sf_scale, o_sf_vec_size=o_sf_vec_size, kv_cache_sf=kv_cache_sf)
    sinks = one_sink(sinks)
    device = devices.device_of(query=query, kv_cache=kv_cache, out=out, lse=lse, sinks=sinks)
    q, pages = device.view(query, "query"), dense_pages(device, kv_cache, kv_layout)
    check_query(q, pages)
    counts, batch = draft_counts(len(q), None, max_q_len, cum_seq_lens_q)
    if integer("batch_size", batch_size, 0, LARGEST_INDEX) != batch:
        raise ShapeError(f"batch_size: expected cum_seq_lens_q's {batch}, got {batch_size}")
    most = integer("max_kv_len", max_kv_len, 0, LARGEST_INDEX)
    lengths = checked_lengths(seq_lens, batch, most, most_name="max_kv_len")
    if not flag("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx):
        block_tables, pages = one_table(block_tables, lengths, pages)
    table = Table.padded(block_tables, lengths, pages.page_size)
    if not np.array_equal(row_offsets(cum_seq_lens_kv, "cum_seq_lens_kv"), offsets_of(table.num_pages)):
        check_equals("cum_seq_lens_kv", cum_seq_lens_kv, offsets_of(lengths), "seq_lens")
    offsets = offsets_of(counts).astype(np.int32)
    rows = RaggedBatch(offsets, table, None, flag("causal", causal), "cum_seq_lens_q").rows
    options = attention_options(window_left, None, softmax_scale(bmm1_scale), None, None)
    attention = Attention(dense_plan(q, pages, options, out, out_dtype))
    scales = (None, None, checked_number(bmm2_scale, "bmm2_scale"))
    return attention.over(rows, query, pages, scales, Results(return_lse, out, lse), sinks=sinks, name="query")
