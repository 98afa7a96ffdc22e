"""The softmax of one tile: scores become weights, relative to a lagging maximum that is seldom raised."""

from std.memory import bitcast
from std.utils.numerics import nan

from ...isa.convert import LANES
from ...isa.memory import FloatPointer
from ...isa.registers import unfused
from ..logits import Logits
from ..params import AttentionRows
from ..softmax import AttentionState, MINUS_INFINITY, exp2
from .kv_tile import KVTile
from .plan import Segment
from .prefetch import KV_TILE_TOKENS, Prefetcher
from .workspace import HeadLayout, SegmentWorkspace

comptime RESCALE_THRESHOLD: Float32 = 8
"""The number by which scores may exceed the lagging maximum, in powers of two, before it is raised and the values are
rescaled.
"""
comptime ScoreVector = SIMD[DType.float32, KV_TILE_TOKENS]


@always_inline
def scores_to_weights[
    dtype: DType, //, split_bf16: Bool
](
    rows: AttentionRows[dtype, ...],
    segment: Segment,
    logits: Logits,
    heads: HeadLayout,
    head: Int,
    weights_index: Int,
    tile: KVTile,
    stride: Int,
    mut workspace: SegmentWorkspace,
    mut prefetcher: Prefetcher,
):
    """Turns the scores of one KV head into weights, in place.

    They are `[stride, KV_TILE_TOKENS]` at index `weights_index` of `workspace.weights`. Where a query's greatest score
    exceeds its maximum by more than `RESCALE_THRESHOLD`, its weighted values and totals are rescaled.

    Parameters:
        split_bf16: Whether each weight is stored as the sum of two bfloat16, first all high parts, then all low ones.
    """
    var m = head * stride
    var tokens = tile.tokens()
    var only_scaled = logits.factor() != 0
    var factor = logits.factor() if only_scaled else Float32(1)
    for row in range(segment.num_rows):
        var length = Int(rows.row_lengths[unsafe_offset=segment.row + row])
        var first = logits.first_token(length)
        var last = length if tile.count == KV_TILE_TOKENS else min(length, tile.first + tile.count)
        var all_seen = first <= tile.first and last >= tile.end()
        for g in range(heads.group):
            prefetcher.run()
            var at = workspace.weights.unsafe_offset(((weights_index - head) * stride + m) * KV_TILE_TOKENS)
            var slope = ScoreVector(
                logits.alibi_slopes[unsafe_offset=head * heads.group + g]
            ) if logits.has_alibi else 0
            var dots = at.unsafe_load[width=KV_TILE_TOKENS]()
            # What `factor` makes scores of: dot products, or scores already.
            var numbers = dots if only_scaled else logits.score_each(dots, slope, tokens.cast[DType.float32]())
            var scores = unfused(numbers * factor)
            if not all_seen:
                var seen = tokens.lt(Int32(last)) & tokens.ge(Int32(first))
                scores = seen.select(scores, MINUS_INFINITY)
                dots = seen.select(dots, ScoreVector(0))
            var greatest = workspace.greatest[unsafe_offset=m]
            # Any number that keeps the weights in range gives the same result, so it need not be the greatest score.
            # After the first tile it is hardly ever raised. NaN counts as greater.
            if not scores.le(greatest + RESCALE_THRESHOLD).reduce_and():
                # `reduce_max` may pass over a NaN.
                raise_maximum(
                    scores.reduce_max() if scores.eq(scores).reduce_and() else nan[DType.float32](),
                    workspace.greatest.unsafe_offset(m),
                    workspace.totals.unsafe_offset(m),
                    workspace.acc.unsafe_offset(m * heads.padded_dim),
                    heads.padded_dim,
                )
                greatest = workspace.greatest[unsafe_offset=m]
            # A row that sees none of these tokens has no greatest score to subtract yet.
            var weights = ScoreVector(0)
            if greatest != MINUS_INFINITY:
                weights = exp2(scores - greatest)
            # NaN where a dot product is infinite: it overflowed, and perhaps in a partial sum of the other sign.
            workspace.totals[unsafe_offset=m] += sum_of_halves(dots.fma(ScoreVector(0), weights))
            comptime if split_bf16:
                var high = weights.cast[DType.bfloat16]()
                var low = (weights - high.cast[DType.float32]()).cast[DType.bfloat16]()
                var target = at.unsafe_bitcast[UInt16]()
                target.unsafe_store(0, bitcast[DType.uint16, KV_TILE_TOKENS](high))
                target.unsafe_store(KV_TILE_TOKENS, bitcast[DType.uint16, KV_TILE_TOKENS](low))
            else:
                at.unsafe_store(0, weights)
            m += 1


@always_inline
def sum_of_halves(x: SIMD[DType.float32, _]) -> Float32:
    """The sum of a power of two of numbers: of both halves lane by lane, and so on. All kernels add weights so."""
    comptime if x.length == 1:
        return x[0]
    else:
        comptime half = x.length // 2
        return sum_of_halves(x.slice[half]() + x.slice[half, offset=half]())


@no_inline
def raise_maximum(score: Float32, greatest: FloatPointer, total: FloatPointer, acc: FloatPointer, padded_dim: Int):
    """Raises a query's lagging maximum to its greatest score and rescales. It hardly ever runs, so it is not inlined.

    Args:
        score: The greatest score.
        greatest: The query's maximum.
        total: The sum of its weights.
        acc: `[padded_dim]`: its weighted values.
        padded_dim: P.
    """
    if greatest[] == MINUS_INFINITY:
        # Nothing was added yet.
        greatest[] = score
        return
    var state = AttentionState(greatest[], total[])
    var factor = state.raise_to(score)
    greatest[] = state.greatest
    total[] = state.total
    for d in range(0, padded_dim, LANES):
        acc.unsafe_store(d, acc.unsafe_load[width=LANES](d) * factor)
