"""Attention over pages at the speed of memory: the walk over tiles, and the merge of what was split.

For each tile (`tiles.mojo`), first q . k of all heads while the tile's V is prefetched, then the weighted sums of V of
all heads while the next tile's K is.
"""

from max.algorithm import sync_parallelize

from .decode_cpu import AttentionRows
from .kv_cache import PagedKVCache
from .lanes import CHUNK, HALF, Pair, unpack
from .logits import Logits
from .softmax import AttentionState, LOG2E, exp2
from .split import Segment, plan_segments
from .tiles import TILE, Floats, Heads, Scratch, Tile, load_queries, score_tile, sum_tile, weigh_tile


def attend_segment[
    dtype: DType
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
    load_queries[k.dtype](rows, segment, heads, scratch)
    var tile = Tile(k, v, request, segment.begin, segment.end)
    var begin = segment.begin
    while begin < segment.end:
        var next = Tile(k, v, request, begin + TILE, segment.end)
        for head in range(heads.kv_heads):
            score_tile(k, v, tile, heads, head, queries, scratch)
        for head in range(heads.kv_heads):
            weigh_tile(rows, segment, logits, heads, head, begin, tile.count, scratch)
        for head in range(heads.kv_heads):
            sum_tile(k, v, tile, next, heads, head, queries, scratch)
        tile = next^
        begin += TILE


def finish[
    dtype: DType, kv_dtype: DType
](rows: AttentionRows[dtype], row: Int, query: Int, logits: Logits, dim: Int, var state: AttentionState, acc: Floats):
    """Writes o and lse of query head `query` of one row."""
    var factor: Float32 = 1
    var sees_tokens = rows.row_batch[unsafe_offset=row] >= 0 and rows.row_lengths[unsafe_offset=row] > 0
    if logits.has_sinks and sees_tokens:
        var sink = logits.sinks[unsafe_offset=query] * LOG2E
        factor = state.raise_to(sink)
        state.add(exp2(sink - state.greatest))
    factor *= state.normaliser() * rows.v_scale
    var target = rows.o.unsafe_offset((row * rows.num_heads + query) * dim)
    for d in range(0, dim, CHUNK):
        var pair = Pair(acc.unsafe_load[width=HALF](d), acc.unsafe_load[width=HALF](d + HALF))
        var out = (unpack[kv_dtype](pair) * factor).cast[dtype]()
        comptime for i in range(CHUNK // 8):
            if d + 8 * i < dim:
                target.unsafe_store(d + 8 * i, out.slice[8, offset=8 * i]())
    rows.lse[unsafe_offset=row * rows.num_heads + query] = state.lse()


def attend_tiles[
    dtype: DType
](rows: AttentionRows[dtype], k: PagedKVCache, v: type_of(k), logits: Logits, workers: Int):
    """Attention of every row, as `attend_rows` defines it, without rotary embedding."""
    comptime kv_dtype = k.dtype
    var heads = Heads(rows, k, v)
    var plan = plan_segments(rows.row_batch, rows.row_lengths, rows.num_rows, logits)
    var count = len(plan.segments)
    var tasks = min(count, max(1, workers) * 4)
    # Partial results: [partials, MAX_BLOCK_ROWS * Hq] states and as many vectors of P.
    var queries = plan.max_rows * rows.num_heads
    var partial_acc = List[Float32](length=plan.partials * queries * heads.padded, fill=0)
    var partial_state = List[AttentionState](length=plan.partials * queries, fill=AttentionState())
    var accs = partial_acc.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    var states = partial_state.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    var segments = plan.segments.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()

    def task(
        index: Int,
    ) {
        var rows,
        var k,
        var v,
        var logits,
        var heads,
        var count,
        var tasks,
        var queries,
        var accs,
        var states,
        var segments,
    }:
        var scratch = Scratch(queries, heads.padded)
        for i in range(index * count // tasks, (index + 1) * count // tasks):
            var segment = segments[unsafe_offset=i]
            attend_segment(rows, segment, k, v, logits, heads, scratch)
            var m_count = segment.num_rows * heads.group
            for head in range(heads.kv_heads):
                for m in range(m_count):
                    var row, g = divmod(m, heads.group)
                    var state = scratch.state[head * m_count + m]
                    var acc = scratch.acc.unsafe_offset((head * m_count + m) * heads.padded)
                    if segment.partial < 0:
                        finish[kv_dtype=kv_dtype](
                            rows, segment.row + row, head * heads.group + g, logits, heads.dim, state, acc
                        )
                    else:
                        var at = segment.partial * queries + row * rows.num_heads + head * heads.group + g
                        states[unsafe_offset=at] = state
                        for d in range(0, heads.padded, HALF):
                            accs.unsafe_store(at * heads.padded + d, acc.unsafe_load[width=HALF](d))

    sync_parallelize(task, tasks)

    # Joins the parts of split blocks, in the order of their tokens.
    var i = 0
    while i < count:
        var first = plan.segments[i]
        var parts = 1
        if first.partial >= 0:
            while i + parts < count and plan.segments[i + parts].row == first.row:
                parts += 1
            for row in range(first.num_rows):
                for query in range(rows.num_heads):
                    var at = first.partial * queries + row * rows.num_heads + query
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
                    finish[kv_dtype=kv_dtype](rows, first.row + row, query, logits, heads.dim, state, acc)
        i += parts
    _ = partial_acc^
    _ = partial_state^
    _ = plan^
