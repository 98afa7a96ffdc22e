"""The segments of attention: every token of every row in exactly one segment."""

from std.testing import TestSuite, assert_equal, assert_true

from mojo_ops.attention.cpu.plan import (
    ALL_HEADS,
    BlockSizes,
    MAX_BLOCK_ROWS,
    SEGMENTS_PER_CALL,
    MIN_SEGMENT_TOKENS,
    SegmentPlan,
    plan_segments,
    max_segment_tokens,
)
from mojo_ops.attention.cpu.prefetch import SPAN_TOKENS
from mojo_ops.attention.logits import Logits
from support import untracked


def plan(
    row_batch: List[Int32],
    row_lengths: List[Int32],
    window_left: Int = -1,
    sizes: BlockSizes = BlockSizes(MAX_BLOCK_ROWS, Int.MAX, 0),
) -> SegmentPlan:
    var none = List[Float32]()
    var logits = Logits(1, 0, window_left, untracked(none), False, untracked(none), False)
    var result = plan_segments(untracked(row_batch), untracked(row_lengths), len(row_batch), logits, sizes)
    _ = none^
    return result^


def check(row_batch: List[Int32], row_lengths: List[Int32], window_left: Int = -1) raises:
    """Rows in order, each in one block; a block's segments join without gap or overlap and are numbered in order.

    All but a block's first and last segment are as long as all tokens together say; spans are not cut.
    """
    var result = plan(row_batch, row_lengths, window_left)
    var total = 0
    for segment in result.segments:
        total += segment.end - segment.begin
    var most = max_segment_tokens(total)
    var row = 0
    var partial = 0
    var i = 0
    while i < len(result.segments):
        var first = result.segments[i]
        assert_equal(first.row, row)
        assert_true(0 < first.num_rows <= min(MAX_BLOCK_ROWS, result.max_rows))
        var begin = Int.MAX
        var end = 0
        for r in range(row, row + first.num_rows):
            assert_equal(row_batch[r], row_batch[row])
            var length = Int(row_lengths[r]) if row_batch[r] >= 0 else 0
            if length > 0:
                begin = min(begin, max(0, length - 1 - window_left) if window_left >= 0 else 0)
                end = max(end, length)
        assert_equal(first.begin, min(begin, end))
        if first.split_result < 0:
            assert_equal(first.end, end)
            assert_true(end - begin <= most)
            assert_equal(first.num_splits, 1)
            i += 1
        else:
            var at = first.begin
            var part = 0
            while i < len(result.segments) and result.segments[i].row == row:
                assert_equal(result.segments[i].begin, at)
                assert_equal(result.segments[i].split_result, partial)
                assert_equal(result.segments[i].split, part)
                assert_equal(result.segments[i].num_splits, first.num_splits)
                assert_true(result.segments[i].end > at)
                at = result.segments[i].end
                assert_true(at == end or at % SPAN_TOKENS == 0)
                var length = at - result.segments[i].begin
                assert_true(length == most or length < most and (at == end or result.segments[i].begin == first.begin))
                partial += 1
                part += 1
                i += 1
            assert_equal(at, end)
            assert_equal(part, first.num_splits)
            assert_true(end - begin > most)
        row += first.num_rows
    assert_equal(row, len(row_batch))
    assert_equal(partial, result.num_split_results)


def test_decode_rows() raises:
    check([], [])
    check([0, 1, 2], [1, 0, 17])
    check([0, 1], [MIN_SEGMENT_TOKENS, MIN_SEGMENT_TOKENS + 1])
    check([0, 1, 2], [100000, 3, 70001])


def test_prefill_rows_share_blocks() raises:
    var row_batch = List[Int32]()
    var row_lengths = List[Int32]()
    for row in range(3 * MAX_BLOCK_ROWS + 1):
        row_batch.append(0)
        row_lengths.append(Int32(2000 + row))
    row_batch.append(1)
    row_lengths.append(5)
    check(row_batch, row_lengths)
    assert_equal(plan(row_batch, row_lengths).max_rows, MAX_BLOCK_ROWS)


def test_wide_blocks_go_head_by_head() raises:
    """A prefill block gives segments for every KV head: the same tokens, and splits of their own."""
    var row_batch = List[Int32]()
    var row_lengths = List[Int32]()
    for row in range(45):
        row_batch.append(0)
        row_lengths.append(Int32(600 + row))
    row_batch.append(1)
    row_lengths.append(700)
    var result = plan(row_batch, row_lengths, sizes=BlockSizes(20, 10, 3))
    var at = 0
    for row, count, end in [(0, 20, 619), (20, 20, 639)]:
        for head in range(3):
            var begin = 0
            while begin < end:
                var segment = result.segments[at]
                assert_true(segment.is_prefill())
                assert_equal(segment.num_splits, 3)
                assert_equal(segment.split, begin // MIN_SEGMENT_TOKENS)
                assert_equal(segment.row, row)
                assert_equal(segment.num_rows, count)
                assert_equal(segment.head, head)
                assert_equal(segment.begin, begin)
                assert_equal(segment.end, min(end, begin + MIN_SEGMENT_TOKENS))
                assert_equal(segment.split_result, at)
                begin = segment.end
                at += 1
    for row, count in [(40, 5), (45, 1)]:
        assert_equal(result.segments[at].row, row)
        assert_equal(result.segments[at].num_rows, count)
        while at < len(result.segments) and result.segments[at].row == row:
            assert_equal(result.segments[at].head, ALL_HEADS)
            at += 1
    assert_equal(at, len(result.segments))
    assert_equal(result.max_rows, 5)
    assert_equal(result.max_prefill_rows, 20)


def test_padding_rows_hold_no_tokens() raises:
    check([-1, -1, 0, -1], [9, 5000, 4000, 0])
    assert_equal(plan([-1], [5000]).segments[0].end, 0)


def test_windows() raises:
    check([0, 0, 1], [30, 5000, 4000], 7)
    check([0], [100000], 1500)  # what is cut is what the window shows
    assert_equal(plan([0], [5000], 7).segments[0].begin, 4992)


def test_segment_length() raises:
    assert_equal(max_segment_tokens(0), MIN_SEGMENT_TOKENS)
    assert_equal(max_segment_tokens(MIN_SEGMENT_TOKENS * SEGMENTS_PER_CALL), MIN_SEGMENT_TOKENS)
    assert_equal(max_segment_tokens(MIN_SEGMENT_TOKENS * SEGMENTS_PER_CALL + 1), MIN_SEGMENT_TOKENS + SPAN_TOKENS)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
