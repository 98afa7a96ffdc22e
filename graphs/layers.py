"""One attention block over a paged cache: project, rotate, append, attend, project."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from max.dtype import DType
from max.graph import TensorValue, ops

from paged_kv.graphs import ops as paged
from paged_kv.graphs.ops import PagedCache


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

    def of_rows(self, rows: TensorValue) -> Rotary:
        """Those of some rows, `[N]` int64."""
        return Rotary(ops.gather(self.cos, rows, axis=0), ops.gather(self.sin, rows, axis=0))


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


@dataclass(frozen=True)
class AttentionWeights:
    """The linear layers of one attention block, `[out, in]` each."""

    q: TensorValue
    k: TensorValue
    v: TensorValue
    o: TensorValue


def paged_attention(
    x: TensorValue,
    cache: PagedCache,
    rows: StepRows,
    rotary: Rotary,
    layer: int,
    weights: AttentionWeights,
    *,
    head_dim: int,
    wanted: TensorValue | None = None,
) -> TensorValue:
    """The attention of `x` `[T, hidden]` over everything its requests have cached and these tokens themselves.

    Keys enter the cache rotated; `cache` is changed in place.

    Args:
        wanted: `[N]` int64: the rows whose result is of use, all where None. K and V of every row are cached.

    Returns:
        `[T, hidden]`, or `[N, hidden]`.
    """

    def heads(y: TensorValue) -> TensorValue:
        return ops.reshape(y, [y.shape[0], -1, head_dim])

    batch, lengths, q_rotary = rows.batch, rows.lengths, rotary
    if wanted is None:
        q, k, v = map(heads, paged.linear_group(x, [weights.q, weights.k, weights.v]))
    else:
        k, v = map(heads, paged.linear_group(x, [weights.k, weights.v]))
        q = heads(paged.linear(ops.gather(x, wanted, axis=0), weights.q))
        batch, lengths = (ops.gather(of_rows, wanted, axis=0) for of_rows in (batch, lengths))
        q_rotary = rotary.of_rows(wanted)
    paged.append(cache, rotary(k), v, rows.batch, rows.positions, layer=layer)
    o, _ = paged.attention(cache, q_rotary(q), batch, lengths, layer=layer)
    return paged.linear(ops.reshape(o, [o.shape[0], -1]), weights.o)
