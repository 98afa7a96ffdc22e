"""How the rows of a call become tiles: rows that share the tokens in shared memory, as pure arithmetic.

`schedule_tiles.mojo` runs it on the device, tests/mojo/test_row_tiles.mojo on the CPU.
"""

from std.math import ceildiv

from .params import GpuAttentionParams
from .split_kv import RowPartition, RowTokens, ScheduleBounds

comptime WARPGROUP_HEADS = 64
"""Heads of query rows that one warpgroup serves: the rows of a wgmma."""
comptime WARPGROUPS = 2
comptime TILE_HEADS = WARPGROUPS * WARPGROUP_HEADS
"""Heads of query rows in a tile: its rows times the query heads of a KV head are at most so many."""
comptime ITEMS_PER_SM = 2
"""Items of a call for each multiprocessor, where few tiles have many tokens: a CTA has a multiprocessor to itself."""


@always_inline
def rows_of_tile(group: Int32) -> Int32:
    """The most rows of a tile, for `group` query heads a KV head."""
    return Int32(TILE_HEADS) // group


@fieldwise_init
struct RowTile(Equatable, TrivialRegisterPassable):
    """Adjacent rows of one request."""

    var first_row: Int32
    var rows: Int32
    """0: no further tile."""
    var begin: Int32
    var end: Int32
    """Some of the rows see tokens `[begin, end)`; `end` is 0 or less where none of them sees any."""

    @always_inline
    def tokens(self) -> RowTokens:
        return RowTokens(self.begin, self.end)


@fieldwise_init
struct TileItem(Equatable, TrivialRegisterPassable):
    """Some tokens of one tile: 32 bytes in global memory. One CTA serves an item for one KV head."""

    var first_row: Int32
    var rows: Int32
    var begin: Int32
    var end: Int32
    """Tokens `[begin, end)` of the item; every row sees those of them that its own length and window let it see."""
    var partial: Int32
    """Index of the first row's partial result in `PartialOutputs`; `WHOLE_ROW` where there is none."""
    var parts: Int32
    """Items of the tile: the partial results of a row are adjacent, so those of a row and the next lie as far apart."""
    var unused: Int64

    @staticmethod
    @always_inline
    def of(tile: RowTile, split: RowPartition, index: Int32, first_partial: Int32) -> Self:
        """The `index`-th item of a tile; `first_partial` is the first partial result of its first row."""
        var item = split.item(tile.first_row, index, first_partial)
        return Self(tile.first_row, tile.rows, item.begin, item.end, item.partial, split.count, 0)


@always_inline
def begins_run(params: GpuAttentionParams, row: Int32) -> Bool:
    """Whether a row cannot share a tile with the one before it.

    It can where both have the same request, and the row sees as many tokens as the one before it or one more: then no
    token between the first and the last of a tile is hidden from all its rows, and limits grow along the rows.
    """
    if row == 0:
        return True
    if params.request(row) != params.request(row - 1):
        return True
    var more = params.tokens(row).end - params.tokens(row - 1).end
    return more != 0 and more != 1


@fieldwise_init
struct TileWalk(TrivialRegisterPassable):
    """The tiles that begin in a range of rows, in their order."""

    var row: Int32
    """The next row to look at."""
    var end: Int32
    """The first row after the range; a tile may reach past it."""
    var run: Int32
    """The row at which the run of `row` begins, if not at `row`."""

    @always_inline
    def next(mut self, params: GpuAttentionParams, most_rows: Int32) -> RowTile:
        """The next tile of at most `most_rows` rows; without a row after the last."""
        while self.row < self.end:
            var row = self.row
            self.row += 1
            if begins_run(params, row):
                self.run = row
            if (row - self.run) % most_rows == 0:
                var rows = Int32(1)
                while rows < most_rows and row + rows < params.num_rows and not begins_run(params, row + rows):
                    rows += 1
                return RowTile(row, rows, params.tokens(row).begin, params.tokens(row + rows - 1).end)
        return RowTile(0, 0, 0, 0)


@fieldwise_init
struct TileBounds(TrivialRegisterPassable):
    """What shapes alone say of a call's tiles, for any requests and lengths."""

    var most_rows: Int
    """Of a tile."""
    var schedule: ScheduleBounds
    """`items` are of two `SplitItem`s each, the size of a `TileItem`."""
    var usual_items: Int
    """Items of a call whose rows are adjacent by request; a list may have more, and is walked to its end."""

    @staticmethod
    def of(rows: Int, requests: Int, group: Int, kv_heads: Int, multiprocessors: Int) -> Self:
        var most_rows = Int(rows_of_tile(Int32(group)))
        var wanted = max(1, ceildiv(multiprocessors * ITEMS_PER_SM, max(1, kv_heads)))
        # As for rows (`ScheduleBounds.of`): fewer than `wanted` tiles are split, into at most `2 * wanted` items.
        var split_rows = min(rows, most_rows)
        var bounds = ScheduleBounds(
            wanted, 2 * (rows + wanted), 2 * wanted * split_rows, min(rows, wanted * split_rows), False
        )
        return Self(most_rows, bounds, min(rows, ceildiv(rows, most_rows) + requests) + wanted)
