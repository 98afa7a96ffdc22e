"""Attention over pages at the speed of memory: the walk over segments and their tiles.

For each tile, first q . k of all heads while the tile's V is prefetched, then the weighted sums of V of all heads while
the next tile's K is. Vectors (`tiles.mojo`) or AMX (`tiles_amx.mojo`) do the arithmetic; each block of rows has its own choice.
"""

from max.algorithm import sync_parallelize
from std.atomic import Atomic
from std.math import ceildiv

from .ahead import TILE, Ahead
from .amx import HAS_AMX, amx_permitted, tile_release
from .blocks_amx import attend_block
from .decode_cpu import AttentionRows
from .desk import Desk, MAX_QUERIES, WIDE, room_of
from .kv_cache import PagedKVCache
from .lanes import chunk_of, is_float8
from .logits import Logits
from .partials import Partials, deliver
from .split import BlockSizes, MAX_BLOCK_ROWS, Segment, plan_segments
from .tile import Heads, Scratch, Tile, weigh_tile
from .tiles import load_queries, score_calls, score_tile, sum_calls, sum_tile
from .tiles_amx import (
    Engine,
    load_queries_amx,
    score_calls_amx,
    score_tile_amx,
    sum_calls_amx,
    sum_tile_amx,
    turn_scores,
)
from .widen import Widened


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


@fieldwise_init
struct Queue(ImplicitlyCopyable):
    """The segments of a call, for whoever is free; which thread computes one leaves no trace in it."""

    var segments: Pointer[Segment, MutUntrackedOrigin]
    var count: Int
    var taken: Pointer[Atomic[Int64], MutUntrackedOrigin]

    @always_inline
    def take(self) -> Segment:
        """The next segment, or one without rows when there is none left."""
        var i = Int(self.taken[].fetch_add(1))
        return self.segments[unsafe_offset=i] if i < self.count else Segment.none()


def attend_segment[
    dtype: DType, //, amx: Bool
](
    rows: AttentionRows[dtype],
    segment: Segment,
    k: PagedKVCache,
    v: type_of(k),
    logits: Logits,
    heads: Heads,
    queue: Queue,
    mut scratch: Scratch,
) -> Segment:
    """The states and weighted values of a segment's queries, into `scratch`; returns the segment to go on with.

    That one is taken early, so that its first K is on its way while the last V is summed up.
    """
    var queries = segment.num_rows * heads.group
    var request = Int(rows.row_batch[unsafe_offset=segment.row])
    var engine = Engine(queries, heads.padded, scratch)
    var stride = queries
    var score_runs = heads.kv_heads * score_calls[k.dtype](heads, queries)
    var sum_runs = heads.kv_heads * (queries + sum_calls[k.dtype](heads, queries))
    comptime if amx:
        stride = engine.stride
        score_runs = heads.kv_heads * score_calls_amx[k.dtype](heads)
        sum_runs = heads.kv_heads * (queries + sum_calls_amx[k.dtype](heads))
        engine.configure()
        load_queries_amx[k.dtype](rows, segment, heads, engine, scratch)
    else:
        load_queries[k.dtype](rows, segment, heads, scratch)
    var following = Segment.none()
    if segment.begin >= segment.end:
        following = queue.take()
    var tile = Tile(k, v, request, segment.begin, segment.end, scratch.place(0))
    var rows_ahead = scratch.place(2)
    var begin = segment.begin
    var turn = 1
    while begin < segment.end:
        var ahead = Ahead(
            v.blocks.ptr, tile.v, rows_ahead, tile.count, heads.kv_heads, heads.dim, heads.v_stride, score_runs
        )
        for head in range(heads.kv_heads):
            comptime if amx:
                score_tile_amx(k, tile, heads, head, engine, scratch, ahead)
            else:
                score_tile(k, tile, heads, head, queries, scratch, ahead)
        var seen = begin
        begin += tile.count
        var next = Tile(k, v, request, begin, segment.end, scratch.place(turn % 2))
        if begin >= segment.end:
            following = queue.take()
            if following.num_rows > 0:
                var other = Int(rows.row_batch[unsafe_offset=following.row])
                next = Tile(k, v, other, following.begin, following.end, scratch.place(turn % 2))
        ahead = Ahead(k.blocks.ptr, next.k, rows_ahead, next.count, heads.kv_heads, heads.dim, heads.k_stride, sum_runs)
        for head in range(heads.kv_heads):
            comptime if amx:
                turn_scores(heads, head, engine, scratch)
            weigh_tile[amx](rows, segment, logits, heads, head, seen, tile.count, stride, scratch, ahead)
            comptime if amx:
                sum_tile_amx(v, tile, heads, head, engine, scratch, ahead)
            else:
                sum_tile(v, tile, heads, head, queries, scratch, ahead)
        tile = next
        turn += 1
    return following


def attend_tiles[
    dtype: DType
](rows: AttentionRows[dtype], k: PagedKVCache, v: type_of(k), logits: Logits, workers: Int):
    """Attention of every row, as `attend_rows` defines it, without rotary embedding."""
    comptime kv_dtype = k.dtype
    var engines = Engines[dtype, kv_dtype]()
    var heads = Heads.of(rows, k, v, Engines[dtype, kv_dtype].chunk)
    var plan = plan_segments(rows.row_batch, rows.row_lengths, rows.num_rows, logits, engines.sizes(heads))
    var room = heads.kv_heads * Engine.stride_of(plan.max_rows * heads.group)
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
    ) {var rows, var k, var v, var logits, var heads, var engines, var queue, var room, var wide, ref partials,}:
        var scratch = Scratch(
            room,
            heads.padded,
            Engine.spare(room, heads.padded) if engines.may_use_amx else 0,
            Ahead.rows_length(heads.kv_heads),
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
                        following = attend_segment[True](rows, segment, k, v, logits, heads, queue, scratch)
                        deliver[kv_dtype, True](rows, segment, logits, heads, stride, scratch, scratch.acc, partials)
                else:
                    following = attend_segment[False](rows, segment, k, v, logits, heads, queue, scratch)
                    deliver[kv_dtype, False](rows, segment, logits, heads, stride, scratch, scratch.acc, partials)
            segment = following
        comptime if amx_serves(dtype, kv_dtype):
            tile_release()

    sync_parallelize(task, max(1, min(queue.count, workers)))
    _ = partials^
    _ = plan^
    _ = taken^
