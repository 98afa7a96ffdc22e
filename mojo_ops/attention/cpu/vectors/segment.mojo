"""A segment in vector arithmetic: its tokens in the order in which memory delivers them best.

Eight runs of memory are read side by side, each from its start to its end, and what is read next is prefetched into the
first-level cache, a few KB prefetcher: the products follow that order. Where the heads of a token are adjacent (NHD), a
tile goes `unit` tokens at a time, all heads of them; otherwise each head goes through the tiles of a whole field.
"""

from std.sys import size_of

from ....cache.paged_kv_cache import PagedKVCache
from ...logits import Logits
from ...params import AttentionRows
from ..kv_tile import HeadLayout, SPAN_TILES, TILE_BUFFERS, SegmentWorkspace, scores_to_weights
from ..plan import SegmentQueue, Segment
from ..prefetch import Prefetcher, STREAMS, KV_TILE_TOKENS
from ..segment_walk import SegmentStep
from .products import pack_queries, score_prefetch_calls, score_tile, sum_prefetch_calls, sum_tile

comptime MIN_UNIT_BYTES = 8192
"""Bytes of a unit, at least: memory answers before they are worked through."""
comptime MAX_UNIT_QUERIES = 4
"""Queries a KV head that are at hand in the first-level cache for every unit, with their sums, of all heads; for more, a
unit is a tile."""


struct TileOrder(TrivialRegisterPassable):
    """In which order a tile's tokens and heads are worked on."""

    var heads: Int
    """How many KV heads go together: all, or one."""
    var unit: Int
    """Entries of a tile that go together: 8, 16 or 32."""
    var row_bytes: Int
    """What is contiguous of a token."""

    def __init__(out self, heads: HeadLayout, queries: Int, element: Int):
        var adjacent = heads.adjacent()
        self.heads = heads.kv_heads if adjacent else 1
        self.row_bytes = self.heads * heads.head_dim * element
        self.unit = STREAMS if adjacent and queries <= MAX_UNIT_QUERIES else KV_TILE_TOKENS
        while self.unit < KV_TILE_TOKENS and self.unit * self.row_bytes < MIN_UNIT_BYTES:
            self.unit *= 2

    @always_inline
    def step_tiles(self, heads: HeadLayout) -> Int:
        """How many tiles of a field make a step."""
        return 1 if self.heads == heads.kv_heads else SPAN_TILES


@always_inline
def attend_segment_vectors[
    dtype: DType, //
](
    rows: AttentionRows[dtype],
    segment: Segment,
    k: PagedKVCache,
    v: type_of(k),
    logits: Logits,
    heads: HeadLayout,
    queue: SegmentQueue,
    mut workspace: SegmentWorkspace,
) -> Segment:
    """The states and weighted values of a segment's queries, into `workspace`; returns the segment to go on with.

    That one is taken early, so that its first K is on its way while the last V is summed up.
    """
    pack_queries[k.dtype](rows, segment, heads, workspace)
    if segment.begin >= segment.end:
        return queue.take()
    var queries = segment.num_rows * heads.group
    var order = TileOrder(heads, queries, size_of[k.dtype]())
    var tiles = order.step_tiles(heads)
    var score_runs = order.heads * score_prefetch_calls[k.dtype](heads, queries)
    var sum_runs = order.heads * (queries + sum_prefetch_calls[k.dtype](heads, queries))
    var request = Int(rows.row_batch[unsafe_offset=segment.row])
    var following = Segment.none()
    var buffer = 0
    var step = SegmentStep(k, v, request, segment, segment.begin, tiles, workspace, buffer)
    while True:
        buffer = SPAN_TILES - buffer
        var next = SegmentStep(k, v, request, segment, step.end, tiles, workspace, buffer)
        if step.end >= segment.end:
            following = queue.take()
            if following.num_rows > 0:
                var other = Int(rows.row_batch[unsafe_offset=following.row])
                next = SegmentStep(k, v, other, following, following.begin, tiles, workspace, buffer)
        for first in range(0, heads.kv_heads, order.heads):
            var prefetcher = Prefetcher[near=True](workspace.offset_buffer(TILE_BUFFERS), order.row_bytes)
            # All of K but the first unit, which was fetched before, and V's first.
            for i in range(step.count):
                prefetcher.add_rows(
                    k.blocks.ptr,
                    step.tiles[unsafe_offset=i].k,
                    0 if i > 0 else order.unit,
                    KV_TILE_TOKENS,
                    first * heads.k_stride,
                )
            prefetcher.add_rows(v.blocks.ptr, step.tiles[].v, 0, order.unit, first * heads.v_stride)
            prefetcher.start(step.count * score_runs)
            for i in range(step.count):
                var tile = step.tiles[unsafe_offset=i]
                for unit in range(0, KV_TILE_TOKENS, order.unit):
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
                            workspace,
                            prefetcher,
                        )
            prefetcher = Prefetcher[near=True](workspace.offset_buffer(TILE_BUFFERS), order.row_bytes)
            for i in range(step.count):
                prefetcher.add_rows(
                    v.blocks.ptr,
                    step.tiles[unsafe_offset=i].v,
                    0 if i > 0 else order.unit,
                    KV_TILE_TOKENS,
                    first * heads.v_stride,
                )
            if first + order.heads < heads.kv_heads:
                prefetcher.add_rows(k.blocks.ptr, step.tiles[].k, 0, order.unit, (first + order.heads) * heads.k_stride)
            elif next.has_tokens():
                prefetcher.add_rows(k.blocks.ptr, next.tiles[].k, 0, order.unit, 0)
            prefetcher.start(step.count * sum_runs)
            for i in range(step.count):
                var tile = step.tiles[unsafe_offset=i]
                # Not all tiles before: a greatest score that rises has to find summed up what was weighed.
                for head in range(first, first + order.heads):
                    scores_to_weights[False](
                        rows, segment, logits, heads, head, head - first + i, tile, queries, workspace, prefetcher
                    )
                for unit in range(0, KV_TILE_TOKENS, order.unit):
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
                            workspace,
                            prefetcher,
                        )
        if step.end >= segment.end:
            return following
        step = next
