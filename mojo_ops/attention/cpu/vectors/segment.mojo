"""Attention over one segment in vector arithmetic, its tokens in the order that gives the most memory bandwidth.

The next unit is prefetched during the arithmetic of this one, in the order and into the cache that `CPU_TUNING` has for
the CPU. Where the heads of a token are adjacent (NHD), a unit is some tokens of a tile with all their heads. Otherwise
(HND) it is one head of a tile, and each head goes through all tiles of a span.
"""

from std.math import align_up
from std.sys import size_of

from ....cache.paged_kv_cache import PagedKVCache
from ....isa.convert import ChunkConstants
from ....isa.cpu_tuning import CPU_TUNING
from ...logits import Logits
from ...params import AttentionRows
from ..kv_tile import SPAN_TILES
from ..plan import Segment, SegmentQueue
from ..prefetch import KV_TILE_TOKENS, Prefetcher, STREAMS
from ..rotary_keys import KeyRotation
from ..segment_walk import SegmentStep, next_step
from ..tile_weights import scores_to_weights
from ..workspace import HeadLayout, SegmentWorkspace, TILE_BUFFERS
from .code_sums import rounds_weights
from .products import score_prefetch_calls, score_tile, sum_prefetch_calls, sum_tile
from .queries import pack_queries, packed_query_dtype

comptime MIN_UNIT_BYTES = CPU_TUNING.decode_unit_bytes
"""Least bytes of a unit: their arithmetic takes longer than memory takes to deliver the next unit, and sums are loaded
and stored once per unit."""
comptime MAX_UNIT_QUERIES = 4
"""With up to so many queries per KV head, queries and sums of all heads stay in the first-level cache beside a unit."""
comptime MAX_LONG_UNIT_QUERIES = 16
"""With up to so many queries per KV head, a unit is at least 16 tokens, so that queries and sums return to the
first-level cache half as often. With more, a unit is a tile."""

comptime PREFETCHES_TO_L1 = CPU_TUNING.decode_prefetch_level == 1
comptime UnitPrefetcher = Prefetcher[to_l1=PREFETCHES_TO_L1, side_by_side=PREFETCHES_TO_L1]


struct TileOrder(TrivialRegisterPassable):
    """The order in which the tokens and heads of a tile are read."""

    var heads: Int
    """KV heads that a unit holds: all, or one."""
    var unit: Int
    """Entries of a tile that a unit holds: 8, 16 or 32."""
    var range_bytes: Int
    """Contiguous bytes of a token in a unit."""
    var ahead: Int
    """Entries that are prefetched before their use, whole units."""

    def __init__(out self, heads: HeadLayout, queries: Int, element_bytes: Int):
        var adjacent = heads.adjacent()
        self.heads = heads.kv_heads if adjacent else 1
        self.range_bytes = self.heads * heads.units * element_bytes
        self.unit = KV_TILE_TOKENS
        if adjacent and queries <= MAX_LONG_UNIT_QUERIES:
            self.unit = STREAMS if queries <= MAX_UNIT_QUERIES else 2 * STREAMS
        # Of all heads of the call, not only of the segment's: weights over codes are rounded a unit at a time.
        var token_bytes = (heads.call_heads if adjacent else 1) * heads.units * element_bytes
        while self.unit < KV_TILE_TOKENS and self.unit * token_bytes < MIN_UNIT_BYTES:
            self.unit *= 2
        self.ahead = align_up(max(1, CPU_TUNING.decode_prefetch_bytes // self.range_bytes), self.unit)

    @always_inline
    def step_tiles(self, heads: HeadLayout) -> Int:
        """Tiles of a step: one, or those of a span."""
        return 1 if self.heads == heads.kv_heads else SPAN_TILES

    @always_inline
    def first_entries(self, step: SegmentStep) -> Int:
        """Entries of a step that are prefetched before its first use."""
        return min(self.ahead, step.count * KV_TILE_TOKENS)


@always_inline
def add_entries[
    of_values: Bool
](mut prefetcher: UnitPrefetcher, cache: PagedKVCache, step: SegmentStep, begin: Int, end: Int, offset: Int):
    """Lists V or K of entries `[begin, end)` of a step, counted through its tiles; `offset` leads to the KV head."""
    for i in range(begin // KV_TILE_TOKENS, step.count):
        var first = i * KV_TILE_TOKENS
        var last = min(end - first, KV_TILE_TOKENS)
        var tile = step.tiles[unsafe_offset=i]
        prefetcher.add_ranges(cache.blocks.ptr, tile.v if of_values else tile.k, max(begin - first, 0), last, offset)


@always_inline
def attend_segment_vectors[
    dtype: DType, //, rotates: Bool
](
    rows: AttentionRows[dtype, ...],
    segment: Segment,
    k: PagedKVCache,
    v: type_of(k),
    logits: Logits,
    heads: HeadLayout,
    mut queue: SegmentQueue,
    mut workspace: SegmentWorkspace,
    mut rotation: KeyRotation,
) -> Segment:
    """Computes the states and weighted values of a segment's queries in `workspace`; returns the next segment.

    The next segment is taken from the queue before this one is finished (`next_step`). If `rotates`, the queries are
    rotated already, and the keys are rotated here, as float32.
    """
    comptime key_dtype = DType.float32 if rotates else k.dtype
    comptime integers = rounds_weights(dtype, k.dtype)
    var key_heads = rotation.heads_of[key_dtype](heads) if rotates else heads
    pack_queries[key_dtype](rows, segment, key_heads, workspace)
    if segment.begin >= segment.end:
        return queue.take()
    var queries = segment.num_rows * heads.group
    # Weights over codes are rounded a unit at a time, so a unit does not depend on the rows of the block.
    var order = TileOrder(heads, heads.group if integers else queries, size_of[k.dtype]())
    var tiles = order.step_tiles(heads)
    var score_runs = order.heads * score_prefetch_calls[key_dtype](key_heads, queries)
    comptime if rotates:
        score_runs += order.heads * KV_TILE_TOKENS
        rotation.place_keys[key_dtype](order.unit)
    var sum_runs = order.heads * (queries + sum_prefetch_calls[k.dtype, integers](heads, queries))
    var request = Int(rows.row_batch[unsafe_offset=segment.row])
    var following = Segment.none()
    var constants = ChunkConstants[k.dtype]()
    var buffer = 0
    var step = SegmentStep(k, v, request, segment, segment.begin, tiles, workspace, buffer)
    while True:
        comptime if rotates:
            for i in range(step.count):
                rotation.select_tile(i, step.tiles[unsafe_offset=i])
        buffer = SPAN_TILES - buffer
        var next = next_step(rows, k, v, request, segment, step.end, tiles, queue, workspace, buffer, following)
        for first in range(0, heads.kv_heads, order.heads):
            var prefetcher = UnitPrefetcher(workspace.offset_buffer(TILE_BUFFERS), order.range_bytes)
            # All of K but its first units, which were prefetched before, and the first units of V.
            var fetched = order.first_entries(step)
            add_entries[False](prefetcher, k, step, fetched, step.count * KV_TILE_TOKENS, first * heads.k_stride)
            add_entries[True](prefetcher, v, step, 0, fetched, first * heads.v_stride)
            prefetcher.start(step.count * score_runs)
            score_step[packed_query_dtype(dtype, key_dtype), key_dtype, rotates](
                k, constants, step, order, first, heads, key_heads, queries, workspace, rotation, prefetcher
            )
            prefetcher = UnitPrefetcher(workspace.offset_buffer(TILE_BUFFERS), order.range_bytes)
            add_entries[True](prefetcher, v, step, fetched, step.count * KV_TILE_TOKENS, first * heads.v_stride)
            if first + order.heads < heads.kv_heads:
                add_entries[False](prefetcher, k, step, 0, fetched, (first + order.heads) * heads.k_stride)
            elif next.has_tokens():
                add_entries[False](prefetcher, k, next, 0, order.first_entries(next), 0)
            prefetcher.start(step.count * sum_runs)
            sum_step[integers](
                rows, segment, v, constants, step, order, first, logits, heads, queries, workspace, prefetcher
            )
        if step.end >= segment.end:
            return following
        step = next


@always_inline
def score_step[
    query_dtype: DType, key_dtype: DType, rotates: Bool
](
    k: PagedKVCache,
    constants: ChunkConstants[k.dtype],
    step: SegmentStep,
    order: TileOrder,
    first: Int,
    heads: HeadLayout,
    key_heads: HeadLayout,
    queries: Int,
    mut workspace: SegmentWorkspace,
    mut rotation: KeyRotation,
    mut prefetcher: UnitPrefetcher,
):
    """Computes the scores of a step's tokens and the KV heads of a unit, from head `first` on."""
    for i in range(step.count):
        var tile = step.tiles[unsafe_offset=i]
        for unit in range(0, KV_TILE_TOKENS, order.unit):
            var end = unit + order.unit
            for head in range(first, first + order.heads):
                var at = head - first + i
                comptime if rotates:
                    rotation.rotate_keys[key_dtype](k, constants, tile, i, heads, head, unit, end, prefetcher)
                    var keys = rotation.keys_of[key_dtype]()
                    var plain = ChunkConstants[key_dtype]()
                    var tokens = rotation.key_offsets()
                    score_tile[query_dtype](
                        keys, plain, tokens, key_heads, head, at, unit, end, queries, workspace, prefetcher
                    )
                else:
                    var keys = k.blocks.ptr.unsafe_offset(head * heads.k_stride)
                    score_tile[query_dtype](
                        keys, constants, tile.k, heads, head, at, unit, end, queries, workspace, prefetcher
                    )


@always_inline
def sum_step[
    integers: Bool
](
    rows: AttentionRows,
    segment: Segment,
    v: PagedKVCache,
    constants: ChunkConstants[v.dtype],
    step: SegmentStep,
    order: TileOrder,
    first: Int,
    logits: Logits,
    heads: HeadLayout,
    queries: Int,
    mut workspace: SegmentWorkspace,
    mut prefetcher: UnitPrefetcher,
):
    """Turns the scores of the same heads into weights, and adds the weighted values.

    Tile by tile: a maximum that is raised rescales the values of all weights before it.
    """
    for i in range(step.count):
        var tile = step.tiles[unsafe_offset=i]
        for head in range(first, first + order.heads):
            scores_to_weights[False](
                rows, segment, logits, heads, head, head - first + i, tile, queries, workspace, prefetcher
            )
        for unit in range(0, KV_TILE_TOKENS, order.unit):
            var end = unit + order.unit
            for head in range(first, first + order.heads):
                var at = head - first + i
                sum_tile[integers](v, constants, tile, heads, head, at, unit, end, queries, workspace, prefetcher)
