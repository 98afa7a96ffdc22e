"""Attention of mixed batches, some requests at prefill and others at decode: FlashInfer's `attention` module.

Letters in shapes: B requests, R query rows, Hq query heads, Hk KV heads, D head dimension (Dv: V's). What rows see, and
arrays, dtypes, options and errors are those of `prefill.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paged_kv.arrays.types import ArrayT, CacheArrays, DTypeLike, SupportsDLPack
from paged_kv.calls.attend import Attention
from paged_kv.calls.plan import AttentionPlan, attention_options, plan_dtypes
from paged_kv.calls.results import Results
from paged_kv.calls.table import Table
from paged_kv.errors import ContractError
from paged_kv.flashinfer.kernel_arguments import refuse_unsupported
from paged_kv.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, PrefillWrapper

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]


class BatchAttention(PrefillWrapper):
    """Attention of a mixed batch over a paged KV cache, whose lengths are given in tokens: `plan` once, `run` for every
    layer. Threads may share one.

    Args:
        kv_layout: "NHD" or "HND", of the caches that `run` gets.
        device: Accepted, without effect: a run takes place where its arrays lie.
    """

    def __init__(self, kv_layout: str = "NHD", device: Any = "cuda") -> None:
        del device
        super().__init__(kv_layout)

    def plan(
        self,
        qo_indptr: SupportsDLPack,
        kv_indptr: SupportsDLPack,
        kv_indices: SupportsDLPack,
        kv_len_arr: SupportsDLPack,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: DTypeLike = "bfloat16",
        kv_data_type: DTypeLike = "bfloat16",
        use_profiler: bool = False,
    ) -> None:
        """Fixes the requests and everything else that the runs to come share. The arrays are copied; they lie on the
        host, for a cache on a GPU too.

        Args:
            qo_indptr: `[B + 1]`, from 0: the query rows of request b are `q[qo_indptr[b]:qo_indptr[b + 1]]`, its last
                tokens. Any integer dtype.
            kv_indptr: `[B + 1]`, from 0: request b owns the pages `kv_indices[kv_indptr[b]:kv_indptr[b + 1]]`.
            kv_indices: `[kv_indptr[B]]` page ids.
            kv_len_arr: `[B]` tokens of each request; pages past them are never read.
            num_qo_heads: Hq, a multiple of `num_kv_heads`.
            num_kv_heads: Hk.
            head_dim_qk, head_dim_vo: D and Dv, multiples of 8 up to 512.
            page_size: Tokens of a page.
            causal: Whether a row sees no token behind its own.
            sm_scale: Multiplies q . k; None is `1 / sqrt(D)`.
            logits_soft_cap: Makes a score x into `cap * tanh(x / cap)`; None and 0 are off.
            q_data_type, kv_data_type: The dtypes of q and o, and of the cache, as in decode's `plan`.
            use_profiler: Must be False.

        Raises:
            PageTableError: offsets or the page table are inconsistent, or a request has fewer pages than its tokens
                need. A page id that is not one of the cache's is found by `run`.
            ContractTypeError, ShapeError, ContractError: as `AttentionPlan` (`calls/plan.py`).

        Nothing changes, the former plan included, if an error is raised.
        """
        refuse_unsupported(use_profiler=use_profiler)
        plan = AttentionPlan(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            head_dim_name="head_dim_qk",
            head_dim_vo=head_dim_vo,
            page_size=page_size,
            **plan_dtypes(q_data_type, kv_data_type),
            pos_encoding_mode="NONE",
            options=attention_options(-1, logits_soft_cap, sm_scale, None, None),
        )
        table = Table.of_lengths(kv_indptr, kv_indices, kv_len_arr, page_size)
        self._replace_plan(plan, qo_indptr, table, (None, None), causal, None)

    def run(
        self,
        q: ArrayT,
        kv_cache: CacheArrays,
        out: ArrayT | None = None,
        lse: ArrayT | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: None = None,
        kv_cache_sf: None = None,
    ) -> tuple[ArrayT, ArrayT]:
        """Attention of the planned requests' query tokens.

        Args:
            q: `[R, Hq, D]`, R = `qo_indptr[B]`, of the planned dtype.
            kv_cache: As `paged_kv_cache` of the prefill wrapper over pages.
            out: `[R, Hq, Dv]` in the dtype of q: written, and returned as o.
            lse: `[R, Hq]` float32: written, and returned as lse.
            k_scale, v_scale: Calibration scales: a stored value times its scale is the meant one; None is 1.
            logits_soft_cap: Instead of the planned one, where not 0; then one must have been planned.
            profiler_buffer, kv_cache_sf: Must be None.

        Returns:
            o `[R, Hq, Dv]` and the base-2 lse `[R, Hq]` float32, in the kind of `q`.

        Raises:
            ContractError, PageTableError, ContractTypeError, ShapeError: as the prefill wrapper's `run`.
        """
        refuse_unsupported(profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf)
        attention, requests = self._last_plan.of_call("run")
        planned = attention.plan.options
        options = replace(planned, logits_soft_cap=0.0 if logits_soft_cap is None else logits_soft_cap)
        if options.logits_soft_cap and not planned.logits_soft_cap:
            raise ContractError(f"logits_soft_cap: expected 0, as none was planned, got {logits_soft_cap}")
        if options.logits_soft_cap and options != planned:
            attention = Attention(replace(attention.plan, options=options))
        rows, scales, results = requests.rows, (None, k_scale, v_scale), Results(True, out, lse)
        o_and_lse: tuple[ArrayT, ArrayT] = attention.over_pages(rows, q, kv_cache, self._kv_layout, scales, results)
        return o_and_lse


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """The prefill wrapper over pages whose `run(q, paged_kv_cache, sinks, sm_scale)` takes sinks by position too:
    `[Hq]` natural-log logits that join the denominator and the lse, and after them an sm_scale instead of the planned
    one. Either may be left out.

    Args:
        float_workspace_buffer, kv_layout, use_cuda_graph, backend: As in the prefill wrapper.
        qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf: So are these.
        custom_mask_buf, mask_indptr_buf: And these.
        pos_encoding_mode, use_fp16_qk_reduction, q_data_type, kv_data_type, head_dim_qk, head_dim_vo, window_left:
            Accepted, without effect: FlashInfer compiles its kernel for them. What counts is what `plan` says.
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
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: DTypeLike = "bfloat16",
        kv_data_type: DTypeLike = "bfloat16",
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        del pos_encoding_mode, use_fp16_qk_reduction, q_data_type, kv_data_type, head_dim_qk, head_dim_vo, window_left
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
            backend,
        )
        self._takes_sinks = True
