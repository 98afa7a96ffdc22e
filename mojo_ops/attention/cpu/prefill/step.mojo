"""The tokens of one step of a prefill segment."""

from ....cache.paged_kv_cache import PagedKVCache
from ....isa.cpu_tuning import CPU_TUNING
from ..kv_tile import KVTile, OFFSET_WIDTH
from ..plan import Segment
from ..prefetch import IntPointer, KV_TILE_TOKENS, SPAN_TOKENS

comptime STEP_TILES = 2
"""KV tiles of a step. The weighted values are loaded and stored once a step."""
comptime STEP_TOKENS = STEP_TILES * KV_TILE_TOKENS
comptime TILE_OFFSETS = 2 * (KV_TILE_TOKENS + OFFSET_WIDTH)
"""The numbers that the offsets of a KV tile take."""
comptime STEP_OFFSETS = STEP_TILES * TILE_OFFSETS
"""The numbers that the offsets of a step take."""


struct PrefillStep(Movable):
    """The tokens of one step: up to `STEP_TILES` KV tiles of one span."""

    var tiles: Array[KVTile, STEP_TILES]
    var count: Int
    """Tiles that have a token."""
    var end: Int
    """The token at which the next step begins, counted in tokens in the order of tiles."""

    def __init__(
        out self,
        k: PagedKVCache,
        v: type_of(k),
        request: Int,
        segment: Segment,
        begin: Int,
        offsets: IntPointer,
        *,
        interleaves: Bool,
    ):
        """The tokens of a segment from `begin` on.

        Args:
            k: The keys.
            v: The values.
            request: The request whose tokens they are.
            segment: The segment.
            begin: The end of the step before.
            offsets: Memory for `STEP_OFFSETS` numbers.
            interleaves: True if whole spans are read in the order in which `SegmentStep` reads them, else all tokens in
                their order.
        """
        var span = begin // SPAN_TOKENS * SPAN_TOKENS
        var whole_span = span >= segment.begin and span < segment.last_span
        var interleaved = interleaves and whole_span and k.slots() <= CPU_TUNING.interleaved_slots
        self.end = begin
        self.count = 0
        self.tiles = Array[KVTile, STEP_TILES](fill=KVTile(k, v, request, begin, begin, offsets))
        comptime for i in range(STEP_TILES):
            if self.end < min(segment.end, span + SPAN_TOKENS):
                var at = offsets.unsafe_offset(i * TILE_OFFSETS)
                if interleaved:
                    var tile = (self.end - span) // KV_TILE_TOKENS
                    self.tiles[i] = KVTile(k, v, request, span=span, tile=tile, offsets=at)
                    self.end += KV_TILE_TOKENS
                else:
                    self.tiles[i] = KVTile(k, v, request, self.end, segment.end, at)
                    self.end = self.tiles[i].first + self.tiles[i].count
                self.count += 1

    @always_inline
    def first(self) -> Int:
        """The first token."""
        return self.tiles[0].first

    @always_inline
    def tiles_before(self, token: Int) -> Int:
        """The number of tiles that begin before a token."""
        var count = 0
        comptime for i in range(STEP_TILES):
            if i < self.count and self.tiles[i].first < token:
                count += 1
        return count
