"""Attention of many rows of one request in AMX tiles, one KV head after the other: prefill.

So many queries share K and V that the arithmetic is what takes time, not the memory. Here a task holds one KV head of up to
`MAX_QUERIES` queries: K and V are laid out once for all of them, and every tile that is loaded serves two products.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.utils.numerics import isfinite

from ....cache.paged_kv_cache import PagedKVCache
from ....isa.amx import tile_load, tile_store
from ....isa.amx_tiles import Elements, configure_tiles, multiply, store_sum, transpose, zero_sums
from ....isa.convert import HALF, Vec
from ...logits import Logits
from ...params import AttentionRows
from ...softmax import LOG2E, MINUS_INFINITY, exp2
from ..kv_tile import Floats, Heads
from ..plan import Segment
from ..prefetch import TILE, WHOLE
from .layout import PART
from .prefill_workspace import COLUMNS, Desk, NO_PAIR, SCORES, SPANS, Step, TOKENS, WORDS, Words16, room_of
from .weighted_sums import pair_tokens
from .widen import Widened, widen_chunk, words_chunk

comptime LIMIT: Float32 = 256
"""How much the weights of a query's step may come to, before its reference follows its greatest score."""


def pack_block[
    kv_dtype: DType, dtype: DType
](rows: AttentionRows[dtype], segment: Segment, logits: Logits, heads: Heads, mut desk: Desk):
    """Packs the block's queries of one KV head and forgets what was summed up."""
    comptime chunk = Widened[kv_dtype].length
    var queries = segment.num_rows * heads.group
    var room = room_of(queries)
    var all = desk.q.unsafe_bitcast[UInt32]()
    for block in range(0, room, COLUMNS):
        for c in range(heads.padded // chunk):
            comptime for part in range(chunk // 32):
                var pairs = Array[SIMD[DType.uint32, 16], 16](fill=0)
                comptime for column in range(COLUMNS):
                    if block + column < queries:
                        var row, g = divmod(block + column, heads.group)
                        var source = rows.q.unsafe_offset(
                            ((segment.row + row) * rows.num_heads + segment.head * heads.group + g) * heads.dim
                            + c * chunk
                        )
                        pairs[column] = bitcast[DType.uint32, 16](
                            words_chunk[kv_dtype, part](
                                source.unsafe_bitcast[UInt16](), min(chunk, heads.dim - c * chunk)
                            )
                        )
                transpose(pairs)
                var target = all.unsafe_offset(block * heads.padded // 2 + (c * (chunk // 32) + part) * WORDS // 2)
                comptime for p in range(16):
                    target.unsafe_store(p * COLUMNS, pairs[p])
    for m in range(room):
        var length = Int(rows.row_lengths[unsafe_offset=segment.row + m // heads.group]) if m < queries else 0
        desk.first[unsafe_offset=m] = Int32(logits.first_token(length))
        desk.last[unsafe_offset=m] = Int32(length)
        # Nothing is to follow where no query is.
        desk.greatest[unsafe_offset=m] = MINUS_INFINITY if m < queries else 0
        desk.totals[unsafe_offset=m] = 0
    for i in range(0, room * heads.padded, HALF):
        desk.acc.unsafe_store(i, Vec(0))


def attend_block[
    dtype: DType, //
](
    rows: AttentionRows[dtype],
    segment: Segment,
    k: PagedKVCache,
    v: type_of(k),
    logits: Logits,
    heads: Heads,
    mut desk: Desk,
):
    """The states and weighted values of a segment's queries of KV head `segment.head`, into `desk`.

    Pairs of query tiles are a production line: the next pair's scores, this pair's softmax, the last pair's sums.
    So no tile is loaded right after it was stored.
    """
    var request = Int(rows.row_batch[unsafe_offset=segment.row])
    var pairs = room_of(segment.num_rows * heads.group) // (2 * COLUMNS)
    configure_tiles()
    pack_block[k.dtype](rows, segment, logits, heads, desk)
    var step = Step(k, v, request, segment.begin, segment.end, desk)
    while step.count > 0:
        lay_out(k, v, step, heads, segment.head, desk)
        var products = Products(step, heads, 0, NO_PAIR, 1, desk)
        products.finish()
        for pair in range(pairs):
            var calls = 2 * step.seen_by(pair, desk) * TILE // 2
            products = Products(step, heads, pair + 1 if pair + 1 < pairs else NO_PAIR, pair - 1, max(1, calls), desk)
            comptime for half in range(2):
                weigh_block(step, logits, heads, segment.head, pair, half, desk, products)
            products.finish()
        products = Products(step, heads, NO_PAIR, pairs - 1, 1, desk)
        products.finish()
        step = Step(k, v, request, step.end, segment.end, desk)


def lay_out(k: PagedKVCache, v: type_of(k), step: Step, heads: Heads, head: Int, mut desk: Desk):
    """K as tiles' rows, and V with its tokens in pairs; tokens past a tile's end are zeros in V."""
    comptime chunk = Widened[v.dtype].length
    var key = k.blocks.ptr.unsafe_offset(head * heads.k_stride)
    var value = v.blocks.ptr.unsafe_offset(head * heads.v_stride)
    for i in range(step.count):
        for token in range(TILE):
            widen_row(
                key.unsafe_offset(step.tiles[i].k[unsafe_offset=token]),
                heads,
                desk.keys.unsafe_offset((i * TILE + token) * heads.padded),
            )
        for c in range(heads.padded // chunk):
            var values = desk.values.unsafe_offset((i * heads.padded + c * chunk) * TILE)
            comptime for part in range(TILE // PART):
                pair_tokens[part](value, step.tiles[i], c * chunk, heads.dim, values)


@always_inline
def widen_row[dtype: DType, //](source: Pointer[Scalar[dtype], _], heads: Heads, target: Words16):
    """One head of one token as bfloat16, padded with zeros."""
    comptime length = Widened[dtype].length
    for d in range(0, heads.padded, length):
        var wide = Widened[dtype]()
        if d + length <= heads.dim:
            widen_chunk[True](source.unsafe_offset(d), length, wide)
        else:
            widen_chunk[False](source.unsafe_offset(d), heads.dim - d, wide)
        comptime for part in range(length // 32):
            target.unsafe_store(d + 32 * part, wide.words[part])


struct Products(Movable):
    """The next pair's dot products and the last pair's weighted sums, a few tiles at a time.

    `run` is called while the vectors turn this pair's scores into weights, so that both units of the core are busy.
    """

    var k: Elements
    var q: Elements
    var scores: Floats
    var score_tiles: Int
    """Tiles of tokens whose dot products are missing, and how many of them were computed."""
    var score_tile: Int
    var values: Elements
    var weights: Elements
    var acc: Floats
    var sum_tiles: Int
    """Tiles of tokens that are summed up."""
    var sum_d: Int
    """The first element of head_dim whose sums are missing."""
    var padded: Int
    var inner: Int
    """Products of the present tile that were computed."""
    var due: Int
    var rate: Int

    def __init__(out self, step: Step, heads: Heads, next: Int, last: Int, calls: Int, desk: Desk):
        """For pairs `next` and `last`, where there are such, spread over `calls` calls of `run`."""
        var padded = heads.padded
        self.padded = padded
        self.k = desk.keys.unsafe_bitcast[BFloat16]()
        self.q = desk.q.unsafe_bitcast[BFloat16]().unsafe_offset(next * 2 * COLUMNS * padded)
        self.scores = desk.scores.unsafe_offset(next % 2 * SCORES)
        self.score_tiles = step.seen_by(next, desk)
        self.score_tile = 0
        self.values = desk.values.unsafe_bitcast[BFloat16]()
        self.weights = desk.weights.unsafe_bitcast[BFloat16]().unsafe_offset(last % 2 * SPANS * 4 * WORDS)
        self.acc = desk.acc.unsafe_offset(last * 2 * COLUMNS * padded)
        self.sum_tiles = step.seen_by(last, desk)
        self.sum_d = 0 if self.sum_tiles > 0 else padded
        self.inner = 0
        self.due = 0
        self.rate = ceildiv(padded // 32 * (self.score_tiles + 2 * self.sum_tiles) * WHOLE, calls)

    @always_inline
    def run(mut self):
        self.due += self.rate
        while self.due >= WHOLE:
            self.due -= WHOLE
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
            var q = self.q.unsafe_offset(self.inner * WORDS)
            multiply(k, k.unsafe_offset(16 * self.padded), self.padded * 2, q, q.unsafe_offset(COLUMNS * self.padded))
            self.inner += 1
            if self.inner == self.padded // 32:
                store_sum[0](self.scores)
                store_sum[1](self.scores.unsafe_offset(TOKENS * COLUMNS))
                store_sum[2](self.scores.unsafe_offset(16 * COLUMNS))
                store_sum[3](self.scores.unsafe_offset((TOKENS + 16) * COLUMNS))
                self.inner = 0
                self.score_tile += 1
                self.k = self.k.unsafe_offset(TILE * self.padded)
                self.scores = self.scores.unsafe_offset(TILE * COLUMNS)
        elif self.sum_d < self.padded:
            var first = self.acc.unsafe_offset(self.sum_d)
            var second = first.unsafe_offset(COLUMNS * self.padded)
            var pitch = self.padded * 4
            if self.inner == 0:
                tile_load[0](first, pitch)
                tile_load[1](first.unsafe_offset(16), pitch)
                tile_load[2](second, pitch)
                tile_load[3](second.unsafe_offset(16), pitch)
            var i = self.inner // 2
            var w = self.weights.unsafe_offset((self.inner % 2 + 4 * i) * WORDS)
            var v = self.values.unsafe_offset((i * self.padded + self.sum_d) * TILE)
            multiply(w, w.unsafe_offset(2 * WORDS), 64, v, v.unsafe_offset(WORDS))
            self.inner += 1
            if self.inner == 2 * self.sum_tiles:
                tile_store[0](first, pitch)
                tile_store[1](first.unsafe_offset(16), pitch)
                tile_store[2](second, pitch)
                tile_store[3](second.unsafe_offset(16), pitch)
                self.inner = 0
                self.sum_d += 32


@always_inline
def weigh_block(
    step: Step, logits: Logits, heads: Heads, head: Int, pair: Int, half: Int, desk: Desk, mut products: Products
):
    """Scores of 16 queries become weights, a query in each lane."""
    var count = step.seen_by(pair, desk)
    if count == 0:
        return
    var m = (2 * pair + half) * COLUMNS
    var scores = desk.scores.unsafe_offset(pair % 2 * SCORES + half * TOKENS * COLUMNS)
    var weights = desk.weights.unsafe_offset((pair % 2 * SPANS * 2 + half) * 2 * WORDS)
    var first = desk.first.unsafe_load[width=COLUMNS](m)
    var last = desk.last.unsafe_load[width=COLUMNS](m)
    var first_of_all = Int(first.reduce_max())
    var last_of_all = Int(last.reduce_min())
    var factor = logits.scale * LOG2E
    var plain = not logits.has_alibi and logits.soft_cap <= 0 and isfinite(factor)
    for i in range(count):
        plain = (
            plain
            and step.tiles[i].count == TILE
            and first_of_all <= step.tiles[i].first
            and step.tiles[i].first + TILE <= last_of_all
        )
    if not plain:
        mask_block(step, count, logits, heads, head, m, scores, desk)
        factor = 1
    var totals = desk.totals.unsafe_load[width=COLUMNS](m)
    var greatest = desk.greatest.unsafe_load[width=COLUMNS](m)
    var sums = weigh_step(count, scores, factor, greatest, weights, desk, products)
    # The greatest score is looked for only where the weights come to much, or nothing was seen before.
    if not (sums.le(LIMIT) & greatest.gt(MINUS_INFINITY)).reduce_and():
        raise_block(count, scores, factor, sums, m, heads.padded, desk)
        totals = desk.totals.unsafe_load[width=COLUMNS](m)
        greatest = desk.greatest.unsafe_load[width=COLUMNS](m)
        sums = weigh_step(count, scores, factor, greatest, weights, desk, products)
    desk.totals.unsafe_store(m, totals + sums)


@always_inline
def weigh_step(
    count: Int, scores: Floats, factor: Float32, greatest: Vec, weights: Words16, desk: Desk, mut products: Products
) -> Vec:
    """The weights of 16 queries over `count` tiles of tokens, as tiles of two bfloat16 each; returns their sums."""
    # A query that has seen no token has no greatest score to subtract yet.
    var reference = greatest.eq(MINUS_INFINITY).select(Vec(0), -greatest)
    var even = Vec(0)
    var odd = Vec(0)
    for i in range(count):
        var source = scores.unsafe_offset(i * TILE * COLUMNS)
        for p in range(TILE // 2):
            products.run()
            var a = exp2(source.unsafe_load[width=HALF](2 * p * HALF).fma(Vec(factor), reference))
            var b = exp2(source.unsafe_load[width=HALF]((2 * p + 1) * HALF).fma(Vec(factor), reference))
            even += a
            odd += b
            var high_a = rounded(a)
            var high_b = rounded(b)
            desk.turning.unsafe_store(p * HALF, high_a >> 16 | high_b)
            var low_a = rounded(a - bitcast[DType.float32, HALF](high_a))
            var low_b = rounded(b - bitcast[DType.float32, HALF](high_b))
            desk.turning.unsafe_store((16 + p) * HALF, low_a >> 16 | low_b)
        var target = weights.unsafe_offset(i * 4 * WORDS).unsafe_bitcast[UInt32]()
        comptime for part in range(2):
            var x = Array[SIMD[DType.uint32, HALF], 16](fill=0)
            comptime for p in range(16):
                x[p] = desk.turning.unsafe_load[width=HALF]((part * 16 + p) * HALF)
            transpose(x)
            comptime for column in range(16):
                target.unsafe_store(part * WORDS // 2 + column * HALF, x[column])
    return even + odd


@always_inline
def rounded(x: Vec) -> SIMD[DType.uint32, HALF]:
    """The nearest bfloat16 in the upper half, away from 0 between two. A NaN may come out as anything: see the sums."""
    return (bitcast[DType.uint32, HALF](x) + 0x8000) & 0xFFFF0000


@no_inline
def mask_block(step: Step, count: Int, logits: Logits, heads: Heads, head: Int, m: Int, scores: Floats, desk: Desk):
    """Dot products of 16 queries become base-2 scores, and -inf where a query does not see a token."""
    var first = desk.first.unsafe_load[width=COLUMNS](m)
    var last = desk.last.unsafe_load[width=COLUMNS](m)
    var slopes = Vec(0)
    if logits.has_alibi:
        for lane in range(COLUMNS):
            slopes[lane] = logits.alibi_slopes[unsafe_offset=head * heads.group + (m + lane) % heads.group]
    for i in range(count):
        for t in range(TILE):
            var at = scores.unsafe_offset((i * TILE + t) * COLUMNS)
            var token = SIMD[DType.int32, COLUMNS](Int32(step.tiles[i].first + t))
            var score = logits.score_each(at.unsafe_load[width=COLUMNS](0), slopes, token.cast[DType.float32]())
            # Rows of the tile past its last token hold another one's scores.
            var seen = token.lt(last) & token.ge(first) & token.lt(Int32(step.tiles[i].first + step.tiles[i].count))
            at.unsafe_store(0, seen.select(score, MINUS_INFINITY))


@no_inline
def raise_block(count: Int, scores: Floats, factor: Float32, sums: Vec, m: Int, padded: Int, desk: Desk):
    """Makes the greatest scores so far what the weights of 16 queries are relative to, where that is due."""
    var old = desk.greatest.unsafe_load[width=COLUMNS](m)
    var new = old
    for t in range(count * TILE):
        new = max(new, scores.unsafe_load[width=COLUMNS](t * COLUMNS) * factor)
    # NaN stays, and all that is relative to it becomes NaN.
    new = sums.eq(sums).select(new, sums)
    new = (sums.le(LIMIT) & old.gt(MINUS_INFINITY)).select(old, new)
    var scale = new.eq(old).select(Vec(1), exp2(old - new))
    desk.greatest.unsafe_store(m, new)
    desk.totals.unsafe_store(m, desk.totals.unsafe_load[width=COLUMNS](m) * scale)
    for lane in range(COLUMNS):
        if scale[lane] != 1:
            var acc = desk.acc.unsafe_offset((m + lane) * padded)
            for d in range(0, padded, HALF):
                acc.unsafe_store(d, acc.unsafe_load[width=HALF](d) * scale[lane])
