"""One tile of tokens against all queries of a block, in vector arithmetic: scores and weighted sums.

One vector holds the scores of one query. Every K or V vector that is loaded serves up to four queries before it leaves
its register. What is read next is prefetched meanwhile.
"""

from std.math import ceildiv

from ....cache.paged_kv_cache import PagedKVCache
from ....isa.convert import HALF, Vec, chunk_of, load_chunk, pack, sum_each
from ...params import AttentionRows
from ..kv_tile import Floats, Heads, Scratch, Tile
from ..plan import Segment
from ..prefetch import Ahead, Offsets, STREAMS, TILE


comptime SLICE = 64
"""Elements of head_dim whose sums stay in registers, for four queries; for fewer, twice as many."""
comptime FETCHING = 2
"""How many blocks of queries prefetch: more of them take so long that memory waits for nobody."""


def load_queries[
    kv_dtype: DType, dtype: DType
](rows: AttentionRows[dtype], segment: Segment, heads: Heads, mut scratch: Scratch):
    """Packs the block's queries and clears what is summed up.

    `[Hk, M, P]`, but the queries that `score_block` takes together change places with the chunks.
    """
    comptime chunk = chunk_of(kv_dtype)
    var queries = segment.num_rows * heads.group
    for head in range(heads.kv_heads):
        for m in range(queries):
            var row, g = divmod(m, heads.group)
            var source = rows.q.unsafe_offset(
                ((segment.row + row) * rows.num_heads + head * heads.group + g) * heads.dim
            )
            var first, count = block_of(m, queries)
            var place = (head * queries + first) * heads.padded + (m - first) * chunk
            var at = (head * queries + m) * heads.padded
            for d in range(0, heads.padded, chunk):
                var x = SIMD[DType.float32, chunk](0)
                comptime for i in range(chunk // 8):
                    if d + 8 * i < heads.dim:
                        x = x.insert[offset=8 * i](source.unsafe_load[width=8](d + 8 * i).cast[DType.float32]())
                scratch.q.unsafe_store(place + d * count, pack[kv_dtype](x))
                scratch.acc.unsafe_store(at + d, SIMD[DType.float32, chunk](0))
            scratch.clear(head * queries + m)


def block_of(query: Int, queries: Int) -> Tuple[Int, Int]:
    """The first query of the block that `query` is in, and how many there are: fours, then a two, then a one."""
    var fours = queries // 4 * 4
    if query < fours:
        return (query // 4 * 4, 4)
    if query < fours + queries % 4 // 2 * 2:
        return (fours, 2)
    return (queries - 1, 1)


def score_calls[kv_dtype: DType](heads: Heads, queries: Int) -> Int:
    """How often `score_tile` calls `ahead.run` for a whole tile."""
    return min(FETCHING, num_blocks(queries)) * ceildiv(heads.dim, chunk_of(kv_dtype)) * (TILE // 4)


def sum_calls[kv_dtype: DType](heads: Heads, queries: Int) -> Int:
    """How often `sum_tile` does."""
    var calls = 0
    var m = 0
    for _ in range(min(FETCHING, num_blocks(queries))):
        var count = block_of(m, queries)[1]
        var slice = SLICE * (1 if count == 4 else 2)
        calls += (heads.dim // slice + ceildiv(heads.dim % slice, chunk_of(kv_dtype))) * TILE
        m += count
    return calls


def num_blocks(queries: Int) -> Int:
    return queries // 4 + queries % 4 // 2 + queries % 2


@always_inline
def score_tile(
    k: PagedKVCache,
    tile: Tile,
    heads: Heads,
    head: Int,
    slot: Int,
    begin: Int,
    end: Int,
    queries: Int,
    mut scratch: Scratch,
    mut ahead: Ahead,
):
    """The dot products of one KV head's queries with entries `begin` to `end - 1` of the tile, whole eights.

    They go to slot `slot` of `scratch.weights`.
    """
    var base = k.blocks.ptr.unsafe_offset(head * heads.k_stride)
    var q = scratch.q.unsafe_offset(head * queries * heads.padded)
    var scores = scratch.weights.unsafe_offset(slot * queries * TILE)
    var m = 0
    var fetch = FETCHING
    comptime for count in [4, 2, 1]:
        while m + count <= queries:
            var at = q.unsafe_offset(m * heads.padded)
            score_block[count](base, tile, begin, end, heads, at, scores.unsafe_offset(m * TILE), fetch > 0, ahead)
            fetch -= 1
            m += count


@always_inline
def score_block[
    kv_dtype: DType, //, count: Int
](
    k: Pointer[Scalar[kv_dtype], _],
    tile: Tile,
    begin: Int,
    end: Int,
    heads: Heads,
    q: Floats,
    target: Floats,
    fetch: Bool,
    mut ahead: Ahead,
):
    """`count` queries with some tokens: up to 16 sums at a time stay in registers."""
    comptime tokens = tokens_of(count)
    comptime chunk = chunk_of(kv_dtype)
    var whole = heads.dim // chunk * chunk
    for first in range(begin, end, tokens):
        var sums = Array[Vec, HALF](fill=0)
        var d = 0
        while d < whole:
            dot_chunk[count, True](k, tile.k, first, d, chunk, q, fetch, sums, ahead)
            d += chunk
        if whole < heads.dim:
            dot_chunk[count, False](k, tile.k, first, whole, heads.dim - whole, q, fetch, sums, ahead)
        var totals = sum_each(sums)
        comptime for m in range(count):
            target.unsafe_store(m * TILE + first, totals.slice[tokens, offset=m * tokens]())


def tokens_of(count: Int) -> Int:
    """How many tokens `count` queries meet at a time."""
    return min(STREAMS, HALF // count)


@always_inline
def dot_chunk[
    kv_dtype: DType, //, count: Int, full: Bool
](
    k: Pointer[Scalar[kv_dtype], _],
    offsets: Offsets,
    token: Int,
    d: Int,
    length: Int,
    q: Floats,
    fetch: Bool,
    mut sums: Array[Vec, HALF],
    mut ahead: Ahead,
):
    """Adds one chunk's share to `sums[m * tokens + i]`, query `m` with token `token + i`."""
    comptime tokens = tokens_of(count)
    comptime parts = chunk_of(kv_dtype) // HALF
    var qs = q.unsafe_offset(d * count)
    comptime for i in range(tokens):
        var x = load_chunk[full](k.unsafe_offset(offsets[unsafe_offset=token + i] + d), length)
        comptime for m in range(count):
            comptime for part in range(parts):
                sums[m * tokens + i] = x.slice[HALF, offset=part * HALF]().fma(
                    qs.unsafe_load[width=HALF]((m * parts + part) * HALF), sums[m * tokens + i]
                )
        comptime if i % 4 == 3:
            if fetch:
                ahead.run()


@always_inline
def sum_tile(
    v: PagedKVCache,
    tile: Tile,
    heads: Heads,
    head: Int,
    slot: Int,
    begin: Int,
    end: Int,
    queries: Int,
    mut scratch: Scratch,
    mut ahead: Ahead,
):
    """Adds the weighted V of one KV head, of entries `begin` to `end - 1` of the tile that are tokens.

    The weights are in slot `slot` of `scratch.weights`.
    """
    var base = v.blocks.ptr.unsafe_offset(head * heads.v_stride)
    var acc = scratch.acc.unsafe_offset(head * queries * heads.padded)
    var weights = scratch.weights.unsafe_offset(slot * queries * TILE)
    var last = min(end, tile.count)
    var m = 0
    var fetch = FETCHING
    comptime for count in [4, 2, 1]:
        while m + count <= queries:
            var at = acc.unsafe_offset(m * heads.padded)
            sum_block[count, SLICE * (1 if count == 4 else 2) // chunk_of(v.dtype)](
                base, tile, begin, last, heads, weights.unsafe_offset(m * TILE), at, fetch > 0, ahead
            )
            fetch -= 1
            m += count


@always_inline
def sum_block[
    kv_dtype: DType, //, count: Int, chunks: Int
](
    v: Pointer[Scalar[kv_dtype], _],
    tile: Tile,
    begin: Int,
    end: Int,
    heads: Heads,
    weights: Floats,
    acc: Floats,
    fetch: Bool,
    mut ahead: Ahead,
):
    """`count` queries over slices of `chunks` chunks of head_dim, each slice's sums in registers for all tokens."""
    comptime chunk = chunk_of(kv_dtype)
    var d = 0
    while d + chunks * chunk <= heads.dim:
        sum_slice[count, chunks, True](v, tile, begin, end, d, chunk, heads.padded, weights, acc, fetch, ahead)
        d += chunks * chunk
    while d + chunk <= heads.dim:
        sum_slice[count, 1, True](v, tile, begin, end, d, chunk, heads.padded, weights, acc, fetch, ahead)
        d += chunk
    if d < heads.dim:
        sum_slice[count, 1, False](v, tile, begin, end, d, heads.dim - d, heads.padded, weights, acc, fetch, ahead)


@always_inline
def sum_slice[
    kv_dtype: DType, //, count: Int, chunks: Int, full: Bool
](
    v: Pointer[Scalar[kv_dtype], _],
    tile: Tile,
    begin: Int,
    end: Int,
    d: Int,
    length: Int,
    padded: Int,
    weights: Floats,
    acc: Floats,
    fetch: Bool,
    mut ahead: Ahead,
):
    comptime chunk = chunk_of(kv_dtype)
    comptime parts = chunks * chunk // HALF
    var sums = Array[Vec, count * parts](fill=0)
    comptime for m in range(count):
        comptime for part in range(parts):
            sums[m * parts + part] = acc.unsafe_load[width=HALF](m * padded + d + part * HALF)
    for i in range(begin, end):
        var source = v.unsafe_offset(tile.v[unsafe_offset=i] + d)
        if fetch:
            ahead.run()
        comptime for c in range(chunks):
            var x = load_chunk[full](source.unsafe_offset(c * chunk), length)
            comptime for m in range(count):
                var w = Vec(weights[unsafe_offset=m * TILE + i])
                comptime for half in range(chunk // HALF):
                    comptime at = m * parts + c * (chunk // HALF) + half
                    sums[at] = x.slice[HALF, offset=half * HALF]().fma(w, sums[at])
    comptime for m in range(count):
        comptime for part in range(parts):
            acc.unsafe_store(m * padded + d + part * HALF, sums[m * parts + part])
