"""The softmax of a prefill step on all CPUs: 16 queries at a time, one in each SIMD lane.

Weights are computed before the greatest score is known. Where the weights of a step sum up to more than
`WEIGHT_SUM_LIMIT`, the lagging maxima are raised and the weights computed again.
"""

from std.utils.numerics import isfinite, nan

from ....isa.convert import FloatVector, LANES
from ....isa.memory import FloatPointer
from ...logits import Logits, nan_where_infinite
from ...softmax import HAS_SCALEF, MINUS_INFINITY, exp2
from ..kv_tile import KVTile
from ..prefetch import KV_TILE_TOKENS
from ..tile_weights import RESCALE_THRESHOLD
from ..workspace import HeadLayout
from .queries import PrefillQueries, QUERY_COLUMNS

comptime WEIGHT_SUM_LIMIT: Float32 = 256
"""The sum of a query's weights over one step beyond which its lagging maximum is raised."""


@always_inline
def only_scaled(logits: Logits, factor: Float32) -> Bool:
    """Return whether a score is the dot product times `factor`, its scale in base 2, and nothing else."""
    return not logits.has_alibi and logits.soft_cap <= 0 and isfinite(factor)


@always_inline
def exceeds_limit(sums: FloatVector, greatest: FloatVector) -> Bool:
    """Return whether the weights of a step, whose sums these are, need another maximum; NaN counts as too much."""
    return not (sums.le(WEIGHT_SUM_LIMIT) & greatest.gt(MINUS_INFINITY)).reduce_and()


@always_inline
def nan_where_overflowed(sums: FloatVector, lowest: FloatVector) -> FloatVector:
    """The sums of weights, NaN where the lowest dot product is -inf: it overflowed, and perhaps in a partial sum alone.

    One of +inf, or NaN, shows in its weight.
    """
    return lowest.gt(MINUS_INFINITY).select(sums, FloatVector(nan[DType.float32]()))


@always_inline
def negated_maximum(greatest: FloatVector) -> FloatVector:
    """Return what is added to scores before `exp2`: a query that has seen no token has no greatest score to subtract
    yet.
    """
    return greatest.eq(MINUS_INFINITY).select(FloatVector(0), -greatest)


@always_inline
def weights_of(x: FloatVector) -> FloatVector:
    """The 2^x of scores less their maximum, which they may exceed by any amount: above 2^126 it is not exact."""
    comptime if HAS_SCALEF:
        return exp2(x)
    else:
        # Not `min`: that would turn a NaN into a number.
        return exp2(x.gt(126).select(FloatVector(126), x))


@no_inline
def mask_scores[
    has_masks: Bool
](
    queries: PrefillQueries,
    m: Int,
    logits: Logits,
    heads: HeadLayout,
    head: Int,
    tile: KVTile,
    word: Int,
    begin: Int,
    end: Int,
    scores: FloatPointer,
):
    """Turns the dot products of 16 queries into base-2 scores, or leaves them where a score is `logits.factor()` times
    the dot product; where a query does not see the token, the score is -inf.

    Parameters:
        has_masks: Whether the queries' `seen` says what they see, else `first` and `last`.

    Args:
        queries: The queries of the segment.
        m: The first of the 16.
        logits: The options of the call.
        heads: The head sizes.
        head: The KV head.
        tile: The KV tile.
        word: Its number in the step; where there are masks, its word of `seen`.
        begin: The first entry of the tile whose dot products are turned.
        end: The entry after the last one.
        scores: `[KV_TILE_TOKENS, 16]`, replaced from `begin` to `end`.
    """
    var slopes = FloatVector(0)
    if logits.has_alibi:
        for lane in range(QUERY_COLUMNS):
            slopes[lane] = logits.alibi_slopes[unsafe_offset=head * heads.group + (m + lane) % heads.group]
    var tokens = tile.tokens()
    var factor = logits.factor()
    var unseen = MINUS_INFINITY if factor >= 0 else -MINUS_INFINITY
    for t in range(begin, end):
        var at = scores.unsafe_offset(t * QUERY_COLUMNS)
        var token = SIMD[DType.int32, QUERY_COLUMNS](tokens[t])
        var dots = nan_where_infinite(at.unsafe_load[width=QUERY_COLUMNS](0))
        var seen = SIMD[DType.bool, QUERY_COLUMNS](fill=t < tile.count)
        comptime if has_masks:
            seen &= (queries.seen_words(m, word) >> UInt32(t) & 1).eq(1)
            token += Int32(queries.token_offset)
        else:
            seen &= token.lt(queries.last.unsafe_load[width=QUERY_COLUMNS](m))
            seen &= token.ge(queries.first.unsafe_load[width=QUERY_COLUMNS](m))
        var score = dots if factor != 0 else logits.score_each(dots, slopes, token.cast[DType.float32]())
        at.unsafe_store(0, seen.select(score, unseen))


@no_inline
def raise_maxima(
    queries: PrefillQueries,
    m: Int,
    padded_value: Int,
    count: Int,
    scores: FloatPointer,
    factor: Float32,
    sums: FloatVector,
):
    """Raises the lagging maxima of 16 queries to their greatest scores, where their weights exceed the limit.

    Args:
        queries: The queries of the segment.
        m: The first of the 16.
        padded_value: Pv.
        count: Tokens of `scores`.
        scores: `[count, 16]`.
        factor: Multiplies the scores.
        sums: The sums of the weights of these scores.
    """
    var old = queries.greatest.unsafe_load[width=QUERY_COLUMNS](m)
    var new = old
    for t in range(count):
        new = max(new, scores.unsafe_load[width=QUERY_COLUMNS](t * QUERY_COLUMNS) * factor)
    # A NaN maximum makes the weights and the result NaN.
    new = sums.eq(sums).select(new, sums)
    new = (sums.le(WEIGHT_SUM_LIMIT) & old.gt(MINUS_INFINITY)).select(old, new)
    var scale = new.eq(old).select(FloatVector(1), exp2(old - new))
    queries.greatest.unsafe_store(m, new)
    queries.totals.unsafe_store(m, queries.totals.unsafe_load[width=QUERY_COLUMNS](m) * scale)
    for lane in range(QUERY_COLUMNS):
        if scale[lane] != 1:
            var acc = queries.acc.unsafe_offset((m + lane) * padded_value)
            for d in range(0, padded_value, LANES):
                acc.unsafe_store(d, acc.unsafe_load[width=LANES](d) * scale[lane])
