"""One attention block over a paged cache: project, rotate, append, attend, project."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from max.dtype import DType
from max.graph import TensorValue, ops

from paged_kv.graphs import ops as paged
from paged_kv.graphs.ops import PagedCache

Projection = Callable[[TensorValue], TensorValue]


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of one step's positions, shared by all layers: `[T, 1, D / 2]` float32."""

    cos: TensorValue
    sin: TensorValue

    @staticmethod
    def of(positions: TensorValue, inverse_frequencies: np.ndarray) -> Rotary:
        """From positions `[T]` int32 and inverse frequencies `[D / 2]` float32."""
        frequencies = ops.constant(inverse_frequencies.reshape(1, 1, -1), DType.float32, positions.device)
        angles = ops.cast(ops.reshape(positions, [-1, 1, 1]), DType.float32) * frequencies
        return Rotary(ops.cos(angles), ops.sin(angles))

    def __call__(self, x: TensorValue) -> TensorValue:
        """Rotates the halves of every head of `x` `[T, H, D]` (rotate_half), in float32."""
        half = int(x.shape[-1]) // 2
        wide = ops.cast(x, DType.float32)
        a, b = wide[:, :, :half], wide[:, :, half:]
        return ops.cast(ops.concat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1), x.dtype)


@dataclass(frozen=True)
class StepRows:
    """Request and position of each token of one step, shared by all layers: each `[T]` int32."""

    batch: TensorValue
    """The request; -1 for padding."""
    positions: TensorValue
    """The token's position in its request."""
    lengths: TensorValue
    """The tokens that it sees: those before it and itself."""

    @staticmethod
    def of(row_offsets: TensorValue, cache_lengths: TensorValue, tokens: TensorValue) -> StepRows:
        batch, positions = paged.ragged_rows(row_offsets, cache_lengths, tokens.shape[0])
        return StepRows(batch, positions, positions + 1)


def paged_attention(
    x: TensorValue,
    cache: PagedCache,
    rows: StepRows,
    rotary: Rotary,
    layer: int,
    *,
    q_proj: Projection,
    k_proj: Projection,
    v_proj: Projection,
    o_proj: Projection,
    head_dim: int,
) -> TensorValue:
    """The attention of `x` `[T, hidden]` over everything its requests have cached and these tokens themselves.

    Keys enter the cache rotated; `cache` is changed in place.
    """
    q, k, v = (ops.reshape(proj(x), [x.shape[0], -1, head_dim]) for proj in (q_proj, k_proj, v_proj))
    paged.append(cache, rotary(k), v, rows.batch, rows.positions, layer=layer)
    o, _ = paged.attention(cache, rotary(q), rows.batch, rows.lengths, layer=layer)
    return o_proj(ops.reshape(o, [x.shape[0], -1]))
