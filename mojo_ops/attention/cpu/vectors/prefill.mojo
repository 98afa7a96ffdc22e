"""Prefill in vectors: many rows of one request, one KV head a segment.

So many queries share K and V that the arithmetic takes the time, not the memory. K and V are widened once a step for
all queries of a block, and every vector that is loaded serves many products.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.sys import size_of
from std.utils import IndexList

from ....cache.paged_kv_cache import PagedKVCache
from ....isa.convert import ChunkConstants, FloatVector, LANES, chunk_of, load_chunk, to_chunk_order
from ....isa.memory import FloatPointer
from ....isa.transpose import transpose_16x16
from ...logits import Logits
from ...params import AttentionRows
from ...row_sight import MASK_TOKENS
from ...softmax import LOG2E
from ..plan import Segment
from ..prefetch import KV_TILE_TOKENS, Prefetcher
from ..prefill.queries import PrefillQueries, QUERY_COLUMNS, STEP_WORDS
from ..prefill.softmax import (
    exceeds_limit,
    mask_scores,
    nan_where_overflowed,
    negated_reference,
    only_scaled,
    raise_references,
    weights_of,
)
from ..prefill.step import PrefillStep, STEP_TOKENS
from ..workspace import HeadLayout
from .prefill_products import WordVector, score_tiles, sum_query_tile
from .prefill_workspace import (
    KEY_TOKENS,
    LINE_WORDS,
    TILES_AT_ONCE,
    TILE_SCORES,
    VALUE_COLUMNS,
    VectorPrefillWorkspace,
    WordPointer,
    score_tokens,
    takes_pairs,
)


@no_inline
def attend_prefill_vectors[
    dtype: DType, //
](
    rows: AttentionRows[dtype, ...],
    segment: Segment,
    k: PagedKVCache,
    v: type_of(k),
    logits: Logits,
    heads: HeadLayout,
    mut workspace: VectorPrefillWorkspace,
):
    """Computes the states and weighted values of a segment's queries of KV head `segment.head` in `workspace`."""
    comptime pairs = takes_pairs(dtype, k.dtype)
    comptime has_masks = rows.Sight.has_masks
    var request = Int(rows.row_batch[unsafe_offset=segment.row])
    var queries = segment.num_rows * heads.group
    pack_queries[k.dtype](rows, segment, heads, workspace)
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
            lay_out_step[pairs](k, v, step, heads, segment.head, workspace)
        buffer = 1 - buffer
        var next = PrefillStep(k, v, request, step.end, segment.end, workspace.offset_buffer(buffer))
        var prefetcher = Prefetcher[to_l1=False](workspace.offset_buffer(2), heads.head_dim * size_of[k.dtype]())
        for i in range(next.count):
            prefetcher.add_ranges(k.blocks.ptr, next.tiles[i].k, 0, KV_TILE_TOKENS, segment.head * heads.k_stride)
            prefetcher.add_ranges(v.blocks.ptr, next.tiles[i].v, 0, KV_TILE_TOKENS, segment.head * heads.v_stride)
        prefetcher.start(num_score_blocks(queries))
        var m = 0
        comptime for tiles in [TILES_AT_ONCE, 1]:
            while is_seen and m + (tiles - 1) * QUERY_COLUMNS < queries:
                attend_tiles[pairs, tiles, has_masks](step, logits, heads, segment.head, m, workspace, prefetcher)
                m += tiles * QUERY_COLUMNS
        step = next^


def num_score_blocks(queries: Int) -> Int:
    """The calls of `prefetcher.run` in a step, at most."""
    var tiles = ceildiv(queries, QUERY_COLUMNS)
    var together, alone = divmod(tiles, TILES_AT_ONCE)
    return together * (KEY_TOKENS // score_tokens(TILES_AT_ONCE)) + alone * (KEY_TOKENS // score_tokens(1))


def pack_queries[
    kv_dtype: DType, dtype: DType
](rows: AttentionRows[dtype, ...], segment: Segment, heads: HeadLayout, mut workspace: VectorPrefillWorkspace):
    """Packs the queries of one KV head of a block as words, a query in each lane."""
    comptime chunk = chunk_of(kv_dtype)
    comptime pairs = takes_pairs(dtype, kv_dtype)
    comptime lines = chunk_lines[pairs](kv_dtype)
    var queries = segment.num_rows * heads.group
    var words = head_words[pairs](heads.padded_dim)
    for m in range(0, queries, QUERY_COLUMNS):
        for c in range(heads.padded_dim // chunk):
            var columns = Array[WordVector, QUERY_COLUMNS * lines](fill=0)
            for column in range(min(QUERY_COLUMNS, queries - m)):
                var row, g = divmod(m + column, heads.group)
                var source = rows.q.unsafe_offset(
                    ((segment.row + row) * rows.num_heads + segment.head * heads.group + g) * heads.head_dim
                )
                var x = SIMD[DType.float32, chunk](0)
                comptime for i in range(chunk // 8):
                    if c * chunk + 8 * i < heads.head_dim:
                        x = x.insert[offset=8 * i](source.unsafe_load[width=8](c * chunk + 8 * i).cast[DType.float32]())
                x = to_chunk_order[kv_dtype](x)
                comptime for line in range(lines):
                    columns[line * QUERY_COLUMNS + column] = words_of[pairs, line](x)
            comptime for line in range(lines):
                var square = Array[WordVector, LINE_WORDS](fill=0)
                comptime for i in range(QUERY_COLUMNS):
                    square[i] = columns[line * QUERY_COLUMNS + i]
                transpose_16x16(square)
                var target = workspace.q.unsafe_offset(m * words + (c * lines + line) * LINE_WORDS * LANES)
                comptime for word in range(LINE_WORDS):
                    target.unsafe_store(word * LANES, square[word])


def chunk_lines[pairs: Bool](dtype: DType) -> Int:
    """Cache lines of words that a chunk takes."""
    return chunk_of(dtype) // (2 * LINE_WORDS if pairs else LINE_WORDS)


def head_words[pairs: Bool](padded_dim: Int) -> Int:
    """Words of a head."""
    return padded_dim // 2 if pairs else padded_dim


@always_inline
def words_of[pairs: Bool, line: Int](x: SIMD[DType.float32, _]) -> WordVector:
    """The words of one cache line of a chunk. What pairs with what does not matter: queries and keys do alike.

    bfloat16 elements as `load_chunk` separates them become the pairs that are stored, and the compiler drops both steps.
    """
    comptime if pairs:
        var low = bitcast[DType.uint32, LANES](x.slice[LANES, offset=2 * line * LANES]())
        var high = bitcast[DType.uint32, LANES](x.slice[LANES, offset=(2 * line + 1) * LANES]())
        return low >> 16 | high & 0xFFFF0000
    else:
        return bitcast[DType.uint32, LANES](x.slice[LANES, offset=line * LANES]())


def lay_out_step[
    pairs: Bool
](
    k: PagedKVCache,
    v: type_of(k),
    step: PrefillStep,
    heads: HeadLayout,
    head: Int,
    mut workspace: VectorPrefillWorkspace,
):
    """Copies K as words and V as float32, each token of the step once."""
    var key = k.blocks.ptr.unsafe_offset(head * heads.k_stride)
    var value = v.blocks.ptr.unsafe_offset(head * heads.v_stride)
    var constants = ChunkConstants[k.dtype]()
    for i in range(step.count):
        var tile = step.tiles[i]
        var first = tile.first - step.first()
        for t in range(tile.count):
            lay_out_token[pairs](
                key.unsafe_offset(tile.k[unsafe_offset=t]),
                value.unsafe_offset(tile.v[unsafe_offset=t]),
                constants,
                heads,
                workspace.keys.unsafe_offset((first + t) * LINE_WORDS),
                workspace.values.unsafe_offset((first + t) * VALUE_COLUMNS),
            )


@always_inline
def lay_out_token[
    dtype: DType, //, pairs: Bool
](
    key: Pointer[Scalar[dtype], _],
    value: Pointer[Scalar[dtype], _],
    constants: ChunkConstants[dtype],
    heads: HeadLayout,
    keys: WordPointer,
    values: FloatPointer,
):
    """Copies one head of one token."""
    comptime chunk = chunk_of(dtype)
    comptime lines = chunk_lines[pairs](dtype)
    for c in range(heads.padded_dim // chunk):
        var k: SIMD[DType.float32, chunk]
        var v: SIMD[DType.float32, chunk]
        var d = c * chunk
        if d + chunk <= heads.head_dim:
            k = load_chunk[True](key.unsafe_offset(d), chunk, constants)
            v = load_chunk[True](value.unsafe_offset(d), chunk, constants)
        else:
            k = load_chunk[False](key.unsafe_offset(d), heads.head_dim - d, constants)
            v = load_chunk[False](value.unsafe_offset(d), heads.head_dim - d, constants)
        comptime for line in range(lines):
            keys.unsafe_store((c * lines + line) * KEY_TOKENS * LINE_WORDS, words_of[pairs, line](k))
        comptime for i in range(0, chunk, LANES):
            comptime column = i // VALUE_COLUMNS * STEP_TOKENS * VALUE_COLUMNS + i % VALUE_COLUMNS
            values.unsafe_store(d * STEP_TOKENS + column, v.slice[LANES, offset=i]())


@no_inline
def attend_tiles[
    pairs: Bool, tiles: Int, has_masks: Bool
](
    step: PrefillStep,
    logits: Logits,
    heads: HeadLayout,
    head: Int,
    m: Int,
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
    score_tiles[pairs, tiles](
        workspace.keys,
        workspace.q.unsafe_offset(m * words),
        words,
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
            heads.padded_dim,
            queries.acc.unsafe_offset(at * heads.padded_dim),
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
        raise_references(queries, m, heads.padded_dim, count, source, factor, sums)
        sums = exp2_weights(count, source, are_dots, factor, queries.greatest.unsafe_load[width=LANES](m), target)
    queries.totals.unsafe_store(m, queries.totals.unsafe_load[width=LANES](m) + sums)


@always_inline
def exp2_weights(
    count: Int, scores: FloatPointer, are_dots: Bool, factor: Float32, greatest: FloatVector, weights: FloatPointer
) -> FloatVector:
    """Computes the weights of 16 queries for `count` tokens; returns their sums.

    The scores are dot products, or else may be -inf where a query does not see the token.
    """
    var reference = negated_reference(greatest)
    var sums = FloatVector(0)
    var lowest = FloatVector(0)
    for t in range(count):
        var score = scores.unsafe_load[width=LANES](t * LANES)
        lowest = score.lt(lowest).select(score, lowest)
        var w = weights_of(score.fma(FloatVector(factor), reference))
        sums += w
        weights.unsafe_store(t * LANES, w)
    return nan_where_overflowed(sums, lowest) if are_dots else sums
