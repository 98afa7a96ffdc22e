"""Attention of many rows of one request in AMX tiles, one KV head after the other: prefill.

So many queries share K and V that the arithmetic is what takes time, not the memory. Here a task holds one KV head of up to
`PREFILL_MAX_QUERIES` queries: K and V are laid out once for all of them, and every tile that is loaded serves two products.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.utils.numerics import isfinite

from ....cache.paged_kv_cache import PagedKVCache
from ....isa.amx import tile_load, tile_store
from ....isa.amx_tiles import Bf16Pointer, configure_tiles, multiply_2x2, store_sum, transpose_16x16, zero_sums
from ....isa.convert import LANES, FloatVector
from ...logits import Logits
from ...params import AttentionRows
from ...softmax import LOG2E, MINUS_INFINITY, exp2
from ..kv_tile import FloatPointer, HeadLayout
from ..plan import Segment
from ..prefetch import KV_TILE_TOKENS, FIXED_POINT_ONE
from .layout import LAYOUT_TOKENS
from .prefill_workspace import (
    QUERY_COLUMNS,
    PrefillWorkspace,
    NO_PAIR,
    PAIR_SCORE_FLOATS,
    STEP_TILES,
    PrefillStep,
    STEP_TOKENS,
    AMX_TILE_ELEMENTS,
    Bf16BitsPointer,
    padded_queries,
)
from .weighted_sums import pair_tokens
from .widen import Bf16Chunk, widen_chunk, query_words

comptime WEIGHT_SUM_LIMIT: Float32 = 256
"""How much the weights of a query's step may come to, before its reference follows its greatest score."""


def pack_queries_prefill[
    kv_dtype: DType, dtype: DType
](rows: AttentionRows[dtype], segment: Segment, logits: Logits, heads: HeadLayout, mut workspace: PrefillWorkspace):
    """Packs the block's queries of one KV head and forgets what was summed up."""
    comptime chunk = Bf16Chunk[kv_dtype].length
    var queries = segment.num_rows * heads.group
    var room = padded_queries(queries)
    var all = workspace.q.unsafe_bitcast[UInt32]()
    for block in range(0, room, QUERY_COLUMNS):
        for c in range(heads.padded_dim // chunk):
            comptime for part in range(chunk // 32):
                var pairs = Array[SIMD[DType.uint32, 16], 16](fill=0)
                comptime for column in range(QUERY_COLUMNS):
                    if block + column < queries:
                        var row, g = divmod(block + column, heads.group)
                        var source = rows.q.unsafe_offset(
                            ((segment.row + row) * rows.num_heads + segment.head * heads.group + g) * heads.head_dim
                            + c * chunk
                        )
                        pairs[column] = bitcast[DType.uint32, 16](
                            query_words[kv_dtype, part](
                                source.unsafe_bitcast[UInt16](), min(chunk, heads.head_dim - c * chunk)
                            )
                        )
                transpose_16x16(pairs)
                var target = all.unsafe_offset(
                    block * heads.padded_dim // 2 + (c * (chunk // 32) + part) * AMX_TILE_ELEMENTS // 2
                )
                comptime for p in range(16):
                    target.unsafe_store(p * QUERY_COLUMNS, pairs[p])
    for m in range(room):
        var length = Int(rows.row_lengths[unsafe_offset=segment.row + m // heads.group]) if m < queries else 0
        workspace.first[unsafe_offset=m] = Int32(logits.first_token(length))
        workspace.last[unsafe_offset=m] = Int32(length)
        # Nothing is to follow where no query is.
        workspace.greatest[unsafe_offset=m] = MINUS_INFINITY if m < queries else 0
        workspace.totals[unsafe_offset=m] = 0
    for i in range(0, room * heads.padded_dim, LANES):
        workspace.acc.unsafe_store(i, FloatVector(0))


def attend_prefill_amx[
    dtype: DType, //
](
    rows: AttentionRows[dtype],
    segment: Segment,
    k: PagedKVCache,
    v: type_of(k),
    logits: Logits,
    heads: HeadLayout,
    mut workspace: PrefillWorkspace,
):
    """The states and weighted values of a segment's queries of KV head `segment.head`, into `workspace`.

    Bf16PairPointer of query tiles are a production line: the next pair's scores, this pair's softmax, the last pair's sums.
    So no tile is loaded right after it was stored.
    """
    var request = Int(rows.row_batch[unsafe_offset=segment.row])
    var pairs = padded_queries(segment.num_rows * heads.group) // (2 * QUERY_COLUMNS)
    configure_tiles()
    pack_queries_prefill[k.dtype](rows, segment, logits, heads, workspace)
    var step = PrefillStep(k, v, request, segment.begin, segment.end, workspace)
    while step.count > 0:
        lay_out_step(k, v, step, heads, segment.head, workspace)
        var products = PairProducts(step, heads, 0, NO_PAIR, 1, workspace)
        products.finish()
        for pair in range(pairs):
            var calls = 2 * step.visible_tiles(pair, workspace) * KV_TILE_TOKENS // 2
            products = PairProducts(
                step, heads, pair + 1 if pair + 1 < pairs else NO_PAIR, pair - 1, max(1, calls), workspace
            )
            comptime for half in range(2):
                columns_to_weights(step, logits, heads, segment.head, pair, half, workspace, products)
            products.finish()
        products = PairProducts(step, heads, NO_PAIR, pairs - 1, 1, workspace)
        products.finish()
        step = PrefillStep(k, v, request, step.end, segment.end, workspace)


def lay_out_step(
    k: PagedKVCache, v: type_of(k), step: PrefillStep, heads: HeadLayout, head: Int, mut workspace: PrefillWorkspace
):
    """K as tiles' rows, and V with its tokens in pairs; tokens past a tile's end are zeros in V."""
    comptime chunk = Bf16Chunk[v.dtype].length
    var key = k.blocks.ptr.unsafe_offset(head * heads.k_stride)
    var value = v.blocks.ptr.unsafe_offset(head * heads.v_stride)
    for i in range(step.count):
        for token in range(KV_TILE_TOKENS):
            widen_key(
                key.unsafe_offset(step.tiles[i].k[unsafe_offset=token]),
                heads,
                workspace.keys.unsafe_offset((i * KV_TILE_TOKENS + token) * heads.padded_dim),
            )
        for c in range(heads.padded_dim // chunk):
            var values = workspace.values.unsafe_offset((i * heads.padded_dim + c * chunk) * KV_TILE_TOKENS)
            comptime for part in range(KV_TILE_TOKENS // LAYOUT_TOKENS):
                pair_tokens[part](value, step.tiles[i], c * chunk, heads.head_dim, values)


@always_inline
def widen_key[dtype: DType, //](source: Pointer[Scalar[dtype], _], heads: HeadLayout, target: Bf16BitsPointer):
    """One head of one token as bfloat16, padded with zeros."""
    comptime length = Bf16Chunk[dtype].length
    for d in range(0, heads.padded_dim, length):
        var wide = Bf16Chunk[dtype]()
        if d + length <= heads.head_dim:
            widen_chunk[True](source.unsafe_offset(d), length, wide)
        else:
            widen_chunk[False](source.unsafe_offset(d), heads.head_dim - d, wide)
        comptime for part in range(length // 32):
            target.unsafe_store(d + 32 * part, wide.words[part])


struct PairProducts(Movable):
    """The next pair's dot products and the last pair's weighted sums, a few tiles at a time.

    `run` is called while the vectors turn this pair's scores into weights, so that both units of the core are busy.
    """

    var k: Bf16Pointer
    var q: Bf16Pointer
    var scores: FloatPointer
    var score_tiles: Int
    """Tiles of tokens whose dot products are missing, and how many of them were computed."""
    var score_tile: Int
    var values: Bf16Pointer
    var weights: Bf16Pointer
    var acc: FloatPointer
    var sum_tiles: Int
    """Tiles of tokens that are summed up."""
    var sum_d: Int
    """The first element of head_dim whose sums are missing."""
    var padded: Int
    var inner: Int
    """PairProducts of the present tile that were computed."""
    var due: Int
    var rate: Int

    def __init__(
        out self, step: PrefillStep, heads: HeadLayout, next: Int, last: Int, calls: Int, workspace: PrefillWorkspace
    ):
        """For pairs `next` and `last`, where there are such, spread over `calls` calls of `run`."""
        var padded = heads.padded_dim
        self.padded = padded
        self.k = workspace.keys.unsafe_bitcast[BFloat16]()
        self.q = workspace.q.unsafe_bitcast[BFloat16]().unsafe_offset(next * 2 * QUERY_COLUMNS * padded)
        self.scores = workspace.scores.unsafe_offset(next % 2 * PAIR_SCORE_FLOATS)
        self.score_tiles = step.visible_tiles(next, workspace)
        self.score_tile = 0
        self.values = workspace.values.unsafe_bitcast[BFloat16]()
        self.weights = workspace.weights.unsafe_bitcast[BFloat16]().unsafe_offset(
            last % 2 * STEP_TILES * 4 * AMX_TILE_ELEMENTS
        )
        self.acc = workspace.acc.unsafe_offset(last * 2 * QUERY_COLUMNS * padded)
        self.sum_tiles = step.visible_tiles(last, workspace)
        self.sum_d = 0 if self.sum_tiles > 0 else padded
        self.inner = 0
        self.due = 0
        self.rate = ceildiv(padded // 32 * (self.score_tiles + 2 * self.sum_tiles) * FIXED_POINT_ONE, calls)

    @always_inline
    def run(mut self):
        self.due += self.rate
        while self.due >= FIXED_POINT_ONE:
            self.due -= FIXED_POINT_ONE
            self.advance()

    @always_inline
    def finish(mut self):
        """Computes what is left."""
        while self.score_tile < self.score_tiles or self.sum_d < self.padded:
            self.advance()

    @always_inline
    def advance(mut self):
        """The next four products."""
        if self.score_tile < self.score_tiles:
            if self.inner == 0:
                zero_sums()
            var k = self.k.unsafe_offset(32 * self.inner)
            var q = self.q.unsafe_offset(self.inner * AMX_TILE_ELEMENTS)
            multiply_2x2(
                k, k.unsafe_offset(16 * self.padded), self.padded * 2, q, q.unsafe_offset(QUERY_COLUMNS * self.padded)
            )
            self.inner += 1
            if self.inner == self.padded // 32:
                store_sum[0](self.scores)
                store_sum[1](self.scores.unsafe_offset(STEP_TOKENS * QUERY_COLUMNS))
                store_sum[2](self.scores.unsafe_offset(16 * QUERY_COLUMNS))
                store_sum[3](self.scores.unsafe_offset((STEP_TOKENS + 16) * QUERY_COLUMNS))
                self.inner = 0
                self.score_tile += 1
                self.k = self.k.unsafe_offset(KV_TILE_TOKENS * self.padded)
                self.scores = self.scores.unsafe_offset(KV_TILE_TOKENS * QUERY_COLUMNS)
        elif self.sum_d < self.padded:
            var first = self.acc.unsafe_offset(self.sum_d)
            var second = first.unsafe_offset(QUERY_COLUMNS * self.padded)
            var pitch = self.padded * 4
            if self.inner == 0:
                tile_load[0](first, pitch)
                tile_load[1](first.unsafe_offset(16), pitch)
                tile_load[2](second, pitch)
                tile_load[3](second.unsafe_offset(16), pitch)
            var i = self.inner // 2
            var w = self.weights.unsafe_offset((self.inner % 2 + 4 * i) * AMX_TILE_ELEMENTS)
            var v = self.values.unsafe_offset((i * self.padded + self.sum_d) * KV_TILE_TOKENS)
            multiply_2x2(w, w.unsafe_offset(2 * AMX_TILE_ELEMENTS), 64, v, v.unsafe_offset(AMX_TILE_ELEMENTS))
            self.inner += 1
            if self.inner == 2 * self.sum_tiles:
                tile_store[0](first, pitch)
                tile_store[1](first.unsafe_offset(16), pitch)
                tile_store[2](second, pitch)
                tile_store[3](second.unsafe_offset(16), pitch)
                self.inner = 0
                self.sum_d += 32


@always_inline
def columns_to_weights(
    step: PrefillStep,
    logits: Logits,
    heads: HeadLayout,
    head: Int,
    pair: Int,
    half: Int,
    workspace: PrefillWorkspace,
    mut products: PairProducts,
):
    """Scores of 16 queries become weights, a query in each lane."""
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
    # The greatest score is looked for only where the weights come to much, or nothing was seen before.
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
    """The weights of 16 queries over `count` tiles of tokens, as tiles of two bfloat16 each; returns their sums."""
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
    """The nearest bfloat16 in the upper half, away from 0 between two. A NaN may come out as anything: see the sums."""
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
    """Dot products of 16 queries become base-2 scores, and -inf where a query does not see a token."""
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
            # Rows of the tile past its last token hold another one's scores.
            var seen = token.lt(last) & token.ge(first) & token.lt(Int32(step.tiles[i].first + step.tiles[i].count))
            at.unsafe_store(0, seen.select(score, MINUS_INFINITY))


@no_inline
def raise_references(
    count: Int,
    scores: FloatPointer,
    factor: Float32,
    sums: FloatVector,
    m: Int,
    padded: Int,
    workspace: PrefillWorkspace,
):
    """Makes the greatest scores so far what the weights of 16 queries are relative to, where that is due."""
    var old = workspace.greatest.unsafe_load[width=QUERY_COLUMNS](m)
    var new = old
    for t in range(count * KV_TILE_TOKENS):
        new = max(new, scores.unsafe_load[width=QUERY_COLUMNS](t * QUERY_COLUMNS) * factor)
    # NaN stays, and all that is relative to it becomes NaN.
    new = sums.eq(sums).select(new, sums)
    new = (sums.le(WEIGHT_SUM_LIMIT) & old.gt(MINUS_INFINITY)).select(old, new)
    var scale = new.eq(old).select(FloatVector(1), exp2(old - new))
    workspace.greatest.unsafe_store(m, new)
    workspace.totals.unsafe_store(m, workspace.totals.unsafe_load[width=QUERY_COLUMNS](m) * scale)
    for lane in range(QUERY_COLUMNS):
        if scale[lane] != 1:
            var acc = workspace.acc.unsafe_offset((m + lane) * padded)
            for d in range(0, padded, LANES):
                acc.unsafe_store(d, acc.unsafe_load[width=LANES](d) * scale[lane])
