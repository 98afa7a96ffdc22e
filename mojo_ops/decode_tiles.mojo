"""Attention over pages at the speed of memory: the walk over tiles, and the merge of what was split.

For each tile, first q . k of all heads while the tile's V is prefetched, then the weighted sums of V of all heads while
the next tile's K is. Vectors (`tiles.mojo`) or AMX (`tiles_amx.mojo`) do the arithmetic; each block of rows has its own choice.
"""

from max.algorithm import sync_parallelize
from std.atomic import Atomic
from std.math import ceildiv

from .ahead import TILE, Ahead
from .amx import HAS_AMX, amx_permitted, tile_release
from .blocks_amx import Desk, MAX_QUERIES, WIDE, attend_block, room_of
from .decode_cpu import AttentionRows
from .kv_cache import PagedKVCache
from .lanes import HALF, chunk_of, is_float8, unpack
from .logits import Logits
from .softmax import AttentionState, LOG2E, exp2
from .split import BlockSizes, MAX_BLOCK_ROWS, Segment, plan_segments
from .tile import Floats, Heads, Scratch, Tile, weigh_tile
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
from .widen import Widened, unpack_sums


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
struct Partials(ImplicitlyCopyable):
    """Where the segments of split blocks leave their unfinished results, each in a slot of its own."""

    var acc: Floats
    """`[partials, queries, P]`: weighted values; a segment sums them up here, and nothing is copied."""
    var states: Pointer[AttentionState, MutUntrackedOrigin]
    """`[partials, queries]`."""
    var queries: Int
    """Room of a slot: all queries of the largest block, or of one KV head where heads go one by one."""
    var padded: Int

    @always_inline
    def acc_of(self, partial: Int) -> Floats:
        return self.acc.unsafe_offset(partial * self.queries * self.padded)

    @always_inline
    def states_of(self, partial: Int) -> Pointer[AttentionState, MutUntrackedOrigin]:
        return self.states.unsafe_offset(partial * self.queries)


def attend_segment[
    dtype: DType, //, amx: Bool
](
    rows: AttentionRows[dtype],
    segment: Segment,
    k: PagedKVCache,
    v: type_of(k),
    logits: Logits,
    heads: Heads,
    mut scratch: Scratch,
):
    """The states and weighted values of a segment's queries, into `scratch`."""
    var queries = segment.num_rows * heads.group
    var request = Int(rows.row_batch[unsafe_offset=segment.row])
    var engine = Engine(queries, heads.padded, scratch)
    var stride = queries
    var score_runs = heads.kv_heads * score_calls[k.dtype](heads, queries)
    var sum_runs = heads.kv_heads * (queries + sum_calls[k.dtype](heads, queries))
    comptime if amx:
        stride = engine.stride
        score_runs = heads.kv_heads * score_calls_amx(heads)
        sum_runs = heads.kv_heads * (queries + sum_calls_amx[k.dtype](heads))
        engine.configure()
        load_queries_amx[k.dtype](rows, segment, heads, engine, scratch)
    else:
        load_queries[k.dtype](rows, segment, heads, scratch)
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


@always_inline
def write_values[
    dtype: DType, //, kv_dtype: DType, amx: Bool
](acc: Floats, factor: Float32, dim: Int, target: Pointer[Scalar[dtype], MutUntrackedOrigin]):
    """Weighted values times `factor`, in their natural order."""
    comptime length = Widened[kv_dtype].length if amx else chunk_of(kv_dtype)
    for d in range(0, dim, length):
        var sums: SIMD[DType.float32, length]
        comptime if amx:
            sums = rebind[SIMD[DType.float32, length]](unpack_sums[kv_dtype](acc.unsafe_offset(d)))
        else:
            sums = rebind[SIMD[DType.float32, length]](unpack[kv_dtype](acc.unsafe_load[width=chunk_of(kv_dtype)](d)))
        var out = (sums * factor).cast[dtype]()
        comptime for i in range(length // 8):
            if d + 8 * i < dim:
                target.unsafe_store(d + 8 * i, out.slice[8, offset=8 * i]())


def finish[
    dtype: DType, //, kv_dtype: DType
](
    rows: AttentionRows[dtype],
    row: Int,
    query: Int,
    logits: Logits,
    dim: Int,
    amx: Bool,
    var state: AttentionState,
    acc: Floats,
):
    """Writes o and lse of query head `query` of one row."""
    var factor: Float32 = 1
    var sees_tokens = rows.row_batch[unsafe_offset=row] >= 0 and rows.row_lengths[unsafe_offset=row] > 0
    if logits.has_sinks and sees_tokens:
        var sink = logits.sinks[unsafe_offset=query] * LOG2E
        factor = state.raise_to(sink)
        state.add(exp2(sink - state.greatest))
    factor *= state.normaliser() * rows.v_scale
    var target = rows.o.unsafe_offset((row * rows.num_heads + query) * dim)
    if amx:
        comptime if amx_serves(dtype, kv_dtype):
            write_values[kv_dtype, True](acc, factor, dim, target)
    else:
        write_values[kv_dtype, False](acc, factor, dim, target)
    rows.lse[unsafe_offset=row * rows.num_heads + query] = state.lse()


def attend_tiles[
    dtype: DType
](rows: AttentionRows[dtype], k: PagedKVCache, v: type_of(k), logits: Logits, workers: Int):
    """Attention of every row, as `attend_rows` defines it, without rotary embedding."""
    comptime kv_dtype = k.dtype
    var engines = Engines[dtype, kv_dtype]()
    var heads = Heads.of(rows, k, v, Engines[dtype, kv_dtype].chunk)
    var plan = plan_segments(rows.row_batch, rows.row_lengths, rows.num_rows, logits, engines.sizes(heads))
    var count = len(plan.segments)
    var tasks = max(1, min(count, workers))
    # Not filled, for no part is read before it was written.
    var room = heads.kv_heads * Engine.stride_of(plan.max_rows * heads.group)
    var wide = plan.max_wide_rows * heads.group
    var slot = max(room, room_of(wide))
    var memory = List[Float32](unsafe_uninit_length=plan.partials * slot * heads.padded + 16)
    var states = List[AttentionState](unsafe_uninit_length=plan.partials * slot)
    var start = memory.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    var partials = Partials(
        start.unsafe_offset((64 - Int(start) % 64) % 64 // 4),
        states.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin](),
        slot,
        heads.padded,
    )
    var segments = plan.segments.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    # Whoever is free takes the next segment; which thread computes one leaves no trace in it.
    var taken = Atomic[Int64](0)
    var next = Pointer(to=taken).unsafe_origin_cast[MutUntrackedOrigin]()

    def task(
        index: Int,
    ) {
        var rows,
        var k,
        var v,
        var logits,
        var heads,
        var engines,
        var room,
        var wide,
        var count,
        var partials,
        var segments,
        var next,
    }:
        var scratch = Scratch(
            room,
            heads.padded,
            Engine.spare(room, heads.padded) if engines.may_use_amx else 0,
            Ahead.rows_length(heads.kv_heads),
        )
        var own = scratch.acc
        var desk = Desk(wide, heads.padded)
        while True:
            var i = Int(next[].fetch_add(1))
            if i >= count:
                break
            var segment = segments[unsafe_offset=i]
            var queries = segment.num_rows * heads.group
            if segment.is_wide():
                comptime if amx_serves(dtype, kv_dtype):
                    desk.acc = desk.own if segment.partial < 0 else partials.acc_of(segment.partial)
                    attend_block(rows, segment, k, v, logits, heads, desk)
                    for m in range(queries):
                        var state = desk.state(m)
                        if segment.partial < 0:
                            var row, g = divmod(m, heads.group)
                            finish[kv_dtype](
                                rows,
                                segment.row + row,
                                segment.head * heads.group + g,
                                logits,
                                heads.dim,
                                True,
                                state,
                                desk.acc.unsafe_offset(m * heads.padded),
                            )
                        else:
                            partials.states_of(segment.partial)[unsafe_offset=m] = state
                continue
            var stride = engines.stride(queries)
            scratch.acc = own if segment.partial < 0 else partials.acc_of(segment.partial)
            if engines.amx(queries):
                comptime if amx_serves(dtype, kv_dtype):
                    attend_segment[True](rows, segment, k, v, logits, heads, scratch)
            else:
                attend_segment[False](rows, segment, k, v, logits, heads, scratch)
            for head in range(heads.kv_heads):
                for m in range(queries):
                    var at = head * stride + m
                    var state = scratch.state(at)
                    if segment.partial < 0:
                        var row, g = divmod(m, heads.group)
                        finish[kv_dtype](
                            rows,
                            segment.row + row,
                            head * heads.group + g,
                            logits,
                            heads.dim,
                            engines.amx(queries),
                            state,
                            scratch.acc.unsafe_offset(at * heads.padded),
                        )
                    else:
                        partials.states_of(segment.partial)[unsafe_offset=at] = state
        comptime if amx_serves(dtype, kv_dtype):
            tile_release()

    sync_parallelize(task, tasks)

    # Joins the parts of split blocks, in the order of their tokens: every task its share of the queries.
    def join(
        index: Int,
    ) {var rows, var logits, var heads, var engines, var count, var tasks, var partials, var segments,}:
        var i = 0
        while i < count:
            var first = segments[unsafe_offset=i]
            var parts = 1
            if first.partial >= 0:
                while i + parts < count and segments[unsafe_offset=i + parts].continues(first):
                    parts += 1
                var queries = first.num_rows * heads.group
                var stride = engines.stride(queries)
                var own_heads = 1 if first.is_wide() else heads.kv_heads
                for query in range(index, own_heads * queries, tasks):
                    var head, m = divmod(query, queries)
                    var at = head * stride + m
                    if first.is_wide():
                        head = first.head
                    var acc = partials.acc_of(first.partial).unsafe_offset(at * heads.padded)
                    var state = partials.states_of(first.partial)[unsafe_offset=at]
                    for part in range(first.partial + 1, first.partial + parts):
                        var mine, theirs = state.merge(partials.states_of(part)[unsafe_offset=at])
                        var added = partials.acc_of(part).unsafe_offset(at * heads.padded)
                        for d in range(0, heads.padded, HALF):
                            acc.unsafe_store(
                                d, acc.unsafe_load[width=HALF](d) * mine + added.unsafe_load[width=HALF](d) * theirs
                            )
                    var row, g = divmod(m, heads.group)
                    finish[kv_dtype](
                        rows,
                        first.row + row,
                        head * heads.group + g,
                        logits,
                        heads.dim,
                        engines.amx(queries),
                        state,
                        acc,
                    )
            i += parts

    if plan.partials > 0:
        sync_parallelize(join, tasks)
    _ = memory^
    _ = states^
    _ = plan^
    _ = taken^
