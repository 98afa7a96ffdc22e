"""A segment on matrix tiles.

For each tile of tokens, first q . k of all heads while the rest of the tile's V is prefetched, then the weighted sums of V of
all heads while the next tile's K is, and the first `EARLY_V_TOKENS` tokens of its V: the sums take longer than the scores. Tiles
are parts of a field, as vectors have them.
"""

from std.sys import size_of

from ....cache.paged_kv_cache import PagedKVCache
from ...logits import Logits
from ...params import AttentionRows
from ..kv_tile import HeadLayout, SPAN_TILES, TILE_BUFFERS, SegmentWorkspace, scores_to_weights
from ..plan import SegmentQueue, Segment
from ..prefetch import Prefetcher, EARLY_V_TOKENS, IntPointer, KV_TILE_TOKENS
from ..segment_walk import SegmentStep
from .layout import AmxBuffers, prefetch_calls_amx, pack_queries_amx, transpose_scores
from .scores import KeyProducts, score_tile_amx
from .weighted_sums import ValueProducts, sum_tile_amx
from .widen import Bf16Chunk


@always_inline
def attend_segment_amx[
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
    """As `attend_segment_vectors`, with the sums in the order of tiles."""
    comptime Rows = Prefetcher[near=False]
    comptime chunk = Bf16Chunk[k.dtype].length
    var queries = segment.num_rows * heads.group
    var buffers = AmxBuffers(queries, heads.padded_dim, workspace)
    buffers.configure()
    pack_queries_amx[k.dtype](rows, segment, heads, buffers, workspace)
    if segment.begin >= segment.end:
        return queue.take()
    var score_runs = heads.kv_heads * prefetch_calls_amx[k.dtype](heads)
    var sum_runs = heads.kv_heads * (queries + prefetch_calls_amx[k.dtype](heads))
    # A row is all heads of a token where they are adjacent, else one of them.
    var heads_per_row = heads.kv_heads if heads.adjacent() else 1
    var row_bytes = heads_per_row * heads.head_dim * size_of[k.dtype]()
    var request = Int(rows.row_batch[unsafe_offset=segment.row])
    var following = Segment.none()
    var buffer = 0
    var v_prefetched = 0
    var step = SegmentStep(k, v, request, segment, segment.begin, 1, workspace, buffer)
    while True:
        var tile = step.tiles[]
        var prefetcher = Rows(workspace.offset_buffer(TILE_BUFFERS), row_bytes)
        list_rows(prefetcher, v, tile.v, v_prefetched, KV_TILE_TOKENS, heads, heads.v_stride, heads_per_row)
        prefetcher.start(score_runs)
        var scores = KeyProducts[chunk](buffers)
        for head in range(heads.kv_heads):
            score_tile_amx(k, tile, heads, head, buffers, workspace, prefetcher, scores)
        buffer = SPAN_TILES - buffer
        var next = SegmentStep(k, v, request, segment, step.end, 1, workspace, buffer)
        if step.end >= segment.end:
            following = queue.take()
            if following.num_rows > 0:
                var other = Int(rows.row_batch[unsafe_offset=following.row])
                next = SegmentStep(k, v, other, following, following.begin, 1, workspace, buffer)
        prefetcher = Rows(workspace.offset_buffer(TILE_BUFFERS), row_bytes)
        if next.has_tokens():
            list_rows(prefetcher, k, next.tiles[].k, 0, KV_TILE_TOKENS, heads, heads.k_stride, heads_per_row)
            list_rows(prefetcher, v, next.tiles[].v, 0, EARLY_V_TOKENS, heads, heads.v_stride, heads_per_row)
        v_prefetched = EARLY_V_TOKENS
        prefetcher.start(sum_runs)
        var sums = ValueProducts[chunk](heads, buffers, workspace)
        for head in range(heads.kv_heads):
            transpose_scores(heads, head, buffers, workspace)
            scores_to_weights[True](
                rows, segment, logits, heads, head, head, tile, buffers.stride, workspace, prefetcher
            )
            sum_tile_amx(v, tile, heads, head, buffers, workspace, prefetcher, sums)
        if step.end >= segment.end:
            return following
        step = next


@always_inline
def list_rows(
    mut prefetcher: Prefetcher,
    cache: PagedKVCache,
    tokens: IntPointer,
    begin: Int,
    end: Int,
    heads: HeadLayout,
    head_stride: Int,
    heads_per_row: Int,
):
    """Entries `begin` to `end - 1` of a tile's `tokens`, of all heads, `heads_per_row` a row."""
    for head in range(0, heads.kv_heads, heads_per_row):
        prefetcher.add_rows(cache.blocks.ptr, tokens, begin, end, head * head_stride)
