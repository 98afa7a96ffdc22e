"""One typed wrapper per registered op: what is wrong is refused while the graph is built.

Attention's lie in `attention.py` and `masked_attention.py`, those of linear layers in `linear_ops.py`. Names of ops
live in these files and nowhere else. Shapes below use `N` and `R` rows, `B` requests, `Hq` query heads, `Hk` KV heads
and `D` = head_dim; any of them may be symbolic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.resources import files
from pathlib import Path

from max.dtype import DType
from max.graph import Dim, TensorType, TensorValue, ops

from paged_kv.graphs.attention import ATTENTION, GpuKernel, attention, attention_at_run_time
from paged_kv.graphs.checks import check_dtype, check_rank, check_tensor, check_value
from paged_kv.graphs.latent_ops import (
    MLA_ATTENTION,
    LatentCache,
    append_latent,
    mla_attention,
    mla_attention_at_run_time,
)
from paged_kv.graphs.layer_ops import (
    ADD_SCALED,
    CHOOSE_EXPERTS,
    GATE_HALVES,
    GATE_UNITS,
    HADAMARD,
    RMS_NORM,
    ROTARY_TABLES,
    ROTATE,
    STEP_ROWS,
    TAKE_COLUMNS,
    TAKE_ROWS,
    WEIGHTED_SUM,
    WIDEN,
    add_scaled,
    choose_experts,
    gate_halves,
    gate_units,
    hadamard,
    is_hadamard_size,
    lengths_and_last_rows,
    rms_norm,
    rotary_tables,
    rotate,
    split_columns,
    take_columns,
    take_rows,
    weighted_sum,
    widened,
)
from paged_kv.graphs.linear_ops import (
    ADAPTER_LINEAR,
    EXPERT_LINEAR,
    LINEAR,
    adapter_linear,
    expert_linear,
    linear,
    linear_group,
)
from paged_kv.graphs.masked_attention import MASKED_ATTENTION, masked_attention, masked_attention_at_run_time
from paged_kv.graphs.paged_cache import BITS, CODES, DTYPES, KV_DTYPES, KVLayout, PagedCache, cache_dtype
from paged_kv.graphs.recurrent_ops import (
    CAUSAL_CONV1D,
    GATED_NORM,
    LINEAR_RECURRENCE,
    causal_conv1d,
    gated_delta_rule,
    gated_norm,
    selective_scan,
)
from paged_kv.graphs.states import States

__all__ = [
    "ADAPTER_LINEAR",
    "ADD_SCALED",
    "ATTENTION",
    "BITS",
    "CAUSAL_CONV1D",
    "CHOOSE_EXPERTS",
    "CODES",
    "DTYPES",
    "EXPERT_LINEAR",
    "GATED_NORM",
    "GATE_HALVES",
    "GATE_UNITS",
    "HADAMARD",
    "KV_DTYPES",
    "LINEAR",
    "LINEAR_RECURRENCE",
    "MASKED_ATTENTION",
    "MLA_ATTENTION",
    "RMS_NORM",
    "ROTARY_TABLES",
    "ROTATE",
    "STEP_ROWS",
    "TAKE_COLUMNS",
    "TAKE_ROWS",
    "WEIGHTED_SUM",
    "WIDEN",
    "GpuKernel",
    "KVLayout",
    "LatentCache",
    "PagedCache",
    "States",
    "adapter_linear",
    "add_scaled",
    "append",
    "append_latent",
    "attention",
    "attention_at_run_time",
    "cache_dtype",
    "causal_conv1d",
    "choose_experts",
    "compiled_kernels",
    "copy_pages",
    "expert_linear",
    "gate_halves",
    "gate_units",
    "gated_delta_rule",
    "gated_norm",
    "gather",
    "hadamard",
    "is_hadamard_size",
    "kernels",
    "lengths_and_last_rows",
    "linear",
    "linear_group",
    "masked_attention",
    "masked_attention_at_run_time",
    "merge_states",
    "mla_attention",
    "mla_attention_at_run_time",
    "ragged_rows",
    "rms_norm",
    "rotary_tables",
    "rotate",
    "selective_scan",
    "split_columns",
    "take_columns",
    "take_rows",
    "weighted_sum",
    "widened",
]

APPEND = "paged_kv_append"
GATHER = "paged_kv_gather"
COPY_PAGES = "paged_kv_copy_pages"
RAGGED_ROWS = "paged_kv_ragged_rows"
MERGE_STATES = "paged_kv_merge_states"

_compiled: ContextVar[Path | None] = ContextVar("compiled_kernels", default=None)


def kernels() -> Path:
    """The Mojo package: pass it as `custom_extensions` of a graph that uses these ops.

    It is the folder of the sources, which MAX compiles again for every graph; in `compiled_kernels`, the given file.
    """
    return _compiled.get() or Path(str(files("paged_kv.mojo_ops")))


@contextmanager
def compiled_kernels(library: Path) -> Iterator[None]:
    """Graphs that are built inside take the kernels from `library`, which was compiled from the same sources."""
    token = _compiled.set(library)
    try:
        yield
    finally:
        _compiled.reset(token)


def append(
    cache: PagedCache,
    k: TensorValue,
    v: TensorValue,
    batch_indices: TensorValue,
    positions: TensorValue,
    *,
    layer: int = 0,
) -> None:
    """Writes `N` tokens into their pages, in place.

    Row `i` of `k` and `v` `[N, Hk, D]` (in the cache's dtype; of a cache of codes in any of `DTYPES`, and quantised)
    becomes token `positions[i]` of request `batch_indices[i]` (both `[N]` int32); a row whose batch index is -1 is
    skipped. When the graph runs, a position outside the request's pages, a page id outside the pool and two rows for
    one slot are errors (`ValueError`), and nothing is written.
    """
    check_tensor("k", k)
    dtype = k.dtype if cache.takes(k.dtype) else cache.dtype
    cache.check("k", k, dtype, [None, cache.num_kv_heads, cache.head_dim])
    cache.check("v", v, dtype, [k.shape[0], cache.num_kv_heads, cache.head_dim])
    cache.check("batch_indices", batch_indices, DType.int32, [k.shape[0]])
    cache.check("positions", positions, DType.int32, [k.shape[0]])
    ops.inplace_custom(
        APPEND,
        device=cache.device,
        values=[k, v, batch_indices, positions, *cache.operands(layer)],
        parameters={"kv_layout": cache.kv_layout},
    )


def gather(
    cache: PagedCache,
    indptr: TensorValue,
    num_tokens: Dim | str | int,
    *,
    num_kv_heads: Dim | str | int | None = None,
    head_dim: Dim | str | int | None = None,
    layer: int = 0,
    dtype: DType | None = None,
) -> tuple[TensorValue, TensorValue]:
    """The tokens of every request, out of their pages: k and v `[num_tokens, Hk, D]`, request after request.

    `indptr` `[B + 1]` int32: request `b` fills rows `[indptr[b], indptr[b + 1])`; its last entry is `num_tokens`.
    `num_kv_heads` and `head_dim` are needed where the storage is strided, and are the cache's elsewhere. `dtype` is
    that of k and v: the cache's, or of a cache of codes one of `DTYPES`, float32 where it is None.
    """
    cache.check("indptr", indptr, DType.int32, [None])
    heads = cache.size("num_kv_heads", num_kv_heads, cache.num_kv_heads)
    dim = cache.size("head_dim", head_dim, cache.head_dim)
    dtype = dtype or (cache.dtype if cache.kv_format is None else DType.float32)
    check_dtype("dtype", dtype, [cache.dtype] if cache.kv_format is None else DTYPES)
    kind = TensorType(dtype, [num_tokens, heads, dim], cache.device)
    k, v = ops.inplace_custom(
        GATHER,
        device=cache.device,
        values=[indptr, *cache.operands(layer)],
        out_types=[kind, kind],
        parameters={"kv_layout": cache.kv_layout},
    )
    return k.tensor, v.tensor


def copy_pages(cache: PagedCache, sources: TensorValue, targets: TensorValue) -> None:
    """Copies page `sources[i]` to page `targets[i]` (both `[N]` int32), in place: K, V and every layer.

    Of a strided cache, what its view shows is copied. When the graph runs, a page outside the pool, a page that is
    written twice and a page that is both read and written are errors (`ValueError`), and nothing is written. On a GPU,
    which refuses nothing, a pair with a page outside the pool is skipped, and what the other two leave is open.
    """
    cache.check("sources", sources, DType.int32, [None])
    cache.check("targets", targets, DType.int32, [sources.shape[0]])
    ops.inplace_custom(
        COPY_PAGES,
        device=cache.device,
        values=[sources, targets, *cache.operands(0)],
        parameters={"kv_layout": cache.kv_layout},
    )


def ragged_rows(
    row_offsets: TensorValue, cache_lengths: TensorValue, num_rows: Dim | str | int
) -> tuple[TensorValue, TensorValue]:
    """Request and position of each of `num_rows` rows, both `[num_rows]` int32.

    Rows `[row_offsets[b], row_offsets[b + 1])` (`[B + 1]` uint32) are request `b`'s next tokens after the
    `cache_lengths[b]` (`[B]` uint32) that it has. Rows past the last are padding: batch index -1, position 0.
    """
    check_tensor("row_offsets", row_offsets)
    device = row_offsets.device
    for name, value in (("row_offsets", row_offsets), ("cache_lengths", cache_lengths)):
        check_value(name, value, DType.uint32, [None], device)
    kind = TensorType(DType.int32, [num_rows], device)
    batch_indices, positions = ops.custom(
        RAGGED_ROWS, device=device, values=[row_offsets, cache_lengths], out_types=[kind, kind]
    )
    return batch_indices.tensor, positions.tensor


def merge_states(v: TensorValue, s: TensorValue) -> tuple[TensorValue, TensorValue]:
    """Merges `n` states of attention over disjoint keys: outputs v `[S, n, H, D]` and base-2 lse s `[S, n, H]` float32.

    Returns v `[S, H, D]` in its dtype and s `[S, H]` float32; 0 and -inf where all states are empty. The output of a
    state whose lse is -inf is ignored, NaN included. It accumulates in float32.
    """
    check_tensor("v", v)
    check_dtype("v", v.dtype, DTYPES)
    check_rank("v", v, 4)
    rows, _, heads, head_dim = v.shape
    check_value("s", s, DType.float32, list(v.shape[:3]), v.device)
    kinds = [
        TensorType(v.dtype, [rows, heads, head_dim], v.device),
        TensorType(DType.float32, [rows, heads], v.device),
    ]
    merged_v, merged_s = ops.custom(MERGE_STATES, device=v.device, values=[v, s], out_types=kinds)
    return merged_v.tensor, merged_s.tensor
