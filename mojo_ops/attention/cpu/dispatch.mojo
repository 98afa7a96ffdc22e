"""Attention over pages at the speed of memory: who computes what, on which thread.

Vectors (`segment_vectors.mojo`) or AMX (`segment_amx.mojo`, `blocks_amx.mojo`) do the arithmetic; each block of rows has
its own choice.
"""

from max.algorithm import sync_parallelize
from std.atomic import Atomic
from std.math import ceildiv

from ...cache.paged_kv_cache import PagedKVCache
from ...isa.amx import HAS_AMX, amx_permitted, tile_release
from ...isa.convert import chunk_of, is_float8
from ..logits import Logits
from ..params import AttentionRows
from .amx.layout import Engine
from .amx.prefill import attend_block
from .amx.prefill_workspace import Desk, MAX_QUERIES, WIDE, room_of
from .amx.segment import attend_on_tiles
from .amx.widen import Widened
from .kv_tile import Heads, Scratch
from .plan import BlockSizes, MAX_BLOCK_ROWS, Queue, Segment, plan_segments
from .split_merge import Partials, deliver
from .vectors.segment import attend_by_vectors


def vector_queries(kv_dtype: DType) -> Int:
    """Up to so many queries, vectors hide behind the memory more completely than AMX does."""
    return 2 if is_float8(kv_dtype) else 4


def amx_serves(dtype: DType, kv_dtype: DType) -> Bool:
    """Whether AMX computes attention of these types without losing bits, and the target has it."""
    return HAS_AMX and dtype == DType.bfloat16 and (kv_dtype == DType.bfloat16 or is_float8(kv_dtype))


@fieldwise_init
struct Engines[dtype: DType, kv_dtype: DType](ImplicitlyCopyable):
    """Who computes a block of rows: it depends on the block alone."""

    comptime may_use_amx = amx_serves(Self.dtype, Self.kv_dtype)
    comptime chunk = max(chunk_of(Self.kv_dtype), Widened[Self.kv_dtype].length if Self.may_use_amx else 0)
    """What head_dim is rounded up to."""
    var permitted: Bool
    """Whether this process may use AMX."""

    def __init__(out self):
        self.permitted = False
        comptime if Self.may_use_amx:
            self.permitted = amx_permitted()

    @always_inline
    def amx(self, queries: Int) -> Bool:
        """Whether AMX computes a block of that many queries a KV head."""
        return self.permitted and queries > vector_queries(Self.kv_dtype)

    @always_inline
    def stride(self, queries: Int) -> Int:
        """The queries of a KV head that it keeps."""
        return Engine.stride_of(queries) if self.amx(queries) else queries

    def sizes(self, heads: Heads) -> BlockSizes:
        """How large blocks are, and from which size on their heads go one by one (`blocks_amx.mojo`)."""
        if not self.permitted:
            return BlockSizes.narrow()
        return BlockSizes(max(MAX_BLOCK_ROWS, MAX_QUERIES // heads.group), ceildiv(WIDE, heads.group), heads.kv_heads)


def attend_tiles[
    dtype: DType
](rows: AttentionRows[dtype], k: PagedKVCache, v: type_of(k), logits: Logits, workers: Int):
    """Attention of every row, as `attend_rows` defines it, without rotary embedding."""
    comptime kv_dtype = k.dtype
    var engines = Engines[dtype, kv_dtype]()
    var heads = Heads.of(rows, k, v, Engines[dtype, kv_dtype].chunk)
    var plan = plan_segments(rows.row_batch, rows.row_lengths, rows.num_rows, logits, engines.sizes(heads))
    var stride_most = Engine.stride_of(plan.max_rows * heads.group)
    var room = heads.kv_heads * stride_most
    var wide = plan.max_wide_rows * heads.group
    var partials = Partials(plan.partials, max(room, room_of(wide)), heads.padded)
    var taken = Atomic[Int64](0)
    var queue = Queue(
        plan.segments.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin](),
        len(plan.segments),
        Pointer(to=taken).unsafe_origin_cast[MutUntrackedOrigin](),
    )

    def task(
        index: Int,
    ) {
        var rows,
        var k,
        var v,
        var logits,
        var heads,
        var engines,
        var queue,
        var stride_most,
        var room,
        var wide,
        ref partials,
    }:
        var scratch = Scratch(
            heads,
            stride_most,
            Engine.spare(room, heads.padded) if engines.may_use_amx else 0,
        )
        var own = scratch.acc
        var desk = Desk(wide, heads.padded)
        var segment = queue.take()
        while segment.num_rows > 0:
            var queries = segment.num_rows * heads.group
            var stride = engines.stride(queries)
            var following = Segment.none()
            if segment.is_wide():
                comptime if amx_serves(dtype, kv_dtype):
                    desk.acc = desk.own if segment.partial < 0 else partials.acc_of(segment.partial)
                    attend_block(rows, segment, k, v, logits, heads, desk)
                    deliver[kv_dtype, True](rows, segment, logits, heads, stride, desk, desk.acc, partials)
                    following = queue.take()
            else:
                scratch.acc = own if segment.partial < 0 else partials.acc_of(segment.partial)
                if engines.amx(queries):
                    comptime if amx_serves(dtype, kv_dtype):
                        following = attend_on_tiles(rows, segment, k, v, logits, heads, queue, scratch)
                        deliver[kv_dtype, True](rows, segment, logits, heads, stride, scratch, scratch.acc, partials)
                else:
                    following = attend_by_vectors(rows, segment, k, v, logits, heads, queue, scratch)
                    deliver[kv_dtype, False](rows, segment, logits, heads, stride, scratch, scratch.acc, partials)
            segment = following
        comptime if amx_serves(dtype, kv_dtype):
            tile_release()

    sync_parallelize(task, max(1, min(queue.count, workers)))
    _ = partials^
    _ = plan^
    _ = taken^
