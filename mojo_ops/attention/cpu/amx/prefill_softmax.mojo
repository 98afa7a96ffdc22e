"""The softmax of a prefill step: 16 queries at a time, one in each SIMD lane.

Weights are computed before the greatest score is known. Where the weights of a step sum up to more than
`WEIGHT_SUM_LIMIT`, the lagging maxima are raised and the weights computed again.
"""

from std.memory import bitcast
from std.utils.numerics import nan

from ....isa.amx_tiles import AMX_TILE_ELEMENTS
from ....isa.convert import FloatVector, LANES
from ....isa.memory import Bf16BitsPointer, FloatPointer
from ....isa.transpose import transpose_16x16
from ...logits import Logits
from ...row_masks import ALL_BITS
from ...softmax import MINUS_INFINITY, exp2
from ..prefetch import KV_TILE_TOKENS
from ..prefill.queries import PrefillQueries, QUERY_COLUMNS
from ..prefill.scores import mask_scores
from ..prefill.step import PrefillStep, STEP_TILES, STEP_TOKENS
from ..workspace import HeadLayout
from .prefill_products import PairProducts
from .prefill_workspace import PAIR_SCORE_FLOATS, PrefillWorkspace, visible_tiles


comptime WEIGHT_SUM_LIMIT: Float32 = 256
"""The sum of a query's weights over one step beyond which its lagging maximum is raised."""


@always_inline
def scores_to_weights_prefill[
    has_masks: Bool
](
    step: PrefillStep,
    logits: Logits,
    heads: HeadLayout,
    head: Int,
    pair: Int,
    half: Int,
    workspace: PrefillWorkspace,
    mut products: PairProducts,
):
    """Computes the weights of query tile `half` of a pair over one step."""
    var count = visible_tiles(step, pair, workspace.queries)
    if count == 0:
        return
    var m = (2 * pair + half) * QUERY_COLUMNS
    var scores = workspace.scores.unsafe_offset(pair % 2 * PAIR_SCORE_FLOATS + half * STEP_TOKENS * QUERY_COLUMNS)
    var weights = workspace.weights.unsafe_offset((pair % 2 * STEP_TILES * 2 + half) * 2 * AMX_TILE_ELEMENTS)
    var queries = workspace.queries
    var factor = logits.factor()
    var are_dots = factor != 0
    for i in range(count):
        var first = step.tiles[i].first
        var all_see: Bool
        comptime if has_masks:
            all_see = queries.all_see_word(m, i, ALL_BITS)
        else:
            all_see = queries.all_see(m, first, first + KV_TILE_TOKENS)
        are_dots = are_dots and step.tiles[i].count == KV_TILE_TOKENS and all_see
    if not are_dots:
        for i in range(count):
            var tile = step.tiles[i]
            # Rows past the tile's last token hold the scores of another token.
            mask_scores[has_masks](
                queries,
                m,
                logits,
                heads,
                head,
                tile,
                i,
                0,
                KV_TILE_TOKENS,
                scores.unsafe_offset(i * KV_TILE_TOKENS * QUERY_COLUMNS),
            )
    if factor == 0:
        factor = 1
    var greatest = queries.greatest.unsafe_load[width=QUERY_COLUMNS](m)
    var sums = exp2_weights(count, scores, are_dots, factor, greatest, weights, workspace, products)
    if exceeds_limit(sums, greatest):
        raise_maxima(queries, m, heads.padded_value, count * KV_TILE_TOKENS, scores, factor, sums)
        greatest = queries.greatest.unsafe_load[width=QUERY_COLUMNS](m)
        sums = exp2_weights(count, scores, are_dots, factor, greatest, weights, workspace, products)
    queries.totals.unsafe_store(m, queries.totals.unsafe_load[width=QUERY_COLUMNS](m) + sums)


@always_inline
def exp2_weights(
    count: Int,
    scores: FloatPointer,
    are_dots: Bool,
    factor: Float32,
    greatest: FloatVector,
    weights: Bf16BitsPointer,
    workspace: PrefillWorkspace,
    mut products: PairProducts,
) -> FloatVector:
    """Computes the weights of 16 queries over `count` KV tiles, as two bfloat16 matrix tiles; returns their sums.

    The scores are dot products, or else may be -inf where a query does not see the token.
    """
    var negated = negated_maximum(greatest)
    var even = FloatVector(0)
    var odd = FloatVector(0)
    var lowest = FloatVector(0)
    for i in range(count):
        var source = scores.unsafe_offset(i * KV_TILE_TOKENS * QUERY_COLUMNS)
        for p in range(KV_TILE_TOKENS // 2):
            products.run()
            var first = source.unsafe_load[width=LANES](2 * p * LANES)
            var second = source.unsafe_load[width=LANES]((2 * p + 1) * LANES)
            lowest = first.lt(lowest).select(first, lowest)
            lowest = second.lt(lowest).select(second, lowest)
            var a = exp2(first.fma(FloatVector(factor), negated))
            var b = exp2(second.fma(FloatVector(factor), negated))
            even += a
            odd += b
            var high_a = rounded_to_bf16(a)
            var high_b = rounded_to_bf16(b)
            workspace.transpose_buffer.unsafe_store(p * LANES, high_a >> 16 | high_b)
            var low_a = rounded_to_bf16(a - bitcast[DType.float32, LANES](high_a))
            var low_b = rounded_to_bf16(b - bitcast[DType.float32, LANES](high_b))
            workspace.transpose_buffer.unsafe_store((16 + p) * LANES, low_a >> 16 | low_b)
        var target = weights.unsafe_offset(i * 4 * AMX_TILE_ELEMENTS).unsafe_bitcast[UInt32]()
        comptime for part in range(2):
            var x = Array[SIMD[DType.uint32, LANES], 16](fill=0)
            comptime for p in range(16):
                x[p] = workspace.transpose_buffer.unsafe_load[width=LANES]((part * 16 + p) * LANES)
            transpose_16x16(x)
            comptime for column in range(16):
                target.unsafe_store(part * AMX_TILE_ELEMENTS // 2 + column * LANES, x[column])
    return nan_where_overflowed(even + odd, lowest) if are_dots else even + odd


@always_inline
def rounded_to_bf16(x: FloatVector) -> SIMD[DType.uint32, LANES]:
    """The nearest bfloat16 in the upper half, ties away from 0. A NaN may become any number; `sums` keeps it."""
    return (bitcast[DType.uint32, LANES](x) + 0x8000) & 0xFFFF0000


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
