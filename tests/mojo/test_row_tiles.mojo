"""Tiles of rows: every row in exactly one tile, of one request and of neighbouring lengths, within what shapes allow."""

from std.math import ceildiv
from std.random import random_si64, seed
from std.testing import TestSuite, assert_equal, assert_true

from mojo_ops.attention.gpu.row_tiles import (
    RowTile,
    TILE_HEADS,
    TileBounds,
    TileItem,
    TileWalk,
    begins_run,
    rows_of_tile,
)
from mojo_ops.attention.gpu.params import GpuAttentionParams
from mojo_ops.attention.gpu.row_masks import GpuNoMasks
from mojo_ops.attention.gpu.split_kv import RowPartition, WHOLE_ROW, max_item_tiles
from support import untracked, untracked_mutable

comptime CAPACITY = 100_000
comptime BATCH = 9


struct Rows(Movable):
    """Rows of a call on the host."""

    var requests: List[Int32]
    var lengths: List[Int32]
    var numbers: List[Float32]
    var window_left: Int32

    def __init__(out self, window_left: Int32 = -1):
        self.requests = List[Int32]()
        self.lengths = List[Int32]()
        self.numbers = List[Float32](length=1, fill=0)
        self.window_left = window_left

    def add(mut self, request: Int, first_length: Int, count: Int):
        """A causal run: each row sees one token more."""
        for i in range(count):
            self.requests.append(Int32(request))
            self.lengths.append(Int32(first_length + i))

    def params(mut self) -> GpuAttentionParams[DType.float32]:
        return GpuAttentionParams[DType.float32](
            untracked_mutable(self.numbers),
            untracked_mutable(self.numbers),
            untracked_mutable(self.numbers),
            untracked(self.requests),
            untracked(self.lengths),
            untracked(self.numbers),
            untracked(self.numbers),
            num_rows=Int32(len(self.requests)),
            num_heads=1,
            head_dim=64,
            batch=BATCH,
            capacity=CAPACITY,
            window_left=self.window_left,
            scale=1,
            soft_cap=0,
            v_scale=1,
            has_alibi=0,
            has_sinks=0,
            masks=GpuNoMasks(),
        )


def tiles_of(params: GpuAttentionParams, most_rows: Int32, threads: Int) -> List[RowTile]:
    """What the device finds, where so many threads share the rows."""
    var tiles = List[RowTile]()
    var share = ceildiv(params.num_rows, Int32(threads))
    var run = Int32(-1)
    for thread in range(threads):
        var begin = min(Int32(thread) * share, params.num_rows)
        var end = min(begin + share, params.num_rows)
        var walk = TileWalk(begin, end, run)
        var tile = walk.next(params, most_rows)
        while tile.rows > 0:
            tiles.append(tile)
            tile = walk.next(params, most_rows)
        for row in range(begin, end):
            if begins_run(params, row):
                run = row
    return tiles^


def check(mut rows: Rows, group: Int, threads: Int = 5) raises -> List[RowTile]:
    var params = rows.params()
    var most_rows = rows_of_tile(Int32(group))
    assert_true(Int(most_rows) * group <= TILE_HEADS)
    var tiles = tiles_of(params, most_rows, threads)
    var row = Int32(0)
    for tile in tiles:
        assert_equal(tile.first_row, row)
        assert_true(tile.rows >= 1 and tile.rows <= most_rows)
        for i in range(tile.rows):
            assert_equal(params.request(row), params.request(tile.first_row))
            var tokens = params.tokens(row)
            if tokens.end > 0:
                # Inside the tile's tokens, and growing along its rows.
                assert_true(tokens.begin >= tile.begin and tokens.end <= tile.end)
                if i > 0:
                    var before = params.tokens(row - 1)
                    assert_true(before.begin <= tokens.begin and before.end <= tokens.end)
                    # No token between is hidden from both.
                    assert_true(before.end <= 0 or tokens.begin <= before.end)
            row += 1
    assert_equal(row, params.num_rows)
    check_items(tiles, Int(params.num_rows), group)
    return tiles^


def check_items(tiles: List[RowTile], rows: Int, group: Int) raises:
    """The items of a tile join, and every row of a split tile has partial results of its own, adjacent ones."""
    for kv_heads in [1, 8]:
        var bounds = TileBounds.of(rows, BATCH, group, kv_heads, 132)
        var total = Int32(0)
        for tile in tiles:
            total += tile.tokens().tiles()
        var longest = max_item_tiles(total, Int32(bounds.schedule.wanted_items))
        var items = 0
        var partials = Int32(0)
        var splits = 0
        for tile in tiles:
            var split = RowPartition.of(tile.tokens(), longest)
            var at = tile.begin
            for i in range(split.count):
                var item = TileItem.of(tile, split, i, partials)
                assert_equal(item.begin, at)
                assert_equal(item.first_row, tile.first_row)
                assert_equal(item.rows, tile.rows)
                at = item.end
                if split.count > 1:
                    assert_equal(item.partial, partials + i)
                    assert_equal(item.parts, split.count)
                else:
                    assert_equal(item.partial, WHOLE_ROW)
            assert_equal(at, tile.end)
            items += Int(split.count)
            if split.count > 1:
                partials += split.count * tile.rows
                splits += Int(tile.rows)
        assert_true(2 * items <= bounds.schedule.items, "items")
        assert_true(Int(partials) <= bounds.schedule.partials, "partials")
        assert_true(splits <= bounds.schedule.splits, "splits")


def test_prefill_is_full_tiles() raises:
    var rows = Rows()
    rows.add(3, 1, 1000)
    rows.add(1, 501, 65)
    for threads in [1, 2, 7, 1024]:
        var tiles = check(rows, 4, threads)
        assert_equal(len(tiles), 32 + 3)
        assert_true(tiles[0] == RowTile(0, 32, 0, 32))
        assert_true(tiles[31] == RowTile(992, 8, 0, 1000))
        assert_true(tiles[34] == RowTile(1064, 1, 0, 565))
    # Where the group does not divide a tile, a few heads of it are padding.
    assert_equal(len(check(rows, 5)), 40 + 3)
    assert_equal(len(check(rows, 1)), 8 + 1)


def test_new_tokens_of_a_request_share_a_tile() raises:
    var rows = Rows()
    for request in range(BATCH):
        rows.add(request, 1 + 1000 * request, 7)
    assert_equal(len(check(rows, 8)), BATCH)


def test_rows_without_tokens() raises:
    """Padding, no tokens, and rows that are not in the table."""
    var rows = Rows()
    for _ in range(3):
        rows.add(-1, 5, 1)
    rows.add(2, 0, 1)
    rows.add(2, -4, 9)  # -4 to 4: those below 0 are NaN
    rows.add(BATCH, 3, 2)
    rows.add(-2, 3, 2)
    rows.add(4, CAPACITY - 1, 3)
    rows.add(5, 9, 1)
    var tiles = check(rows, 4)
    assert_true(tiles[0] == RowTile(0, 3, 0, 0))
    assert_true(tiles[len(tiles) - 1] == RowTile(Int32(len(rows.requests) - 1), 1, 0, 9))


def test_windows() raises:
    for window in [0, 1, 63, 500]:
        var rows = Rows(Int32(window))
        rows.add(0, 1, 700)
        rows.add(1, 90, 3)
        var tiles = check(rows, 2)
        assert_true(tiles[1] == RowTile(64, 64, max(Int32(0), Int32(64 - window)), 128))


def test_rows_of_one_length() raises:
    """Without a causal limit all rows of a request see the same tokens."""
    var rows = Rows(10)
    for _ in range(50):
        rows.add(6, 300, 1)
    assert_equal(len(check(rows, 4)), 2)


def test_any_rows() raises:
    """Rows that are not adjacent by request, and lengths that jump, take more tiles and are as right."""
    seed(1)
    for _ in range(40):
        var rows = Rows(Int32(random_si64(-1, 40)))
        for _ in range(Int(random_si64(1, 60))):
            rows.add(Int(random_si64(-2, BATCH)), Int(random_si64(-3, 3000)), Int(random_si64(1, 40)))
        _ = check(rows, Int(random_si64(1, 16)), Int(random_si64(1, 40)))


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
