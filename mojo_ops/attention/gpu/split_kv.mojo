"""The split of an attention call's rows into items: types and pure arithmetic (`README.md`, "Schedule").

The arithmetic is in tiles of `SPLIT_TILE_TOKENS` tokens, counted from token 0, so that an item ends inside a tile only
where its row ends. `scheduler.mojo` runs it on the device, tests/mojo/test_split_kv.mojo on the CPU.
"""

from std.math import ceildiv
from std.sys import size_of

comptime SPLIT_TILE_TOKENS = 128
"""Tokens: items begin and end at multiples of it, but for the first and the last token of a row."""
comptime MIN_ITEM_TILES = 2
"""Below this a row is not split: a partial result costs as much as some tokens."""
comptime ITEMS_PER_SM = 4
"""Items of a call for each multiprocessor: enough to balance the load, few enough to merge cheaply."""
comptime FIXED_ITEM_TILES = 8
"""The least length of an item where the split is batch-invariant."""
comptime MAX_FIXED_ITEMS = 64
"""The most items of a row where the split is batch-invariant."""
comptime MAX_PASS_BYTES = 1 << 28
"""Bytes of the partial results of a batch-invariant call at one time: the rows of a larger one go in several passes."""
comptime NO_ROW: Int32 = -1
comptime WHOLE_ROW: Int32 = -1
"""The `partial` of an item that is its row's only one: the item writes o and lse itself."""
comptime INVALID_ROW: Int32 = -1
"""The `end` of a row whose request or length is not in the table: its results are NaN."""


@fieldwise_init
struct SplitItem(Equatable, TrivialRegisterPassable):
    """Some tokens of one row: 16 bytes in global memory. One CTA serves an item for one KV head."""

    var row: Int32
    """`NO_ROW` past the last item of the list."""
    var begin: Int32
    var end: Int32
    """Tokens `[begin, end)`; both 0 for a row that sees no token (o = 0, lse = -inf); end = `INVALID_ROW`: all NaN."""
    var partial: Int32
    """Index of its partial result in `PartialOutputs`; `WHOLE_ROW` where there is none."""


@fieldwise_init
struct SplitRow(Equatable, TrivialRegisterPassable):
    """A row of several items, whose partial results `[first, first + count)` lie in the order of its tokens."""

    var row: Int32
    """`NO_ROW` past the last."""
    var first: Int32
    var count: Int32
    var unused: Int32


@fieldwise_init
struct RowTokens(TrivialRegisterPassable):
    """The tokens `[begin, end)` that one row attends to; `end` is `INVALID_ROW` where the table has no such row."""

    var begin: Int32
    var end: Int32

    @staticmethod
    @always_inline
    def of(request: Int32, length: Int32, batch: Int32, capacity: Int32, window_left: Int32) -> Self:
        """From a row's operands; `capacity` is the most tokens that a row of the page table can hold.

        A request of -1 is padding, whatever its length.
        """
        if request == -1:
            return Self(0, 0)
        if request < -1 or request >= batch or length < 0 or length > capacity:
            return Self(0, INVALID_ROW)
        var begin = max(Int32(0), length - 1 - window_left) if window_left >= 0 else 0
        return Self(begin, length)

    @always_inline
    def first_tile(self) -> Int32:
        return self.begin // SPLIT_TILE_TOKENS

    @always_inline
    def tiles(self) -> Int32:
        """Tiles that hold a token of the row."""
        return max(Int32(0), ceildiv(self.end, Int32(SPLIT_TILE_TOKENS)) - self.first_tile()) if self.end > 0 else 0


@fieldwise_init
struct RowPartition(TrivialRegisterPassable):
    """A row split into `count` items of `size` tiles; the last item has the rest."""

    var tokens: RowTokens
    var size: Int32
    var count: Int32
    """At least 1: a row without a token is an item too, which writes its result."""

    @staticmethod
    @always_inline
    def of(tokens: RowTokens, max_tiles: Int32) -> Self:
        """As few items as have at most `max_tiles` tiles each, of even size."""
        var tiles = tokens.tiles()
        var size = ceildiv(tiles, max(Int32(1), ceildiv(tiles, max_tiles)))
        return Self(tokens, size, ceildiv(tiles, size) if size > 0 else 1)

    @always_inline
    def item(self, row: Int32, index: Int32, first_partial: Int32) -> SplitItem:
        """The `index`-th item; `first_partial` is the index of item 0's partial result, where there are several."""
        if self.count == 1:
            return SplitItem(row, self.tokens.begin, self.tokens.end, WHOLE_ROW)
        var first = self.tokens.first_tile() + index * self.size
        return SplitItem(
            row,
            max(self.tokens.begin, first * SPLIT_TILE_TOKENS),
            min(self.tokens.end, (first + self.size) * SPLIT_TILE_TOKENS),
            first_partial + index,
        )


@always_inline
def max_item_tiles(total_tiles: Int32, wanted_items: Int32) -> Int32:
    """The longest item, in tiles, where `total_tiles` are to make about `wanted_items` items.

    Rows of `total_tiles` in all then have at most `wanted_items` items more than there are rows.
    """
    return max(Int32(MIN_ITEM_TILES), ceildiv(total_tiles, wanted_items))


@always_inline
def fixed_max_item_tiles(tiles: Int32) -> Int32:
    """The longest item of a row of `tiles` tiles, whatever else is in the batch."""
    return max(Int32(FIXED_ITEM_TILES), ceildiv(tiles, Int32(MAX_FIXED_ITEMS)))


@always_inline
def max_fixed_items(capacity: Int) -> Int:
    """The most items of a row of up to `capacity` tokens, whatever else is in the batch."""
    return max(1, min(MAX_FIXED_ITEMS, ceildiv(ceildiv(capacity, SPLIT_TILE_TOKENS), FIXED_ITEM_TILES)))


def rows_of_pass(capacity: Int, num_heads: Int, value_dim: Int) -> Int:
    """The rows of a batch-invariant call that are attended to at one time; the next pass has the next ones.

    Their partial results take up to `MAX_PASS_BYTES`, or they are one row. A row's items and the order in which its
    partial results are merged depend on the row alone, so its bits do not depend on the pass that it is in.

    Args:
        capacity: `max_pages * page_size`.
        num_heads: Query heads.
        value_dim: Elements of a head of o.
    """
    var each = max_fixed_items(capacity)
    if each == 1:
        return Int(Int32.MAX)  # no row is split
    return max(1, MAX_PASS_BYTES // (each * num_heads * (value_dim + 2) * size_of[DType.float32]()))


@fieldwise_init
struct ScheduleBounds(TrivialRegisterPassable):
    """The sizes of the schedule and of the partial results: known from shapes alone, for any lengths."""

    var wanted_items: Int
    """Items wanted, not counting that every row has at least one."""
    var items: Int
    var partials: Int
    var splits: Int
    """Rows that may have more than one item."""
    var batch_invariant: Bool

    @staticmethod
    def of(rows: Int, capacity: Int, ctas_per_item: Int, multiprocessors: Int, batch_invariant: Bool) -> Self:
        """For `rows` rows of at most `capacity` tokens.

        Args:
            rows: R.
            capacity: `max_pages * page_size`.
            ctas_per_item: CTAs that serve one item: KV heads, times the parts that a group is split into.
            multiprocessors: The number of multiprocessors of the device.
            batch_invariant: Whether a row's split depends on its own length alone.
        """
        if batch_invariant:
            var each = max_fixed_items(capacity)
            var splits = rows if each > 1 else 0
            return Self(0, rows * each, splits * each, splits, True)
        var wanted = max(1, ceildiv(multiprocessors * ITEMS_PER_SM, max(1, ctas_per_item)))
        # A split row has more than `max_item_tiles` >= total / wanted tiles, so fewer than `wanted` rows are split.
        return Self(wanted, rows + wanted, 2 * wanted, min(rows, wanted), False)
