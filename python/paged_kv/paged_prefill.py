"""The batch prefill wrapper over a paged cache: FlashInfer's class, as `prefill.py` says; import it from there."""

from __future__ import annotations

from typing import Any

from paged_kv.arrays import devices
from paged_kv.arrays.dtypes import dtype_of
from paged_kv.arrays.types import ArrayT, DTypeLike, PagedCache, SupportsDLPack
from paged_kv.calls.dense_tables import check_said_again
from paged_kv.calls.kernel_arguments import check_skipped_softmax, refuse_given
from paged_kv.calls.page_table import PageTable
from paged_kv.calls.paged_call import attend_paged
from paged_kv.calls.plan import AttentionPlan, attention_options, dtypes_of
from paged_kv.calls.ragged import WHY_HOST
from paged_kv.errors import ContractError
from paged_kv.prefill_base import PrefillWrapper, check_neutral

_CSR_NAMES = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")


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
        buffers = {
            "qo_indptr_buf": qo_indptr_buf,
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }
        masks = (custom_mask_buf, mask_indptr_buf)
        super().__init__(kv_layout, use_cuda_graph, buffers, masks, backend, jit_args, variant_owns_mask)

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
            num_qo_heads: Hq, a multiple of `num_kv_heads`.
            num_kv_heads: Hk.
            head_dim_qk: D, a multiple of 8 up to 512.
            page_size: Tokens of a page.
            head_dim_vo: Dv, of V and o, a multiple of 8 up to 512; None is D.
            custom_mask: bool: which tokens each row sees, `[q_len, kv_len]` of each request, flattened, one request
                after the other. It counts instead of `causal`; a window still holds.
            packed_custom_mask: The same as `[bytes]` uint8, the lowest bit of a byte first, each request from a new
                byte on, as `segment_packbits(..., bitorder="little")` makes it. It counts instead of `custom_mask`.
            causal: Whether a row sees no token behind its own. With fewer tokens than rows, a request's first rows see
                nothing.
            pos_encoding_mode: "NONE", "ROPE_LLAMA" (q and the un-rotated keys are rotated on the fly) or "ALIBI".
            sm_scale: Multiplies q . k; None is `1 / sqrt(D)`.
            window_left: Keeps the tokens from `window_left` before a row's own on; -1 keeps all.
            logits_soft_cap: Makes a score x into `cap * tanh(x / cap)`; None and 0 are off.
            rope_scale, rope_theta: As in decode's `plan`.
            q_data_type, kv_data_type, o_data_type: Of q, of the cache and of o, as in decode's `plan`; None is q's.
            prefix_len_ptr, token_pos_in_items_ptr, max_item_len_ptr: Must be None, and `token_pos_in_items_len` 0:
                multi-item scoring is not supported.
            seq_lens, seq_lens_q: `[B]` tokens and query rows of each request. They and `block_tables` `[B, n]` may be
                left out: they say again what the other arrays say.
            use_fp16_qk_reduction, non_blocking, fixed_split_size, disable_split_kv: Accepted, without effect.
            max_token_per_sequence, max_sequence_kv, uniform_q_len: Accepted, without effect.

        Raises:
            PageTableError: offsets or the page table are inconsistent. A page id that is not one of the cache's is
                found by `run`.
            ShapeError: a mask has not a bit for each row and token.
            ContractTypeError, ShapeError, ContractError: as `AttentionPlan` (`calls/plan.py`); an argument above is
                given that must not be; or, where the requests live in the user's buffers, they do not fit.

        Options are float32: 0, or from 1.2e-38 to 3.4e38 in magnitude; so is the product of sm_scale and a run's
        q_scale and k_scale. Nothing changes, the former plan included, if an error is raised.
        """
        del use_fp16_qk_reduction, non_blocking, max_token_per_sequence, max_sequence_kv
        del fixed_split_size, disable_split_kv, uniform_q_len
        check_neutral(
            token_pos_in_items_len,
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            max_item_len_ptr=max_item_len_ptr,
        )
        q_dtype, kv_dtype = dtypes_of(q_data_type, kv_data_type, None)
        plan = AttentionPlan(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            head_dim_vo=head_dim_vo,
            page_size=page_size,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            pos_encoding_mode=pos_encoding_mode,
            options=attention_options(window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
            o_dtype=None if o_data_type is None else dtype_of(o_data_type, "o_data_type"),
        )
        arrays = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        for name, array in zip(_CSR_NAMES, arrays, strict=True):
            devices.require_host(array, name, WHY_HOST)
        table = PageTable.of(*arrays, page_size, _CSR_NAMES)
        check_said_again(table, block_tables, seq_lens)
        self._replace_plan(plan, qo_indptr, table, (custom_mask, packed_custom_mask), causal, seq_lens_q)

    begin_forward = plan

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Accepted, without effect: one compiled graph takes K and V of any strides.

        Raises:
            ContractError: nothing was planned, or the variant is another one than "independent".
        """
        if variant != "independent":
            raise ContractError("variant must be 'independent'")
        self._last_plan.of_call("prewarm_paged_kv_stride_variant")

    def run(
        self,
        q: ArrayT,
        paged_kv_cache: PagedCache,
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
        refuse_given(kv_cache_sf=kv_cache_sf)
        check_skipped_softmax(skip_softmax_threshold_scale_factor)
        attention, rows, all_sinks = self._of_run(args, sinks)
        return attend_paged(
            attention,
            rows,
            q,
            paged_kv_cache,
            self._kv_layout,
            (q_scale, k_scale, v_scale),
            return_lse=return_lse,
            out=out,
            lse=lse,
            lse_base=lse_base,
            lse_layout=lse_layout,
            sinks=all_sinks,
            window_left=window_left,
            buffers=self._last_plan.buffers,
        )

    def run_return_lse(self, q: ArrayT, paged_kv_cache: PagedCache, *args: Any, **options: Any) -> tuple[Any, Any]:
        """`run` with `return_lse=True`."""
        return self.run(q, paged_kv_cache, *args, **options | {"return_lse": True})

    def forward(
        self,
        q: ArrayT,
        paged_kv_cache: PagedCache,
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
        scales = (None, k_scale, v_scale)
        return attend_paged(attention, rows, q, paged_kv_cache, self._kv_layout, scales, return_lse=return_lse)

    def forward_return_lse(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """`forward` with `return_lse=True`."""
        return self.forward(*args, **kwargs | {"return_lse": True})
