"""Prefill in vectors: many rows of one request, one KV head a segment.

A row has the bits that it has in `segment.mojo`: products, weights and values are added in the same order.

So many queries share K and V that the arithmetic takes the time, not the memory. K and V are widened once a step for
all queries of a block, and every vector that is loaded serves many products.
"""

from std.bit import log2_floor
from std.math import ceildiv
from std.sys import size_of
from std.utils import IndexList

from ....cache.paged_kv_cache import PagedKVCache
from ....isa.codes import is_codes
from ....isa.convert import FloatVector, LANES
from ....isa.memory import FloatPointer
from ....isa.registers import unfused
from ...logits import Logits
from ...params import AttentionRows
from ...row_masks import MASK_TOKENS, bits_between
from ...softmax import MINUS_INFINITY, exp2
from ..kv_tile import KVTile
from ..plan import Segment
from ..prefetch import KV_TILE_TOKENS, Prefetcher
from ..prefill.queries import PrefillQueries, QUERY_COLUMNS, STEP_WORDS
from ..prefill.scores import mask_scores
from ..prefill.step import PrefillStep
from ..rotary_keys import KeyRotation
from ..tile_weights import RESCALE_THRESHOLD, raise_maximum
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
    if not segment.continues:
        pack_queries[key_dtype, latent](rows, segment, key_heads, workspace)
    workspace.queries.clear(rows, segment, logits, heads)
    var buffer = 0
    var step = PrefillStep(k, v, request, segment, segment.begin, workspace.offset_buffer(0), interleaves=not has_masks)
    while step.count > 0:
        var is_seen = True
        comptime if has_masks:
            var starts = IndexList[STEP_WORDS](step.first(), step.first() + MASK_TOKENS)
            var ends = IndexList[STEP_WORDS](step.end, step.end)
            is_seen = workspace.queries.read_masks(rows, segment, logits, heads.group, starts, ends)
        if is_seen:
            lay_out_step[pairs, latent, rotates](k, v, step, heads, segment.head, workspace, rotation)
        buffer = 1 - buffer
        var next = PrefillStep(
            k, v, request, segment, step.end, workspace.offset_buffer(buffer), interleaves=not has_masks
        )
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
                attend_tiles[pairs, is_codes(k.dtype) and not latent, tiles, has_masks, latent](
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
    pairs: Bool, codes: Bool, tiles: Int, has_masks: Bool, latent: Bool
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
    var begin = 0
    var end = step.count * KV_TILE_TOKENS
    comptime if has_masks:
        begin, end = queries.seen_range[tiles](m)
    else:
        if not step.tiles[0].interleaved:
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
        var acc = queries.acc.unsafe_offset(at * heads.padded_value)
        var summed = begin
        for i in range(step.count):
            var from_entry = max(begin - i * KV_TILE_TOKENS, 0)
            var to_entry = min(end - i * KV_TILE_TOKENS, KV_TILE_TOKENS)
            if from_entry >= to_entry:
                continue
            var of_tile = scores.unsafe_offset(i * KV_TILE_TOKENS * QUERY_COLUMNS)
            comptime if codes:
                scale_rows(workspace.key_scales, i * KV_TILE_TOKENS, from_entry, to_entry, of_tile)
            var factor = logits.factor()
            var are_dots = factor != 0 and sees_tile[has_masks](queries, step.tiles[i], i, from_entry, to_entry, at)
            if not are_dots:
                mask_scores[has_masks](
                    queries, at, logits, heads, head, step.tiles[i], i, from_entry, to_entry, of_tile
                )
            if factor == 0:
                factor = 1
            var most, least = extremes(of_tile, from_entry, to_entry)
            var greatest = (most if factor > 0 else least) * factor
            # NaN where a dot product is infinite: it overflowed, and perhaps in a partial sum of the other sign.
            var zeros = (most - most) + (least - least) if are_dots else FloatVector(0)
            if not greatest.le(queries.greatest.unsafe_load[width=LANES](at) + RESCALE_THRESHOLD).reduce_and():
                # The weights so far are relative to the maxima so far.
                var entry = i * KV_TILE_TOKENS + from_entry
                if summed < entry:
                    sum_query_tile(workspace.values, workspace.weights, summed, entry, heads.padded_value, acc)
                    summed = entry
                raise_maxima(queries, at, heads.padded_value, greatest)
            var weights = workspace.weights.unsafe_offset(i * KV_TILE_TOKENS * QUERY_COLUMNS)
            exp2_weights(of_tile, factor, from_entry, to_entry, queries.greatest.unsafe_load[width=LANES](at), weights)
            var totals = queries.totals.unsafe_load[width=LANES](at)
            queries.totals.unsafe_store(at, totals + (sum_of_entries(weights) + zeros))
            comptime if codes:
                scale_rows(workspace.value_scales, i * KV_TILE_TOKENS, from_entry, to_entry, weights)
        sum_query_tile(workspace.values, workspace.weights, summed, end, heads.padded_value, acc)


@always_inline
def scale_rows(scales: FloatPointer, first: Int, begin: Int, end: Int, numbers: FloatPointer):
    """Multiplies rows `[begin, end)` of `[KV_TILE_TOKENS, 16]` by the scales of their tokens, from `scales[first]` on."""
    for t in range(begin, end):
        var row = numbers.unsafe_load[width=LANES](t * LANES)
        numbers.unsafe_store(t * LANES, row * scales[unsafe_offset=first + t])


@always_inline
def sees_tile[has_masks: Bool](queries: PrefillQueries, tile: KVTile, word: Int, begin: Int, end: Int, m: Int) -> Bool:
    """Return whether each of the 16 queries from `m` on sees all entries `[begin, end)` of KV tile `word` of a step."""
    comptime if has_masks:
        return queries.all_see_word(m, word, bits_between(0, begin, end))
    else:
        return tile.interleaved or queries.all_see(m, tile.first + begin, tile.first + end)


@always_inline
def extremes(scores: FloatPointer, begin: Int, end: Int) -> Tuple[FloatVector, FloatVector]:
    """The greatest and the least score of each of 16 queries among entries `[begin, end)` of a KV tile."""
    var most = scores.unsafe_load[width=LANES](begin * LANES)
    var least = most
    for t in range(begin + 1, end):
        var score = scores.unsafe_load[width=LANES](t * LANES)
        most = max(most, score)
        least = min(least, score)
    return most, least


@no_inline
def raise_maxima(queries: PrefillQueries, m: Int, padded_value: Int, scores: FloatVector):
    """Raises the lagging maxima of query tile `m` that these scores exceed by too much, as decode does."""
    for lane in range(QUERY_COLUMNS):
        if not scores[lane] <= queries.greatest[unsafe_offset=m + lane] + RESCALE_THRESHOLD:
            raise_maximum(
                scores[lane],
                queries.greatest.unsafe_offset(m + lane),
                queries.totals.unsafe_offset(m + lane),
                queries.acc.unsafe_offset((m + lane) * padded_value),
                padded_value,
            )


@always_inline
def exp2_weights(
    scores: FloatPointer, factor: Float32, begin: Int, end: Int, greatest: FloatVector, weights: FloatPointer
):
    """Computes the weights `[KV_TILE_TOKENS, 16]` of scores, which are base 2 after `factor`; those of entries outside
    `[begin, end)` are 0.
    """
    # A query that has seen no token has no greatest score to subtract yet.
    var least = greatest.eq(MINUS_INFINITY).select(FloatVector(0), greatest)
    for t in range(begin):
        weights.unsafe_store(t * LANES, FloatVector(0))
    for t in range(begin, end):
        var score = unfused(scores.unsafe_load[width=LANES](t * LANES) * factor)
        weights.unsafe_store(t * LANES, exp2(score - least))
    for t in range(end, KV_TILE_TOKENS):
        weights.unsafe_store(t * LANES, FloatVector(0))


@always_inline
def sum_of_entries(weights: FloatPointer) -> FloatVector:
    """The sums of the weights `[KV_TILE_TOKENS, 16]` of each query, added as `sum_of_halves` does."""
    comptime half = KV_TILE_TOKENS // 2
    var sums = Array[FloatVector, half](fill=0)
    comptime for t in range(half):
        sums[t] = weights.unsafe_load[width=LANES](t * LANES) + weights.unsafe_load[width=LANES]((t + half) * LANES)
    comptime for step in range(log2_floor(half)):
        comptime width = half >> (step + 1)
        comptime for t in range(width):
            sums[t] += sums[t + width]
    return sums[0]
