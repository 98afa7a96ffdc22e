"""Attention on matrix tiles (AMX), bfloat16 queries over bfloat16 or float8 caches: registers, buffers, packed queries.

The products of one KV tile are in `scores.mojo` and `weighted_sums.mojo`. They are exact, and their sums float32.
"""

from std.math import ceildiv
from std.memory import bitcast

from ....isa.amx import TileShapes
from ....isa.convert import FloatVector, LANES
from ....isa.memory import Bf16BitsPointer, FloatPointer
from ...params import AttentionRows
from ..bf16_chunk import Bf16Chunk, query_words
from ..plan import Segment
from ..prefetch import KV_TILE_TOKENS
from ..workspace import HeadLayout, SegmentWorkspace

# The tile registers of a segment; those of prefill are in `prefill_products.mojo`. N is `AmxBuffers.columns`.
comptime TMM_SCORES = 0  # and 1: [16 tokens, N] float32
comptime TMM_QUERIES = 2  # [16 pairs, N, 2] bfloat16
comptime TMM_KV = 3  # [16 tokens, 32] bfloat16 of K, or [16 pairs of tokens, 16, 2] of V
comptime TMM_SUMS = 4  # and 5: [N, 16] float32
comptime TMM_WEIGHTS_HIGH = 6  # [N, KV_TILE_TOKENS] bfloat16: the weights, rounded
comptime TMM_WEIGHTS_LOW = 7  # [N, KV_TILE_TOKENS] bfloat16: the weights less TMM_WEIGHTS_HIGH

comptime MAX_CHUNK_ELEMENTS = 64
"""Elements of the longest chunk, one of float8."""
comptime LAYOUT_TOKENS = 8
"""Tokens of a tile that are laid out between two steps of the products."""


struct AmxBuffers(ImplicitlyCopyable):
    """The memory of a task that matrix tiles are loaded from and stored to, and how many queries one holds."""

    var columns: Int
    """N: queries of a matrix tile, a power of two up to 16."""
    var stride: Int
    """Queries of a KV head, rounded up to whole matrix tiles."""
    var keys: Bf16BitsPointer
    """`[2, KV_TILE_TOKENS, chunk]`: two chunks of K, in turn; for more than N queries all `P / chunk` of them."""
    var values: Bf16BitsPointer
    """`[2, chunk / 16, KV_TILE_TOKENS / 2, 16, 2]`: two chunks of V, in turn, tokens in pairs.

    It is small because V itself passes through the same cache, and because a load waits for pending stores whose
    addresses have the same low 12 bits.
    """
    var scores: FloatPointer
    """`[Hk, stride / N, KV_TILE_TOKENS, N]`."""

    @staticmethod
    def columns_of(queries: Int) -> Int:
        var columns = 1
        while columns < 16 and columns < queries:
            columns *= 2
        return columns

    @staticmethod
    def query_stride(queries: Int) -> Int:
        """`queries` rounded up to whole matrix tiles. More queries never give a smaller number."""
        var columns = Self.columns_of(queries)
        return ceildiv(queries, columns) * columns

    @staticmethod
    def key_words(padded_dim: Int) -> Int:
        return KV_TILE_TOKENS * max(padded_dim, 2 * MAX_CHUNK_ELEMENTS)

    @staticmethod
    def num_floats(queries: Int, padded_dim: Int) -> Int:
        """The size of the buffers in float32 numbers, for `queries` queries of all KV heads together."""
        return Self.key_words(padded_dim) // 2 + KV_TILE_TOKENS * MAX_CHUNK_ELEMENTS + queries * KV_TILE_TOKENS

    def __init__(out self, queries: Int, padded_dim: Int, workspace: SegmentWorkspace):
        self.columns = Self.columns_of(queries)
        self.stride = Self.query_stride(queries)
        self.keys = workspace.amx_floats.unsafe_bitcast[UInt16]()
        self.values = self.keys.unsafe_offset(Self.key_words(padded_dim))
        self.scores = self.values.unsafe_offset(2 * KV_TILE_TOKENS * MAX_CHUNK_ELEMENTS).unsafe_bitcast[Float32]()

    def configure(self):
        """Configures this thread's tile registers."""
        var shapes = TileShapes()
        for i in range(2):
            shapes.set(TMM_SCORES + i, 16, self.columns * 4)
            shapes.set(TMM_SUMS + i, self.columns, 64)
            shapes.set(TMM_WEIGHTS_HIGH + i, self.columns, KV_TILE_TOKENS * 2)
        shapes.set(TMM_QUERIES, 16, self.columns * 4)
        shapes.set(TMM_KV, 16, 64)
        shapes.apply()


def pack_queries_amx[
    kv_dtype: DType, dtype: DType
](
    rows: AttentionRows[dtype, ...],
    segment: Segment,
    heads: HeadLayout,
    buffers: AmxBuffers,
    mut workspace: SegmentWorkspace,
):
    """Packs the queries of a segment as `[Hk, stride / N, P / 32, 16, N]` pairs; clears their states and values."""
    var queries = segment.num_rows * heads.group
    var n = buffers.columns
    var all = workspace.q.unsafe_bitcast[UInt32]()
    var tile = 16 * n
    for head in range(heads.kv_heads):
        for m in range(buffers.stride):
            var block, column = divmod(m, n)
            var target = all.unsafe_offset((head * buffers.stride + block * n) * (heads.padded_dim // 2) + column)
            var row, g = divmod(m, heads.group)
            var source = rows.q.unsafe_offset(
                ((segment.row + row) * rows.num_heads + head * heads.group + g) * heads.head_dim
            ).unsafe_bitcast[UInt16]()
            for c in range(heads.padded_dim // Bf16Chunk[kv_dtype].length):
                comptime for part in range(Bf16Chunk[kv_dtype].length // 32):
                    var words = SIMD[DType.uint16, 32](0)
                    if m < queries:
                        words = query_words[kv_dtype, part](
                            source.unsafe_offset(c * Bf16Chunk[kv_dtype].length),
                            min(Bf16Chunk[kv_dtype].length, heads.head_dim - c * Bf16Chunk[kv_dtype].length),
                        )
                    var pairs = bitcast[DType.uint32, 16](words)
                    var at = (c * (Bf16Chunk[kv_dtype].length // 32) + part) * tile
                    comptime for p in range(16):
                        target[unsafe_offset=at + p * n] = pairs[p]
        var start = head * buffers.stride
        for i in range(start * heads.padded_value, (start + buffers.stride) * heads.padded_value, LANES):
            workspace.acc.unsafe_store(i, FloatVector(0))
        for m in range(queries):
            workspace.clear(start + m)


def prefetch_calls_amx[kv_dtype: DType](heads: HeadLayout) -> Int:
    """Return how often `score_tile_amx` and `sum_tile_amx` call `prefetcher.run`: for each `LAYOUT_TOKENS` of a
    chunk.
    """
    return heads.padded_dim // Bf16Chunk[kv_dtype].length * (KV_TILE_TOKENS // LAYOUT_TOKENS)


@always_inline
def transpose_scores(heads: HeadLayout, head: Int, buffers: AmxBuffers, workspace: SegmentWorkspace):
    """Transposes one KV head's scores to `[stride, KV_TILE_TOKENS]` in `workspace.weights`.

    The scores were stored long enough before that no load waits for its store.
    """
    var n = buffers.columns
    for block in range(head * buffers.stride, (head + 1) * buffers.stride, n):
        comptime for count in [1, 2, 4, 8, 16]:
            if n == count:
                comptime for part in range(KV_TILE_TOKENS // 16):
                    transpose_score_tile[count](
                        buffers.scores.unsafe_offset(block * KV_TILE_TOKENS + part * 16 * count),
                        workspace.weights.unsafe_offset(block * KV_TILE_TOKENS + part * 16),
                    )


@always_inline
def transpose_score_tile[count: Int](source: FloatPointer, target: FloatPointer):
    """Transposes `[16, count]` to `[count, 16]`, rows `KV_TILE_TOKENS` apart: every round separates even and odd
    ones.
    """
    var x = Array[FloatVector, count](fill=0)
    comptime for i in range(count):
        x[i] = source.unsafe_load[width=LANES](i * LANES)
    comptime rounds = 4 if count == 16 else (3 if count == 8 else (2 if count == 4 else (1 if count == 2 else 0)))
    comptime for step in range(rounds):
        comptime run = count >> step  # vectors that hold the same columns
        var y = Array[FloatVector, count](fill=0)
        comptime for start in range(0, count, run):
            comptime for i in range(run // 2):
                var halves = x[start + 2 * i].join(x[start + 2 * i + 1]).deinterleave()
                y[start + i] = rebind[FloatVector](halves[0])
                y[start + run // 2 + i] = rebind[FloatVector](halves[1])
        comptime for i in range(count):
            x[i] = y[i]
    comptime for i in range(count):
        comptime column = reverse_bits(i, rounds)
        target.unsafe_store(column * KV_TILE_TOKENS, x[i])


def reverse_bits(value: Int, bits: Int) -> Int:
    """The low `bits` bits of `value` in reverse order."""
    var out = 0
    for i in range(bits):
        out |= ((value >> i) & 1) << (bits - 1 - i)
    return out
