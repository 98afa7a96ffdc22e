"""The segments of attention: every token of every row in exactly one segment."""

from std.math import ceildiv
from std.testing import TestSuite, assert_equal, assert_true

from mojo_ops.attention.cpu.plan import (
    BlockSizes,
    MAX_BLOCK_ROWS,
    LENGTHS,
    LONG_SEGMENTS_PER_CALL,
    MIN_LONG_TOKENS,
    MIN_QUERIES,
    MOST_LONG_SEGMENTS,
    SPLIT_TOKENS,
    Segment,
    SegmentLengths,
    SegmentPlan,
    THREAD_WORK,
    WORK_CLASSES,
    plan_segments,
)
from mojo_ops.attention.cpu.prefetch import SPAN_TOKENS
from mojo_ops.attention.logits import Logits, ScoreOptions
from mojo_ops.attention.row_masks import NoMasks
from support import untracked


def plan(
    row_batch: List[Int32],
    row_lengths: List[Int32],
    window_left: Int = -1,
    sizes: BlockSizes = BlockSizes(MAX_BLOCK_ROWS, Int.MAX, 0, SPLIT_TOKENS),
) -> SegmentPlan:
    var none = List[Float32]()
    var logits = Logits(ScoreOptions(1), window_left, untracked(none), False, untracked(none), False)
    var result = plan_segments(untracked(row_batch), untracked(row_lengths), len(row_batch), NoMasks(), logits, sizes)
    _ = none^
    return result^


def by_rows(plan: SegmentPlan) -> List[Segment]:
    """The segments in the order of rows, heads and tokens, as they are cut."""

    def before(a: Segment, b: Segment) {} -> Bool:
        if a.row != b.row:
            return a.row < b.row
        return a.head < b.head or a.head == b.head and a.split < b.split

    var segments = plan.segments.copy()
    sort(segments, before)
    return segments^


def check(row_batch: List[Int32], row_lengths: List[Int32], window_left: Int = -1) raises:
    """Rows in order, each in one block; a block's segments join without gap or overlap and are numbered in order.

    Segments are not longer than all tokens together say, and end between splits. The rows of a block end in the same
    span, and the same spans are whole for them.
    """
    var result = plan(row_batch, row_lengths, window_left)
    var segments = by_rows(result)
    var total = 0
    for segment in segments:
        total += segment.end - segment.begin
    var lengths = SegmentLengths(total)
    for segment in segments:
        if segment.num_splits == 1:
            lengths.cut += segment.end - segment.begin
    var row = 0
    var splits = 0
    var i = 0
    while i < len(segments):
        var first = segments[i]
        assert_equal(first.row, row)
        assert_true(0 < first.num_rows <= min(MAX_BLOCK_ROWS, result.max_rows))
        var begin = Int.MAX
        var end = 0
        for r in range(row, row + first.num_rows):
            assert_equal(row_batch[r], row_batch[row])
            var length = Int(row_lengths[r]) if row_batch[r] >= 0 else 0
            if length > 0:
                var seen = max(0, length - 1 - window_left) if window_left >= 0 else 0
                assert_equal((length - 1) // SPAN_TOKENS * SPAN_TOKENS, first.last_span)
                assert_true(begin == Int.MAX or ceildiv(seen, SPAN_TOKENS) == ceildiv(begin, SPAN_TOKENS))
                begin = min(begin, seen)
                end = max(end, length)
        begin = min(begin, end)
        assert_equal(first.num_splits, max(1, ceildiv(end, SPLIT_TOKENS) - begin // SPLIT_TOKENS))
        assert_equal(first.first_split(), begin // SPLIT_TOKENS)
        var at = begin
        var split = 0
        while split < first.num_splits:
            var segment = segments[i]
            assert_equal(segment.row, row)
            assert_equal(segment.begin, at)
            assert_true(segment.end > at or end == begin)
            at = segment.end
            if first.num_splits > 1:
                assert_true(at - segment.begin <= lengths.length())
                assert_equal(segment.split_result, splits + split)
                lengths.cut += at - segment.begin
            else:
                assert_equal(segment.split_result, -1)
            assert_equal(segment.split, split)
            assert_equal(segment.num_splits, first.num_splits)
            assert_true(at == end or at % SPLIT_TOKENS == 0)
            check_splits(segment)
            split += segment.splits()
            i += 1
        assert_equal(split, first.num_splits)
        assert_equal(at, end)
        if first.num_splits > 1:
            splits += first.num_splits
        row += first.num_rows
    assert_equal(row, len(row_batch))
    assert_equal(splits, result.num_split_results)
    assert_true(result.max_results() <= splits)


def check_splits(segment: Segment) raises:
    """A task takes the splits of a segment one by one."""
    var rest = segment
    var at = segment.begin
    for i in range(segment.splits()):
        var split = rest.take_split()
        assert_equal(split.begin, at)
        assert_equal(split.splits(), 1)
        assert_equal(split.split, segment.split + i)
        assert_equal(split.first_split(), segment.first_split())
        assert_equal(split.split_result - segment.split_result, i)
        assert_equal(split.continues, i > 0)
        assert_equal(split.num_rows, segment.num_rows)
        at = split.end
    assert_equal(at, segment.end)
    assert_equal(rest.num_rows, 0)


def test_decode_rows() raises:
    check([], [])
    check([0, 1, 2], [1, 0, 17])
    check([0, 1], [SPLIT_TOKENS, SPLIT_TOKENS + 1])
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
    var result = plan(row_batch, row_lengths, sizes=BlockSizes(20, 10, 3, 2 * SPLIT_TOKENS))
    var segments = by_rows(result)
    var at = 0
    for row, count, end in [(0, 20, 619), (20, 20, 639)]:
        for head in range(3):
            var begin = 0
            var first = segments[at]
            var split = 0
            assert_equal(first.num_splits, ceildiv(end, 2 * SPLIT_TOKENS))
            while split < first.num_splits:
                var segment = segments[at]
                assert_true(segment.prefill)
                assert_equal(segment.num_splits, first.num_splits)
                assert_equal(segment.split, split)
                assert_equal(segment.split_result, first.split_result + split)
                assert_equal(segment.row, row)
                assert_equal(segment.num_rows, count)
                assert_equal(segment.head, head)
                assert_equal(segment.begin, begin)
                begin = segment.end
                split += segment.splits()
                at += 1
            assert_equal(begin, end)
    # Row 40 has 640 tokens, and the next one begins another span.
    for row, count in [(40, 1), (41, 4), (45, 1)]:
        assert_equal(segments[at].row, row)
        assert_equal(segments[at].num_rows, count)
        while at < len(segments) and segments[at].row == row:
            assert_true(not segments[at].prefill)
            at += 1
    assert_equal(at, len(segments))
    assert_equal(result.max_rows, 4)
    assert_equal(result.max_prefill_rows, 20)


def test_a_prefill_block_alone_is_split() raises:
    """A few new tokens over a long context: 8 KV heads alone would be too few segments for many threads."""
    var row_batch = List[Int32]()
    var row_lengths = List[Int32]()
    for row in range(64):
        row_batch.append(0)
        row_lengths.append(Int32(65536 - 64 + row + 1))
    var result = plan(row_batch, row_lengths, sizes=BlockSizes(64, 16, 8, SPLIT_TOKENS))
    # The tokens of 8 heads, two segments a thread of 128; half of them in shorter segments.
    assert_equal(result.segments[0].end, 8 * 65536 // MOST_LONG_SEGMENTS)
    assert_true(len(result.segments) >= MOST_LONG_SEGMENTS)


def test_the_most_work_comes_first() raises:
    var result = plan([0, 1, 1, 2], [100, 5000, 5001, 64])
    var most = 512
    for segment in result.segments:
        var work = (segment.end - segment.begin) * segment.num_rows
        # Segments of one class of work keep their order.
        assert_true(work <= most + ceildiv(512, WORK_CLASSES - 1))
        most = work
    assert_equal(result.segments[0].num_rows, 2)


def test_padding_rows_hold_no_tokens() raises:
    check([-1, -1, 0, -1], [9, 5000, 4000, 0])
    assert_equal(plan([-1], [5000]).segments[0].end, 0)


def test_windows() raises:
    check([0, 0, 1], [30, 5000, 4000], 7)
    check([0], [100000], 1500)  # what is cut is what the window shows
    assert_equal(plan([0], [5000], 7).segments[0].begin, 4992)


def test_segment_lengths() raises:
    for total, expected in [
        (1000, [MIN_LONG_TOKENS, 128, 128, 128]),
        (MIN_LONG_TOKENS * LONG_SEGMENTS_PER_CALL, [MIN_LONG_TOKENS, 128, 128, 128]),
        (32768, [512, 256, 128, 128]),
        (10**5, [1024, 512, 256, 128]),
        (10**6, [3840, 1920, 896, 384]),
    ]:
        var lengths = SegmentLengths(total)
        for i in range(LENGTHS):
            assert_equal(lengths.length(), expected[i])
            lengths.cut += total >> (i + 1)
        lengths.cut = total
        assert_equal(lengths.length(), expected[LENGTHS - 1])


def test_each_length_holds_half_of_the_rest() raises:
    for requests in [1, 8]:
        var row_batch = List[Int32]()
        for row in range(requests):
            row_batch.append(Int32(row))
        var counts = List[Int](length=LENGTHS, fill=0)
        for segment in plan(row_batch, List[Int32](length=requests, fill=Int32(32768 // requests))).segments:
            for i in range(LENGTHS):
                if segment.end - segment.begin == 512 >> i:
                    counts[i] += 1
        for i, count in [(0, 32), (1, 32), (2, 64), (3, 0)]:
            assert_equal(counts[i], count)


def test_threads_are_woken_for_work_alone() raises:
    """The same plan, more workers than it keeps busy: K and V of few queries count as of `MIN_QUERIES`."""
    var result = plan([0, 1, 2, 3], [64, 64, 64, 64])
    var kv_heads = THREAD_WORK // (256 * MIN_QUERIES * 128)
    for group, head_dim, tasks in [(1, 128, 1), (1, 256, 2), (MIN_QUERIES, 256, 2), (8, 128, 2), (32, 128, 8)]:
        assert_equal(result.num_tasks(group, kv_heads, head_dim, 16), tasks)
        assert_equal(result.num_tasks(group, kv_heads, head_dim, 1), 1)
    assert_equal(plan([0], [0]).num_tasks(8, 8, 128, 16), 1)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
