"""The batch prefill wrapper over contiguous K and V: FlashInfer's class, as `prefill.py` says; import it from there."""

from __future__ import annotations

from typing import Any

from paged_kv.arguments import shown
from paged_kv.arrays import devices
from paged_kv.arrays.dtypes import DTYPES, dtype_of, is_float8
from paged_kv.arrays.types import ArrayT, DTypeLike, SupportsDLPack
from paged_kv.calls.kernel_arguments import refuse_given
from paged_kv.calls.paged_call import attend_tokens
from paged_kv.calls.plan import AttentionPlan, attention_options, dtypes_of
from paged_kv.calls.ragged import WHY_HOST, TokenRanges, check_equals
from paged_kv.calls.scalars import one_number
from paged_kv.errors import ContractError
from paged_kv.prefill_base import PrefillWrapper, check_neutral


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
        buffers = {"qo_indptr_buf": qo_indptr_buf, "kv_indptr_buf": kv_indptr_buf}
        masks = (custom_mask_buf, mask_indptr_buf)
        super().__init__(kv_layout, use_cuda_graph, buffers, masks, backend, jit_args, variant_owns_mask)

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
            o_data_type: Of o; None is q's, or bfloat16 for float8 queries.
            v_indptr, o_indptr: None, or what `kv_indptr` and `qo_indptr` say.

        The other arguments and errors are those of the wrapper over pages.
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
        if o_data_type is not None:
            o_dtype = dtype_of(o_data_type, "o_data_type")
        else:
            o_dtype = DTYPES["bfloat16"] if is_float8(q_dtype) else q_dtype
        plan = AttentionPlan(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            head_dim_vo=head_dim_vo,
            page_size=None,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            pos_encoding_mode=pos_encoding_mode,
            options=attention_options(window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
            o_dtype=o_dtype,
        )
        devices.require_host(kv_indptr, "kv_indptr", WHY_HOST)
        tokens = TokenRanges.of(kv_indptr, "kv_indptr")
        check_equals("seq_lens", seq_lens, tokens.lengths, "kv_indptr")
        check_equals("v_indptr", v_indptr, tokens.indptr, "kv_indptr")
        self._replace_plan(plan, qo_indptr, tokens, (custom_mask, packed_custom_mask), causal, seq_lens_q, o_indptr)

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
        refuse_given(kv_cache_sf=kv_cache_sf)
        scale = one_number(o_scale, "o_scale")
        if scale is not None and not (isinstance(scale, int | float) and scale == 1):
            raise ContractError(f"o_scale must be None or 1, not {shown(scale)}: the output is not quantised")
        attention, rows, sinks = self._of_run(args, None)
        return attend_tokens(
            attention,
            rows,
            q,
            (k, v),
            self._kv_layout,
            (q_scale, k_scale, v_scale),
            return_lse=return_lse,
            out=out,
            lse=lse,
            lse_base=lse_base,
            lse_layout=lse_layout,
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
        return attend_tokens(attention, rows, q, (k, v), self._kv_layout, (None, None, None), return_lse=return_lse)

    def forward_return_lse(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """`forward` with `return_lse=True`."""
        return self.forward(*args, **kwargs | {"return_lse": True})
