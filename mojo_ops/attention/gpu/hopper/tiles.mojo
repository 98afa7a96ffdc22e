"""The tiles of one item's tokens in shared memory, and the boxes of pages that are copied into them."""

comptime WGMMA_TILE_TOKENS = 64
"""Tokens in a tile: the rows of one wgmma."""
comptime MIN_BOX_BITS: Int32 = 3
"""The base-2 logarithm of 8 slots: a smaller box would not line up with the period of the swizzle."""


@fieldwise_init
struct CopyBox(TrivialRegisterPassable):
    """The slots of one page that one copy fetches: a power of two, so that run-time divisions by it are shifts."""

    var bits: Int32
    """The base-2 logarithm of the slots: 3 to 6."""

    @staticmethod
    def of_page(page_size: Int) -> Self:
        """The greatest power of two that divides the page, at most a tile.

        The kernel takes boxes of at least 8 slots (`MIN_BOX_BITS`).
        """
        var bits = 0
        while (2 << bits) <= WGMMA_TILE_TOKENS and page_size % (2 << bits) == 0:
            bits += 1
        return Self(Int32(bits))

    @always_inline
    def slots(self) -> Int32:
        return Int32(1) << self.bits


@fieldwise_init
struct ItemTiles(TrivialRegisterPassable):
    """The tiles of one split item: the producer and the consumers walk them in the same order."""

    var first: Int32
    """The token of the first tile's row 0, at or below `begin`: a multiple of a box, so that no box crosses a page."""
    var begin: Int32
    var end: Int32
    """Tokens `[begin, end)` belong to the item; a tile's other rows may hold anything."""
    var count: Int32

    @staticmethod
    @always_inline
    def of(begin: Int32, end: Int32, box: CopyBox) -> Self:
        var first = (begin >> box.bits) << box.bits
        return Self(first, begin, end, (end - first + WGMMA_TILE_TOKENS - 1) // WGMMA_TILE_TOKENS if end > begin else 0)

    @always_inline
    def token(self, tile: Int32) -> Int32:
        """The token of a tile's row 0."""
        return self.first + tile * WGMMA_TILE_TOKENS

    @always_inline
    def valid_rows(self, tile: Int32) -> TileRows:
        """The rows of a tile whose tokens belong to the item."""
        var token = self.token(tile)
        return TileRows(max(Int32(0), self.begin - token), min(Int32(WGMMA_TILE_TOKENS), self.end - token))


@fieldwise_init
struct TileRows(TrivialRegisterPassable):
    """Rows `[begin, end)` of a tile; at least one."""

    var begin: Int32
    var end: Int32

    @always_inline
    def boxes(self, box: CopyBox) -> Int32:
        """Return how many of the tile's boxes, from the first on, hold these rows."""
        return (self.end + box.slots() - 1) >> box.bits

    @always_inline
    def all(self) -> Bool:
        return self.begin == 0 and self.end == WGMMA_TILE_TOKENS
