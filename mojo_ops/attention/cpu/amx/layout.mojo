"""One tile of tokens against all queries of a block, in AMX tiles: bfloat16 queries over bfloat16 or float8 caches.

Here the memory, the queries and the turn of the scores; the products are in `scores_amx.mojo` and `sums_amx.mojo`. They are
exact, and their sums float32.
"""

from std.math import ceildiv
from std.memory import bitcast

from ....isa.amx import TileShapes
from ....isa.convert import HALF, Vec
from ...params import AttentionRows
from ..kv_tile import Floats, Heads, Scratch
from ..plan import Segment
from ..prefetch import TILE
from .widen import Widened, words_chunk

comptime Words16 = Pointer[UInt16, MutUntrackedOrigin]

# The tile registers.
comptime SCORES = 0  # and 1: [16 tokens, N] float32
comptime QUERIES = 2  # [16 pairs, N, 2] bfloat16
comptime ROWS = 3  # [16 tokens, 32] bfloat16 of K, or [16 pairs of tokens, 16, 2] of V
comptime SUMS = 4  # and 5: [N, 16] float32
comptime HIGH = 6  # [N, TILE] bfloat16: the weights
comptime LOW = 7  # likewise: what HIGH's rounding left

comptime MAX_CHUNK = 64
comptime PART = 8
"""Tokens of a tile that are laid out between two steps of the products."""


struct Engine(ImplicitlyCopyable):
    """Where a task keeps what the tiles are loaded from, and how many queries they take."""

    var columns: Int
    """N: queries of a tile, a power of two up to 16."""
    var stride: Int
    """Queries of a KV head, rounded up to whole tiles."""
    var keys: Words16
    """`[2, TILE, chunk]`: two chunks of K in turn; for several blocks of N queries all `P / chunk`."""
    var values: Words16
    """`[2, chunk / 16, TILE / 2, 16, 2]`: two chunks of V in turn, tokens in pairs. Small, because V streams through the
    same cache, and because loads wait for pending stores that share their low 12 address bits."""
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
    def key_words(padded: Int) -> Int:
        return TILE * max(padded, 2 * MAX_CHUNK)

    @staticmethod
    def spare(queries: Int, padded: Int) -> Int:
        """The float32 numbers that the fields point into, for `queries` of all KV heads."""
        return Self.key_words(padded) // 2 + TILE * MAX_CHUNK + queries * TILE

    def __init__(out self, queries: Int, padded: Int, scratch: Scratch):
        self.columns = Self.columns_of(queries)
        self.stride = Self.stride_of(queries)
        self.keys = scratch.spare.unsafe_bitcast[UInt16]()
        self.values = self.keys.unsafe_offset(Self.key_words(padded))
        self.scores = self.values.unsafe_offset(2 * TILE * MAX_CHUNK).unsafe_bitcast[Float32]()

    def configure(self):
        """Shapes this thread's tile registers."""
        var shapes = TileShapes()
        for i in range(2):
            shapes.set(SCORES + i, 16, self.columns * 4)
            shapes.set(SUMS + i, self.columns, 64)
            shapes.set(HIGH + i, self.columns, TILE * 2)
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


def calls_amx[kv_dtype: DType](heads: Heads) -> Int:
    """How often `score_tile_amx` calls `ahead.run`, and how often `sum_tile_amx` does: once a part of each chunk."""
    return heads.padded // Widened[kv_dtype].length * (TILE // PART)


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
