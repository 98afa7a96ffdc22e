"""The batch decode wrapper: FlashInfer's class, as `decode.py` says; import it from there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack, overload

from paged_kv.arguments import LARGEST_INDEX, integer
from paged_kv.arrays.types import ArrayT, PagedCache, SupportsDLPack
from paged_kv.calls.attend import Attention
from paged_kv.calls.kernel_arguments import check_skipped_softmax, refuse_given
from paged_kv.calls.paged_call import attend_paged
from paged_kv.decode_plan import DecodePlanner


class RunOptions(TypedDict, total=False):
    """The keyword arguments of `run`, which says what they are."""

    q_scale: float | None
    k_scale: float | None
    v_scale: float | None
    out: Any
    lse: Any
    enable_pdl: bool | None
    window_left: int | None
    sinks: SupportsDLPack | None
    q_len_per_req: int | None
    skip_softmax_threshold_scale_factor: float | None
    kv_cache_sf: None


class BatchDecodeWithPagedKVCacheWrapper(DecodePlanner):
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
        backend: Accepted; the name of one of FlashInfer's, without effect.
        jit_args: None: kernels of one's own are not compiled.

    Raises:
        ContractError: the layout is unknown; a buffer is missing, cannot be written, or shares memory with itself or
            another one; `jit_args` are given.
        ContractTypeError: a buffer is no array of these dtypes.
        ShapeError: a buffer is not 1-D, or the lengths of the buffers do not fit each other.
    """

    @overload
    def run(
        self,
        q: ArrayT,
        paged_kv_cache: PagedCache,
        *args: Any,
        return_lse: Literal[False] = False,
        **options: Unpack[RunOptions],
    ) -> ArrayT: ...
    @overload
    def run(
        self,
        q: ArrayT,
        paged_kv_cache: PagedCache,
        *args: Any,
        return_lse: Literal[True],
        **options: Unpack[RunOptions],
    ) -> tuple[ArrayT, ArrayT]: ...
    def run(
        self,
        q: Any,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: SupportsDLPack | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: None = None,
    ) -> Any:
        """Attention of the planned requests' query tokens; request b's last one stands at position L_b - 1.

        Args:
            q: `[R, Hq, D]`, of the planned dtype; R is `B * q_len_per_req`.
            paged_kv_cache: `[pages, 2, page_size, Hk, D]` (NHD) or `[pages, 2, Hk, page_size, D]` (HND), or a tuple
                (k, v) of such arrays without the 2, of the planned dtype. It need not be contiguous, but its last
                stride is 1. Slots that no request uses may hold anything, NaN included. The wrapper keeps the last
                run's cache alive until it runs over another or plans again.
            args, kv_cache_sf: Nothing: there are no kernels of one's own, and no NVFP4 caches.
            q_scale, k_scale, v_scale: Calibration scales: a stored value times its scale is the meant one; None is 1.
                A number, or a float array of one element on the host.
            out: `[R, Hq, D]` in the planned dtype of o: written, and returned as o.
            lse: `[R, Hq]` float32: written, and returned as lse. It may be given without `return_lse`.
            return_lse: Whether to return the lse as well.
            enable_pdl: Accepted, without effect.
            window_left: Instead of the planned one, for this run.
            sinks: `[Hq]` float32, float16 or bfloat16: natural-log logits that join the denominator, and the lse.
            q_len_per_req: Instead of the planned one, for this run.
            skip_softmax_threshold_scale_factor: None, or from 0 to 2^-25, without effect: no token is left out.

        Returns:
            o `[R, Hq, D]` in the planned dtype, or o and the base-2 lse `[R, Hq]` float32. A request without tokens has
            o = 0 and lse = -inf.

        Raises:
            ContractError: nothing was planned, a number is out of range, an argument would need another kernel, or
                `out` or `lse` cannot be written or shares memory with itself or another argument (`q` too).
            PageTableError: a page id is not one of the cache's, or the user's buffers hold an inconsistent page table.
            ContractTypeError, ShapeError: an array is not as planned.
        """
        del enable_pdl
        attention, rows = self._last_plan.of_call("run")
        if args or kv_cache_sf is not None or skip_softmax_threshold_scale_factor is not None:
            refuse_given(args=args, kv_cache_sf=kv_cache_sf)
            check_skipped_softmax(skip_softmax_threshold_scale_factor)
        number = attention.plan.q_len_per_req
        if q_len_per_req is not None:
            number = integer("q_len_per_req", q_len_per_req, 1, LARGEST_INDEX)
        if number != 1:
            rows = rows.repeated(number)
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
            sinks=sinks,
            window_left=window_left,
            buffers=self._last_plan.buffers,
        )

    def run_return_lse(
        self, q: ArrayT, paged_kv_cache: PagedCache, *args: Any, **options: Unpack[RunOptions]
    ) -> tuple[ArrayT, ArrayT]:
        """`run` with `return_lse=True`."""
        return self.run(q, paged_kv_cache, *args, return_lse=True, **options)

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
        rows, scales = rows.repeated(plan.q_len_per_req), (q_scale, k_scale, v_scale)
        return attend_paged(Attention(plan), rows, q, paged_kv_cache, self._kv_layout, scales, return_lse=return_lse)

    def forward_return_lse(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """`forward` with `return_lse=True`."""
        return self.forward(*args, **kwargs | {"return_lse": True})

    def end_forward(self) -> None:
        """Accepted, without effect, as in FlashInfer."""

    def __repr__(self) -> str:
        facts = [self._kv_layout, str(self._last_plan)]
        if (buffers := self._last_plan.buffers) is not None:
            facts.insert(1, f"page table of {buffers.batch_size} requests in the user's buffers")
        return f"{type(self).__name__}({', '.join(facts)})"
