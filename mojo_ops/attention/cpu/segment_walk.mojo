"""What a walk over a segment takes at a time."""

from ...cache.paged_kv_cache import PagedKVCache
from .kv_tile import Scratch, Tile
from .plan import Segment
from .prefetch import FIELD, TILE


struct Step(TrivialRegisterPassable):
    """The tiles that go through all heads together: one, or those of a field."""

    var tiles: Pointer[Tile, MutUntrackedOrigin]
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
        parts: Int,
        scratch: Scratch,
        place: Int,
    ):
        """What follows `begin`, in tile memory from `place` on; nothing past the segment's end.

        Args:
            k: The keys.
            v: The values.
            request: Whose tokens they are.
            segment: Which of them.
            begin: Where the step before ended.
            parts: How many tiles of a field go together, 1 or all.
            scratch: Memory for the tiles.
            place: Where, 0 or `PARTS`.
        """
        var field = begin // FIELD * FIELD
        var spread = field >= segment.begin and field + FIELD <= segment.end
        self.tiles = scratch.tile(place)
        self.count = 1
        self.end = begin
        if not spread:
            self.tiles[] = Tile(k, v, request, begin, segment.end, scratch.place(place))
            self.end += self.tiles[].count
            return
        self.count = parts
        var part = (begin - field) // TILE
        for i in range(self.count):
            self.tiles[unsafe_offset=i] = Tile(
                k, v, request, field=field, part=part + i, place=scratch.place(place + i)
            )
        self.end += self.count * TILE

    @always_inline
    def has_tokens(self) -> Bool:
        return self.tiles[].count > 0
