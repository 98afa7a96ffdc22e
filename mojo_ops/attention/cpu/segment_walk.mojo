"""The steps in which the tokens of a segment are read, in vectors and on matrix tiles alike."""

from ...cache.paged_kv_cache import PagedKVCache
from ...isa.cpu_tuning import CPU_TUNING
from ..params import AttentionRows
from .kv_tile import KVTile
from .plan import Segment, SegmentQueue
from .prefetch import KV_TILE_TOKENS, SPAN_TOKENS
from .workspace import SegmentWorkspace


struct SegmentStep(TrivialRegisterPassable):
    """The tiles that are read before the next ones are: one tile, or those of a span."""

    var tiles: Pointer[KVTile, MutUntrackedOrigin]
    var count: Int
    var end: Int
    """The token at which the next step begins, counted in tokens in the order of tiles."""

    def __init__(
        out self,
        k: PagedKVCache,
        v: type_of(k),
        request: Int,
        segment: Segment,
        begin: Int,
        tiles: Int,
        workspace: SegmentWorkspace,
        buffer: Int,
    ):
        """The tiles from `begin` on, in tile buffers `buffer` and on. At the segment's end they have no tokens.

        Args:
            k: The keys.
            v: The values.
            request: The request whose tokens they are.
            segment: The segment.
            begin: The end of the step before.
            tiles: How many tiles of a span make a step, 1 or `SPAN_TILES`.
            workspace: The memory of the tiles.
            buffer: The first tile buffer, 0 or `SPAN_TILES`.
        """
        var span = begin // SPAN_TOKENS * SPAN_TOKENS
        # The same for every row of the block, whichever rows it has (`plan_segments`).
        var whole_span = span >= segment.begin and span < segment.last_span
        var interleaved = k.slots() <= CPU_TUNING.interleaved_slots
        self.tiles = workspace.tile(buffer)
        self.count = 1
        self.end = begin
        if not whole_span:
            self.tiles[] = KVTile(k, v, request, begin, segment.end, workspace.offset_buffer(buffer))
            self.end = self.tiles[].first + self.tiles[].count
            return
        self.count = tiles
        var first_tile = (begin - span) // KV_TILE_TOKENS
        for i in range(self.count):
            var tile = first_tile + i
            var offsets = workspace.offset_buffer(buffer + i)
            if interleaved:
                self.tiles[unsafe_offset=i] = KVTile(k, v, request, span=span, tile=tile, offsets=offsets)
            else:
                var first = span + tile * KV_TILE_TOKENS
                self.tiles[unsafe_offset=i] = KVTile(k, v, request, first, segment.end, offsets)
        self.end += self.count * KV_TILE_TOKENS

    @always_inline
    def has_tokens(self) -> Bool:
        return self.tiles[].count > 0


@always_inline
def next_step[
    dtype: DType, //
](
    rows: AttentionRows[dtype, ...],
    k: PagedKVCache,
    v: type_of(k),
    request: Int,
    segment: Segment,
    end: Int,
    tiles: Int,
    mut queue: SegmentQueue,
    workspace: SegmentWorkspace,
    buffer: Int,
    mut following: Segment,
) -> SegmentStep:
    """The step after the one that ends with `end`; after a segment's last step the first one of the next segment.

    That segment is taken from the queue into `following` here, before this one is finished, so that its first K is
    prefetched during the last arithmetic of this one.
    """
    var next = SegmentStep(k, v, request, segment, end, tiles, workspace, buffer)
    if end >= segment.end:
        following = queue.take()
        if following.num_rows > 0:
            var other = Int(rows.row_batch[unsafe_offset=following.row])
            next = SegmentStep(k, v, other, following, following.begin, tiles, workspace, buffer)
    return next
