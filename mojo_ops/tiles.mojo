"""One tile of tokens against all queries of a block, in vector arithmetic: scores and weighted sums.

One vector holds the scores of one query. Every K or V vector that is loaded serves up to four queries before it leaves
its register, and each half of the work prefetches what the other half reads next.
"""

from std.math import ceildiv

from .ahead import TILE, Ahead, Offsets
from .decode_cpu import AttentionRows
from .kv_cache import PagedKVCache
from .lanes import CHUNK, HALF, Pair, Vec, load_chunk, pack, sum_each
from .split import Segment
from .tile import Floats, Heads, Scratch, Tile


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
            scratch.clear(head * queries + m)


@always_inline
def score_tile(
    k: PagedKVCache,
    tile: Tile,
    heads: Heads,
    head: Int,
    queries: Int,
    mut scratch: Scratch,
    mut ahead: Ahead,
):
    """The dot products of one KV head's queries with the tile's tokens; `ahead` advances by one head's share."""
    var base = k.blocks.ptr.unsafe_offset(head * heads.k_stride)
    var q = scratch.q.unsafe_offset(head * queries * heads.padded)
    var scores = scratch.weights.unsafe_offset(head * queries * TILE)
    ahead.share(heads.kv_heads)
    var m = 0
    comptime for count in [4, 2, 1]:
        while m + count <= queries:
            var at = q.unsafe_offset(m * heads.padded)
            score_block[count](
                base, tile, heads, at, scores.unsafe_offset(m * TILE), ahead.steps if m == 0 else 0, ahead
            )
            m += count


@always_inline
def score_block[
    kv_dtype: DType, //, count: Int
](k: Pointer[Scalar[kv_dtype], _], tile: Tile, heads: Heads, q: Floats, target: Floats, share: Int, mut ahead: Ahead,):
    """`count` queries with all tokens of the tile: 16 sums at a time stay in registers."""
    comptime tokens = HALF // count
    comptime blocks = TILE // tokens
    var whole = heads.dim // CHUNK * CHUNK
    var steps = ceildiv(share * CHUNK, blocks * heads.padded)
    for block in range(blocks):
        var sums = Array[Vec, HALF](fill=0)
        for d in range(0, whole, CHUNK):
            dot_chunk[count, True](k, tile.k, block * tokens, d, CHUNK, q, heads.padded, sums)
            ahead.run(steps)
        if whole < heads.dim:
            dot_chunk[count, False](k, tile.k, block * tokens, whole, heads.dim - whole, q, heads.padded, sums)
            ahead.run(steps)
        var totals = sum_each(sums)
        comptime for m in range(count):
            target.unsafe_store(m * TILE + block * tokens, totals.slice[tokens, offset=m * tokens]())


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
        var pair = load_chunk[full](k.unsafe_offset(offsets[unsafe_offset=token + i] + d), length)
        comptime for m in range(count):
            sums[m * tokens + i] = pair.b.fma(qs[m].b, pair.a.fma(qs[m].a, sums[m * tokens + i]))


@always_inline
def sum_tile(
    v: PagedKVCache,
    tile: Tile,
    heads: Heads,
    head: Int,
    queries: Int,
    mut scratch: Scratch,
    mut ahead: Ahead,
):
    """Adds the tile's weighted V of one KV head; `ahead` advances by one head's share."""
    var base = v.blocks.ptr.unsafe_offset(head * heads.v_stride)
    var acc = scratch.acc.unsafe_offset(head * queries * heads.padded)
    var weights = scratch.weights.unsafe_offset(head * queries * TILE)
    var steps = ahead.left()
    var m = 0
    comptime for count in [4, 2, 1]:
        while m + count <= queries:
            var at = acc.unsafe_offset(m * heads.padded)
            sum_block[count, 2 if count == 4 else 4](
                base, tile, heads, weights.unsafe_offset(m * TILE), at, steps if m == 0 else 0, ahead
            )
            m += count


@always_inline
def sum_block[
    kv_dtype: DType, //, count: Int, chunks: Int
](
    v: Pointer[Scalar[kv_dtype], _],
    tile: Tile,
    heads: Heads,
    weights: Floats,
    acc: Floats,
    share: Int,
    mut ahead: Ahead,
):
    """`count` queries over slices of `chunks` chunks of head_dim, each slice's sums in registers for the whole tile."""
    var steps = ceildiv(share * chunks * CHUNK, TILE * heads.padded)
    var d = 0
    while d + chunks * CHUNK <= heads.dim:
        sum_slice[count, chunks, True](v, tile, d, CHUNK, heads.padded, weights, acc, steps, ahead)
        d += chunks * CHUNK
    while d + CHUNK <= heads.dim:
        sum_slice[count, 1, True](v, tile, d, CHUNK, heads.padded, weights, acc, steps, ahead)
        d += CHUNK
    if d < heads.dim:
        sum_slice[count, 1, False](v, tile, d, heads.dim - d, heads.padded, weights, acc, steps, ahead)


@always_inline
def sum_slice[
    kv_dtype: DType, //, count: Int, chunks: Int, full: Bool
](
    v: Pointer[Scalar[kv_dtype], _],
    tile: Tile,
    d: Int,
    length: Int,
    padded: Int,
    weights: Floats,
    acc: Floats,
    steps: Int,
    mut ahead: Ahead,
):
    var sums = Array[Vec, count * chunks * 2](fill=0)
    comptime for m in range(count):
        comptime for c in range(2 * chunks):
            sums[m * 2 * chunks + c] = acc.unsafe_load[width=HALF](m * padded + d + c * HALF)
    for i in range(tile.count):
        var source = v.unsafe_offset(tile.v[unsafe_offset=i] + d)
        ahead.run(steps)
        comptime for c in range(chunks):
            var pair = load_chunk[full](source.unsafe_offset(c * CHUNK), length)
            comptime for m in range(count):
                var w = Vec(weights[unsafe_offset=m * TILE + i])
                sums[(m * chunks + c) * 2] = pair.a.fma(w, sums[(m * chunks + c) * 2])
                sums[(m * chunks + c) * 2 + 1] = pair.b.fma(w, sums[(m * chunks + c) * 2 + 1])
    comptime for m in range(count):
        comptime for c in range(2 * chunks):
            acc.unsafe_store(m * padded + d + c * HALF, sums[m * 2 * chunks + c])
