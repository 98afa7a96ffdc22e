"""The GPU's schedule: every token of every row in exactly one item, within the bounds that shapes alone give."""

from std.random import random_si64, seed
from std.testing import TestSuite, assert_equal, assert_true

from mojo_ops.attention.gpu.params import GpuAttentionParams, rows_of
from mojo_ops.attention.gpu.row_masks import GpuNoMasks
from mojo_ops.attention.gpu.split_kv import (
    MAX_FIXED_ITEMS,
    MAX_PASS_BYTES,
    INVALID_ROW,
    MIN_ITEM_TILES,
    NO_ROW,
    RowPartition,
    RowTokens,
    SPLIT_TILE_TOKENS,
    WHOLE_ROW,
    ScheduleBounds,
    SplitItem,
    max_item_tiles,
    fixed_max_item_tiles,
    rows_of_pass,
)
from mojo_ops.attention.logits import ScoreOptions
from support import untracked, untracked_mutable

comptime CAPACITY = 1 << 20


def tokens_of(length: Int, window_left: Int = -1) -> RowTokens:
    return RowTokens.of(0, Int32(length), 1, CAPACITY, Int32(window_left))


def plan(rows: List[RowTokens], bounds: ScheduleBounds) raises -> List[SplitItem]:
    """Compute as the device does, one row after the other."""
    var total = Int32(0)
    for row in rows:
        total += row.tiles()
    var items = List[SplitItem]()
    var partials = Int32(0)
    var splits = 0
    for r in range(len(rows)):
        var tiles = rows[r].tiles()
        var longest = fixed_max_item_tiles(tiles) if bounds.batch_invariant else max_item_tiles(
            total, Int32(bounds.wanted_items)
        )
        var split = RowPartition.of(rows[r], longest)
        for i in range(Int(split.count)):
            items.append(split.item(Int32(r), Int32(i), partials))
        if split.count > 1:
            partials += split.count
            splits += 1
    assert_true(len(items) <= bounds.items, "items")
    assert_true(Int(partials) <= bounds.partials, "partials")
    assert_true(splits <= bounds.splits, "splits")
    return items^


def check(rows: List[RowTokens], bounds: ScheduleBounds) raises -> List[SplitItem]:
    """The items of a row join without gap or overlap; only its ends lie inside a tile; partials count up."""
    var items = plan(rows, bounds)
    var i = 0
    var partial = Int32(0)
    for r in range(len(rows)):
        var tokens = rows[r]
        var first = i
        var at = tokens.begin
        while i < len(items) and Int(items[i].row) == r:
            var item = items[i]
            assert_equal(item.begin, at)
            assert_true(item.begin == tokens.begin or item.begin % SPLIT_TILE_TOKENS == 0)
            assert_true(item.end == tokens.end or item.end % SPLIT_TILE_TOKENS == 0)
            if item.partial != WHOLE_ROW:
                assert_equal(item.partial, partial)
                assert_true(item.end > item.begin)
                partial += 1
            at = item.end
            i += 1
        assert_equal(at, tokens.end)
        assert_true(i > first)
        assert_equal(i - first == 1, items[first].partial == WHOLE_ROW)
    assert_equal(i, len(items))
    return items^


def bounds_of(rows: Int, batch_invariant: Bool = False, kv_heads: Int = 8) -> ScheduleBounds:
    return ScheduleBounds.of(rows, CAPACITY, kv_heads, 132, batch_invariant)


def test_a_row_of_the_table() raises:
    assert_equal(tokens_of(5).begin, 0)
    assert_equal(tokens_of(5).end, 5)
    assert_equal(tokens_of(5, 0).begin, 4)
    assert_equal(tokens_of(300, 9).begin, 290)
    assert_equal(tokens_of(300, 9).tiles(), 1)
    assert_equal(tokens_of(300, 300).begin, 0)
    assert_equal(tokens_of(CAPACITY).end, CAPACITY)


def test_rows_that_the_table_has_not_are_marked() raises:
    assert_equal(RowTokens.of(-2, 5, 4, 100, -1).end, INVALID_ROW)
    assert_equal(RowTokens.of(4, 5, 4, 100, -1).end, INVALID_ROW)
    assert_equal(RowTokens.of(3, -1, 4, 100, -1).end, INVALID_ROW)
    assert_equal(RowTokens.of(3, -7, 4, 100, -1).end, INVALID_ROW)
    assert_equal(RowTokens.of(3, 101, 4, 100, -1).end, INVALID_ROW)
    assert_equal(RowTokens.of(3, 100, 4, 100, -1).end, 100)
    assert_equal(RowTokens.of(4, 5, 4, 100, -1).tiles(), 0)


def test_padding_and_empty_rows_are_one_item_without_tokens() raises:
    for row in [RowTokens.of(-1, 50, 4, 100, -1), RowTokens.of(0, 0, 4, 100, 7)]:
        var items = check([row], bounds_of(1))
        assert_equal(len(items), 1)
        assert_equal(items[0].begin, 0)
        assert_equal(items[0].end, 0)
    var items = plan([RowTokens.of(9, 50, 4, 100, -1)], bounds_of(1))
    assert_equal(items[0].end, INVALID_ROW)
    assert_equal(items[0].partial, WHOLE_ROW)


def test_edges() raises:
    for length in [
        1,
        SPLIT_TILE_TOKENS - 1,
        SPLIT_TILE_TOKENS,
        SPLIT_TILE_TOKENS + 1,
        2 * SPLIT_TILE_TOKENS,
        2 * SPLIT_TILE_TOKENS + 1,
        3 * SPLIT_TILE_TOKENS,
        100 * SPLIT_TILE_TOKENS + 1,
    ]:
        for window_left in [-1, 0, 1, SPLIT_TILE_TOKENS, 77 * SPLIT_TILE_TOKENS + 5]:
            _ = check([tokens_of(length, window_left)], bounds_of(1))
            _ = check([tokens_of(length, window_left)], bounds_of(1, True))


def test_items_of_a_row_are_of_even_size() raises:
    """One token more than an item may have makes two halves, not an item and a token."""
    var split = RowPartition.of(tokens_of(16 * SPLIT_TILE_TOKENS + 1), 16)
    assert_equal(split.count, 2)
    assert_equal(split.size, 9)


def test_short_rows_stay_whole() raises:
    assert_equal(len(check([tokens_of(MIN_ITEM_TILES * SPLIT_TILE_TOKENS)], bounds_of(1))), 1)
    assert_equal(len(check([tokens_of(MIN_ITEM_TILES * SPLIT_TILE_TOKENS + 1)], bounds_of(1))), 2)


def test_one_long_row_fills_the_device() raises:
    var items = check([tokens_of(131072)], bounds_of(1))
    assert_equal(len(items), 64)
    for item in items:
        assert_equal(item.end - item.begin, 2048)


def test_many_equal_rows_stay_whole() raises:
    var rows = List[RowTokens](length=256, fill=tokens_of(4096))
    assert_equal(len(check(rows, bounds_of(256))), 256)


def test_random_batches_keep_the_bounds() raises:
    seed(5)
    for trial in range(300):
        var rows = List[RowTokens]()
        for _ in range(Int(random_si64(0, 40))):
            var length = Int(random_si64(0, Int64(1) << random_si64(0, 17)))
            rows.append(tokens_of(length, Int(random_si64(-1, 9000)) if trial % 3 == 0 else -1))
        var heads = 1 << (trial % 6)
        _ = check(rows, bounds_of(len(rows), kv_heads=heads))
        _ = check(rows, bounds_of(len(rows), True, heads))


def test_a_fixed_split_depends_on_the_row_alone() raises:
    var others = List[RowTokens](length=30, fill=tokens_of(70000))
    for length in [0, 1, 1024, 1025, 8191, 65536, 65537, 1000000]:
        var alone = check([tokens_of(length)], bounds_of(1, True))
        assert_true(len(alone) <= MAX_FIXED_ITEMS)
        var rows = others.copy()
        rows.append(tokens_of(length))
        var items = check(rows, bounds_of(len(rows), True))
        for i in range(len(alone)):
            var item = items[len(items) - len(alone) + i]
            assert_equal(item.begin, alone[i].begin)
            assert_equal(item.end, alone[i].end)


def test_a_row_as_long_as_the_table_keeps_the_fixed_bounds() raises:
    """The workspace that shapes give is enough for the longest row of each capacity, and for a batch of them."""
    for tiles in range(1, 1200):
        var length = tiles * SPLIT_TILE_TOKENS - tiles % 3
        for rows in [1, 3]:
            var bounds = ScheduleBounds.of(rows, length, 8, 132, True)
            _ = check(List[RowTokens](length=rows, fill=tokens_of(length)), bounds)


def test_the_memory_of_a_pass_is_bounded() raises:
    """The passes cover any shapes, and no pass is smaller than it must be."""
    for capacity in [0, 1, 1024, 1025, 5000, 65536, 131072, CAPACITY]:
        for heads in [1, 8, 32, 128]:
            for dim in [8, 128, 512]:
                var rows = rows_of_pass(capacity, heads, dim)
                assert_true(rows >= 1)
                if capacity <= 1024:
                    assert_true(rows > 1 << 30)
                    continue
                var of_row = ScheduleBounds.of(1, capacity, 8, 132, True).partials * heads * (dim + 2) * 4
                assert_equal(rows, max(1, MAX_PASS_BYTES // of_row))
                var bounds = ScheduleBounds.of(rows, capacity, 8, 132, True)
                assert_true(bounds.partials * heads * (dim + 2) * 4 <= max(MAX_PASS_BYTES, of_row))
    # A batch that decodes is one pass, of 64 partial results of 130 numbers for each row and head.
    assert_equal(rows_of_pass(131072, 32, 128), 256 * 1024 * 1024 // (64 * 32 * 130 * 4))
    # A row whose partial results take more than that is a pass by itself.
    assert_equal(rows_of_pass(CAPACITY, 4096, 512), 1)


def test_passes_have_the_items_of_the_whole() raises:
    seed(6)
    var rows = List[RowTokens]()
    for _ in range(50):
        rows.append(tokens_of(Int(random_si64(0, Int64(1) << random_si64(0, 20)))))
    var whole = check(rows, bounds_of(len(rows), True))
    for at_once in [1, 7, 49, 50]:
        var i = 0
        for first in range(0, len(rows), at_once):
            var part = List[RowTokens]()
            for r in range(first, min(first + at_once, len(rows))):
                part.append(rows[r])
            var base = Int32(-1)
            for item in check(part, bounds_of(len(part), True)):
                assert_equal(item.row + Int32(first), whole[i].row)
                assert_equal(item.begin, whole[i].begin)
                assert_equal(item.end, whole[i].end)
                assert_equal(item.partial == WHOLE_ROW, whole[i].partial == WHOLE_ROW)
                if item.partial != WHOLE_ROW:
                    # Partial results of a row lie in the same order.
                    base = whole[i].partial - item.partial if base < 0 else base
                    assert_equal(item.partial + base, whole[i].partial)
                i += 1
        assert_equal(i, len(whole))


def test_rows_of_a_call_are_where_they_were() raises:
    """A pass finds its rows' elements, and nothing else of the call differs."""
    var numbers = List[Float32](length=4, fill=0)
    var requests = List[Int32](length=4, fill=0)
    var at = untracked(numbers)
    var integers = untracked(requests)
    var whole = GpuAttentionParams[DType.float32](
        untracked_mutable(numbers),
        untracked_mutable(numbers),
        untracked_mutable(numbers),
        integers,
        integers,
        at,
        at,
        num_rows=9,
        num_heads=6,
        head_dim=64,
        batch=4,
        capacity=100,
        window_left=-1,
        scores=ScoreOptions(1),
        v_scale=1,
        has_alibi=1,
        has_sinks=1,
        masks=GpuNoMasks(),
    )
    for first in range(9):
        var part = rows_of(whole, first, 2)
        assert_equal(Int(part.q) - Int(whole.q), 4 * whole.element(Int32(first), 0, 0))
        assert_equal(Int(part.o) - Int(whole.o), 4 * whole.o_element(Int32(first), 0, 0))
        assert_equal(Int(part.lse) - Int(whole.lse), 4 * first * 6)
        assert_equal(Int(part.row_batch) - Int(whole.row_batch), 4 * first)
        assert_equal(Int(part.row_lengths) - Int(whole.row_lengths), 4 * first)
        assert_equal(part.num_rows, 2)
        assert_equal(Int(part.sinks), Int(whole.sinks))
        assert_equal(Int(part.alibi_slopes), Int(whole.alibi_slopes))
        assert_equal(part.num_heads, 6)
        assert_equal(part.capacity, 100)
    _ = (numbers^, requests^)


def test_bounds_need_no_length() raises:
    var few = ScheduleBounds.of(1, 16, 8, 132, False)
    var many = ScheduleBounds.of(1, 1 << 30, 8, 132, False)
    assert_equal(few.items, many.items)
    assert_equal(few.partials, many.partials)
    for ctas in range(1, 40):  # at least four CTAs a multiprocessor
        assert_true(ScheduleBounds.of(1, 16, ctas, 132, False).wanted_items * ctas >= 4 * 132)
    assert_equal(ScheduleBounds.of(7, 1024, 8, 132, True).partials, 0)
    assert_equal(ScheduleBounds.of(7, 1025, 8, 132, True).partials, 14)
    assert_equal(NO_ROW, -1)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
