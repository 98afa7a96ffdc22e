"""One tile of tokens against all queries of a block, in AMX tiles: bfloat16 queries over bfloat16 or float8 caches.

Scores: K is the left operand as it lies in memory (16 tokens by 32 elements), the queries the right one, packed once a
segment. Weighted sums: the weights are the left operand, V the right one, its tokens interleaved in pairs on the way.
Products are exact and sums float32. A weight enters as the sum of two bfloat16, so that it keeps 16 bits and more: the
result is as good as float32 arithmetic makes it.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.utils import IndexList

from .ahead import TILE, Ahead
from .amx import TileShapes, tile_dot, tile_load, tile_store, tile_zero
from .decode_cpu import AttentionRows
from .kv_cache import PagedKVCache
from .lanes import HALF, Vec
from .split import Segment
from .tile import Floats, Heads, Scratch, Tile
from .widen import Widened, widen_chunk, words_chunk

comptime Words16 = Pointer[UInt16, MutUntrackedOrigin]

comptime SPAN = 32
"""Tokens that one multiplication by weights takes."""

# The tile registers.
comptime SCORES = 0  # and 1: [16 tokens, N] float32
comptime QUERIES = 2  # [16 pairs, N, 2] bfloat16
comptime ROWS = 3  # [16 tokens, 32] bfloat16 of K; or [16 pairs of tokens, 16, 2] of V
comptime SUMS = 4  # and 5: [N, 16] float32
comptime HIGH = 6  # [N, SPAN] bfloat16: the weights
comptime LOW = 7  # likewise: what HIGH's rounding left

comptime MAX_CHUNK = 64


struct Engine(ImplicitlyCopyable):
    """Where a task keeps what the tiles are loaded from, and how many queries they take."""

    var columns: Int
    """N: queries of a tile, a power of two up to 16."""
    var stride: Int
    """Queries of a KV head, rounded up to whole tiles."""
    var keys: Words16
    """`[TILE, P]`: K of one head where it cannot be loaded from where it lies."""
    var values: Words16
    """`[2, TILE / SPAN, chunk / 16, SPAN / 2, 16, 2]`: two chunks of V in turn, tokens in pairs. Small, because V streams through
    the same cache, and because loads wait for pending stores that share their low 12 address bits."""
    var scores: Floats
    """`[Hk, stride / N, TILE, N]`."""

    @staticmethod
    def columns_of(queries: Int) -> Int:
        var columns = 1
        while columns < 16 and columns < queries:
            columns *= 2
        return columns

    @staticmethod
    def stride_of(queries: Int) -> Int:
        """The queries that `queries` take room for; it never falls as they grow."""
        var columns = Self.columns_of(queries)
        return ceildiv(queries, columns) * columns

    @staticmethod
    def spare(queries: Int, padded: Int) -> Int:
        """The float32 numbers that the fields point into, for `queries` of all KV heads."""
        return TILE * padded // 2 + TILE * MAX_CHUNK + queries * TILE

    def __init__(out self, queries: Int, padded: Int, scratch: Scratch):
        self.columns = Self.columns_of(queries)
        self.stride = Self.stride_of(queries)
        self.keys = scratch.spare.unsafe_bitcast[UInt16]()
        self.values = self.keys.unsafe_offset(TILE * padded)
        self.scores = self.values.unsafe_offset(2 * TILE * MAX_CHUNK).unsafe_bitcast[Float32]()

    def configure(self):
        """Shapes this thread's tile registers."""
        var shapes = TileShapes()
        for i in range(2):
            shapes.set(SCORES + i, 16, self.columns * 4)
            shapes.set(SUMS + i, self.columns, 64)
            shapes.set(HIGH + i, self.columns, SPAN * 2)
        shapes.set(QUERIES, 16, self.columns * 4)
        shapes.set(ROWS, 16, 64)
        shapes.apply()


def load_queries_amx[
    kv_dtype: DType, dtype: DType
](rows: AttentionRows[dtype], segment: Segment, heads: Heads, engine: Engine, mut scratch: Scratch):
    """Packs the block's queries as `[Hk, stride / N, P / 32, 16, N]` pairs and clears what is summed up."""
    var queries = segment.num_rows * heads.group
    var n = engine.columns
    var all = scratch.q.unsafe_bitcast[UInt32]()
    var tile = 16 * n
    for head in range(heads.kv_heads):
        for m in range(engine.stride):
            var block, column = divmod(m, n)
            var target = all.unsafe_offset((head * engine.stride + block * n) * (heads.padded // 2) + column)
            var row, g = divmod(m, heads.group)
            var source = rows.q.unsafe_offset(
                ((segment.row + row) * rows.num_heads + head * heads.group + g) * heads.dim
            ).unsafe_bitcast[UInt16]()
            for c in range(heads.padded // Widened[kv_dtype].length):
                comptime for part in range(Widened[kv_dtype].length // 32):
                    var words = SIMD[DType.uint16, 32](0)
                    if m < queries:
                        words = words_chunk[kv_dtype, part](
                            source.unsafe_offset(c * Widened[kv_dtype].length),
                            min(Widened[kv_dtype].length, heads.dim - c * Widened[kv_dtype].length),
                        )
                    var pairs = bitcast[DType.uint32, 16](words)
                    var at = (c * (Widened[kv_dtype].length // 32) + part) * tile
                    comptime for p in range(16):
                        target[unsafe_offset=at + p * n] = pairs[p]
        var start = head * engine.stride
        for i in range(start * heads.padded, (start + engine.stride) * heads.padded, HALF):
            scratch.acc.unsafe_store(i, Vec(0))
        for m in range(queries):
            scratch.clear(start + m)


def score_calls_amx[kv_dtype: DType](heads: Heads) -> Int:
    """How often `score_tile_amx` calls `ahead.run`: while it widens K, if it always does, for that takes the longest."""
    return 2 * heads.padded // 32 * (TILE // SPAN) if kv_dtype == DType.bfloat16 else TILE


def sum_calls_amx[kv_dtype: DType](heads: Heads) -> Int:
    """How often `sum_tile_amx` does."""
    return heads.padded // Widened[kv_dtype].length * (TILE // 8)


@always_inline
def score_tile_amx(
    k: PagedKVCache,
    tile: Tile,
    heads: Heads,
    head: Int,
    engine: Engine,
    scratch: Scratch,
    mut ahead: Ahead,
):
    """The dot products of one KV head's queries with the tile's tokens."""
    var base = k.blocks.ptr.unsafe_offset(head * heads.k_stride)
    var chunks = heads.padded // 32
    var stride = heads.padded * 2
    var direct = False
    comptime if k.dtype == DType.bfloat16:
        direct = tile.uniform and heads.padded == heads.dim
    if direct:
        stride = (tile.k[unsafe_offset=1] - tile.k[unsafe_offset=0]) * 2
    else:
        for i in range(TILE):
            var token = base.unsafe_offset(tile.k[unsafe_offset=i])
            widen_row(token, heads, engine.keys.unsafe_offset(i * heads.padded))
            comptime if k.dtype != DType.bfloat16:
                ahead.run()

    var n = engine.columns
    var pairs = scratch.q.unsafe_bitcast[UInt32]().unsafe_offset(head * engine.stride * (heads.padded // 2))
    for span in range(0, TILE, SPAN):
        var first = engine.keys.unsafe_offset(span * heads.padded)
        var second = engine.keys.unsafe_offset((span + 16) * heads.padded)
        if direct:
            first = base.unsafe_offset(tile.k[unsafe_offset=span]).unsafe_bitcast[UInt16]()
            second = base.unsafe_offset(tile.k[unsafe_offset=span + 16]).unsafe_bitcast[UInt16]()
        for block in range(0, engine.stride, n):
            var packed = pairs.unsafe_offset(block * (heads.padded // 2))
            tile_zero[SCORES]()
            tile_zero[SCORES + 1]()
            for c in range(chunks):
                tile_load[QUERIES](packed.unsafe_offset(c * 16 * n), n * 4)
                tile_load[ROWS](first.unsafe_offset(32 * c), stride)
                tile_dot[SCORES, ROWS, QUERIES]()
                comptime if k.dtype == DType.bfloat16:
                    if block == 0:
                        ahead.run()
                tile_load[ROWS](second.unsafe_offset(32 * c), stride)
                tile_dot[SCORES + 1, ROWS, QUERIES]()
                comptime if k.dtype == DType.bfloat16:
                    if block == 0:
                        ahead.run()
            var target = engine.scores.unsafe_offset((head * engine.stride + block) * TILE + span * n)
            tile_store[SCORES](target, n * 4)
            tile_store[SCORES + 1](target.unsafe_offset(16 * n), n * 4)


@always_inline
def turn_scores(heads: Heads, head: Int, engine: Engine, scratch: Scratch):
    """One KV head's scores as `[stride, TILE]`; long enough after they were stored that nobody waits for them."""
    var n = engine.columns
    for block in range(head * engine.stride, (head + 1) * engine.stride, n):
        comptime for count in [1, 2, 4, 8, 16]:
            if n == count:
                comptime for part in range(TILE // 16):
                    transpose[count](
                        engine.scores.unsafe_offset(block * TILE + part * 16 * count),
                        scratch.weights.unsafe_offset(block * TILE + part * 16),
                    )


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


@always_inline
def transpose[count: Int](source: Floats, target: Floats):
    """`[16, count]` becomes `[count, 16]`, rows `TILE` apart: every round separates even and odd columns."""
    var x = Array[Vec, count](fill=0)
    comptime for i in range(count):
        x[i] = source.unsafe_load[width=HALF](i * HALF)
    comptime rounds = 4 if count == 16 else (3 if count == 8 else (2 if count == 4 else (1 if count == 2 else 0)))
    comptime for step in range(rounds):
        comptime run = count >> step  # vectors that hold the same columns
        var y = Array[Vec, count](fill=0)
        comptime for start in range(0, count, run):
            comptime for i in range(run // 2):
                var halves = x[start + 2 * i].join(x[start + 2 * i + 1]).deinterleave()
                y[start + i] = rebind[Vec](halves[0])
                y[start + run // 2 + i] = rebind[Vec](halves[1])
        comptime for i in range(count):
            x[i] = y[i]
    comptime for i in range(count):
        comptime column = reverse_bits(i, rounds)
        target.unsafe_store(column * TILE, x[i])


def reverse_bits(value: Int, bits: Int) -> Int:
    var out = 0
    for i in range(bits):
        out |= ((value >> i) & 1) << (bits - 1 - i)
    return out


@always_inline
def sum_tile_amx(
    v: PagedKVCache, tile: Tile, heads: Heads, head: Int, engine: Engine, scratch: Scratch, mut ahead: Ahead
):
    """Adds the tile's weighted V of one KV head, but for its last chunk, which the call for the next head adds.

    V is laid out one chunk ahead, so that the stores are done when the tiles are loaded from there.
    """
    comptime chunk = Widened[v.dtype].length
    var chunks = heads.padded // chunk
    var base = v.blocks.ptr.unsafe_offset(head * heads.v_stride)
    for c in range(chunks):
        var turn = (head * chunks + c) % 2
        pair_chunk(base, tile, c * chunk, heads.dim, engine.values.unsafe_offset(turn * TILE * chunk), ahead)
        if c > 0:
            sum_chunk[chunk](heads, head, c - 1, 1 - turn, engine, scratch)
        elif head > 0:
            sum_chunk[chunk](heads, head - 1, chunks - 1, 1 - turn, engine, scratch)
    if head == heads.kv_heads - 1:
        sum_chunk[chunk](heads, head, chunks - 1, (head * chunks + chunks - 1) % 2, engine, scratch)


@always_inline
def pair_chunk[
    dtype: DType, //
](base: Pointer[Scalar[dtype], _], tile: Tile, d: Int, dim: Int, values: Words16, mut ahead: Ahead,):
    """Lays out one chunk of V of all tokens for the multiplication."""
    comptime chunk = Widened[dtype].length
    var whole = tile.count == TILE and d + chunk <= dim
    for part in range(TILE // 8):
        ahead.run()
        comptime for i in range(4):
            var token = part * 8 + 2 * i
            var first = base.unsafe_offset(tile.v[unsafe_offset=token] + d)
            var second = base.unsafe_offset(tile.v[unsafe_offset=token + 1] + d)
            var a = Widened[dtype]()
            var b = Widened[dtype]()
            if whole:
                widen_chunk[True](first, chunk, a)
                widen_chunk[True](second, chunk, b)
            else:
                # No token past the last may enter, not even with weight 0: its slot may hold NaN.
                if token < tile.count:
                    widen_chunk[False](first, min(chunk, dim - d), a)
                if token + 1 < tile.count:
                    widen_chunk[False](second, min(chunk, dim - d), b)
            zip_chunks(a, b, values.unsafe_offset(token // SPAN * SPAN * chunk + token % SPAN * 16))


@always_inline
def sum_chunk[chunk: Int](heads: Heads, head: Int, c: Int, turn: Int, engine: Engine, scratch: Scratch):
    """Adds one chunk of one KV head's weighted V."""
    var values = engine.values.unsafe_offset(turn * TILE * chunk)
    var weights = scratch.weights.unsafe_offset(head * engine.stride * TILE).unsafe_bitcast[UInt16]()
    var sums = scratch.acc.unsafe_offset(head * engine.stride * heads.padded + c * chunk)
    for block in range(0, engine.stride, engine.columns):
        comptime for part in range(chunk // 32):
            var at = sums.unsafe_offset(block * heads.padded + 32 * part)
            comptime for half in range(2):
                tile_load[SUMS + half](at.unsafe_offset(half * HALF), heads.padded * 4)
            comptime for span in range(TILE // SPAN):
                var parts = weights.unsafe_offset(2 * block * TILE + span * SPAN)
                tile_load[HIGH](parts, TILE * 4)
                tile_load[LOW](parts.unsafe_offset(TILE), TILE * 4)
                comptime for half in range(2):
                    tile_load[ROWS](values.unsafe_offset(span * SPAN * chunk + (32 * part + half * HALF) * SPAN), 64)
                    tile_dot[SUMS + half, HIGH, ROWS]()
                    tile_dot[SUMS + half, LOW, ROWS]()
            comptime for half in range(2):
                tile_store[SUMS + half](at.unsafe_offset(half * HALF), heads.padded * 4)


@always_inline
def zip_chunks[dtype: DType, //](a: Widened[dtype], b: Widened[dtype], target: Words16):
    """The pairs of two tokens' chunks, for the tiles of their columns: one row of each."""
    comptime for part in range(Widened[dtype].length // 32):
        comptime for upper in range(2):
            comptime mask = zip_mask(4 * upper)
            target.unsafe_store((32 * part + 16 * upper) * SPAN, a.words[part].shuffle[mask=mask](b.words[part]))


def zip_mask(start: Int) -> IndexList[32]:
    """From each run of 8 words, words `start` to `start + 3` of both operands in turn."""
    var mask = IndexList[32]()
    for i in range(32):
        mask[i] = i // 8 * 8 + start + i % 8 // 2 + i % 2 * 32
    return mask
