"""A segment on matrix tiles.

For each tile of tokens, first q . k of all heads while the tile's V is prefetched, then the weighted sums of V of all heads
while the next tile's K is.
"""

from std.sys import size_of

from .ahead import TILE, Ahead, Offsets
from .decode_cpu import AttentionRows
from .kv_cache import PagedKVCache
from .logits import Logits
from .split import Queue, Segment
from .tile import Heads, PLACES, Scratch, Tile, weigh_tile
from .tiles_amx import (
    Engine,
    load_queries_amx,
    score_calls_amx,
    score_tile_amx,
    sum_calls_amx,
    sum_tile_amx,
    turn_scores,
)


@always_inline
def all_heads[
    dtype: DType, //
](base: Pointer[Scalar[dtype], _], tokens: Offsets, count: Int, heads: Heads, head_stride: Int, scratch: Scratch) -> Ahead[
    False
]:
    """The K or the V of one tile: a row is all heads of a token where they are neighbours, else one head of it."""
    var together = heads.kv_heads if head_stride == heads.dim else 1
    var ahead = Ahead[False](scratch.place(PLACES), together * heads.dim * size_of[dtype]())
    if count > 0:
        for head in range(0, heads.kv_heads, together):
            ahead.add(base, tokens, 0, TILE, head * head_stride)
    return ahead^


@always_inline
def attend_on_tiles[
    dtype: DType, //
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
    """As `attend_by_vectors`, with the sums in the order of tiles."""
    var queries = segment.num_rows * heads.group
    var engine = Engine(queries, heads.padded, scratch)
    engine.configure()
    load_queries_amx[k.dtype](rows, segment, heads, engine, scratch)
    if segment.begin >= segment.end:
        return queue.take()
    var score_runs = heads.kv_heads * score_calls_amx[k.dtype](heads)
    var sum_runs = heads.kv_heads * (queries + sum_calls_amx[k.dtype](heads))
    var request = Int(rows.row_batch[unsafe_offset=segment.row])
    var following = Segment.none()
    var tile = Tile(k, v, request, segment.begin, segment.end, scratch.place(0))
    var begin = segment.begin
    var turn = 1
    while begin < segment.end:
        var ahead = all_heads(v.blocks.ptr, tile.v, tile.count, heads, heads.v_stride, scratch)
        ahead.start(score_runs)
        for head in range(heads.kv_heads):
            score_tile_amx(k, tile, heads, head, engine, scratch, ahead)
        begin += tile.count
        var next = Tile(k, v, request, begin, segment.end, scratch.place(turn % 2))
        if begin >= segment.end:
            following = queue.take()
            if following.num_rows > 0:
                var other = Int(rows.row_batch[unsafe_offset=following.row])
                next = Tile(k, v, other, following.begin, following.end, scratch.place(turn % 2))
        ahead = all_heads(k.blocks.ptr, next.k, next.count, heads, heads.k_stride, scratch)
        ahead.start(sum_runs)
        for head in range(heads.kv_heads):
            turn_scores(heads, head, engine, scratch)
            weigh_tile[True](rows, segment, logits, heads, head, head, tile, engine.stride, scratch, ahead)
            sum_tile_amx(v, tile, heads, head, engine, scratch, ahead)
        tile = next
        turn += 1
    return following
