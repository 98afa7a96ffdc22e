"""What a walk over a segment takes at a time."""

from ...cache.paged_kv_cache import PagedKVCache
from .kv_tile import SegmentWorkspace, KVTile
from .plan import Segment
from .prefetch import SPAN_TOKENS, KV_TILE_TOKENS


struct SegmentStep(TrivialRegisterPassable):
    """The tiles that go through all heads together: one, or those of a span."""

    var tiles: Pointer[KVTile, MutUntrackedOrigin]
    var count: Int
    var end: Int
    """The step after it begins with token `end` of the segment, in the order of tiles."""

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
        """What follows `begin`, in tile memory from `buffer` on; nothing past the segment's end.

        Args:
            k: The keys.
            v: The values.
            request: Whose tokens they are.
            segment: Which of them.
            begin: Where the step before ended.
            tiles: How many tiles of a span go together, 1 or all.
            workspace: Memory for the tiles.
            buffer: Where, 0 or `SPAN_TILES`.
        """
        var span = begin // SPAN_TOKENS * SPAN_TOKENS
        var interleaved = span >= segment.begin and span + SPAN_TOKENS <= segment.end
        self.tiles = workspace.tile(buffer)
        self.count = 1
        self.end = begin
        if not interleaved:
            self.tiles[] = KVTile(k, v, request, begin, segment.end, workspace.offset_buffer(buffer))
            self.end += self.tiles[].count
            return
        self.count = tiles
        var first_tile = (begin - span) // KV_TILE_TOKENS
        for i in range(self.count):
            self.tiles[unsafe_offset=i] = KVTile(
                k, v, request, span=span, tile=first_tile + i, offsets=workspace.offset_buffer(buffer + i)
            )
        self.end += self.count * KV_TILE_TOKENS

    @always_inline
    def has_tokens(self) -> Bool:
        return self.tiles[].count > 0
