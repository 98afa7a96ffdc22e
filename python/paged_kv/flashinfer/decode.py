"""Decode attention: the names, argument order and meaning of FlashInfer's `decode` module.

Letters in shapes: B requests, Hq query heads, Hk KV heads, D head dimension, L tokens of one request.

Arrays are torch, NumPy (`ml_dtypes` for bfloat16 and float8), JAX or MAX arrays in the memory of the CPU, or torch and
MAX arrays on one GPU (`arrays.gpu`); they come in without a copy, and results have the kind of `q` and lie beside it.
Queries are float32, float16 or bfloat16; K and V have the dtype of the queries, or are float8_e4m3fn or float8_e5m2
under any of the three. Queries of either float8 are widened, exactly, to the dtype of K, or to bfloat16. Scores,
softmax and sums are float32 whatever the storage; on the CPU, what overflows is computed again in float64
(`mojo_ops/attention/README.md`). D is a multiple of 8 up to 512; every group size Hq / Hk and every page_size is
supported.

Errors are `ContractTypeError` (a TypeError) for types and dtypes, and `ShapeError`, `PageTableError` and
`ContractError` (ValueErrors) for the rest; whenever one is raised, nothing was written. A process that was forked after
MAX ran in its parent has none of MAX's threads: calls there raise `ToolchainError`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack, overload

from paged_kv.arguments import LARGEST_INDEX, flag, integer
from paged_kv.arrays import devices
from paged_kv.arrays.dtypes import dtype_of
from paged_kv.arrays.host import as_indices
from paged_kv.arrays.pages import Pages, token_views
from paged_kv.arrays.types import ArrayDevice, ArrayT, CacheArrays, DTypeLike, SupportsDLPack
from paged_kv.calls.attend import Attention
from paged_kv.calls.block_tables import checked_lengths, one_table
from paged_kv.calls.buffers import FixedBuffers
from paged_kv.calls.draft_rows import draft_counts, draft_rows
from paged_kv.calls.plan import AttentionPlan, attention_options, plan_dtypes
from paged_kv.calls.planned import LastPlan
from paged_kv.calls.results import Results
from paged_kv.calls.rows import DecodeBatch, Rows
from paged_kv.calls.scalars import checked_number
from paged_kv.calls.table import Table
from paged_kv.errors import ShapeError
from paged_kv.flashinfer.kernel_arguments import check_backend, check_skipped_softmax, refuse_unsupported
from paged_kv.flashinfer.mla_decode import BatchDecodeMlaWithPagedKVCacheWrapper
from paged_kv.flashinfer.wrapper import TABLE_BUFFERS, PlannedWrapper
from paged_kv.options import AttentionOptions

__all__ = [
    "BatchDecodeMlaWithPagedKVCacheWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
]


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


class BatchDecodeWithPagedKVCacheWrapper(PlannedWrapper[Attention, DecodeBatch, Rows]):
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

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: SupportsDLPack | None = None,
        paged_kv_indices_buffer: SupportsDLPack | None = None,
        paged_kv_last_page_len_buffer: SupportsDLPack | None = None,
        backend: str = "auto",
        jit_args: None = None,
    ) -> None:
        del float_workspace_buffer
        check_backend(backend)
        refuse_unsupported(jit_args=jit_args)
        self._use_tensor_cores = use_tensor_cores
        arrays = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        fixed: FixedBuffers[DecodeBatch, Rows] | None = None
        if flag("use_cuda_graph", use_cuda_graph):
            fixed = FixedBuffers([TABLE_BUFFERS], arrays, "the page table lives")
        super().__init__(kv_layout, LastPlan(fixed))

    @property
    def use_tensor_cores(self) -> bool:
        """As it was given; without effect."""
        return self._use_tensor_cores

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
        o_data_type: DTypeLike | None = None,
        data_type: DTypeLike | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: SupportsDLPack | None = None,
        seq_lens: SupportsDLPack | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
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
            q_data_type: The dtype of q: float32, float16 or bfloat16, as a name or a torch, NumPy or MAX dtype; or
                float8_e4m3fn or float8_e5m2, which is widened, exactly, to the dtype of the cache, or to bfloat16.
            kv_data_type: The dtype of the cache: that of q, or either float8; any of the five under float8 queries; or
                int8 or int4, codes with scales, in which elements of V below 3e-32 may count as 0
                (docs/quantised-cache.md). None is `q_data_type`.
            o_data_type: The dtype of o: any of the five; None is `q_data_type`. It is rounded once, from float32.
            data_type: Deprecated: the dtype of the cache where `kv_data_type` is None, and that of q unless it is
                float8.
            sm_scale: Multiplies q . k; None is `1 / sqrt(D)`.
            rope_scale: Divides the rotary frequencies; None is 1. The fastest, `max(1, 1 / rope_theta) / rope_scale`,
                is at most 1000 radians a token.
            rope_theta: Base of the rotary embedding; None is 1e4.
            non_blocking, fixed_split_size, disable_split_kv: Accepted, without effect.
            block_tables: `[B, n]` page ids, in their first entries those of `indices`. They and `seq_lens` may be left
                out: they repeat the page table.
            seq_lens: `[B]` tokens of each request.
            q_len_per_req: Query tokens of each request, its last ones: row i of n sees `L - n + i + 1` tokens. Requests
                without tokens have rows that see nothing. It is fixed, as the batch is, where the page table lives in
                the user's buffers.
            window_right: 0: no query sees tokens after its own.

        Raises:
            PageTableError: the page table is inconsistent, or a request has fewer tokens than query rows. A page id
                that is not one of the cache's is found by `run`.
            ContractTypeError, ShapeError, ContractError: as `AttentionPlan` (`calls/plan.py`); or, where the page table
                lives in the user's buffers, another batch size or q_len_per_req, or more indices than fit.

        Options are float32: 0, or from 1.2e-38 to 3.4e38 in magnitude; so is the product of sm_scale and a run's
        q_scale and k_scale. Nothing changes, the former plan included, if an error is raised.
        """
        del non_blocking, fixed_split_size, disable_split_kv
        refuse_unsupported(window_right=window_right)
        plan = AttentionPlan(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            pos_encoding_mode=pos_encoding_mode,
            options=attention_options(window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
            q_len_per_req=q_len_per_req,
            **plan_dtypes(q_data_type, kv_data_type, o_data_type, data_type),
        )
        table = Table.csr(indptr, indices, last_page_len, page_size)
        table.check_same(block_tables, seq_lens)
        self._last_plan.replace(Attention(plan), DecodeBatch(table, plan.q_len_per_req))

    begin_forward = plan

    @overload
    def run(
        self,
        q: ArrayT,
        paged_kv_cache: CacheArrays,
        *args: Any,
        return_lse: Literal[False] = False,
        **options: Unpack[RunOptions],
    ) -> ArrayT: ...
    @overload
    def run(
        self,
        q: ArrayT,
        paged_kv_cache: CacheArrays,
        *args: Any,
        return_lse: Literal[True],
        **options: Unpack[RunOptions],
    ) -> tuple[ArrayT, ArrayT]: ...
    def run(
        self,
        q: Any,
        paged_kv_cache: CacheArrays,
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

        Examples:
            >>> import numpy as np
            >>> wrapper = BatchDecodeWithPagedKVCacheWrapper(None, "NHD")
            >>> indptr, pages, last = (np.array(x, np.int32) for x in ([0, 2, 3], [6, 3, 1], [2, 4]))
            >>> wrapper.plan(indptr, pages, last, 4, 2, 8, 4, q_data_type="float32")
            >>> cache = np.ones((8, 2, 4, 2, 8), np.float32)  # every value is 1, and so is each average
            >>> o, lse = wrapper.run(np.zeros((2, 4, 8), np.float32), cache, return_lse=True)
            >>> o.shape, float(o.min()), np.exp2(lse[:, 0]).round().tolist()  # 6 and 4 tokens
            ((2, 4, 8), 1.0, [6.0, 4.0])
        """
        del enable_pdl
        attention, rows = self._last_plan.of_call("run")
        if args or kv_cache_sf is not None or skip_softmax_threshold_scale_factor is not None:
            refuse_unsupported(args=args, kv_cache_sf=kv_cache_sf)
            check_skipped_softmax(skip_softmax_threshold_scale_factor)
        number = attention.plan.q_len_per_req
        if q_len_per_req is not None:
            number = integer("q_len_per_req", q_len_per_req, 1, LARGEST_INDEX)
        if number != 1:
            rows = rows.repeated(number)
        return attention.over_pages(
            rows,
            q,
            paged_kv_cache,
            self._kv_layout,
            (q_scale, k_scale, v_scale),
            Results(return_lse, out, lse),
            sinks=sinks,
            window_left=window_left,
            buffers=self._last_plan.buffers,
        )

    def run_return_lse(
        self, q: ArrayT, paged_kv_cache: CacheArrays, *args: Any, **options: Unpack[RunOptions]
    ) -> tuple[ArrayT, ArrayT]:
        """`run` with `return_lse=True`."""
        return self.run(q, paged_kv_cache, *args, return_lse=True, **options)

    def forward(
        self,
        q: ArrayT,
        paged_kv_cache: CacheArrays,
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
        overrides: dict[str, Any] = {
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "sm_scale": sm_scale,
            "rope_scale": rope_scale,
            "rope_theta": rope_theta,
        }
        plan = attention.plan
        options = replace(plan.options, **{name: value for name, value in overrides.items() if value is not None})
        mode = plan.pos_encoding_mode if pos_encoding_mode is None else pos_encoding_mode
        plan = replace(plan, options=options, pos_encoding_mode=mode)
        rows, scales = rows.repeated(plan.q_len_per_req), (q_scale, k_scale, v_scale)
        results = Results(return_lse)
        return Attention(plan).over_pages(rows, q, paged_kv_cache, self._kv_layout, scales, results)

    def forward_return_lse(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """`forward` with `return_lse=True`."""
        return self.forward(*args, **kwargs | {"return_lse": True})


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The wrapper whose page table lives in the user's buffers, which fix the batch.

    A captured graph of FlashInfer's replays with whatever the buffers hold; here every `run` reads them.

    Args:
        workspace_buffer: Accepted, not kept.
        indptr_buffer, indices_buffer, last_page_len_buffer, kv_layout, use_tensor_cores: As in the other wrapper.
    """

    def __init__(
        self,
        workspace_buffer: Any,
        indptr_buffer: SupportsDLPack,
        indices_buffer: SupportsDLPack,
        last_page_len_buffer: SupportsDLPack,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            True,
            use_tensor_cores,
            indptr_buffer,
            indices_buffer,
            last_page_len_buffer,
        )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
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
    q_data_type: DTypeLike | None = None,
    kv_data_type: DTypeLike | None = None,
    data_type: DTypeLike | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: SupportsDLPack | None = None,
) -> None:
    """The wrapper's `plan`, under the name of FlashInfer's faster one: this `plan` copies nothing that it could spare.

    Args:
        self: The wrapper, which may have this function in place of its `plan`.
        q_data_type: None is `data_type`, and float16 where that is None too.
        global_override_indptr_cpu: `[B + 1]` or longer: instead of `indptr`, which may then lie on a GPU.

    The other arguments and what is raised: as of `plan`.
    """
    if q_data_type is None:
        q_data_type = "float16" if data_type is None else data_type
    if global_override_indptr_cpu is not None:
        offsets = as_indices(global_override_indptr_cpu, "global_override_indptr_cpu")
        indptr = offsets[: len(as_indices(last_page_len, "last_page_len")) + 1]
    BatchDecodeWithPagedKVCacheWrapper.plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode,
        window_left,
        logits_soft_cap,
        q_data_type,
        kv_data_type,
        data_type=data_type,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        non_blocking=non_blocking,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )


@overload
def single_decode_with_kv_cache(
    q: ArrayT,
    k: SupportsDLPack,
    v: SupportsDLPack,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: Literal[False] = False,
) -> ArrayT: ...
@overload
def single_decode_with_kv_cache(
    q: ArrayT,
    k: SupportsDLPack,
    v: SupportsDLPack,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    *,
    return_lse: Literal[True],
) -> tuple[ArrayT, ArrayT]: ...
def single_decode_with_kv_cache(
    q: ArrayT,
    k: SupportsDLPack,
    v: SupportsDLPack,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> ArrayT | tuple[ArrayT, ArrayT]:
    """Attention of one query token over one request's contiguous K and V, as FlashInfer's function of this name.

    Args:
        q: `[Hq, D]`.
        k, v: `[L, Hk, D]` (NHD) or `[Hk, L, D]` (HND), of one shape and dtype; they need not be contiguous, but
            their last stride is 1. The query stands at position L - 1.
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE", "ROPE_LLAMA" (q and the un-rotated k are rotated on the fly) or "ALIBI".
        use_tensor_cores: Accepted; the CPU has none.
        q_scale, k_scale, v_scale: Calibration scales of quantised q, k and v; None is 1.
        window_left: Keeps the last `window_left + 1` tokens; -1 keeps all.
        logits_soft_cap: Makes a score x into `cap * tanh(x / cap)`; None and 0 are off.
        sm_scale: Multiplies q . k; None is `1 / sqrt(D)`.
        rope_scale: Divides the rotary frequencies; None is 1.
        rope_theta: Base of the rotary embedding; None is 1e4.
        return_lse: Whether to return the lse as well.

    Returns:
        o `[Hq, D]` in the dtype of `q`, or o and the base-2 lse `[Hq]` float32. L = 0 gives o = 0, lse = -inf.

    Raises:
        ContractTypeError: a dtype or a pair of dtypes is not supported, or an argument has the wrong type.
        ShapeError: a rank, shape, head count or head_dim does not fit.
        ContractError: another value is out of range.
    """
    del use_tensor_cores
    wants_lse = flag("return_lse", return_lse)
    device = devices.device_of(q=q, k=k, v=v)
    query = device.view(q, "q")
    if query.ndim != 2:
        raise ShapeError(f"q: expected [num_qo_heads, head_dim], got shape {list(query.shape)}")
    keys, values = token_views(device, (k, v), kv_layout)
    length, kv_heads, head_dim = keys.shape
    if query.shape[0] % max(kv_heads, 1):
        raise ShapeError(f"q: expected a multiple of k's {kv_heads} heads, got {query.shape[0]}")
    if head_dim != query.shape[1]:
        raise ShapeError(f"k: expected q's head_dim {query.shape[1]}, got {head_dim}")
    attention = Attention(
        AttentionPlan(
            num_qo_heads=query.shape[0],
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=max(length, 1),
            q_dtype=device.dtype(query),
            kv_dtype=device.dtype(keys),
            pos_encoding_mode=pos_encoding_mode,
            options=attention_options(window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
            dtype_names=("q: dtype", "k: dtype"),
        )
    )
    scales = (q_scale, k_scale, v_scale)
    pages, rows = Pages.of_one(keys, values, device), Rows.of_decode(Table.of_one(length))
    o, lse = attention.run(query[None], pages, rows, scales)
    result = device.like(q, o[0])
    return (result, device.like(q, lse[0])) if wants_lse else result


def trtllm_batch_decode_with_kv_cache(
    query: ArrayT,
    kv_cache: CacheArrays,
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
    """Attention of each request's last tokens over a paged cache with a dense page table, which each call checks.

    Args:
        query: `[R, Hq, D]`, request after request: float32, float16 or bfloat16, or either float8, which is widened.
        kv_cache: `[pages, 2, Hk, page_size, D]` (HND) or `[pages, 2, page_size, Hk, D]` (NHD), or a tuple (k, v) of
            such arrays without the 2; with 1 in place of the 2, K and V are the same. Of the dtype of `query`, or
            float8; of any dtype under float8 queries.
        block_tables: `[B, n]` page ids on the host; what follows a request's last page may be anything, -1 included.
        seq_lens: `[B]` tokens of each request, the new ones included, on the host; `max_seq_len` at most.
        bmm1_scale: Multiplies q . k: sm_scale and the calibration scales of q and k. A number, or a float array of one
            element on the host; so are `bmm2_scale`, which multiplies o (v's calibration scale over o's), and
            `bmm1_scale_log2`, which is `bmm1_scale * log2(e)` in its place.
        window_left: Keeps the last `window_left + 1` tokens; -1 keeps all.
        out: `[R, Hq, D]`: written, and returned as o.
        out_dtype: The dtype of o; None: the dtype of `out`, else of `query`. It is rounded once, from float32.
        sinks: `[Hq]` natural-log logits that join the denominator, and the lse; or a list of one such array.
        kv_layout: "HND" or "NHD".
        q_len_per_req: Query rows of each request: row i of n sees `seq_lens[b] - n + i + 1` tokens. Without effect
            where `cum_seq_lens_q` is given.
        mask: `[B, q_len_per_req, 2 * ceil(q_len_per_req / 32)]` uint16, or `[R, ...]` with `cum_seq_lens_q`: bit j of a
            row, the lowest of its first entry first, says whether it sees the request's new token j; older tokens are
            seen. None: row i sees j <= i.
        max_q_len: At least the most rows of a request.
        cum_seq_lens_q: `[B + 1]`, from 0: request b has rows `cum_seq_lens_q[b]` to `cum_seq_lens_q[b + 1]` of `query`.
        uses_shared_paged_kv_idx: False: `block_tables` is `[B, 2, n]`, the pages of K and those of V, whose ids differ
            by one number for all.
        lse: `[R, Hq]` float32: written, and returned as lse where `return_lse` is true.
        skip_softmax_threshold_scale_factor: None, or from 0 to 2^-25, without effect: no token is left out.

    The other arguments choose, feed or tune NVIDIA's kernels: `kernel_arguments` says what each may be. `o_scale` is
    without effect, as `bmm2_scale` has it already.

    Returns:
        o `[R, Hq, D]`, or o and the base-2 lse `[R, Hq]` float32. A request without tokens has o = 0 and lse = -inf.

    Raises:
        ContractTypeError, ShapeError: an argument has a type, dtype or shape that is not supported, or does not fit.
        PageTableError: a page id is not one of the cache's; a length is negative, or over the request's entries; a
            request has fewer tokens than rows.
        ContractError: another value is out of range, or would need another kernel; `out` or `lse` cannot be written, or
            shares memory with itself or another argument.
    """
    del workspace_buffer, multi_ctas_kv_counter_buffer, enable_pdl, o_scale, bf16q_fp8kv_transform_mode
    del request_order, request_order_plan
    check_backend(backend)
    check_skipped_softmax(skip_softmax_threshold_scale_factor)
    refuse_unsupported(o_sf_scale=o_sf_scale, o_sf_vec_size=o_sf_vec_size, kv_cache_sf=kv_cache_sf)
    refuse_unsupported(cp_world=cp_world, cp_rank=cp_rank, causal_seqlens_kv_global=causal_seqlens_kv_global)
    refuse_unsupported(enable_block_sparse_attention=enable_block_sparse_attention)
    sinks = one_sink(sinks)
    device = devices.device_of(query=query, kv_cache=kv_cache, out=out, lse=lse, sinks=sinks)
    q, pages = device.view(query, "query"), dense_pages(device, kv_cache, kv_layout)
    check_query(q, pages)
    counts, batch = draft_counts(len(q), q_len_per_req, max_q_len, cum_seq_lens_q)
    lengths = checked_lengths(seq_lens, batch, integer("max_seq_len", max_seq_len, 0, LARGEST_INDEX))
    if not flag("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx):
        block_tables, pages = one_table(block_tables, lengths, pages)
    rows = draft_rows(Table.padded(block_tables, lengths, pages.page_size), counts, mask)
    options = attention_options(window_left, None, softmax_scale(bmm1_scale, bmm1_scale_log2), None, None)
    plan = dense_plan(q, pages, options, out, out_dtype)
    scales = (None, None, checked_number(bmm2_scale, "bmm2_scale"))
    return Attention(plan).over(rows, query, pages, scales, Results(return_lse, out, lse), sinks=sinks, name="query")


def one_sink(sinks: Any) -> Any:
    """The array of sinks, which may come in a list."""
    return sinks[0] if isinstance(sinks, list | tuple) and len(sinks) == 1 else sinks


def check_query(q: Any, pages: Pages) -> None:
    """Refuses queries that are not `[R, Hq, D]` of the cache's D.

    Raises:
        ShapeError: as said.
    """
    if q.ndim != 3:
        raise ShapeError(f"query: expected [R, num_qo_heads, head_dim], got shape {list(q.shape)}")
    if q.shape[2] != pages.k.shape[3]:
        raise ShapeError(f"query: expected kv_cache's head_dim {pages.k.shape[3]}, got {q.shape[2]}")


def dense_plan(q: Any, pages: Pages, options: AttentionOptions, out: Any, out_dtype: DTypeLike | None) -> AttentionPlan:
    """The plan of one call over pages, with the dtype of `out` where it and not `out_dtype` says that of o."""
    device = pages.device
    o_dtype = device.dtype(q if out is None else device.view(out, "out"))
    return AttentionPlan(
        num_qo_heads=q.shape[1],
        num_kv_heads=pages.k.shape[2],
        head_dim=q.shape[2],
        page_size=pages.page_size,
        q_dtype=device.dtype(q),
        kv_dtype=pages.dtype,
        pos_encoding_mode="NONE",
        options=options,
        o_dtype=o_dtype if out_dtype is None else dtype_of(out_dtype, "out_dtype"),
        dtype_names=("query: dtype", "kv_cache: dtype"),
    )


def dense_pages(device: ArrayDevice, kv_cache: CacheArrays, kv_layout: str) -> Pages:
    """The pages of a cache; K and V are one array where dimension 1 is 1."""
    if not isinstance(kv_cache, tuple | list):
        view = device.view(kv_cache, "kv_cache")
        if view.ndim == 5 and view.shape[1] == 1:
            kv_cache = view[:, 0], view[:, 0]
    return Pages.of(kv_cache, kv_layout, "kv_cache", device=device)


def softmax_scale(bmm1_scale: Any, bmm1_scale_log2: Any = None) -> float:
    """Return what multiplies q . k."""
    if bmm1_scale_log2 is None:
        return checked_number(bmm1_scale, "bmm1_scale")
    return checked_number(bmm1_scale_log2, "bmm1_scale_log2") * math.log(2)
