"""Latent attention (MLA) over pages in graphs: the cache of compressed K and V, its append, its attention.

Shapes use `N` and `R` rows, `B` requests, `H` query heads, `Dckv` and `Dkpe` for the widths of a token's latent vector
and of its rotary part; any but `Dckv` may be symbolic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from max.dtype import DType
from max.graph import BufferValue, DeviceRef, Dim, StaticDim, TensorType, TensorValue, ops

from paged_kv.call_layouts import LATENT_OPTIONS
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.graphs.checks import check_dtype, check_rank, check_tensor, check_value
from paged_kv.graphs.paged_cache import BITS, DTYPES, KV_DTYPES, constant
from paged_kv.options import HEAD_DIMS, LatentOptions, is_head_dim

MLA_ATTENTION = "paged_kv_mla_attention"
APPEND = "paged_kv_append"


@dataclass(frozen=True)
class LatentCache:
    """The pages of a latent cache inside a graph, with the table that says which request owns which.

    `blocks` is a graph buffer `[pages, layers, page_size, Dckv + Dkpe]`: a slot holds a token's latent vector ckv, then
    its rotary part kpe. Where `view` is given, `blocks` and `kpe_blocks` are flat memory (rank 1) that holds ckv and
    kpe, and `view`, `[13]` int64 on the host, says how it is read (`mojo_ops/ops.mojo`; kpe is K there, and ckv V).

    `lookup_table` is `[B, max_pages]` uint32. All of it lies on one device, which is where the ops over it run.
    """

    blocks: BufferValue
    lookup_table: TensorValue
    kpe_blocks: BufferValue | None = None
    view: TensorValue | None = None

    def __post_init__(self) -> None:
        strided = self.view is not None
        if (self.kpe_blocks is not None) != strided:
            raise ContractError("kpe_blocks, view: expected both, for strided storage, or neither")
        for name, blocks in (("blocks", self.blocks), ("kpe_blocks", self.kpe)):
            if not isinstance(blocks, BufferValue):
                raise ContractTypeError(
                    f"{name}: expected a graph buffer (BufferType input), got {type(blocks).__name__}"
                )
            check_dtype(name, blocks.dtype, KV_DTYPES + BITS)
            if blocks.dtype != self.dtype:
                raise ContractTypeError(f"{name}: expected dtype {self.dtype.name}, as blocks, got {blocks.dtype.name}")
            if blocks.device != self.device:
                raise ContractError(f"{name}: expected device {self.device}, as blocks, got {blocks.device}")
            check_rank(name, blocks, 1 if strided else 4)
        check_value("lookup_table", self.lookup_table, DType.uint32, [None, None], self.device)
        if self.view is not None:
            check_value("view", self.view, DType.int64, [Dim(13)], DeviceRef.CPU())

    @property
    def dtype(self) -> DType:
        return self.blocks.dtype

    @property
    def device(self) -> DeviceRef:
        return self.blocks.device

    @property
    def kpe(self) -> BufferValue:
        """The buffer that holds kpe."""
        return self.blocks if self.kpe_blocks is None else self.kpe_blocks

    @property
    def kv_layout(self) -> str:
        """As the ops name it."""
        return "LATENT" if self.view is None else "STRIDED"

    def operands(self, layer: int, ckv_dim: Dim) -> list[BufferValue | TensorValue]:
        """Return what every op over pages takes after its own tensors, where ckv is `ckv_dim` wide."""
        layers = self.blocks.shape[1] if self.view is None else Dim(1)
        if layer < 0 or (isinstance(layers, StaticDim) and layer >= layers.dim):
            raise ContractError(f"layer: expected one of the cache's {layers} layers, got {layer}")
        view = self.view
        if view is None:
            if not isinstance(ckv_dim, StaticDim):
                raise ContractError(f"ckv: expected a static width, got {ckv_dim}")
            view = constant(np.array([layer, int(ckv_dim)], np.int64))
        return [self.kpe, self.blocks, self.lookup_table, view]

    def check_widths(self, ckv: str, ckv_dim: Dim, kpe: str, kpe_dim: Dim) -> None:
        """Refuses the widths of two arguments, named `ckv` and `kpe`, that do not make up a slot."""
        width = self.blocks.shape[-1]
        sizes = (ckv_dim, kpe_dim, width)
        if self.view is None and all(isinstance(size, StaticDim) for size in sizes) and ckv_dim + kpe_dim != width:
            raise ShapeError(
                f"{ckv}, {kpe}: expected {width} elements together, as in the cache's slots, got {ckv_dim} + {kpe_dim}"
            )


def append_latent(
    cache: LatentCache,
    ckv: TensorValue,
    kpe: TensorValue,
    batch_indices: TensorValue,
    positions: TensorValue,
    *,
    layer: int = 0,
) -> None:
    """Writes `N` tokens into their pages, in place.

    Row `i` of `ckv` `[N, Dckv]` and `kpe` `[N, Dkpe]` (in the cache's dtype) becomes token `positions[i]` of request
    `batch_indices[i]` (both `[N]` int32); a row whose batch index is -1 is skipped. What is refused when the graph runs
    is that of `paged_kv.graphs.ops.append`.
    """
    check_value("ckv", ckv, cache.dtype, [None, None], cache.device)
    check_value("kpe", kpe, cache.dtype, [ckv.shape[0], None], cache.device)
    for name, value in (("batch_indices", batch_indices), ("positions", positions)):
        check_value(name, value, DType.int32, [ckv.shape[0]], cache.device)
    cache.check_widths("ckv", ckv.shape[1], "kpe", kpe.shape[1])
    ops.inplace_custom(
        APPEND,
        device=cache.device,
        values=[
            *(ops.reshape(rows, [rows.shape[0], 1, rows.shape[1]]) for rows in (kpe, ckv)),
            batch_indices,
            positions,
            *cache.operands(layer, ckv.shape[1]),
        ],
        parameters={"kv_layout": cache.kv_layout},
    )


def mla_attention(
    cache: LatentCache,
    q_nope: TensorValue,
    q_pe: TensorValue,
    row_batch: TensorValue,
    row_lengths: TensorValue,
    *,
    sm_scale: float,
    ckv_scale: float = 1.0,
    kpe_scale: float = 1.0,
    sinks: TensorValue | None = None,
    layer: int = 0,
    o_dtype: DType | None = None,
) -> tuple[TensorValue, TensorValue]:
    """Latent attention of `R` query rows over the pages of their requests: decode and causal prefill alike.

    Row `r` of `q_nope` `[R, H, Dckv]`, which went through the up-projection of K already, and `q_pe` `[R, H, Dkpe]`
    belongs to request `row_batch[r]` and sees its first `row_lengths[r]` tokens (both `[R]` int32). Token j has the
    score `sm_scale * (ckv_scale * q_nope . ckv_j + kpe_scale * q_pe . kpe_j)` and the value `ckv_scale * ckv_j`.

    Args:
        sm_scale: `1 / sqrt` of the head_dim before compression, `(128 + 64) ** -0.5` in DeepSeek's models.
        ckv_scale, kpe_scale: calibration scales of a quantised cache; positive.
        sinks: `[H]` float32: natural-log scores that join the softmax's denominator alone, and so the lse.
        layer: of the cache.
        o_dtype: of o; None: q's.

    Returns:
        o `[R, H, Dckv]` and the base-2 lse `[R, H]` float32. A row of request -1 or of length 0 has o = 0
        and lse = -inf.
    """
    return mla_attention_at_run_time(
        cache,
        q_nope,
        q_pe,
        row_batch,
        row_lengths,
        sinks=constant(np.zeros(0, np.float32), cache.device) if sinks is None else sinks,
        options=constant(LatentOptions(sm_scale, ckv_scale, kpe_scale).numbers()),
        layer=layer,
        o_dtype=o_dtype,
    )


def mla_attention_at_run_time(
    cache: LatentCache,
    q_nope: TensorValue,
    q_pe: TensorValue,
    row_batch: TensorValue,
    row_lengths: TensorValue,
    *,
    sinks: TensorValue,
    options: TensorValue,
    layer: int = 0,
    o_dtype: DType | None = None,
) -> tuple[TensorValue, TensorValue]:
    """`mla_attention` with its options as values of the graph.

    `options` `[4]` float32 is `LatentOptions.numbers`, on the host; `sinks` has `[H]` or no entries.
    """
    check_tensor("q_nope", q_nope)
    check_dtype("q_nope", q_nope.dtype, DTYPES)
    check_dtype("o_dtype", o_dtype or q_nope.dtype, DTYPES)
    check_dtype("blocks", cache.dtype, KV_DTYPES)
    check_value("q_nope", q_nope, q_nope.dtype, [None, None, None], cache.device)
    rows, heads, ckv_dim = q_nope.shape
    check_value("q_pe", q_pe, q_nope.dtype, [rows, heads, None], cache.device)
    for name, value in (("q_nope", q_nope), ("q_pe", q_pe)):
        width = value.shape[-1]
        if isinstance(width, StaticDim) and not (is_head_dim(int(width)) or (name == "q_pe" and int(width) == 0)):
            raise ShapeError(f"{name}: expected a width that is a {HEAD_DIMS}, got {width}")
    cache.check_widths("q_nope", ckv_dim, "q_pe", q_pe.shape[-1])
    check_value("row_batch", row_batch, DType.int32, [rows], cache.device)
    check_value("row_lengths", row_lengths, DType.int32, [rows], cache.device)
    none = isinstance(sinks, TensorValue) and list(sinks.shape) == [Dim(0)]
    check_value("sinks", sinks, DType.float32, [None if none else heads], cache.device)
    check_value("options", options, DType.float32, [Dim(LATENT_OPTIONS.size)], DeviceRef.CPU())
    o, lse = ops.inplace_custom(
        MLA_ATTENTION,
        device=cache.device,
        values=[q_nope, q_pe, row_batch, row_lengths, *cache.operands(layer, ckv_dim), sinks, options],
        out_types=[
            TensorType(o_dtype or q_nope.dtype, q_nope.shape, cache.device),
            TensorType(DType.float32, [rows, heads], cache.device),
        ],
        parameters={"kv_layout": cache.kv_layout},
    )
    return o.tensor, lse.tensor
