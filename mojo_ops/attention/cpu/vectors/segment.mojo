"""A segment in vector arithmetic: its tokens in the order in which memory delivers them best.

Eight runs of memory are read side by side, each from its start to its end, and what is read next is prefetched into the
first-level cache, a few KB ahead: the products follow that order. Where the heads of a token are neighbours (NHD), a
tile goes `unit` tokens at a time, all heads of them; otherwise each head goes through the tiles of a whole field.
"""

from std.sys import size_of

from ....cache.paged_kv_cache import PagedKVCache
from ...logits import Logits
from ...params import AttentionRows
from ..kv_tile import Heads, PARTS, PLACES, Scratch, weigh_tile
from ..plan import Queue, Segment
from ..prefetch import Ahead, STREAMS, TILE
from ..segment_walk import Step
from .products import load_queries, score_calls, score_tile, sum_calls, sum_tile

comptime NEAR = 8192
"""Bytes of a unit, at least: memory answers before they are worked through."""
comptime FEW = 4
"""Queries a KV head that are at hand in the first-level cache for every unit, with their sums, of all heads; for more, a
unit is a tile."""


struct Order(TrivialRegisterPassable):
    """In which order a tile's tokens and heads are worked on."""

    var heads: Int
    """How many KV heads go together: all, or one."""
    var unit: Int
    """Entries of a tile that go together: 8, 16 or 32."""
    var row_bytes: Int
    """What is contiguous of a token."""

    def __init__(out self, heads: Heads, queries: Int, element: Int):
        var neighbours = heads.neighbours()
        self.heads = heads.kv_heads if neighbours else 1
        self.row_bytes = self.heads * heads.dim * element
        self.unit = STREAMS if neighbours and queries <= FEW else TILE
        while self.unit < TILE and self.unit * self.row_bytes < NEAR:
            self.unit *= 2

    @always_inline
    def parts(self, heads: Heads) -> Int:
        """How many tiles of a field make a step."""
        return 1 if self.heads == heads.kv_heads else PARTS


@always_inline
def attend_by_vectors[
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
    """The states and weighted values of a segment's queries, into `scratch`; returns the segment to go on with.

    That one is taken early, so that its first K is on its way while the last V is summed up.
    """
    load_queries[k.dtype](rows, segment, heads, scratch)
    if segment.begin >= segment.end:
        return queue.take()
    var queries = segment.num_rows * heads.group
    var order = Order(heads, queries, size_of[k.dtype]())
    var parts = order.parts(heads)
    var score_runs = order.heads * score_calls[k.dtype](heads, queries)
    var sum_runs = order.heads * (queries + sum_calls[k.dtype](heads, queries))
    var request = Int(rows.row_batch[unsafe_offset=segment.row])
    var following = Segment.none()
    var place = 0
    var step = Step(k, v, request, segment, segment.begin, parts, scratch, place)
    while True:
        place = PARTS - place
        var next = Step(k, v, request, segment, step.end, parts, scratch, place)
        if step.end >= segment.end:
            following = queue.take()
            if following.num_rows > 0:
                var other = Int(rows.row_batch[unsafe_offset=following.row])
                next = Step(k, v, other, following, following.begin, parts, scratch, place)
        for first in range(0, heads.kv_heads, order.heads):
            var ahead = Ahead[near=True](scratch.place(PLACES), order.row_bytes)
            # All of K but the first unit, which was fetched before, and V's first.
            for i in range(step.count):
                ahead.add(
                    k.blocks.ptr,
                    step.tiles[unsafe_offset=i].k,
                    0 if i > 0 else order.unit,
                    TILE,
                    first * heads.k_stride,
                )
            ahead.add(v.blocks.ptr, step.tiles[].v, 0, order.unit, first * heads.v_stride)
            ahead.start(step.count * score_runs)
            for i in range(step.count):
                var tile = step.tiles[unsafe_offset=i]
                for unit in range(0, TILE, order.unit):
                    for head in range(first, first + order.heads):
                        score_tile(
                            k,
                            tile,
                            heads,
                            head,
                            head - first + i,
                            unit,
                            unit + order.unit,
                            queries,
                            scratch,
                            ahead,
                        )
            ahead = Ahead[near=True](scratch.place(PLACES), order.row_bytes)
            for i in range(step.count):
                ahead.add(
                    v.blocks.ptr,
                    step.tiles[unsafe_offset=i].v,
                    0 if i > 0 else order.unit,
                    TILE,
                    first * heads.v_stride,
                )
            if first + order.heads < heads.kv_heads:
                ahead.add(k.blocks.ptr, step.tiles[].k, 0, order.unit, (first + order.heads) * heads.k_stride)
            elif next.has_tokens():
                ahead.add(k.blocks.ptr, next.tiles[].k, 0, order.unit, 0)
            ahead.start(step.count * sum_runs)
            for i in range(step.count):
                var tile = step.tiles[unsafe_offset=i]
                # Not all tiles before: a greatest score that rises has to find summed up what was weighed.
                for head in range(first, first + order.heads):
                    weigh_tile[False](
                        rows, segment, logits, heads, head, head - first + i, tile, queries, scratch, ahead
                    )
                for unit in range(0, TILE, order.unit):
                    for head in range(first, first + order.heads):
                        sum_tile(
                            v,
                            tile,
                            heads,
                            head,
                            head - first + i,
                            unit,
                            unit + order.unit,
                            queries,
                            scratch,
                            ahead,
                        )
        if step.end >= segment.end:
            return following
        step = next
