"""Prefill in vectors: many rows of one request, one KV head a segment.

So many queries share K and V that the arithmetic takes the time, not the memory. K and V are widened once a step for
all queries of a block, and every vector that is loaded serves many products.
"""

from std.math import ceildiv
from std.sys import size_of
from std.utils import IndexList

from ....cache.paged_kv_cache import PagedKVCache
from ....isa.codes import is_codes
from ....isa.convert import FloatVector, LANES
from ....isa.memory import FloatPointer
from ...logits import Logits
from ...params import AttentionRows
from ...row_masks import MASK_TOKENS
from ...softmax import LOG2E
from ..plan import Segment
from ..prefetch import KV_TILE_TOKENS, Prefetcher
from ..prefill.queries import PrefillQueries, QUERY_COLUMNS, STEP_WORDS
from ..prefill.softmax import (
    exceeds_limit,
    mask_scores,
    nan_where_overflowed,
    negated_maximum,
    only_scaled,
    raise_maxima,
    weights_of,
)
from ..prefill.step import PrefillStep, STEP_TOKENS
from ..rotary_keys import KeyRotation
from ..workspace import HeadLayout
from .prefill_packing import head_words, lay_out_step, pack_queries
from .prefill_products import score_tiles, sum_query_tile
from .prefill_workspace import (
    KEY_TOKENS,
    TILES_AT_ONCE,
    TILE_SCORES,
    VectorPrefillWorkspace,
    score_tokens,
    takes_pairs,
)


@no_inline
def attend_prefill_vectors[
    dtype: DType, //, latent: Bool, rotates: Bool
](
    rows: AttentionRows[dtype, ...],
    segment: Segment,
    k: PagedKVCache,
    v: type_of(k),
    logits: Logits,
    heads: HeadLayout,
    mut workspace: VectorPrefillWorkspace,
    mut rotation: KeyRotation,
):
    """Computes the states and weighted values of a segment's queries of KV head `segment.head` in `workspace`.

    Parameters:
        dtype: The dtype of the queries.
        latent: Whether a key is a token's V and then its K.
        rotates: Whether the keys are rotated here; the queries are already (`../rotary_keys.mojo`).

    Args:
        rows: The rows of the call.
        segment: The segment.
        k: The keys.
        v: The values.
        logits: The options of the call.
        heads: The head sizes.
        workspace: The task's.
        rotation: The task's.
    """
    comptime key_dtype = DType.float32 if rotates else k.dtype
    comptime pairs = takes_pairs(dtype, key_dtype)
    comptime has_masks = rows.Masks.has_masks
    var request = Int(rows.row_batch[unsafe_offset=segment.row])
    var queries = segment.num_rows * heads.group
    var key_heads = heads
    comptime if rotates:
        key_heads = rotation.heads_of[key_dtype](heads)
        rotation.place_keys[key_dtype](KV_TILE_TOKENS)
    pack_queries[key_dtype, latent](rows, segment, key_heads, workspace)
    workspace.queries.clear(rows, segment, logits, heads)
    var buffer = 0
    var step = PrefillStep(k, v, request, segment.begin, segment.end, workspace.offset_buffer(0))
    while step.count > 0:
        var is_seen = True
        comptime if has_masks:
            var starts = IndexList[STEP_WORDS](step.first(), step.first() + MASK_TOKENS)
            var ends = IndexList[STEP_WORDS](step.end, step.end)
            is_seen = workspace.queries.read_masks(rows, segment, logits, heads.group, starts, ends)
        if is_seen:
            lay_out_step[pairs, latent, rotates](k, v, step, heads, segment.head, workspace, rotation)
        buffer = 1 - buffer
        var next = PrefillStep(k, v, request, step.end, segment.end, workspace.offset_buffer(buffer))
        var length = heads.units if is_codes(k.dtype) else prefetch_elements(heads)
        var prefetcher = Prefetcher[to_l1=False](workspace.offset_buffer(2), length * size_of[k.dtype]())
        for i in range(next.count):
            for d in range(0, heads.units, length):
                var at = segment.head * heads.k_stride + d
                prefetcher.add_ranges(k.blocks.ptr, next.tiles[i].k, 0, KV_TILE_TOKENS, at)
            for d in range(0, heads.units if is_codes(v.dtype) else heads.value_dim, length):
                var at = segment.head * heads.v_stride + d
                prefetcher.add_ranges(v.blocks.ptr, next.tiles[i].v, 0, KV_TILE_TOKENS, at)
        prefetcher.start(num_score_blocks(queries))
        var m = 0
        comptime for tiles in [TILES_AT_ONCE, 1]:
            while is_seen and m + (tiles - 1) * QUERY_COLUMNS < queries:
                attend_tiles[pairs, tiles, has_masks, latent](
                    step, logits, heads, segment.head, m, rows.latent_scale, workspace, prefetcher
                )
                m += tiles * QUERY_COLUMNS
        step = next^


def prefetch_elements(heads: HeadLayout) -> Int:
    """The length of the ranges that are prefetched: K and V of a token take whole ones, where their widths differ."""
    return min(heads.head_dim, heads.value_dim) if heads.head_dim > 0 else heads.value_dim


def prefetch_ranges(heads: HeadLayout) -> Int:
    """The ranges of a token."""
    var length = prefetch_elements(heads)
    return ceildiv(heads.head_dim, length) + ceildiv(heads.value_dim, length)


def num_score_blocks(queries: Int) -> Int:
    """The calls of `prefetcher.run` in a step, at most."""
    var tiles = ceildiv(queries, QUERY_COLUMNS)
    var together, alone = divmod(tiles, TILES_AT_ONCE)
    return together * (KEY_TOKENS // score_tokens(TILES_AT_ONCE)) + alone * (KEY_TOKENS // score_tokens(1))


@no_inline
def attend_tiles[
    pairs: Bool, tiles: Int, has_masks: Bool, latent: Bool
](
    step: PrefillStep,
    logits: Logits,
    heads: HeadLayout,
    head: Int,
    m: Int,
    latent_scale: Float32,
    workspace: VectorPrefillWorkspace,
    mut prefetcher: Prefetcher,
):
    """Adds one step to the states and weighted values of `tiles` query tiles, from query `m` on."""
    var queries = workspace.queries
    var first = step.first()
    var begin: Int
    var end: Int
    comptime if has_masks:
        begin, end = queries.seen_range[tiles](m)
    else:
        begin = max(queries.first_seen[tiles](m), first) - first
        end = min(queries.end_seen[tiles](m), step.end) - first
    if begin >= end:
        return
    var words = head_words[pairs](heads.padded_dim)
    score_tiles[pairs, tiles, latent](
        workspace.keys,
        workspace.q.unsafe_offset(m * words),
        words,
        head_words[pairs](heads.padded_value) if latent else 0,
        latent_scale,
        begin,
        end,
        workspace.scores,
        prefetcher,
    )
    comptime for tile in range(tiles):
        var at = m + tile * QUERY_COLUMNS
        var scores = workspace.scores.unsafe_offset(tile * TILE_SCORES)
        scores_to_weights[has_masks](queries, first, begin, end, logits, heads, head, at, scores, workspace.weights)
        sum_query_tile(
            workspace.values,
            workspace.weights,
            begin,
            end,
            heads.padded_value,
            queries.acc.unsafe_offset(at * heads.padded_value),
        )


@always_inline
def scores_to_weights[
    has_masks: Bool
](
    queries: PrefillQueries,
    first: Int,
    begin: Int,
    end: Int,
    logits: Logits,
    heads: HeadLayout,
    head: Int,
    m: Int,
    scores: FloatPointer,
    weights: FloatPointer,
):
    """Computes the weights of query tile `m` for tokens `[begin, end)` of the step whose first token is `first`."""
    var count = end - begin
    var source = scores.unsafe_offset(begin * QUERY_COLUMNS)
    var target = weights.unsafe_offset(begin * QUERY_COLUMNS)
    var factor = logits.scale * LOG2E
    var all_see: Bool
    comptime if has_masks:
        all_see = queries.all_see_step(m, begin, end)
    else:
        all_see = queries.all_see(m, first + begin, first + end)
    var are_dots = only_scaled(logits, factor) and all_see
    if not are_dots:
        mask_scores[has_masks](queries, m, logits, heads, head, first + begin, count, first + end, begin, source)
        factor = 1
    var sums = exp2_weights(count, source, are_dots, factor, queries.greatest.unsafe_load[width=LANES](m), target)
    if exceeds_limit(sums, queries.greatest.unsafe_load[width=LANES](m)):
        raise_maxima(queries, m, heads.padded_value, count, source, factor, sums)
        sums = exp2_weights(count, source, are_dots, factor, queries.greatest.unsafe_load[width=LANES](m), target)
    queries.totals.unsafe_store(m, queries.totals.unsafe_load[width=LANES](m) + sums)


@always_inline
def exp2_weights(
    count: Int, scores: FloatPointer, are_dots: Bool, factor: Float32, greatest: FloatVector, weights: FloatPointer
) -> FloatVector:
    """Computes the weights of 16 queries for `count` tokens; returns their sums.

    The scores are dot products, or else may be -inf where a query does not see the token.
    """
    var negated = negated_maximum(greatest)
    var sums = FloatVector(0)
    var lowest = FloatVector(0)
    for t in range(count):
        var score = scores.unsafe_load[width=LANES](t * LANES)
        lowest = score.lt(lowest).select(score, lowest)
        var w = weights_of(score.fma(FloatVector(factor), negated))
        sums += w
        weights.unsafe_store(t * LANES, w)
    return nan_where_overflowed(sums, lowest) if are_dots else sums
