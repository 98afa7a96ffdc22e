"""Queries and keys that are rotated when they are read: keys are stored without their rotation (ROPE_LLAMA).

The keys of a tile and one KV head are rotated into memory of the task, from where the kernels read them as they read
pages. The cosines and sines of a tile serve all heads: those of its first token, times those of the steps from there.
"""

from std.math import align_up

from ...cache.paged_kv_cache import PagedKVCache
from ...cache.pointers import untracked
from ...isa.convert import ChunkConstants, LANES, chunk_of, lane_order
from ...isa.memory import FloatPointer, align_to_line
from ..params import AttentionRows
from ..rope import RotaryEmbedding, cos_and_sin
from ..row_masks import RowMasks
from .kv_tile import KVTile, SPAN_TILES
from .plan import Segment
from .prefetch import IntPointer, KV_TILE_TOKENS, Prefetcher, RUN_TOKENS, STREAMS
from .rotated_head import BF16_PRODUCTS, parts_of, rotate_head
from .workspace import HeadLayout

comptime DoublePointer = Pointer[Float64, MutUntrackedOrigin]


struct RotaryTables[kv_dtype: DType](Movable):
    """Tables that all tasks of a call read. H is half of head_dim, rounded up to whole vectors.

    Where half of head_dim is whole chunks of the cache's dtype, all elements are in the order of `load_chunk`, and so
    are the rotated queries and keys: their dot products do not depend on it. Else the order is the natural one.
    """

    var turns: List[Float64]
    """`[H]` quarter turns a token."""
    var steps: List[Float32]
    """`[2, KV_TILE_TOKENS, 2, H]`: cosines and sines of a tile's tokens relative to the first, interleaved or not."""

    def __init__(out self, head_dim: Int, theta: Float32, scale: Float32):
        """For heads of `head_dim` elements; without a rotation (`theta` 0) no memory."""
        comptime chunk = chunk_of(Self.kv_dtype)
        comptime order = lane_order[Self.kv_dtype]()
        var natural = RotaryEmbedding(head_dim, theta, scale)
        var half = len(natural.turns)
        var padded = align_up(half, LANES)
        self.turns = List[Float64](length=padded, fill=0)
        for i in range(half):
            self.turns[i] = natural.turns[i // chunk * chunk + order[i % chunk] if half % chunk == 0 else i]
        self.steps = List[Float32](length=2 * KV_TILE_TOKENS * 2 * padded + LANES, fill=0)
        if half > 0:
            var at = align_to_line(untracked(self.steps.unsafe_ptr()))
            for i in range(KV_TILE_TOKENS):
                var interleaved = i % STREAMS * RUN_TOKENS + i // STREAMS
                write_angles(untracked(self.turns.unsafe_ptr()), padded, i, at.unsafe_offset(i * 2 * padded))
                write_angles(
                    untracked(self.turns.unsafe_ptr()),
                    padded,
                    interleaved,
                    at.unsafe_offset((KV_TILE_TOKENS + i) * 2 * padded),
                )


@always_inline
def write_angles(turns: DoublePointer, count: Int, position: Int, target: FloatPointer):
    """Writes `count` cosines, then as many sines, of the angles of a position; `count` is a multiple of `LANES`."""
    for i in range(0, count, LANES):
        var cos_sin = cos_and_sin(turns.unsafe_load[width=LANES](i) * Float64(position))
        target.unsafe_store(i, cos_sin[0])
        target.unsafe_store(count + i, cos_sin[1])


struct KeyRotation(Movable):
    """The memory of a task that rotates: angles, rotated keys of one KV head, rotated queries of a segment."""

    var memory: List[Float32]
    var offsets: List[Int]
    """`[KV_TILE_TOKENS]`: where the rotated keys of a tile's entries lie, in elements from `keys`."""
    var turns: DoublePointer
    var steps: FloatPointer
    """Both of `RotaryTables`."""
    var head_dim: Int
    var padded_dim: Int
    """P. Rotated heads are padded with zeros: kernels take P as their head_dim, or `BF16_PRODUCTS` times P."""
    var padded_half: Int
    """H."""
    var token_offset: Int
    """The position of the first token of the segment's request."""
    var position: FloatPointer
    """`[2, H]`: cosines and sines of one position."""
    var angles: FloatPointer
    """`[SPAN_TILES, KV_TILE_TOKENS, 2, H]`: cosines and sines of the tokens of a step."""
    var keys: FloatPointer
    """`[KV_TILE_TOKENS, P]` float32 or `[KV_TILE_TOKENS, BF16_PRODUCTS, P]` bfloat16, at `offsets`."""
    var queries: FloatPointer
    """`[rows, heads, P]` or `[rows, heads, BF16_PRODUCTS, P]` likewise."""

    def __init__(out self, tables: RotaryTables, heads: HeadLayout, queries: Int, has_bf16: Bool):
        """For segments of up to `queries` queries of all heads that go together; without a rotation, no memory.

        Args:
            tables: Those of the call.
            heads: The head sizes.
            queries: The queries of the heads that go together.
            has_bf16: Whether a kernel of the call takes bfloat16.
        """
        self.turns = untracked(tables.turns.unsafe_ptr())
        self.steps = align_to_line(untracked(tables.steps.unsafe_ptr()))
        self.head_dim = heads.head_dim
        self.padded_dim = heads.padded_dim
        self.padded_half = len(tables.turns)
        self.token_offset = 0
        var row = 2 * self.padded_half
        var is_on = row > 0
        var floats = heads.padded_dim * BF16_PRODUCTS // 2 if has_bf16 else heads.padded_dim
        self.memory = List[Float32](
            unsafe_uninit_length=(
                row * (1 + SPAN_TILES * KV_TILE_TOKENS) + (KV_TILE_TOKENS + queries) * floats if is_on else 0
            )
            + LANES
        )
        self.offsets = List[Int](length=KV_TILE_TOKENS if is_on else 0, fill=0)
        self.position = align_to_line(untracked(self.memory.unsafe_ptr()))
        self.angles = self.position.unsafe_offset(row)
        self.keys = self.angles.unsafe_offset(SPAN_TILES * KV_TILE_TOKENS * row)
        self.queries = self.keys.unsafe_offset(KV_TILE_TOKENS * floats)

    def key_offsets(self) -> IntPointer:
        return untracked(self.offsets.unsafe_ptr())

    @always_inline
    def keys_of[dtype: DType](self) -> Pointer[Scalar[dtype], MutUntrackedOrigin]:
        """The rotated keys, as the kernel takes them."""
        return self.keys.unsafe_bitcast[Scalar[dtype]]()

    @always_inline
    def length[dtype: DType](self) -> Int:
        """The length of a rotated head."""
        return self.padded_dim * parts_of(dtype)

    def heads_of[dtype: DType](self, heads: HeadLayout) -> HeadLayout:
        """The head sizes of rotated queries and keys."""
        var rotated = heads
        rotated.head_dim = self.length[dtype]()
        rotated.padded_dim = rotated.head_dim
        return rotated

    @always_inline
    def key[dtype: DType](self, entry: Int) -> Pointer[Scalar[dtype], MutUntrackedOrigin]:
        """The rotated key of an entry of a tile."""
        return self.keys_of[dtype]().unsafe_offset(self.key_offsets()[unsafe_offset=entry])

    def place_keys[dtype: DType](mut self, unit: Int):
        """Says that so many entries of a tile are rotated before they are read; the next ones take their place."""
        for i in range(KV_TILE_TOKENS):
            self.offsets[i] = i % unit * self.length[dtype]()
            self.pad(self.keys_of[dtype]().unsafe_offset(self.offsets[i]))

    @always_inline
    def pad[dtype: DType, //](self, head: Pointer[Scalar[dtype], MutUntrackedOrigin]):
        """Writes the zeros after each part of a rotated head."""
        for part in range(0, self.length[dtype](), self.padded_dim):
            for d in range(self.head_dim, self.padded_dim, 8):
                head.unsafe_store(part + d, SIMD[dtype, 8](0))

    def rotate_queries[
        dtype: DType, o_dtype: DType, Masks: RowMasks, //, to: DType, kv_dtype: DType
    ](mut self, rows: AttentionRows[dtype, o_dtype, Masks], segment: Segment, heads: HeadLayout) -> AttentionRows[
        to, o_dtype, Masks
    ]:
        """The rows of a call with the rotated queries of a segment, and of no other, as `to`."""
        var num_heads = heads.group * (1 if segment.prefill else heads.kv_heads)
        var first_head = segment.head * heads.group if segment.prefill else 0
        var target = self.queries.unsafe_bitcast[Scalar[to]]()
        var request = Int(rows.row_batch[unsafe_offset=segment.row])
        self.token_offset = rows.masks.offset(request) if request >= 0 else 0
        # A split that continues another one has the queries of that one.
        var num_rows = 0 if segment.continues else segment.num_rows
        for row in range(segment.row, segment.row + num_rows):
            write_angles(self.turns, self.padded_half, rows.position(row) if request >= 0 else 0, self.position)
            for head in range(num_heads):
                var rotated = target.unsafe_offset(((row - segment.row) * num_heads + head) * self.length[to]())
                rotate_head[kv_dtype, False](
                    rows.q.unsafe_offset((row * rows.num_heads + first_head + head) * self.head_dim),
                    ChunkConstants[dtype](),
                    self.head_dim // 2,
                    self.position,
                    self.padded_half,
                    rotated,
                    self.padded_dim,
                )
                self.pad(rotated)
        # As if the queries of all rows and heads lay there: a kernel reads those of its segment alone.
        var first = segment.row * num_heads + first_head
        return AttentionRows[to, o_dtype, Masks](
            target.unsafe_offset(-first * self.length[to]()),
            rows.o,
            rows.lse,
            rows.row_batch,
            rows.row_lengths,
            rows.num_rows,
            num_heads,
            rows.v_scale,
            rows.rope_theta,
            rows.rope_scale,
            rows.masks,
            rows.q_latent.unsafe_bitcast[Scalar[to]](),
            rows.latent_scale,
        )

    def select_tile(self, index: Int, tile: KVTile):
        """Computes the angles of tile `index` of a step."""
        var count = self.padded_half
        write_angles(self.turns, count, self.token_offset + tile.first, self.position)
        var steps = self.steps.unsafe_offset(KV_TILE_TOKENS * 2 * count if tile.interleaved else 0)
        var angles = self.angles.unsafe_offset(index * KV_TILE_TOKENS * 2 * count)
        for i in range(0, count, LANES):
            var c = self.position.unsafe_load[width=LANES](i)
            var s = self.position.unsafe_load[width=LANES](count + i)
            for at in range(i, KV_TILE_TOKENS * 2 * count, 2 * count):
                var step_c = steps.unsafe_load[width=LANES](at)
                var step_s = steps.unsafe_load[width=LANES](count + at)
                angles.unsafe_store(at, c.fma(step_c, -s * step_s))
                angles.unsafe_store(count + at, s.fma(step_c, c * step_s))

    @always_inline
    def rotate_key[
        dtype: DType, //, to: DType
    ](self, key: Pointer[Scalar[dtype], _], constants: ChunkConstants[dtype], index: Int, entry: Int):
        """Rotates one head of entry `entry` of tile `index` into its place among the keys."""
        rotate_head[dtype, True](
            key,
            constants,
            self.head_dim // 2,
            self.angles.unsafe_offset((index * KV_TILE_TOKENS + entry) * 2 * self.padded_half),
            self.padded_half,
            self.key[to](entry),
            self.padded_dim,
        )

    @always_inline
    def rotate_keys[
        to: DType
    ](
        self,
        k: PagedKVCache,
        constants: ChunkConstants[k.dtype],
        tile: KVTile,
        index: Int,
        heads: HeadLayout,
        head: Int,
        begin: Int,
        end: Int,
        mut prefetcher: Prefetcher,
    ):
        """Rotates the keys of one KV head, of entries `begin` to `end - 1` of tile `index` of a step.

        It calls `prefetcher.run` for each entry.
        """
        var base = k.blocks.ptr.unsafe_offset(head * heads.k_stride)
        for entry in range(begin, end):
            prefetcher.run()
            self.rotate_key[to](base.unsafe_offset(tile.k[unsafe_offset=entry]), constants, index, entry)
