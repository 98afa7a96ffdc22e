"""The softmax of a prefill step: 16 queries at a time, one in each SIMD lane."""

from std.memory import bitcast

from ....isa.amx_tiles import AMX_TILE_ELEMENTS
from ....isa.convert import FloatVector, LANES
from ....isa.memory import Bf16BitsPointer, FloatPointer
from ....isa.transpose import transpose_16x16
from ...logits import Logits
from ...row_masks import ALL_BITS, MASK_TOKENS
from ...softmax import LOG2E, exp2
from ..prefetch import KV_TILE_TOKENS
from ..prefill.queries import QUERY_COLUMNS
from ..prefill.softmax import (
    exceeds_limit,
    mask_scores,
    nan_where_overflowed,
    negated_maximum,
    only_scaled,
    raise_maxima,
)
from ..prefill.step import PrefillStep, STEP_TILES, STEP_TOKENS
from ..workspace import HeadLayout
from .prefill_products import PairProducts
from .prefill_workspace import PAIR_SCORE_FLOATS, PrefillWorkspace, visible_tiles


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
