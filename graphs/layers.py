"""State that the layers of one step share: which request and position each token has, its rotation, its norms."""

from __future__ import annotations

from dataclasses import dataclass, replace

from max.graph import TensorValue

from paged_kv.graphs import ops as paged
from paged_kv.graphs.paged_cache import PagedCache
from paged_kv.graphs.rope import Rope
from paged_kv.options import AttentionArguments


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of one step's positions: `[T, dims / 2]` float32."""

    cos: TensorValue
    sin: TensorValue

    @staticmethod
    def of(positions: TensorValue, rope: Rope) -> Rotary:
        """Those of positions `[T]` int32."""
        return Rotary(
            *paged.rotary_tables(positions, rope.inverse_frequencies(), amplitude=rope.amplitude, past=rope.past())
        )

    def __call__(self, x: TensorValue) -> TensorValue:
        """Rotates the halves of the first dimensions of every head of `x` `[T, H, D]` (rotate_half), in float32."""
        return paged.rotate(x, self.cos, self.sin)

    def of_pairs(self, x: TensorValue) -> TensorValue:
        """Rotates the pairs of adjacent dimensions at the beginning of every head of `x` `[T, H, D]`, in float32.

        The rotated pairs come out as halves, all first members and then all second ones: in products of queries and
        keys that are both in this order it makes no difference.
        """
        return paged.rotate(x, self.cos, self.sin, pairs=True)

    def of_rows(self, rows: TensorValue) -> Rotary:
        """Those of some rows, `[N]` int32."""
        return Rotary(paged.take_rows(self.cos, rows), paged.take_rows(self.sin, rows))


@dataclass(frozen=True)
class StepRows:
    """Request and position of each token of one step, shared by all layers: each `[T]` int32."""

    batch: TensorValue
    """The request; -1 for padding."""
    positions: TensorValue
    """The token's position in its request."""
    lengths: TensorValue
    """The tokens that it sees: those before it and itself."""
    last: TensorValue | None = None
    """The last row of each request, `[B]`; None in a selection of rows."""
    window_lengths: TensorValue | None = None
    """Where tokens see both ways: the tokens before the end of the row's window."""

    @staticmethod
    def of(row_offsets: TensorValue, cache_lengths: TensorValue, tokens: TensorValue) -> StepRows:
        batch, positions = paged.ragged_rows(row_offsets, cache_lengths, tokens.shape[0])
        lengths, last = paged.lengths_and_last_rows(positions, row_offsets, cache_lengths.shape[0])
        return StepRows(batch, positions, lengths, last)

    def both_ways(self, window_lengths: TensorValue | None) -> StepRows:
        """The rows of requests whose tokens see all tokens of their request, those after themselves too; in layers with
        windows the first `window_lengths` `[T]` int32, of which the window hides the beginning.
        """
        assert self.last is not None
        lengths = paged.take_rows(self.lengths, paged.take_rows(self.last, self.batch))
        return replace(self, lengths=lengths, window_lengths=window_lengths)

    def of_rows(self, rows: TensorValue) -> StepRows:
        """Some rows, `[N]` int32."""
        ends = None if self.window_lengths is None else paged.take_rows(self.window_lengths, rows)
        batch, positions, lengths = (paged.take_rows(x, rows) for x in (self.batch, self.positions, self.lengths))
        return StepRows(batch, positions, lengths, window_lengths=ends)

    def attend(
        self,
        cache: PagedCache,
        q: TensorValue,
        *,
        layer: int,
        sm_scale: float | None,
        logits_soft_cap: float,
        window_left: int,
        sinks: TensorValue | None = None,
    ) -> TensorValue:
        """Attention of the rows' q `[T, Hq, D]` over what each sees in a layer, as `q`; `sinks` are `[Hq]` float32."""
        options: AttentionArguments = {
            "sm_scale": sm_scale,
            "logits_soft_cap": logits_soft_cap,
            "window_left": window_left,
        }
        if window_left >= 0 and self.window_lengths is not None:
            ends, positions = self.window_lengths, self.positions
            o, _ = paged.masked_attention(
                cache, q, self.batch, ends, row_positions=positions, layer=layer, sinks=sinks, **options
            )
            return o
        o, _ = paged.attention(cache, q, self.batch, self.lengths, layer=layer, sinks=sinks, **options)
        return o
