"""What the layers of one step share: which request and position each token has, its rotation, its norms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from max.dtype import DType
from max.graph import TensorValue, ops

from paged_kv.graphs import ops as paged
from paged_kv.graphs.paged_cache import PagedCache
from paged_kv.graphs.rope import Rope


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of one step's positions: `[T, 1, dims / 2]` float32."""

    cos: TensorValue
    sin: TensorValue

    @staticmethod
    def of(positions: TensorValue, rope: Rope) -> Rotary:
        """Those of positions `[T]` int32."""

        def angles(frequencies: np.ndarray) -> TensorValue:
            return wide * ops.constant(frequencies.reshape(1, 1, -1), DType.float32, positions.device)

        wide = ops.cast(ops.reshape(positions, [-1, 1, 1]), DType.float32)
        turned = angles(rope.inverse_frequencies())
        past = rope.past()
        if past is not None:
            start, frequencies = past
            turned = ops.where(ops.broadcast_to(wide >= float(start), turned.shape), angles(frequencies), turned)
        cos, sin = ops.cos(turned), ops.sin(turned)
        return Rotary(cos, sin) if rope.amplitude == 1 else Rotary(cos * rope.amplitude, sin * rope.amplitude)

    def __call__(self, x: TensorValue) -> TensorValue:
        """Rotates the halves of the first dimensions of every head of `x` `[T, H, D]` (rotate_half), in float32."""
        half = int(self.cos.shape[-1])
        wide = ops.cast(x, DType.float32)
        a, b = wide[:, :, :half], wide[:, :, half : 2 * half]
        parts = [a * self.cos - b * self.sin, b * self.cos + a * self.sin]
        if 2 * half < int(x.shape[-1]):
            parts.append(wide[:, :, 2 * half :])
        return ops.cast(ops.concat(parts, -1), x.dtype)

    def of_pairs(self, x: TensorValue) -> TensorValue:
        """Rotates the pairs of adjacent dimensions of every head of `x` `[T, H, 2 pairs]`, in float32.

        The rotated pairs come out as halves, all first members and then all second ones: in products of queries and
        keys that are both in this order it makes no difference.
        """
        tokens, heads, dims = x.shape
        pairs = ops.reshape(ops.cast(x, DType.float32), [tokens, heads, int(dims) // 2, 2])
        a, b = pairs[:, :, :, 0], pairs[:, :, :, 1]
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

    @property
    def slots(self) -> TensorValue:
        """The token of its request that each row is appended as."""
        return self.positions

    def of_rows(self, rows: TensorValue) -> StepRows:
        """Some rows, `[N]` int64."""
        return StepRows(*(ops.gather(x, rows, axis=0) for x in (self.batch, self.positions, self.lengths)))

    def attend(
        self, cache: PagedCache, q: TensorValue, *, layer: int, sm_scale: float | None, window_left: int
    ) -> TensorValue:
        """Attention of the rows' q `[T, Hq, D]` over what each sees in a layer, as `q`."""
        o, _ = paged.attention(
            cache, q, self.batch, self.lengths, layer=layer, sm_scale=sm_scale, window_left=window_left
        )
        return o


def rms_norm(
    x: TensorValue, weight: TensorValue, eps: float, *, offset: float = 0.0, rounds_once: bool = False
) -> TensorValue:
    """`(offset + weight) * x / sqrt(mean(x^2) + eps)` over the last axis, in float32.

    It is rounded to x's dtype before the weight, and after it; only after it where `rounds_once` is true.
    """
    wide = ops.cast(x, DType.float32)
    scaled = wide * ops.rsqrt(ops.mean(wide * wide, axis=-1) + eps)
    if rounds_once:
        return ops.cast((ops.cast(weight, DType.float32) + offset) * scaled, x.dtype)
    if offset:
        weight = weight + offset
    return ops.cast(weight, x.dtype) * ops.cast(scaled, x.dtype)
