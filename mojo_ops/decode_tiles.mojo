"""Attention over pages at the speed of memory: the walk over tiles, and the merge of what was split.

For each tile, first q . k of all heads while the tile's V is prefetched, then the weighted sums of V of all heads while
the next tile's K is. Who does the arithmetic is a parameter: vectors (`tiles.mojo`) or AMX (`tiles_amx.mojo`).
"""

from max.algorithm import sync_parallelize
from std.atomic import Atomic
from std.sys import size_of

from .ahead import TILE, Ahead
from .amx import HAS_AMX, amx_permitted, tile_release
from .decode_cpu import AttentionRows
from .kv_cache import PagedKVCache
from .lanes import CHUNK, HALF, Pair, unpack
from .logits import Logits
from .softmax import AttentionState, LOG2E, exp2
from .split import Segment, plan_segments
from .tile import Floats, Heads, Scratch, Tile, weigh_tile
from .tiles import load_queries, score_tile, sum_tile
from .tiles_amx import Engine, load_queries_amx, score_tile_amx, sum_tile_amx, turn_scores
from .widen import Widened, unpack_sums


def amx_serves(dtype: DType, kv_dtype: DType) -> Bool:
    """Whether AMX computes attention of these types without losing bits, and the target has it."""
    return (
        HAS_AMX
        and dtype == DType.bfloat16
        and (kv_dtype == DType.bfloat16 or kv_dtype == DType.float8_e4m3fn or kv_dtype == DType.float8_e5m2)
    )


def attend_tiles[
    dtype: DType
](rows: AttentionRows[dtype], k: PagedKVCache, v: type_of(k), logits: Logits, workers: Int):
    """Attention of every row, as `attend_rows` defines it, without rotary embedding."""
    comptime if amx_serves(dtype, k.dtype):
        if amx_permitted():
            return attend_segments[True](rows, k, v, logits, workers)
    attend_segments[False](rows, k, v, logits, workers)


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
) -> Int:
    """The states and weighted values of a segment's queries, into `scratch`; returns its stride of queries."""
    var queries = segment.num_rows * heads.group
    var request = Int(rows.row_batch[unsafe_offset=segment.row])
    var engine = Engine(queries, heads.padded, scratch)
    var stride = queries
    comptime if amx:
        stride = engine.stride
        engine.configure()
        load_queries_amx[k.dtype](rows, segment, heads, engine, scratch)
    else:
        load_queries[k.dtype](rows, segment, heads, scratch)
    var tile = Tile(k, v, request, segment.begin, segment.end, scratch.place(0))
    var begin = segment.begin
    var turn = 1
    while begin < segment.end:
        var ahead = Ahead(v.blocks.ptr, tile.v, scratch.place(2), tile.count, heads.kv_heads, heads.dim, heads.v_stride)
        for head in range(heads.kv_heads):
            comptime if amx:
                score_tile_amx(k, tile, heads, head, engine, scratch, ahead)
            else:
                score_tile(k, tile, heads, head, queries, scratch, ahead)
        var seen = begin
        begin += tile.count
        var next = Tile(k, v, request, begin, segment.end, scratch.place(turn % 2))
        ahead = Ahead(k.blocks.ptr, next.k, scratch.place(2), next.count, heads.kv_heads, heads.dim, heads.k_stride)
        for head in range(heads.kv_heads):
            ahead.share(heads.kv_heads)
            comptime if amx:
                turn_scores(heads, head, engine, scratch)
            weigh_tile[amx](rows, segment, logits, heads, head, seen, tile.count, stride, scratch, ahead)
            comptime if amx:
                sum_tile_amx(v, tile, heads, head, engine, scratch, ahead)
            else:
                sum_tile(v, tile, heads, head, queries, scratch, ahead)
        tile = next
        turn += 1
    return stride


def finish[
    dtype: DType, //, kv_dtype: DType, amx: Bool
](rows: AttentionRows[dtype], row: Int, query: Int, logits: Logits, dim: Int, var state: AttentionState, acc: Floats):
    """Writes o and lse of query head `query` of one row."""
    comptime length = Widened[kv_dtype].length if amx else CHUNK
    var factor: Float32 = 1
    var sees_tokens = rows.row_batch[unsafe_offset=row] >= 0 and rows.row_lengths[unsafe_offset=row] > 0
    if logits.has_sinks and sees_tokens:
        var sink = logits.sinks[unsafe_offset=query] * LOG2E
        factor = state.raise_to(sink)
        state.add(exp2(sink - state.greatest))
    factor *= state.normaliser() * rows.v_scale
    var target = rows.o.unsafe_offset((row * rows.num_heads + query) * dim)
    for d in range(0, dim, length):
        var sums: SIMD[DType.float32, length]
        comptime if amx:
            sums = rebind[SIMD[DType.float32, length]](unpack_sums[kv_dtype](acc.unsafe_offset(d)))
        else:
            var pair = Pair(acc.unsafe_load[width=HALF](d), acc.unsafe_load[width=HALF](d + HALF))
            sums = rebind[SIMD[DType.float32, length]](unpack[kv_dtype](pair))
        var out = (sums * factor).cast[dtype]()
        comptime for i in range(length // 8):
            if d + 8 * i < dim:
                target.unsafe_store(d + 8 * i, out.slice[8, offset=8 * i]())
    rows.lse[unsafe_offset=row * rows.num_heads + query] = state.lse()


def attend_segments[
    dtype: DType, //, amx: Bool
](rows: AttentionRows[dtype], k: PagedKVCache, v: type_of(k), logits: Logits, workers: Int):
    comptime kv_dtype = k.dtype
    var heads = Heads.of(rows, k, v, Widened[kv_dtype].length if amx else CHUNK)
    var plan = plan_segments(rows.row_batch, rows.row_lengths, rows.num_rows, logits)
    var count = len(plan.segments)
    var tasks = max(1, min(count, workers))
    # Partial results: [partials, MAX_BLOCK_ROWS * Hq] states and as many vectors of P.
    var queries = plan.max_rows * rows.num_heads
    var partial_acc = List[Float32](length=plan.partials * queries * heads.padded, fill=0)
    var partial_state = List[AttentionState](length=plan.partials * queries, fill=AttentionState())
    var accs = partial_acc.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    var states = partial_state.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    var segments = plan.segments.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    var room = plan.max_rows * heads.group
    comptime if amx:
        room = Engine.stride_of(room)
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
        var count,
        var room,
        var queries,
        var accs,
        var states,
        var segments,
        var next,
    }:
        var scratch = Scratch(
            room * heads.kv_heads,
            heads.padded,
            Engine.spare(room * heads.kv_heads, heads.padded) if amx else 0,
            Ahead.list_length(heads.dim, size_of[kv_dtype]()),
        )
        while True:
            var i = Int(next[].fetch_add(1))
            if i >= count:
                break
            var segment = segments[unsafe_offset=i]
            var stride = attend_segment[amx](rows, segment, k, v, logits, heads, scratch)
            for head in range(heads.kv_heads):
                for m in range(segment.num_rows * heads.group):
                    var row, g = divmod(m, heads.group)
                    var state = scratch.state(head * stride + m)
                    var acc = scratch.acc.unsafe_offset((head * stride + m) * heads.padded)
                    if segment.partial < 0:
                        finish[kv_dtype, amx](
                            rows, segment.row + row, head * heads.group + g, logits, heads.dim, state, acc
                        )
                    else:
                        var at = segment.partial * queries + row * rows.num_heads + head * heads.group + g
                        states[unsafe_offset=at] = state
                        for d in range(0, heads.padded, HALF):
                            accs.unsafe_store(at * heads.padded + d, acc.unsafe_load[width=HALF](d))
        comptime if amx:
            tile_release()

    sync_parallelize(task, tasks)

    # Joins the parts of split blocks, in the order of their tokens: every task its share of the queries.
    def join(
        index: Int,
    ) {var rows, var logits, var heads, var count, var tasks, var queries, var accs, var states, var segments,}:
        var i = 0
        while i < count:
            var first = segments[unsafe_offset=i]
            var parts = 1
            if first.partial >= 0:
                while i + parts < count and segments[unsafe_offset=i + parts].row == first.row:
                    parts += 1
                for m in range(index, first.num_rows * rows.num_heads, tasks):
                    var at = first.partial * queries + m
                    var acc = accs.unsafe_offset(at * heads.padded)
                    var state = states[unsafe_offset=at]
                    for part in range(1, parts):
                        var other = at + part * queries
                        var mine, theirs = state.merge(states[unsafe_offset=other])
                        var added = accs.unsafe_offset(other * heads.padded)
                        for d in range(0, heads.padded, HALF):
                            acc.unsafe_store(
                                d, acc.unsafe_load[width=HALF](d) * mine + added.unsafe_load[width=HALF](d) * theirs
                            )
                    var row, query = divmod(m, rows.num_heads)
                    finish[kv_dtype, amx](rows, first.row + row, query, logits, heads.dim, state, acc)
            i += parts

    if plan.partials > 0:
        sync_parallelize(join, tasks)
    _ = partial_acc^
    _ = partial_state^
    _ = plan^
    _ = taken^
