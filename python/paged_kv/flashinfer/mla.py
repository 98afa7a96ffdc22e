"""Latent attention (MLA) over a paged, compressed KV cache: FlashInfer's `mla` module on any arrays.

Letters in shapes: B requests, R query rows, H query heads; Dckv and Dkpe are the widths of a token's latent vector and
of its rotary part. The up-projection of K was applied to the queries (`q_nope`) before, that of V is applied to the
output after. `page.append_paged_mla_kv_cache` fills the cache. Arrays are those that `page` takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from paged_kv.arguments import LARGEST_INDEX, flag, integer, one_of
from paged_kv.arrays import devices
from paged_kv.arrays.dtypes import dtype_of
from paged_kv.arrays.types import DTypeLike, SupportsDLPack
from paged_kv.calls.buffers import Buffer, FixedBuffers
from paged_kv.calls.latent import LatentArrays, LatentAttention, LatentBatch, LatentPlan, csr_of_dense, rows_of_dense
from paged_kv.calls.planned import LastPlan
from paged_kv.calls.results import Results
from paged_kv.calls.rows import Rows
from paged_kv.errors import ContractError, ContractTypeError, PageTableError, ShapeError
from paged_kv.flashinfer.kernel_arguments import check_backend, check_skipped_softmax, refuse_unsupported
from paged_kv.options import FLOAT8_DTYPES, LatentOptions

__all__ = ["BatchMLAPagedAttentionWrapper", "MLAPlanMetadata"]

_BUFFERS = (
    Buffer("qo_indptr", "kv_len_arr", extra=1),
    Buffer("kv_indptr", "kv_len_arr", extra=1),
    Buffer("kv_indices", "kv_indices", extra=None),
    Buffer("kv_len_arr", "kv_len_arr"),
)

_DEEPSEEK_SCALE = (128 + 64) ** -0.5
"""The scale of scores in FlashInfer's backend "cutlass", which plans nothing."""


@dataclass(frozen=True, eq=False)
class MLAPlanMetadata:
    """The requests of a plan: offsets and lists of pages (`csr`), a dense page table (`dense`), or both (`dual`)."""

    qo_indptr: Any = None
    kv_indptr: Any = None
    kv_indices: Any = None
    kv_len_arr: Any = None
    cum_seq_lens_q: Any = None
    block_tables: Any = None
    seq_lens: Any = None
    max_q_len: int | None = None
    """Without effect."""

    @classmethod
    def csr(cls, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any) -> MLAPlanMetadata:
        """As the arguments of `plan` by these names."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls, cum_seq_lens_q: Any, block_tables: Any, seq_lens: Any, max_q_len: int | None = None
    ) -> MLAPlanMetadata:
        """As the arguments of `plan` by these names."""
        return cls(None, None, None, None, cum_seq_lens_q, block_tables, seq_lens, max_q_len)

    @classmethod
    def dual(
        cls,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any,
        kv_len_arr: Any,
        *,
        cum_seq_lens_q: Any,
        block_tables: Any,
        seq_lens: Any,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Both, which must say the same."""
        dense = (cum_seq_lens_q, block_tables, seq_lens, max_q_len)
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr, *dense)


class BatchMLAPagedAttentionWrapper:
    """Latent attention of query rows over a paged cache of compressed K and V: `plan` once, `run` for every layer.

    Threads may share a wrapper, as they may share `BatchDecodeWithPagedKVCacheWrapper`.

    Args:
        float_workspace_buffer: Accepted, not kept. May be None.
        use_cuda_graph: Keeps the requests in the four buffers below: the batch is then fixed, `plan` copies into them
            and `run` reads them again each time.
        qo_indptr, kv_indptr: `[B + 1]` int32 or int64.
        kv_indices: int32 or int64, long enough for the most page ids ever planned.
        kv_len_arr: `[B]` int32 or int64.
        backend: Accepted, without effect; but for "cutlass", with which `run` takes `kv_len` and `page_table`.

    Raises:
        ContractError: a buffer is missing, cannot be written, or shares memory with itself or another one.
        ContractTypeError: `backend` is no str; a buffer is no array of these dtypes.
        ShapeError: a buffer is not 1-D, or the lengths of the buffers do not fit each other.
    """

    def __init__(
        self,
        float_workspace_buffer: Any,
        use_cuda_graph: bool = False,
        qo_indptr: SupportsDLPack | None = None,
        kv_indptr: SupportsDLPack | None = None,
        kv_indices: SupportsDLPack | None = None,
        kv_len_arr: SupportsDLPack | None = None,
        backend: str = "auto",
    ) -> None:
        del float_workspace_buffer
        check_backend(backend)
        self._is_cutlass = backend == "cutlass"
        fixed: FixedBuffers[LatentBatch, LatentBatch] | None = None
        if flag("use_cuda_graph", use_cuda_graph):
            fixed = FixedBuffers([_BUFFERS], (qo_indptr, kv_indptr, kv_indices, kv_len_arr), "the requests live")
        self._last_plan: LastPlan[LatentAttention, LatentBatch, LatentBatch] = LastPlan(fixed)

    def plan(
        self,
        qo_indptr: SupportsDLPack | None = None,
        kv_indptr: SupportsDLPack | None = None,
        kv_indices: SupportsDLPack | None = None,
        kv_len_arr: SupportsDLPack | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: DTypeLike | None = None,
        kv_data_type: DTypeLike | None = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: SupportsDLPack | None = None,
        block_tables: SupportsDLPack | None = None,
        seq_lens: SupportsDLPack | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: DTypeLike | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Fixes the requests and everything else that the runs to come share. The index arrays are copied, and lie on
        the host.

        Args:
            qo_indptr: `[B + 1]`, from 0: request b's query rows are `qo_indptr[b]` to `qo_indptr[b + 1]`.
            kv_indptr: `[B + 1]` or longer, from 0: request b owns the pages
                `kv_indices[kv_indptr[b]:kv_indptr[b + 1]]`.
            kv_indices: `[kv_indptr[B]]` page ids, or more.
            kv_len_arr: `[B]`: the tokens of each request, from 0 to what its pages hold.
            num_heads: H.
            head_dim_ckv: Dckv, a multiple of 8 up to 512.
            head_dim_kpe: Dkpe, a multiple of 8 up to 512, or 0.
            page_size: Tokens of a page.
            causal: Whether the rows of a request are its last tokens, and none sees a token behind its own. With fewer
                tokens than rows, the first rows see nothing.
            sm_scale: Multiplies q . k: `1 / sqrt(D)` of the heads before compression.
            q_data_type, kv_data_type: The dtypes of the queries and of the cache, which has q's dtype or float8. Float8
                queries are widened, exactly.
            metadata: Instead of the index arrays: `MLAPlanMetadata.csr`, `.dense` or `.dual`.
            cum_seq_lens_q, block_tables, seq_lens: `[B + 1]`, `[B, n]` page ids and `[B]` tokens: a dense page table
                instead of the first four arrays.
            output_dtype: The dtype of o: float32, float16 or bfloat16; None is q's.
            output_scale: Must be "none", and `use_profiler` and `skip_softmax` False.
            max_q_len, query_layout, kv_cache_layout, lse_mode, scale_mode, enable_pdl, use_sinks: Without
                effect: a run says itself how its arrays lie and what it returns. Scales are numbers, so that
                `scale_mode` is not "bmm-scalar" or "bmm-tensor".

        Raises:
            PageTableError: offsets or lengths are inconsistent. A page id that is not one of the cache's is found by
                `run`.
            ContractTypeError, ShapeError, ContractError: an argument is missing, of another type or out of range; or
                the requests do not fit the user's buffers.

        Nothing changes, the former plan included, if an error is raised.
        """
        del enable_pdl, use_sinks
        for name, value, legal in (
            ("query_layout", query_layout, (None, "packed", "split")),
            ("kv_cache_layout", kv_cache_layout, (None, "packed", "split")),
            ("lse_mode", lse_mode, ("none", "base2", "basee")),
            ("scale_mode", scale_mode, ("default", "kv-per-tensor")),
        ):
            one_of(name, value, legal)
        refuse_unsupported(output_scale=output_scale, use_profiler=use_profiler, skip_softmax=skip_softmax)
        if sm_scale is None or causal is None:
            raise ContractError(f"{'sm_scale' if sm_scale is None else 'causal'}: expected a value, got None")
        q_dtype = dtype_of(q_data_type, "q_data_type")
        plan = LatentPlan(
            num_heads=cast(int, num_heads),
            head_dim_ckv=cast(int, head_dim_ckv),
            head_dim_kpe=cast(int, head_dim_kpe),
            page_size=cast(int, page_size),
            sm_scale=sm_scale,
            q_dtype=q_dtype,
            kv_dtype=q_dtype if kv_data_type is None else dtype_of(kv_data_type, "kv_data_type"),
            o_dtype=None if output_dtype is None else dtype_of(output_dtype, "output_dtype"),
        )
        flat = MLAPlanMetadata(
            qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len
        )
        arrays = index_arrays(flat, metadata, plan.page_size)
        batch = LatentBatch.of(arrays, plan.page_size, flag("causal", causal))
        self._last_plan.replace(LatentAttention(plan), batch)

    def run(
        self,
        q_nope: Any = None,
        q_pe: Any = None,
        ckv_cache: SupportsDLPack | None = None,
        kpe_cache: SupportsDLPack | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        profiler_buffer: None = None,
        kv_len: SupportsDLPack | None = None,
        page_table: SupportsDLPack | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: None = None,
        *,
        query: Any = None,
        kv_cache: SupportsDLPack | None = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: None = None,
        kpe_scale: float | None = None,
        sinks: SupportsDLPack | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: None = None,
        bmm2_scale: None = None,
    ) -> Any:
        """Attention of the planned requests' query rows.

        Args:
            q_nope: `[R, H, Dckv]`, R = `qo_indptr[B]`, of the planned dtype.
            q_pe: `[R, H, Dkpe]`, likewise.
            ckv_cache: `[pages, page_size, Dckv]`, of the planned dtype; any strides but the last, which is 1. Slots
                that no request uses may hold anything, NaN included.
            kpe_cache: `[pages, page_size, Dkpe]`, likewise.
            out: `[R, H, Dckv]` in the planned dtype of o: written, and returned as o.
            lse: `[R, H]` float32: written, and returned as lse. It may be given without `return_lse`.
            return_lse: Whether to return the lse as well.
            kv_len, page_table: `[B]` tokens and `[B, n]` page ids, with backend "cutlass" alone, and there instead of a
                plan: one row a request, over all its tokens, with a scale of `(128 + 64) ** -0.5`.
            return_lse_base_on_e: Whether the lse is a natural logarithm, else one of base 2.
            query: (q_nope, q_pe), or both parts in one array `[R, H, Dckv + Dkpe]`.
            kv_cache: (ckv_cache, kpe_cache), or `[pages, page_size, Dckv + Dkpe]`, or the same with one head,
                `[pages, 1, page_size, Dckv + Dkpe]`. It and `query` come instead of the first four arguments.
            ckv_scale, kpe_scale: Calibration scales of a float8 cache, positive: a stored value times its scale is the
                meant one. Both are needed there, and refused elsewhere.
            sinks: `[H]` float32, float16 or bfloat16: natural-log logits that join the denominator, and the lse.
            skip_softmax_threshold_scale_factor: None, or so small that it has no effect.
            profiler_buffer, o_scale, ckv_scale_arr, bmm1_scale, bmm2_scale: Must be None.

        Returns:
            o `[R, H, Dckv]` in the kind of the queries, or o and the lse `[R, H]` float32. A row that sees no token has
            o = 0 and lse = -inf.

        Raises:
            ContractError: nothing was planned, a number is out of range, an argument above is given that must not be,
                or `out` or `lse` cannot be written or shares memory with itself or another argument.
            PageTableError: a page id is not one of the cache's, or the user's buffers hold inconsistent requests.
            ContractTypeError, ShapeError: an array is not as planned.
        """
        refuse_unsupported(
            profiler_buffer=profiler_buffer,
            o_scale=o_scale,
            ckv_scale_arr=ckv_scale_arr,
            bmm1_scale=bmm1_scale,
            bmm2_scale=bmm2_scale,
        )
        check_skipped_softmax(skip_softmax_threshold_scale_factor)
        if self._is_cutlass and (kv_len is not None or page_table is not None):
            attention, rows = unplanned(q_nope, q_pe, ckv_cache, kv_len, page_table)
        else:
            if kv_len is not None or page_table is not None:
                raise ContractError(
                    "kv_len, page_table: expected None without backend 'cutlass', as plan has the requests"
                )
            attention, requests = self._last_plan.of_call("run")
            rows = requests.rows
        plan = attention.plan
        if query is not None or kv_cache is not None:
            if any(array is not None for array in (q_nope, q_pe, ckv_cache, kpe_cache)):
                raise ContractError("query, kv_cache: expected None with q_nope, q_pe, ckv_cache and kpe_cache")
            q_nope, q_pe = parts(query, "query", 3, plan)
            ckv_cache, kpe_cache = parts(kv_cache, "kv_cache", 3, plan)
        base = "ln" if flag("return_lse_base_on_e", return_lse_base_on_e) else "log2"
        return attention.run(
            LatentArrays(q_nope, q_pe, ckv_cache, kpe_cache, sinks),
            rows,
            scales(plan, ckv_scale, kpe_scale),
            Results(return_lse, out, lse, base),
            buffers=self._last_plan.buffers,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._last_plan})"


_CSR = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
_DENSE = ("cum_seq_lens_q", "block_tables", "seq_lens")


def index_arrays(flat: MLAPlanMetadata, metadata: Any, page_size: int) -> tuple[Any, ...]:
    """The four arrays of `_CSR`, from the arguments of `plan` or from its `metadata`.

    Raises:
        ContractTypeError: `metadata` is no `MLAPlanMetadata`.
        ContractError: an array is missing, or both kinds of tables are given where one is meant.
        ShapeError, PageTableError: a dense table is inconsistent, or says something else than the other table.
    """
    if metadata is not None:
        if not isinstance(metadata, MLAPlanMetadata):
            raise ContractTypeError(f"metadata: expected an MLAPlanMetadata, got {type(metadata).__name__}")
        if any(getattr(flat, name) is not None for name in (*_CSR, *_DENSE)):
            raise ContractError("metadata: expected None with index arrays")
    source = flat if metadata is None else metadata
    tables = [any(getattr(source, name) is not None for name in names) for names in (_CSR, _DENSE)]
    if tables == [True, True] and metadata is None:
        raise ContractError("block_tables: expected None with qo_indptr, kv_indptr, kv_indices and kv_len_arr")
    for names in [names for names, is_set in zip((_CSR, _DENSE), tables, strict=True) if is_set or not any(tables)]:
        for name in names:
            if getattr(source, name) is None:
                raise ContractError(f"{name}: expected an array, got None")
    csr = tuple(getattr(source, name) for name in _CSR)
    if not tables[1]:
        return csr
    dense = (source.cum_seq_lens_q, *csr_of_dense(source.seq_lens, source.block_tables, page_size))
    if tables[0]:
        one, other = (LatentBatch.of(arrays, page_size, True) for arrays in (csr, dense))
        same = (
            (one.qo_indptr, other.qo_indptr),
            (one.table.lengths, other.table.lengths),
            (one.table.used, other.table.used),
        )
        if not all(np.array_equal(a, b) for a, b in same):
            raise PageTableError("block_tables: expected the requests of kv_indptr and kv_indices, got others")
    return dense


def scales(plan: LatentPlan, ckv_scale: Any, kpe_scale: Any) -> tuple[float, float]:
    """The scales of the cache: of float8, both are needed, and elsewhere neither is taken."""
    is_float8 = plan.kv_dtype.name in FLOAT8_DTYPES
    for name, scale in (("ckv_scale", ckv_scale), ("kpe_scale", kpe_scale)):
        if (scale is not None) != is_float8:
            what = "is needed for a cache of float8" if is_float8 else "belongs to a cache of float8"
            raise ContractError(f"{name} {what}, planned {plan.kv_dtype.name} (kv_data_type)")
    if not is_float8:
        return 1.0, 1.0
    LatentOptions(plan.sm_scale, ckv_scale, kpe_scale)  # refuses what is no scale
    return ckv_scale, kpe_scale


def parts(array: Any, name: str, ndim: int, plan: LatentPlan) -> tuple[Any, Any]:
    """Both parts of the queries, or of the cache, out of one array of the user's, in its kind."""
    if isinstance(array, tuple | list):
        if len(array) != 2:
            raise ShapeError(f"{name}: expected a tuple of both parts, got {len(array)} arrays")
        return array[0], array[1]
    shape = getattr(array, "shape", None)
    if shape is None:
        raise ContractTypeError(f"{name}: expected an array, got {type(array).__name__}")
    if name == "kv_cache" and len(shape) == 4 and shape[1] == 1:
        array, shape = array[:, 0], (shape[0], *shape[2:])
    width = plan.head_dim_ckv + plan.head_dim_kpe
    if len(shape) != ndim or shape[-1] != width:
        raise ShapeError(f"{name}: expected {ndim} dimensions, the last one {width}, got shape {list(shape)}")
    return array[..., : plan.head_dim_ckv], array[..., plan.head_dim_ckv :]


def unplanned(q_nope: Any, q_pe: Any, ckv_cache: Any, kv_len: Any, page_table: Any) -> tuple[LatentAttention, Rows]:
    """The attention and rows of a call that gives everything at once."""
    if kv_len is None or page_table is None:
        raise ContractError("kv_len, page_table: expected arrays with backend 'cutlass', got None")
    device = devices.device_of(q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv_cache)
    views = [device.view(array, name) for array, name in ((q_nope, "q_nope"), (q_pe, "q_pe"), (ckv_cache, "ckv_cache"))]
    for view, name in zip(views, ("q_nope", "q_pe", "ckv_cache"), strict=True):
        if view.ndim != 3:
            raise ShapeError(f"{name}: expected 3 dimensions, got shape {list(view.shape)}")
    queries, rotary, cache = views
    plan = LatentPlan(
        num_heads=queries.shape[1],
        head_dim_ckv=queries.shape[2],
        head_dim_kpe=rotary.shape[2],
        page_size=integer("page_size", int(cache.shape[1]), 1, LARGEST_INDEX),
        sm_scale=_DEEPSEEK_SCALE,
        q_dtype=device.dtype(queries),
        kv_dtype=device.dtype(cache),
    )
    return LatentAttention(plan), rows_of_dense(kv_len, page_table, plan.page_size)
