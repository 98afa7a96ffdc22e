"""The batch decode wrapper: FlashInfer's class, as `decode.py` says; import it from there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, overload

import numpy as np

from paged_kv.arguments import flag
from paged_kv.arrays import devices
from paged_kv.arrays.cache_storage import check_layout, paged_views
from paged_kv.arrays.dtypes import dtype_of
from paged_kv.arrays.types import ArrayT, DTypeLike, PagedCache, SupportsDLPack
from paged_kv.calls.attend import Attention, Scales
from paged_kv.calls.buffers import PageTableBuffers
from paged_kv.calls.page_table import PageTable
from paged_kv.calls.plan import AttentionPlan, attention_options, output_views
from paged_kv.calls.planned import LastPlan
from paged_kv.calls.rows import Rows

_FLOAT32 = np.dtype(np.float32)


class BatchDecodeWithPagedKVCacheWrapper:
    """Attention of one query token a request over a paged KV cache: `plan` once, `run` for every layer.

    Threads may share a wrapper. A run follows one plan whole: the one in force when it began. The user's buffers below
    are the exception: while other code writes to them, or another wrapper over the same ones plans, no run may begin.

    Args:
        float_workspace_buffer: Accepted, not kept: the kernels take what they need from MAX. May be None.
        kv_layout: "NHD" or "HND", of the caches that `run` gets.
        use_cuda_graph: Keeps the page table in the three buffers below, of whatever kind: the batch is then fixed,
            `plan` copies into them and `run` reads them again each time, so that changes made to them in place count.
        use_tensor_cores: Accepted; the CPU has none.
        paged_kv_indptr_buffer: `[B + 1]` int32 or int64.
        paged_kv_indices_buffer: int32 or int64, long enough for the most page indices ever planned.
        paged_kv_last_page_len_buffer: `[B]` int32 or int64.

    Raises:
        ContractError: the layout is unknown; a buffer is missing, cannot be written, or shares memory with itself or
            another one.
        ContractTypeError: a buffer is no array of these dtypes.
        ShapeError: a buffer is not 1-D, or the lengths of the buffers do not fit each other.
    """

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: SupportsDLPack | None = None,
        paged_kv_indices_buffer: SupportsDLPack | None = None,
        paged_kv_last_page_len_buffer: SupportsDLPack | None = None,
    ) -> None:
        del float_workspace_buffer
        check_layout(kv_layout)
        self._kv_layout = kv_layout
        self._use_tensor_cores = use_tensor_cores
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        fixed = PageTableBuffers(*buffers) if flag("use_cuda_graph", use_cuda_graph) else None
        self._last_plan = LastPlan(Rows.of_decode, fixed)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the page table lives in the user's buffers and the batch is fixed."""
        return self._last_plan.buffers is not None

    @property
    def use_tensor_cores(self) -> bool:
        """As it was given; without effect."""
        return self._use_tensor_cores

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Accepted, without effect: the CPU needs no workspace. The plan stays."""

    def plan(
        self,
        indptr: SupportsDLPack,
        indices: SupportsDLPack,
        last_page_len: SupportsDLPack,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: DTypeLike = "float16",
        kv_data_type: DTypeLike | None = None,
        data_type: DTypeLike | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = False,
    ) -> None:
        """Fixes the requests and everything else that the runs to come share. The arrays are copied; they may be the
        user's buffers of `use_cuda_graph` themselves.

        Give the page table as arrays on the host, for a cache on a GPU too: it is checked, and its tables are made,
        there; a run copies them to the device once and reads nothing back. Arrays on a GPU are refused here, since
        reading them would wait for the device: `indptr.cpu()` says that the wait is meant.

        Args:
            indptr: `[B + 1]`, from 0: request b owns `indices[indptr[b]:indptr[b + 1]]`. Any integer dtype.
            indices: `[indptr[B]]` page ids.
            last_page_len: `[B]`: tokens in each request's last page, from 1 to page_size; of a request without pages,
                0 or anything else up to page_size.
            num_qo_heads: Hq, a multiple of `num_kv_heads`.
            num_kv_heads: Hk.
            head_dim: D, a multiple of 8 up to 512.
            page_size: Tokens of a page.
            pos_encoding_mode: "NONE", "ROPE_LLAMA" (q and the un-rotated keys are rotated on the fly) or "ALIBI".
            window_left: Keeps the last `window_left + 1` tokens; -1 keeps all.
            logits_soft_cap: Makes a score x into `cap * tanh(x / cap)`; None and 0 are off.
            q_data_type: Of q and o: float32, float16 or bfloat16, as a name or a torch, NumPy or MAX dtype.
            kv_data_type: Of the cache: that of q, or float8_e4m3fn or float8_e5m2. None is `q_data_type`.
            data_type: Deprecated: sets both of the former, except for a `kv_data_type` that is given.
            sm_scale: Multiplies q . k; None is `1 / sqrt(D)`.
            rope_scale: Divides the rotary frequencies; None is 1. The fastest, `max(1, 1 / rope_theta) / rope_scale`,
                is at most 1000 radians a token.
            rope_theta: Base of the rotary embedding; None is 1e4.
            non_blocking: Accepted, without effect.

        Raises:
            PageTableError: the page table is inconsistent. A page id that is not one of the cache's is found by `run`.
            ContractTypeError, ShapeError, ContractError: as `AttentionPlan` (`calls/plan.py`); or, where the page table
                lives in the user's buffers, another batch size, or more indices than fit.

        Options are float32: 0, or from 1.2e-38 to 3.4e38 in magnitude; so is the product of sm_scale and a run's
        q_scale and k_scale. Nothing changes, the former plan included, if an error is raised.
        """
        del non_blocking
        if data_type is not None:
            q_data_type = data_type
        q_dtype = dtype_of(q_data_type, "q_data_type" if data_type is None else "data_type")
        plan = AttentionPlan(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            q_dtype=q_dtype,
            kv_dtype=q_dtype if kv_data_type is None else dtype_of(kv_data_type, "kv_data_type"),
            pos_encoding_mode=pos_encoding_mode,
            options=attention_options(window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
        )
        for name, array in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
            devices.require_host(array, name, "plan takes the page table on the host")
        table = PageTable.of(indptr, indices, last_page_len, page_size)
        self._last_plan.replace(Attention(plan), table)

    begin_forward = plan

    @overload
    def run(
        self,
        q: ArrayT,
        paged_kv_cache: PagedCache,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: Literal[False] = False,
        out: ArrayT | None = None,
        lse: ArrayT | None = None,
        sinks: SupportsDLPack | None = None,
    ) -> ArrayT: ...
    @overload
    def run(
        self,
        q: ArrayT,
        paged_kv_cache: PagedCache,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: Literal[True] = ...,
        out: ArrayT | None = None,
        lse: ArrayT | None = None,
        sinks: SupportsDLPack | None = None,
    ) -> tuple[ArrayT, ArrayT]: ...
    def run(
        self,
        q: ArrayT,
        paged_kv_cache: PagedCache,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
        out: ArrayT | None = None,
        lse: ArrayT | None = None,
        sinks: SupportsDLPack | None = None,
    ) -> ArrayT | tuple[ArrayT, ArrayT]:
        """Attention of the planned requests' query tokens; request b's stands at position L_b - 1.

        Args:
            q: `[B, Hq, D]`, of the planned dtype.
            paged_kv_cache: `[pages, 2, page_size, Hk, D]` (NHD) or `[pages, 2, Hk, page_size, D]` (HND), or a tuple
                (k, v) of such arrays without the 2, of the planned dtype. It need not be contiguous, but its last
                stride is 1. Slots that no request uses may hold anything, NaN included. The wrapper keeps the last
                run's cache alive until it runs over another or plans again.
            q_scale, k_scale, v_scale: Calibration scales: a stored value times its scale is the meant one; None is 1.
            return_lse: Whether to return the lse as well.
            out: `[B, Hq, D]` in the dtype of `q`: written, and returned as o.
            lse: `[B, Hq]` float32: written, and returned as lse. It may be given without `return_lse`.
            sinks: `[Hq]` float32, float16 or bfloat16: natural-log logits that join the denominator, and the lse.

        Returns:
            o `[B, Hq, D]` in the dtype of `q`, or o and the base-2 lse `[B, Hq]` float32. A request without tokens has
            o = 0 and lse = -inf.

        Raises:
            ContractError: nothing was planned, a number is out of range, or `out` or `lse` cannot be written or shares
                memory with itself or another argument (`q` too).
            PageTableError: a page id is not one of the cache's, or the user's buffers hold an inconsistent page table.
            ContractTypeError, ShapeError: an array is not as planned.
        """
        attention, rows = self._last_plan.of_call("run")
        scales = (q_scale, k_scale, v_scale)
        return self._run(attention, rows, q, paged_kv_cache, scales, return_lse, out, lse, sinks)

    def run_return_lse(
        self,
        q: ArrayT,
        paged_kv_cache: PagedCache,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: ArrayT | None = None,
        lse: ArrayT | None = None,
        sinks: SupportsDLPack | None = None,
    ) -> tuple[ArrayT, ArrayT]:
        """`run` with `return_lse=True`."""
        return self.run(q, paged_kv_cache, q_scale, k_scale, v_scale, True, out, lse, sinks)

    def forward(
        self,
        q: ArrayT,
        paged_kv_cache: PagedCache,
        pos_encoding_mode: str | None = None,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int | None = None,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> ArrayT | tuple[ArrayT, ArrayT]:
        """FlashInfer's older `run`: options that are given replace the planned ones, for this call alone."""
        attention, rows = self._last_plan.of_call("forward")
        given: dict[str, Any] = {
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "sm_scale": sm_scale,
            "rope_scale": rope_scale,
            "rope_theta": rope_theta,
        }
        plan = attention.plan
        options = replace(plan.options, **{name: value for name, value in given.items() if value is not None})
        plan = replace(plan, options=options, pos_encoding_mode=pos_encoding_mode or plan.pos_encoding_mode)
        return self._run(Attention(plan), rows, q, paged_kv_cache, (q_scale, k_scale, v_scale), return_lse)

    def forward_return_lse(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """`forward` with `return_lse=True`."""
        return self.forward(*args, **kwargs | {"return_lse": True})

    def end_forward(self) -> None:
        """Accepted, without effect, as in FlashInfer."""

    def _run(
        self,
        attention: Attention,
        rows: Rows,
        q: Any,
        paged_kv_cache: Any,
        scales: Scales,
        return_lse: bool,
        out: Any = None,
        lse: Any = None,
        sinks: Any = None,
    ) -> Any:
        plan, wants_lse = attention.plan, flag("return_lse", return_lse)
        device = devices.device_of(q=q, paged_kv_cache=paged_kv_cache, out=out, lse=lse, sinks=sinks)
        queries = device.view(q, "q")
        k, v = paged_views(paged_kv_cache, self._kv_layout, device=device)
        shape = (rows.count, plan.num_qo_heads, plan.head_dim)
        out_view = lse_view = None
        if out is not None or lse is not None:
            read = [("q", queries), ("paged_kv_cache", k), ("paged_kv_cache", v)]
            if sinks is not None:
                read.append(("sinks", device.view(sinks, "sinks")))
            if (buffers := self._last_plan.buffers) is not None:
                read += buffers.on(device)
            outputs = (("out", out, shape, plan.result_dtype), ("lse", lse, shape[:2], _FLOAT32))
            out_view, lse_view = output_views(device, outputs, read)
        o, sums = attention.run(device, queries, k, v, rows, scales, sinks)
        if out_view is not None:
            device.write(out_view, o)
        if lse_view is not None:
            device.write(lse_view, sums)
        o = device.like(q, o) if out is None else out
        if not wants_lse:
            return o
        return o, device.like(q, sums) if lse is None else lse

    def __repr__(self) -> str:
        facts = [self._kv_layout, str(self._last_plan)]
        if (buffers := self._last_plan.buffers) is not None:
            facts.insert(1, f"page table of {buffers.batch_size} requests in the user's buffers")
        return f"{type(self).__name__}({', '.join(facts)})"
