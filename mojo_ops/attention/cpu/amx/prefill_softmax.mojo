"""The softmax of a prefill step: 16 queries at a time, one in each SIMD lane."""

from std.memory import bitcast
from std.utils.numerics import isfinite

from ....isa.amx_tiles import AMX_TILE_ELEMENTS, transpose_16x16
from ....isa.convert import FloatVector, LANES
from ....isa.memory import Bf16BitsPointer, FloatPointer
from ...logits import Logits
from ...softmax import LOG2E, MINUS_INFINITY, exp2
from ..prefetch import KV_TILE_TOKENS
from ..workspace import HeadLayout
from .prefill_products import PairProducts
from .prefill_workspace import PAIR_SCORE_FLOATS, PrefillStep, PrefillWorkspace, QUERY_COLUMNS, STEP_TILES, STEP_TOKENS

comptime WEIGHT_SUM_LIMIT: Float32 = 256
"""The sum of a query's weights over one step beyond which its reference is raised to its greatest score."""


@always_inline
def scores_to_weights_prefill(
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
    var count = step.visible_tiles(pair, workspace)
    if count == 0:
        return
    var m = (2 * pair + half) * QUERY_COLUMNS
    var scores = workspace.scores.unsafe_offset(pair % 2 * PAIR_SCORE_FLOATS + half * STEP_TOKENS * QUERY_COLUMNS)
    var weights = workspace.weights.unsafe_offset((pair % 2 * STEP_TILES * 2 + half) * 2 * AMX_TILE_ELEMENTS)
    var first = workspace.first.unsafe_load[width=QUERY_COLUMNS](m)
    var last = workspace.last.unsafe_load[width=QUERY_COLUMNS](m)
    var first_of_all = Int(first.reduce_max())
    var last_of_all = Int(last.reduce_min())
    var factor = logits.scale * LOG2E
    var plain = not logits.has_alibi and logits.soft_cap <= 0 and isfinite(factor)
    for i in range(count):
        plain = (
            plain
            and step.tiles[i].count == KV_TILE_TOKENS
            and first_of_all <= step.tiles[i].first
            and step.tiles[i].first + KV_TILE_TOKENS <= last_of_all
        )
    if not plain:
        mask_scores(step, count, logits, heads, head, m, scores, workspace)
        factor = 1
    var totals = workspace.totals.unsafe_load[width=QUERY_COLUMNS](m)
    var greatest = workspace.greatest.unsafe_load[width=QUERY_COLUMNS](m)
    var sums = exp2_weights(count, scores, factor, greatest, weights, workspace, products)
    # The greatest score is computed only where the weights sum up to more than the limit, or no token was seen before.
    if not (sums.le(WEIGHT_SUM_LIMIT) & greatest.gt(MINUS_INFINITY)).reduce_and():
        raise_references(count, scores, factor, sums, m, heads.padded_dim, workspace)
        totals = workspace.totals.unsafe_load[width=QUERY_COLUMNS](m)
        greatest = workspace.greatest.unsafe_load[width=QUERY_COLUMNS](m)
        sums = exp2_weights(count, scores, factor, greatest, weights, workspace, products)
    workspace.totals.unsafe_store(m, totals + sums)


@always_inline
def exp2_weights(
    count: Int,
    scores: FloatPointer,
    factor: Float32,
    greatest: FloatVector,
    weights: Bf16BitsPointer,
    workspace: PrefillWorkspace,
    mut products: PairProducts,
) -> FloatVector:
    """Computes the weights of 16 queries over `count` KV tiles, as two bfloat16 matrix tiles; returns their sums."""
    # A query that has seen no token has no greatest score to subtract yet.
    var reference = greatest.eq(MINUS_INFINITY).select(FloatVector(0), -greatest)
    var even = FloatVector(0)
    var odd = FloatVector(0)
    for i in range(count):
        var source = scores.unsafe_offset(i * KV_TILE_TOKENS * QUERY_COLUMNS)
        for p in range(KV_TILE_TOKENS // 2):
            products.run()
            var a = exp2(source.unsafe_load[width=LANES](2 * p * LANES).fma(FloatVector(factor), reference))
            var b = exp2(source.unsafe_load[width=LANES]((2 * p + 1) * LANES).fma(FloatVector(factor), reference))
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
    return even + odd


@always_inline
def rounded_to_bf16(x: FloatVector) -> SIMD[DType.uint32, LANES]:
    """The nearest bfloat16 in the upper half, ties away from 0. A NaN may become any number; `sums` keeps it."""
    return (bitcast[DType.uint32, LANES](x) + 0x8000) & 0xFFFF0000


@no_inline
def mask_scores(
    step: PrefillStep,
    count: Int,
    logits: Logits,
    heads: HeadLayout,
    head: Int,
    m: Int,
    scores: FloatPointer,
    workspace: PrefillWorkspace,
):
    """Turns the dot products of 16 queries into base-2 scores, and into -inf where a query does not see the token."""
    var first = workspace.first.unsafe_load[width=QUERY_COLUMNS](m)
    var last = workspace.last.unsafe_load[width=QUERY_COLUMNS](m)
    var slopes = FloatVector(0)
    if logits.has_alibi:
        for lane in range(QUERY_COLUMNS):
            slopes[lane] = logits.alibi_slopes[unsafe_offset=head * heads.group + (m + lane) % heads.group]
    for i in range(count):
        for t in range(KV_TILE_TOKENS):
            var at = scores.unsafe_offset((i * KV_TILE_TOKENS + t) * QUERY_COLUMNS)
            var token = SIMD[DType.int32, QUERY_COLUMNS](Int32(step.tiles[i].first + t))
            var score = logits.score_each(at.unsafe_load[width=QUERY_COLUMNS](0), slopes, token.cast[DType.float32]())
            # Rows past the tile's last token hold the scores of another token.
            var seen = token.lt(last) & token.ge(first) & token.lt(Int32(step.tiles[i].first + step.tiles[i].count))
            at.unsafe_store(0, seen.select(score, MINUS_INFINITY))


@no_inline
def raise_references(
    count: Int,
    scores: FloatPointer,
    factor: Float32,
    sums: FloatVector,
    m: Int,
    padded_dim: Int,
    workspace: PrefillWorkspace,
):
    """Raises the references of 16 queries to their greatest scores, where their weights exceed the limit."""
    var old = workspace.greatest.unsafe_load[width=QUERY_COLUMNS](m)
    var new = old
    for t in range(count * KV_TILE_TOKENS):
        new = max(new, scores.unsafe_load[width=QUERY_COLUMNS](t * QUERY_COLUMNS) * factor)
    # A NaN reference makes the weights and the result NaN.
    new = sums.eq(sums).select(new, sums)
    new = (sums.le(WEIGHT_SUM_LIMIT) & old.gt(MINUS_INFINITY)).select(old, new)
    var scale = new.eq(old).select(FloatVector(1), exp2(old - new))
    workspace.greatest.unsafe_store(m, new)
    workspace.totals.unsafe_store(m, workspace.totals.unsafe_load[width=QUERY_COLUMNS](m) * scale)
    for lane in range(QUERY_COLUMNS):
        if scale[lane] != 1:
            var acc = workspace.acc.unsafe_offset((m + lane) * padded_dim)
            for d in range(0, padded_dim, LANES):
                acc.unsafe_store(d, acc.unsafe_load[width=LANES](d) * scale[lane])
