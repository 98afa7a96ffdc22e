"""One tile of 16 tokens against all queries of a block: scores, weights, weighted sums.

One vector holds the scores of one query. Every K or V vector that is loaded serves up to four queries before it leaves
its register, and each half of the work prefetches what the other half reads next.
"""

from std.math import align_up, iota
from std.sys import size_of
from std.sys.intrinsics import PrefetchOptions, prefetch

from .decode_cpu import AttentionRows
from .kv_cache import PagedKVCache
from .lanes import CHUNK, HALF, Pair, Vec, load_chunk, pack, sum_each
from .logits import Logits
from .softmax import AttentionState, MINUS_INFINITY, exp2
from .split import Segment

comptime TILE = 16
comptime Floats = Pointer[Float32, MutUntrackedOrigin]


struct Scratch(Movable):
    """Float32 working memory of one task, for a block of rows of one request.

    A KV head has `M` queries: the rows of the block times the group. `P` is head_dim rounded up to whole chunks.
    """

    var memory: List[Float32]
    var q: Floats
    """`[Hk, M, P]` in the order of the lanes."""
    var acc: Floats
    """`[Hk, M, P]`: weighted values, likewise."""
    var weights: Floats
    """`[Hk, M, TILE]`: scores, then weights."""
    var state: List[AttentionState]
    """`[Hk, M]`."""

    def __init__(out self, queries: Int, padded: Int):
        self.memory = List[Float32](length=queries * (2 * padded + TILE) + 16, fill=0)
        # Vectors must not straddle cache lines.
        var start = self.memory.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
        self.q = start.unsafe_offset((64 - Int(start) % 64) % 64 // 4)
        self.acc = self.q.unsafe_offset(queries * padded)
        self.weights = self.acc.unsafe_offset(queries * padded)
        self.state = List[AttentionState](length=queries, fill=AttentionState())


struct Tile(Movable):
    """Where the tokens of one tile lie: elements from the start of K's and of V's blocks to their first head."""

    var k: Array[Int, TILE]
    var v: Array[Int, TILE]
    var count: Int
    """Tokens; the entries past them repeat the last, so that it is safe to read there."""

    def __init__(out self, k: PagedKVCache, v: type_of(k), request: Int, begin: Int, end: Int):
        self.k = Array[Int, TILE](fill=0)
        self.v = Array[Int, TILE](fill=0)
        self.count = max(0, min(TILE, end - begin))
        if self.count == 0:
            return
        var size = k.slots()
        var page_slot, slot = divmod(begin, size)
        var page = k.page(request, page_slot)
        for i in range(TILE):
            self.k[i] = k.offset(page, slot, 0)
            self.v[i] = v.offset(page, slot, 0)
            if i + 1 < self.count:
                slot += 1
                if slot == size:
                    slot = 0
                    page_slot += 1
                    page = k.page(request, page_slot)


@always_inline
def prefetch_chunk[dtype: DType, //](at: Pointer[Scalar[dtype], _]):
    """Asks for the cache lines of one chunk."""
    comptime options = PrefetchOptions().for_read().high_locality().to_data_cache()
    prefetch[options](at)
    comptime if CHUNK * size_of[dtype]() > 64:
        prefetch[options](at.unsafe_offset(CHUNK // 2))


struct Heads(ImplicitlyCopyable):
    """The sizes that all heads of a call share."""

    var kv_heads: Int
    var group: Int
    var dim: Int
    var padded: Int
    var k_stride: Int
    """Elements from one KV head of a token to the next."""
    var v_stride: Int

    def __init__(out self, rows: AttentionRows, k: PagedKVCache, v: type_of(k)):
        self.kv_heads = k.num_heads()
        self.group = rows.num_heads // self.kv_heads
        self.dim = k.head_dim()
        self.padded = align_up(self.dim, CHUNK)
        self.k_stride = k.strides().head
        self.v_stride = v.strides().head


def load_queries[
    kv_dtype: DType, dtype: DType
](rows: AttentionRows[dtype], segment: Segment, heads: Heads, mut scratch: Scratch):
    """Packs the block's queries as `[Hk, M, P]` and clears what is summed up."""
    var queries = segment.num_rows * heads.group
    for head in range(heads.kv_heads):
        for m in range(queries):
            var row, g = divmod(m, heads.group)
            var source = rows.q.unsafe_offset(
                ((segment.row + row) * rows.num_heads + head * heads.group + g) * heads.dim
            )
            var at = (head * queries + m) * heads.padded
            for d in range(0, heads.padded, CHUNK):
                var chunk = SIMD[DType.float32, CHUNK](0)
                comptime for i in range(CHUNK // 8):
                    if d + 8 * i < heads.dim:
                        chunk = chunk.insert[offset=8 * i](source.unsafe_load[width=8](d + 8 * i).cast[DType.float32]())
                var pair = pack[kv_dtype](chunk)
                scratch.q.unsafe_store(at + d, pair.a)
                scratch.q.unsafe_store(at + d + HALF, pair.b)
                scratch.acc.unsafe_store(at + d, SIMD[DType.float32, CHUNK](0))
            scratch.state[head * queries + m] = AttentionState()


@always_inline
def score_tile(k: PagedKVCache, v: type_of(k), tile: Tile, heads: Heads, head: Int, queries: Int, mut scratch: Scratch):
    """The dot products of one KV head's queries with the tile's tokens; the tile's V of that head is prefetched meanwhile."""
    var base = k.blocks.ptr.unsafe_offset(head * heads.k_stride)
    var v_base = v.blocks.ptr.unsafe_offset(head * heads.v_stride)
    var q = scratch.q.unsafe_offset(head * queries * heads.padded)
    var out = scratch.weights.unsafe_offset(head * queries * TILE)
    var m = 0
    while m + 4 <= queries:
        score_block[4](
            base, v_base, tile, heads, q.unsafe_offset(m * heads.padded), out.unsafe_offset(m * TILE), m == 0
        )
        m += 4
    if m + 2 <= queries:
        score_block[2](
            base, v_base, tile, heads, q.unsafe_offset(m * heads.padded), out.unsafe_offset(m * TILE), m == 0
        )
        m += 2
    if m < queries:
        score_block[1](
            base, v_base, tile, heads, q.unsafe_offset(m * heads.padded), out.unsafe_offset(m * TILE), m == 0
        )


@always_inline
def score_block[
    kv_dtype: DType, //, count: Int
](
    k: Pointer[Scalar[kv_dtype], _],
    v: Pointer[Scalar[kv_dtype], _],
    tile: Tile,
    heads: Heads,
    q: Floats,
    target: Floats,
    first: Bool,
):
    """`count` queries with all tokens of the tile: 16 sums at a time stay in registers."""
    comptime tokens = HALF // count
    var whole = heads.dim // CHUNK * CHUNK
    comptime for step in range(TILE // tokens):
        var sums = Array[Vec, HALF](fill=0)
        for d in range(0, whole, CHUNK):
            dot_chunk[count, True](k, tile.k, step * tokens, d, CHUNK, q, heads.padded, sums)
            if first:
                comptime for i in range(tokens):
                    prefetch_chunk(v.unsafe_offset(tile.v[step * tokens + i] + d))
        if whole < heads.dim:
            dot_chunk[count, False](k, tile.k, step * tokens, whole, heads.dim - whole, q, heads.padded, sums)
            if first:
                comptime for i in range(tokens):
                    prefetch_chunk(v.unsafe_offset(tile.v[step * tokens + i] + whole))
        var totals = sum_each(sums)
        comptime for m in range(count):
            target.unsafe_store(m * TILE + step * tokens, totals.slice[tokens, offset=m * tokens]())


@always_inline
def dot_chunk[
    kv_dtype: DType, //, count: Int, full: Bool
](
    k: Pointer[Scalar[kv_dtype], _],
    offsets: Array[Int, TILE],
    token: Int,
    d: Int,
    length: Int,
    q: Floats,
    padded: Int,
    mut sums: Array[Vec, HALF],
):
    """Adds one chunk's share to `sums[m * tokens + i]`, query `m` with token `token + i`."""
    comptime tokens = HALF // count
    var qs = Array[Pair, count](fill=Pair(0, 0))
    comptime for m in range(count):
        var at = q.unsafe_offset(m * padded + d)
        qs[m] = Pair(at.unsafe_load[width=HALF](), at.unsafe_load[width=HALF](HALF))
    comptime for i in range(tokens):
        var pair = load_chunk[full](k.unsafe_offset(offsets[token + i] + d), length)
        comptime for m in range(count):
            sums[m * tokens + i] = pair.b.fma(qs[m].b, pair.a.fma(qs[m].a, sums[m * tokens + i]))


@always_inline
def weigh_tile[
    dtype: DType
](
    rows: AttentionRows[dtype],
    segment: Segment,
    logits: Logits,
    heads: Heads,
    head: Int,
    begin: Int,
    count: Int,
    mut scratch: Scratch,
):
    """Scores become weights; where a query's greatest score rises, what it has summed so far is scaled down."""
    var queries = segment.num_rows * heads.group
    var token = iota[DType.int32, TILE](Int32(begin))
    for m in range(queries):
        var row, g = divmod(m, heads.group)
        var length = Int(rows.row_lengths[unsafe_offset=segment.row + row])
        var at = scratch.weights.unsafe_offset((head * queries + m) * TILE)
        var scores = logits.score(at.unsafe_load[width=TILE](), head * heads.group + g, begin)
        var seen = token.lt(Int32(min(length, begin + count))) & token.ge(Int32(logits.first_token(length)))
        scores = seen.select(scores, MINUS_INFINITY)
        ref state = scratch.state[head * queries + m]
        var factor = state.raise_to(scores.reduce_max())
        if factor != 1:
            var acc = scratch.acc.unsafe_offset((head * queries + m) * heads.padded)
            for d in range(0, heads.padded, HALF):
                acc.unsafe_store(d, acc.unsafe_load[width=HALF](d) * factor)
        # A row that sees none of these tokens has no greatest score to subtract yet.
        var weights = exp2(scores - state.greatest) if state.greatest != MINUS_INFINITY else Vec(0)
        at.unsafe_store(0, weights)
        state.add(weights.reduce_add())


@always_inline
def sum_tile(
    k: PagedKVCache, v: type_of(k), tile: Tile, next: Tile, heads: Heads, head: Int, queries: Int, mut scratch: Scratch
):
    """Adds the tile's weighted V of one KV head; the next tile's K of that head is prefetched meanwhile."""
    var base = v.blocks.ptr.unsafe_offset(head * heads.v_stride)
    var k_base = k.blocks.ptr.unsafe_offset(head * heads.k_stride)
    var acc = scratch.acc.unsafe_offset(head * queries * heads.padded)
    var weights = scratch.weights.unsafe_offset(head * queries * TILE)
    var m = 0
    while m + 4 <= queries:
        sum_block[4, 2](
            base,
            k_base,
            tile,
            next,
            heads,
            weights.unsafe_offset(m * TILE),
            acc.unsafe_offset(m * heads.padded),
            m == 0,
        )
        m += 4
    if m + 2 <= queries:
        sum_block[2, 4](
            base,
            k_base,
            tile,
            next,
            heads,
            weights.unsafe_offset(m * TILE),
            acc.unsafe_offset(m * heads.padded),
            m == 0,
        )
        m += 2
    if m < queries:
        sum_block[1, 4](
            base,
            k_base,
            tile,
            next,
            heads,
            weights.unsafe_offset(m * TILE),
            acc.unsafe_offset(m * heads.padded),
            m == 0,
        )


@always_inline
def sum_block[
    kv_dtype: DType, //, count: Int, chunks: Int
](
    v: Pointer[Scalar[kv_dtype], _],
    k: Pointer[Scalar[kv_dtype], _],
    tile: Tile,
    next: Tile,
    heads: Heads,
    weights: Floats,
    acc: Floats,
    first: Bool,
):
    """`count` queries over slices of `chunks` chunks of head_dim, each slice's sums in registers for the whole tile."""
    var d = 0
    while d + chunks * CHUNK <= heads.dim:
        sum_slice[count, chunks, True](v, k, tile, next, d, CHUNK, heads.padded, weights, acc, first)
        d += chunks * CHUNK
    while d + CHUNK <= heads.dim:
        sum_slice[count, 1, True](v, k, tile, next, d, CHUNK, heads.padded, weights, acc, first)
        d += CHUNK
    if d < heads.dim:
        sum_slice[count, 1, False](v, k, tile, next, d, heads.dim - d, heads.padded, weights, acc, first)


@always_inline
def sum_slice[
    kv_dtype: DType, //, count: Int, chunks: Int, full: Bool
](
    v: Pointer[Scalar[kv_dtype], _],
    k: Pointer[Scalar[kv_dtype], _],
    tile: Tile,
    next: Tile,
    d: Int,
    length: Int,
    padded: Int,
    weights: Floats,
    acc: Floats,
    first: Bool,
):
    var sums = Array[Vec, count * chunks * 2](fill=0)
    comptime for m in range(count):
        comptime for c in range(2 * chunks):
            sums[m * 2 * chunks + c] = acc.unsafe_load[width=HALF](m * padded + d + c * HALF)
    for i in range(tile.count):
        var source = v.unsafe_offset(tile.v[i] + d)
        if first and next.count > 0:
            comptime for c in range(chunks):
                prefetch_chunk(k.unsafe_offset(next.k[i] + d + c * CHUNK))
        comptime for c in range(chunks):
            var pair = load_chunk[full](source.unsafe_offset(c * CHUNK), length)
            comptime for m in range(count):
                var w = Vec(weights[unsafe_offset=m * TILE + i])
                sums[(m * chunks + c) * 2] = pair.a.fma(w, sums[(m * chunks + c) * 2])
                sums[(m * chunks + c) * 2 + 1] = pair.b.fma(w, sums[(m * chunks + c) * 2 + 1])
    comptime for m in range(count):
        comptime for c in range(2 * chunks):
            acc.unsafe_store(m * padded + d + c * HALF, sums[m * 2 * chunks + c])
