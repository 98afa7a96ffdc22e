"""A segment on matrix tiles.

For each tile of tokens, first q . k of all heads while the rest of the tile's V is prefetched, then the weighted sums of V of
all heads while the next tile's K is, and the first `EARLY` tokens of its V: the sums take longer than the scores. Tiles
are parts of a field, as vectors have them.
"""

from std.sys import size_of

from ....cache.paged_kv_cache import PagedKVCache
from ...logits import Logits
from ...params import AttentionRows
from ..kv_tile import Heads, PARTS, PLACES, Scratch, weigh_tile
from ..plan import Queue, Segment
from ..prefetch import Ahead, EARLY, Offsets, TILE
from ..segment_walk import Step
from .layout import Engine, calls_amx, load_queries_amx, turn_scores
from .scores import Scores, score_tile_amx
from .weighted_sums import Sums, sum_tile_amx
from .widen import Widened


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
    comptime Rows = Ahead[near=False]
    comptime chunk = Widened[k.dtype].length
    var queries = segment.num_rows * heads.group
    var engine = Engine(queries, heads.padded, scratch)
    engine.configure()
    load_queries_amx[k.dtype](rows, segment, heads, engine, scratch)
    if segment.begin >= segment.end:
        return queue.take()
    var score_runs = heads.kv_heads * calls_amx[k.dtype](heads)
    var sum_runs = heads.kv_heads * (queries + calls_amx[k.dtype](heads))
    # A row is all heads of a token where they are neighbours, else one of them.
    var together = heads.kv_heads if heads.neighbours() else 1
    var row_bytes = together * heads.dim * size_of[k.dtype]()
    var request = Int(rows.row_batch[unsafe_offset=segment.row])
    var following = Segment.none()
    var place = 0
    var asked = 0
    var step = Step(k, v, request, segment, segment.begin, 1, scratch, place)
    while True:
        var tile = step.tiles[]
        var ahead = Rows(scratch.place(PLACES), row_bytes)
        list_rows(ahead, v, tile.v, asked, TILE, heads, heads.v_stride, together)
        ahead.start(score_runs)
        var scores = Scores[chunk](engine)
        for head in range(heads.kv_heads):
            score_tile_amx(k, tile, heads, head, engine, scratch, ahead, scores)
        place = PARTS - place
        var next = Step(k, v, request, segment, step.end, 1, scratch, place)
        if step.end >= segment.end:
            following = queue.take()
            if following.num_rows > 0:
                var other = Int(rows.row_batch[unsafe_offset=following.row])
                next = Step(k, v, other, following, following.begin, 1, scratch, place)
        ahead = Rows(scratch.place(PLACES), row_bytes)
        if next.has_tokens():
            list_rows(ahead, k, next.tiles[].k, 0, TILE, heads, heads.k_stride, together)
            list_rows(ahead, v, next.tiles[].v, 0, EARLY, heads, heads.v_stride, together)
        asked = EARLY
        ahead.start(sum_runs)
        var sums = Sums[chunk](heads, engine, scratch)
        for head in range(heads.kv_heads):
            turn_scores(heads, head, engine, scratch)
            weigh_tile[True](rows, segment, logits, heads, head, head, tile, engine.stride, scratch, ahead)
            sum_tile_amx(v, tile, heads, head, engine, scratch, ahead, sums)
        if step.end >= segment.end:
            return following
        step = next


@always_inline
def list_rows(
    mut ahead: Ahead,
    cache: PagedKVCache,
    tokens: Offsets,
    begin: Int,
    end: Int,
    heads: Heads,
    head_stride: Int,
    together: Int,
):
    """Entries `begin` to `end - 1` of a tile's `tokens`, of all heads, `together` a row."""
    for head in range(0, heads.kv_heads, together):
        ahead.add(cache.blocks.ptr, tokens, begin, end, head * head_stride)
