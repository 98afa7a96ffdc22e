"""The tokens of one step of a prefill segment."""

from ....cache.paged_kv_cache import PagedKVCache
from ..kv_tile import KVTile, OFFSET_WIDTH
from ..prefetch import IntPointer, KV_TILE_TOKENS

comptime STEP_TILES = 2
"""KV tiles of a step. The weighted values are loaded and stored once a step."""
comptime STEP_TOKENS = STEP_TILES * KV_TILE_TOKENS
comptime TILE_OFFSETS = 2 * (KV_TILE_TOKENS + OFFSET_WIDTH)
"""The numbers that the offsets of a KV tile take."""
comptime STEP_OFFSETS = STEP_TILES * TILE_OFFSETS
"""The numbers that the offsets of a step take."""


struct PrefillStep(Movable):
    """The tokens of one step: up to `STEP_TILES` KV tiles, adjacent tokens in order."""

    var tiles: Array[KVTile, STEP_TILES]
    var count: Int
    """Tiles that have a token."""
    var end: Int
    """The token after the last one."""

    def __init__(out self, k: PagedKVCache, v: type_of(k), request: Int, begin: Int, end: Int, offsets: IntPointer):
        """The tokens from `begin` on, none past `end`; `offsets` is memory for `STEP_OFFSETS` numbers."""
        self.end = begin
        self.count = 0
        self.tiles = Array[KVTile, STEP_TILES](fill=KVTile(k, v, request, begin, begin, offsets))
        comptime for i in range(STEP_TILES):
            if self.end < end:
                self.tiles[i] = KVTile(k, v, request, self.end, end, offsets.unsafe_offset(i * TILE_OFFSETS))
                self.end += self.tiles[i].count
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
