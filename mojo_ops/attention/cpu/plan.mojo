"""The plan of one attention call: its segments, and how threads take them."""

from std.atomic import Atomic
from std.math import ceildiv

from ...cache.pointers import RowPointer
from ..logits import Logits
from ..params import first_in_window
from ..row_masks import RowMasks
from .prefetch import SPAN_TOKENS

comptime MAX_BLOCK_ROWS = 8
"""Rows of one request that share every load of its K and V, in a block that is not prefill."""
comptime MAX_WHOLE_TOKENS = 256
"""Up to so many tokens a block is not split. A split costs as much time as two tokens."""
comptime MIN_LONG_TOKENS = 256
"""Tokens of the longest segments, at least."""
comptime MIN_SHORT_TOKENS = 64
"""Tokens of the shortest segments, at least, but the last of a block. Less than a span only where the longest are 8
times as long: few tokens in many splits took 1.08 times as long on two threads (1 x 2048; Zen 5, 2026-11-22)."""
comptime LONG_SEGMENTS_PER_CALL = 64
"""Segments that the tokens of all blocks would make, were all of them as long as the longest: one a thread of 64."""
comptime MOST_LONG_SEGMENTS = 256
"""The same of calls of so many tokens that the longest segments have `CHEAP_TOKENS` all the same: two a thread of
128.
"""
comptime CHEAP_TOKENS = 1024
"""Tokens beside which a split costs little. On two threads 256 splits of 8 x 4096 tokens instead of 160 took 1.04 times
as long (Emerald Rapids without AMX, 2026-11-23)."""
comptime MAX_WHOLE_PREFILL = 2
"""A prefill block of up to so many of the longest segments is not split, because its split costs more: 512 new tokens
of 2048 took 1.06 times as long where every block was split (32/8 heads of 128; Zen 5, two threads, 2026-11-22)."""
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
    """Some tokens of a block of rows of one request: a whole block, or one split of it."""

    var row: Int
    """The block's first row."""
    var num_rows: Int
    """Rows of the block, adjacent ones."""
    var begin: Int
    var end: Int
    """Tokens `[begin, end)`."""
    var split_result: Int
    """Its index in `SplitResults`; -1 where it is a whole block."""
    var split: Int
    """The number of the split in its block. The split results of a block are adjacent."""
    var num_splits: Int
    """Splits of the block."""
    var head: Int
    """The first KV head."""
    var num_heads: Int
    """The number of KV heads, or `ALL_HEADS`: one of a prefill block, a part where heads are cut."""
    var prefill: Bool
    """True if it is one KV head of a prefill block."""

    def __init__(out self, row: Int, num_rows: Int, begin: Int, end: Int):
        """A whole block of all KV heads."""
        self.row = row
        self.num_rows = num_rows
        self.begin = begin
        self.end = end
        self.split_result = -1
        self.split = 0
        self.num_splits = 1
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


@fieldwise_init
struct BlockSizes(TrivialRegisterPassable):
    """The rows of one request that make a block, and the blocks that are prefill: one KV head a segment."""

    var max_rows: Int
    """Rows of a block, at most."""
    var prefill_rows: Int
    """Rows of a prefill block, at least."""
    var kv_heads: Int
    """KV heads of a prefill block."""


@fieldwise_init
struct SegmentQueue(ImplicitlyCopyable):
    """The segments of a call. The next idle thread takes the next one; results do not depend on the thread."""

    var segments: Pointer[Segment, MutUntrackedOrigin]
    """`[count]`."""
    var count: Int
    var num_taken: Pointer[Atomic[Int64], MutUntrackedOrigin]

    @always_inline
    def take(self) -> Segment:
        """The next segment, or one without rows where none is left."""
        var i = Int(self.num_taken[].fetch_add(1))
        return self.segments[unsafe_offset=i] if i < self.count else Segment.none()


struct SegmentLengths(Movable):
    """The tokens of each segment of a call, from all tokens: long ones until half of the tokens are cut, half as long
    until half of the rest are, and so on.

    The queue begins with the longest segments, and the short ones make up for what the long ones leave unequal. The
    number of threads plays no part, so the result does not depend on it.
    """

    var total: Int
    """Tokens of all segments together."""
    var cut: Int
    """Tokens of the segments that are cut."""

    def __init__(out self, total: Int):
        self.total = total
        self.cut = 0

    def longest(self) -> Int:
        """Tokens of the longest segments: whole spans."""
        var longest = self.total // LONG_SEGMENTS_PER_CALL
        if longest > CHEAP_TOKENS:
            longest = max(CHEAP_TOKENS, self.total // MOST_LONG_SEGMENTS)
        return max(MIN_LONG_TOKENS, longest // SPAN_TOKENS * SPAN_TOKENS)

    def length(self) -> Int:
        """Tokens of the next segment, at most: whole spans, or `MIN_SHORT_TOKENS`."""
        var longest = self.longest()
        var length = longest
        var rest = self.total - self.cut
        for _ in range(LENGTHS - 1):
            rest *= 2
            if rest > self.total:
                break
            length //= 2
        if length >= SPAN_TOKENS:
            return length // SPAN_TOKENS * SPAN_TOKENS
        return MIN_SHORT_TOKENS if longest >= 8 * MIN_SHORT_TOKENS else SPAN_TOKENS


struct SegmentPlan(Movable):
    """The segments of one call."""

    var segments: List[Segment]
    var num_split_results: Int
    """Segments that are splits of a block."""
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
        """Adds a block, in one segment or split. `lengths` counts blocks of up to `MAX_WHOLE_TOKENS` already."""
        var tokens = block.end - block.begin
        if tokens <= MAX_WHOLE_TOKENS:
            self.segments.append(block)
            return
        if tokens <= (MAX_WHOLE_PREFILL * lengths.longest() if block.prefill else lengths.length()):
            self.segments.append(block)
            lengths.cut += tokens
            return
        # Segments end at multiples of a span, or of `MIN_SHORT_TOKENS`.
        var end = block.begin // SPAN_TOKENS * SPAN_TOKENS
        var first = len(self.segments)
        while end < block.end:
            var segment = block
            segment.begin = max(block.begin, end)
            end = min(block.end, end + lengths.length())
            if end <= block.begin:
                continue
            segment.end = end
            segment.split = len(self.segments) - first
            segment.split_result = self.num_split_results + segment.split
            self.segments.append(segment)
            lengths.cut += end - segment.begin
        var num_splits = len(self.segments) - first
        for i in range(first, len(self.segments)):
            self.segments[i].num_splits = num_splits
        self.num_split_results += num_splits

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
        more than the mean work of a thread.

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
        while kv_heads % (2 * parts) == 0 and longest * tasks > total * parts:
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
    """Makes blocks of up to `sizes.max_rows` adjacent rows of one request, and splits long blocks."""
    var blocks = List[Segment]()
    var total = 0
    var row = 0
    while row < num_rows:
        var request = row_batch[unsafe_offset=row]
        var block = Segment(row, 0, Int.MAX, 0)
        while block.num_rows < sizes.max_rows and row < num_rows and row_batch[unsafe_offset=row] == request:
            var length = Int(row_lengths[unsafe_offset=row]) if request >= 0 else 0
            if length > 0:
                var begin = first_in_window(masks, row, Int(request), length, logits)
                if begin < length:
                    block.begin = min(block.begin, begin)
                    block.end = max(block.end, length)
            block.num_rows += 1
            row += 1
        block.begin = min(block.begin, block.end)
        total += block.end - block.begin
        blocks.append(block)

    var plan = SegmentPlan()
    var lengths = SegmentLengths(total)
    # A token of a prefill segment is that of one KV head.
    var prefill_lengths = SegmentLengths(total * sizes.kv_heads)
    # Short blocks count first: the last and shortest splits are then those of long blocks.
    for block in blocks:
        var tokens = block.end - block.begin
        if tokens <= MAX_WHOLE_TOKENS:
            lengths.cut += tokens
            prefill_lengths.cut += tokens * sizes.kv_heads
    for block in blocks:
        if block.num_rows < sizes.prefill_rows:
            plan.max_rows = max(plan.max_rows, block.num_rows)
            plan.add_block(block, lengths)
            continue
        plan.max_prefill_rows = max(plan.max_prefill_rows, block.num_rows)
        for head in range(sizes.kv_heads):
            var part = block.part(head, 1)
            part.prefill = True
            plan.add_block(part, prefill_lengths)
    plan.order_by_work(max(1, sizes.kv_heads))
    return plan^
