"""Attention over one segment on matrix tiles.

For each KV tile: q . k of all heads, while the rest of the tile's V is prefetched; then the weighted sums of V of all
heads, while the next tile's K and the first `EARLY_V_TOKENS` tokens of its V are prefetched. The sums take longer than
the scores, so more is prefetched during the sums. The order of tokens is that of `vectors/segment.mojo`.
"""

from std.sys import size_of

from ....cache.paged_kv_cache import PagedKVCache
from ....isa.convert import ChunkConstants
from ...logits import Logits
from ...params import AttentionRows
from ..bf16_chunk import Bf16Chunk
from ..kv_tile import SPAN_TILES
from ..plan import Segment, SegmentQueue
from ..prefetch import EARLY_V_TOKENS, IntPointer, KV_TILE_TOKENS, Prefetcher
from ..rotary_keys import KeyRotation
from ..segment_walk import SegmentStep, next_step
from ..tile_weights import scores_to_weights
from ..workspace import HeadLayout, SegmentWorkspace, TILE_BUFFERS
from .layout import AmxBuffers, pack_queries_amx, prefetch_calls_amx, transpose_scores
from .scores import KeyProducts, score_tile_amx
from .weighted_sums import ValueProducts, sum_tile_amx


@always_inline
def attend_segment_amx[
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
    """As `attend_segment_vectors`, but leaves the weighted values in the order of matrix tiles (`unpack_sums`).

    Rotated keys are sums of bfloat16 (`../rotary_keys.mojo`).
    """
    comptime key_dtype = DType.bfloat16 if rotates else k.dtype
    comptime L2Prefetcher = Prefetcher[to_l1=False]
    comptime chunk = Bf16Chunk[k.dtype].length
    var queries = segment.num_rows * heads.group
    var key_heads = rotation.heads_of[key_dtype](heads) if rotates else heads
    var buffers = AmxBuffers(queries, key_heads.padded_dim, workspace)
    buffers.configure()
    pack_queries_amx[key_dtype](rows, segment, key_heads, buffers, workspace)
    if segment.begin >= segment.end:
        return queue.take()
    var score_runs = heads.kv_heads * prefetch_calls_amx[key_dtype](key_heads)
    comptime if rotates:
        score_runs += heads.kv_heads * KV_TILE_TOKENS
        rotation.place_keys[key_dtype](KV_TILE_TOKENS)
    var sum_runs = heads.kv_heads * (queries + prefetch_calls_amx[k.dtype](heads))
    # A contiguous range is all heads of a token where they are adjacent, else one head.
    var heads_per_range = heads.kv_heads if heads.adjacent() else 1
    var range_bytes = heads_per_range * heads.head_dim * size_of[k.dtype]()
    var request = Int(rows.row_batch[unsafe_offset=segment.row])
    var following = Segment.none()
    var buffer = 0
    var v_prefetched = 0
    var step = SegmentStep(k, v, request, segment, segment.begin, 1, workspace, buffer)
    while True:
        var tile = step.tiles[]
        var prefetcher = L2Prefetcher(workspace.offset_buffer(TILE_BUFFERS), range_bytes)
        add_tile_ranges(prefetcher, v, tile.v, v_prefetched, KV_TILE_TOKENS, heads, heads.v_stride, heads_per_range)
        prefetcher.start(score_runs)
        var scores = KeyProducts[Bf16Chunk[key_dtype].length](buffers)
        comptime if rotates:
            rotation.select_tile(0, tile)
        for head in range(heads.kv_heads):
            comptime if rotates:
                rotation.rotate_keys[key_dtype](
                    k, ChunkConstants[k.dtype](), tile, 0, heads, head, 0, KV_TILE_TOKENS, prefetcher
                )
                score_tile_amx(
                    rotation.keys_of[key_dtype](),
                    rotation.key_offsets(),
                    key_heads,
                    head,
                    buffers,
                    workspace,
                    prefetcher,
                    scores,
                )
            else:
                var keys = k.blocks.ptr.unsafe_offset(head * heads.k_stride)
                score_tile_amx(keys, tile.k, heads, head, buffers, workspace, prefetcher, scores)
        buffer = SPAN_TILES - buffer
        var next = next_step(rows, k, v, request, segment, step.end, 1, queue, workspace, buffer, following)
        prefetcher = L2Prefetcher(workspace.offset_buffer(TILE_BUFFERS), range_bytes)
        if next.has_tokens():
            add_tile_ranges(prefetcher, k, next.tiles[].k, 0, KV_TILE_TOKENS, heads, heads.k_stride, heads_per_range)
            add_tile_ranges(prefetcher, v, next.tiles[].v, 0, EARLY_V_TOKENS, heads, heads.v_stride, heads_per_range)
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
def add_tile_ranges(
    mut prefetcher: Prefetcher,
    cache: PagedKVCache,
    tokens: IntPointer,
    begin: Int,
    end: Int,
    heads: HeadLayout,
    head_stride: Int,
    heads_per_range: Int,
):
    """Lists entries `begin` to `end - 1` of a tile's `tokens` for prefetching: all heads, `heads_per_range` a range."""
    for head in range(0, heads.kv_heads, heads_per_range):
        prefetcher.add_ranges(cache.blocks.ptr, tokens, begin, end, head * head_stride)
