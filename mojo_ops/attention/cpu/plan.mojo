"""The plan of one attention call: its segments, and how threads take them."""

from std.atomic import Atomic
from std.bit import bit_width
from std.math import ceildiv

from ...cache.pointers import RowPointer
from ..logits import Logits
from ..params import first_in_window
from ..row_masks import RowMasks
from .prefetch import SPAN_TOKENS

comptime MAX_BLOCK_ROWS = 8
"""Rows of one request that share every load of its K and V, in a block that is not prefill."""
comptime SPLIT_TOKENS = SPAN_TOKENS
"""Tokens of a split in vectors: each ends at a multiple of it, or with the block, so where a row is split depends on
the row alone.
Prefill of 2,048 tokens takes 1.05 times as long with splits of 128 tokens as with those of 512, decode as long; but a
call of 8 x 4096 tokens leaves 192 threads idle for an eighth of the time with 256 (Zen 4, 2026-11-30)."""
comptime MIN_LONG_TOKENS = 256
"""Tokens of the longest segments, at least."""
comptime LONG_SEGMENTS_PER_CALL = 64
"""Segments that the tokens of all blocks would make, were all of them as long as the longest: one a thread of 64."""
comptime MOST_LONG_SEGMENTS = 256
"""The same of calls of so many tokens that the longest segments have `CHEAP_TOKENS` all the same: two a thread of
128.
"""
comptime CHEAP_TOKENS = 1024
"""Tokens beside which a segment costs little. On two threads 256 segments of 8 x 4096 tokens instead of 160 took 1.04
times as long (Emerald Rapids without AMX, 2026-11-23)."""
comptime MAX_WHOLE_PREFILL = 2
"""A prefill block of up to so many of the longest segments is one segment: 512 new tokens of 2048 took 1.06 times as
long where every block was cut (32/8 heads of 128; Zen 5, two threads, 2026-11-22)."""
comptime THREAD_WORK = 1 << 18
"""Multiply-adds of q and K that a thread is woken for, at least: 15 to 30 us on Zen 4, and to wake one takes 10 us
where it spins and some 50 where it sleeps."""
comptime MIN_QUERIES = 4
"""As so many queries a KV head counts what has fewer: to read K and V then takes most of the time."""
comptime LENGTHS = 4
"""Lengths of segments, each half of the one before."""
comptime WORK_CLASSES = 64
"""Into so many classes segments are sorted by their work."""
comptime ALL_HEADS = -1


struct Segment(TrivialRegisterPassable):
    """Some adjacent splits of a block of rows of one request, or one of them."""

    var row: Int
    """The block's first row."""
    var num_rows: Int
    """Rows of the block, adjacent ones."""
    var begin: Int
    var end: Int
    """Tokens `[begin, end)`."""
    var last_span: Int
    """The first token of the span that holds the last tokens of the block's rows. It is read in the order of tokens."""
    var split_tokens: Int
    """Tokens of a split: each ends at a multiple of it, or with the block."""
    var split_result: Int
    """The index of its first split in `SplitResults`; -1 where the block has one split."""
    var split: Int
    """The number of its first split in the block. The split results of a block are adjacent."""
    var num_splits: Int
    """Splits of the block."""
    var continues: Bool
    """True if it is one split, and the one before it was computed by the same task just before."""
    var head: Int
    """The first KV head."""
    var num_heads: Int
    """The number of KV heads, or `ALL_HEADS`: one of a prefill block, a part where heads are cut."""
    var prefill: Bool
    """True if it is one KV head of a prefill block."""

    def __init__(out self, row: Int, num_rows: Int, begin: Int, end: Int):
        """A whole block of all KV heads, which is not split."""
        self.row = row
        self.num_rows = num_rows
        self.begin = begin
        self.end = end
        self.last_span = max(0, end - 1) // SPAN_TOKENS * SPAN_TOKENS
        self.split_tokens = SPLIT_TOKENS
        self.split_result = -1
        self.split = 0
        self.num_splits = 1
        self.continues = False
        self.head = 0
        self.num_heads = ALL_HEADS
        self.prefill = False

    @staticmethod
    def none() -> Self:
        """A segment without rows."""
        return Self(0, 0, 0, 0)

    def part(self, head: Int, num_heads: Int) -> Self:
        """Some of its KV heads."""
        var part = self
        part.head = head
        part.num_heads = num_heads
        return part

    def heads_of(self, kv_heads: Int) -> Int:
        """Return how many of a call's KV heads it computes."""
        return kv_heads if self.num_heads == ALL_HEADS else self.num_heads

    def first_split(self) -> Int:
        """The number of the block's first split, counted from token 0."""
        return self.begin // self.split_tokens - self.split

    def splits(self) -> Int:
        """Return how many splits it has."""
        return max(1, (self.end - 1) // self.split_tokens + 1 - self.begin // self.split_tokens)

    @always_inline
    def take_split(mut self) -> Self:
        """Removes its first split and returns it. After the last one it has no rows."""
        var split = self
        var end = (self.begin // self.split_tokens + 1) * self.split_tokens
        if end >= self.end:
            self.num_rows = 0
            return split
        split.end = end
        self.begin = end
        self.split += 1
        self.split_result += 1
        self.continues = True
        return split


@fieldwise_init
struct BlockSizes(TrivialRegisterPassable):
    """The rows of one request that make a block, and the blocks that are prefill: one KV head a segment."""

    var max_rows: Int
    """Rows of a block, at most."""
    var prefill_rows: Int
    """Rows of a prefill block, at least."""
    var kv_heads: Int
    """KV heads of a prefill block."""
    var prefill_split_tokens: Int
    """Tokens of a split of a prefill block: whole spans."""


@fieldwise_init
struct SegmentQueue(ImplicitlyCopyable):
    """The segments of a call, as one task sees them. The next idle task takes the next one; results do not depend on
    the task."""

    var segments: Pointer[Segment, MutUntrackedOrigin]
    """`[count]`."""
    var count: Int
    var num_taken: Pointer[Atomic[Int64], MutUntrackedOrigin]
    var rest: Segment
    """The splits that are left of the segment that the task took last."""

    @always_inline
    def take(mut self) -> Segment:
        """The next split of the task's segment or of the next segment; one without rows where none is left."""
        if self.rest.num_rows == 0:
            var i = Int(self.num_taken[].fetch_add(1))
            if i >= self.count:
                return Segment.none()
            self.rest = self.segments[unsafe_offset=i]
        return self.rest.take_split()


struct SegmentLengths(Movable):
    """The tokens of each segment of a call, from all tokens: long ones until half of the tokens are cut, half as long
    until half of the rest are, and so on. They have whole splits, and no result depends on them.

    The queue begins with the longest segments, and the short ones make up for what the long ones leave unequal.
    """

    var total: Int
    """Tokens of all segments together."""
    var cut: Int
    """Tokens of the segments that are cut."""

    def __init__(out self, total: Int):
        self.total = total
        self.cut = 0

    def longest(self) -> Int:
        """Tokens of the longest segments."""
        var longest = self.total // LONG_SEGMENTS_PER_CALL
        if longest > CHEAP_TOKENS:
            longest = max(CHEAP_TOKENS, self.total // MOST_LONG_SEGMENTS)
        return max(MIN_LONG_TOKENS, longest // SPLIT_TOKENS * SPLIT_TOKENS)

    def length(self) -> Int:
        """Tokens of the next segment, at most."""
        var length = self.longest()
        var rest = self.total - self.cut
        for _ in range(LENGTHS - 1):
            rest *= 2
            if rest > self.total:
                break
            length //= 2
        return max(SPLIT_TOKENS, length // SPLIT_TOKENS * SPLIT_TOKENS)


struct SegmentPlan(Movable):
    """The segments of one call."""

    var segments: List[Segment]
    var num_split_results: Int
    """Splits of all blocks that have more than one."""
    var max_rows: Int
    """Rows of the largest block that is not prefill."""
    var max_prefill_rows: Int
    """Rows of the largest prefill block."""

    def __init__(out self):
        self.segments = List[Segment]()
        self.num_split_results = 0
        self.max_rows = 0
        self.max_prefill_rows = 0

    def add_block(mut self, block: Segment, mut lengths: SegmentLengths):
        """Adds a block, in one segment or cut. `lengths` counts blocks of one split already."""
        var rest = block
        rest.num_splits = block.splits()
        if rest.num_splits == 1:
            self.segments.append(rest)
            return
        rest.split_result = self.num_split_results
        self.num_split_results += rest.num_splits
        var whole = block.prefill and block.end - block.begin <= MAX_WHOLE_PREFILL * lengths.longest()
        while rest.begin < rest.end:
            var segment = rest
            if not whole:
                var tokens = max(1, lengths.length() // rest.split_tokens) * rest.split_tokens
                segment.end = min(rest.end, rest.begin // rest.split_tokens * rest.split_tokens + tokens)
            self.segments.append(segment)
            var splits = segment.splits()
            rest.split += splits
            rest.split_result += splits
            rest.begin = segment.end
            lengths.cut += segment.end - segment.begin

    def max_results(self) -> Int:
        """Return how many split results wait to be merged, at most: those of a segment are merged in pairs."""
        var most = 0
        for segment in self.segments:
            if segment.split_result >= 0:
                var splits = segment.splits()
                most += min(splits, 2 * Int(bit_width(UInt(splits))))
        return most

    def num_tasks(self, group: Int, kv_heads: Int, head_dim: Int, workers: Int) -> Int:
        """Return how many threads have enough to do, from 1 to `workers`: no result depends on it.

        Args:
            group: Query heads of a KV head.
            kv_heads: KV heads of the call.
            head_dim: The head_dim of K.
            workers: Threads, at most.
        """
        var work = 0
        for segment in self.segments:
            var queries = max(segment.num_rows * group, MIN_QUERIES)
            work += (segment.end - segment.begin) * queries * segment.heads_of(kv_heads)
        return max(1, min(workers, work * head_dim // THREAD_WORK))

    def cut_heads(mut self, kv_heads: Int, tasks: Int):
        """Cuts segments that are not prefill by their KV heads, in halves, quarters and so on, until the longest is no
        more than half of the mean work of a thread.

        So many threads have enough segments, and no result depends on it: heads are computed one by one, and each part
        of a block merges its own splits. A segment that is alone is not cut: 100 to 256 tokens were as fast on one
        thread as on two (Zen 4, 2026-11-28), and need not wait for another.
        """
        if len(self.segments) < 2:
            return
        var total = 0
        var longest = 0
        for segment in self.segments:
            var work = (segment.end - segment.begin) * segment.num_rows * segment.heads_of(kv_heads)
            total += work
            if not segment.prefill:
                longest = max(longest, work)
        var parts = 1
        while kv_heads % (2 * parts) == 0 and 2 * longest * tasks > total * parts:
            parts *= 2
        if parts == 1:
            return
        var cut = List[Segment](capacity=len(self.segments) * parts)
        for segment in self.segments:
            if segment.prefill:
                cut.append(segment)
                continue
            for part in range(parts):
                var piece = segment.part(part * (kv_heads // parts), kv_heads // parts)
                if segment.split_result >= 0:
                    piece.split_result += part * self.num_split_results
                cut.append(piece)
        self.num_split_results *= parts
        self.segments = cut^
        self.order_by_work(kv_heads)

    def order_by_work(mut self, kv_heads: Int):
        """Sorts segments: the most work first, so that threads end together; within a class of work as they were.

        Args:
            kv_heads: KV heads of a call. A prefill segment computes one of them, another segment all.
        """

        def work(segment: Segment) {var kv_heads} -> Int:
            return (segment.end - segment.begin) * segment.num_rows * segment.heads_of(kv_heads)

        var most = 1
        for segment in self.segments:
            most = max(most, work(segment))
        var starts = Array[Int, WORK_CLASSES + 1](fill=0)
        for segment in self.segments:
            starts[WORK_CLASSES - work(segment) * (WORK_CLASSES - 1) // most] += 1
        for i in range(WORK_CLASSES):
            starts[i + 1] += starts[i]
        var sorted = List[Segment](length=len(self.segments), fill=Segment.none())
        for segment in self.segments:
            # The first index of a class is the end of the class before it.
            ref at = starts[WORK_CLASSES - 1 - work(segment) * (WORK_CLASSES - 1) // most]
            sorted[at] = segment
            at += 1
        self.segments = sorted^


def plan_segments[
    Masks: RowMasks, //
](
    row_batch: RowPointer, row_lengths: RowPointer, num_rows: Int, masks: Masks, logits: Logits, sizes: BlockSizes
) -> SegmentPlan:
    """Makes blocks of up to `sizes.max_rows` adjacent rows of one request, and cuts long blocks into segments."""
    var blocks = List[Segment]()
    var total = 0
    var row = 0
    while row < num_rows:
        var request = row_batch[unsafe_offset=row]
        var block = Segment(row, 0, 0, 0)
        var first_span = -1
        while block.num_rows < sizes.max_rows and row < num_rows and row_batch[unsafe_offset=row] == request:
            var length = Int(row_lengths[unsafe_offset=row]) if request >= 0 else 0
            var begin = first_in_window(masks, row, Int(request), length, logits) if length > 0 else 0
            if begin < length:
                # Rows that are read in another order do not share a block (`segment_walk.mojo`).
                var last_span = (length - 1) // SPAN_TOKENS * SPAN_TOKENS
                var first_whole = ceildiv(begin, SPAN_TOKENS)
                if first_span < 0:
                    first_span = first_whole
                    block.begin = begin
                    block.last_span = last_span
                elif first_whole != first_span or last_span != block.last_span:
                    break
                block.begin = min(block.begin, begin)
                block.end = max(block.end, length)
            block.num_rows += 1
            row += 1
        block.prefill = block.num_rows >= sizes.prefill_rows
        if block.prefill:
            block.split_tokens = sizes.prefill_split_tokens
        total += block.end - block.begin
        blocks.append(block)

    var plan = SegmentPlan()
    var lengths = SegmentLengths(total)
    # A token of a prefill segment is that of one KV head.
    var prefill_lengths = SegmentLengths(total * sizes.kv_heads)
    # Blocks of one split count first: the last and shortest segments are then those of long blocks.
    for block in blocks:
        if block.splits() == 1:
            var tokens = block.end - block.begin
            lengths.cut += tokens
            prefill_lengths.cut += tokens * sizes.kv_heads
    for block in blocks:
        if not block.prefill:
            plan.max_rows = max(plan.max_rows, block.num_rows)
            plan.add_block(block, lengths)
            continue
        plan.max_prefill_rows = max(plan.max_prefill_rows, block.num_rows)
        for head in range(sizes.kv_heads):
            plan.add_block(block.part(head, 1), prefill_lengths)
    plan.order_by_work(max(1, sizes.kv_heads))
    return plan^
