"""How one attention call is cut into segments, and how threads take them."""

from std.atomic import Atomic
from std.math import ceildiv

from ...cache.pointers import RowPointer
from ..logits import Logits
from .prefetch import SPAN_TOKENS

comptime MAX_BLOCK_ROWS = 8
"""Rows of one request that share every load of its K and V, in a block that is not prefill."""
comptime MIN_SEGMENT_TOKENS = 256
"""Up to so many tokens a block is not split. A split result costs as much time as a few tokens."""
comptime SEGMENTS_PER_CALL = 32
"""Segments that the tokens of all blocks are divided into, where those are not shorter than `MIN_SEGMENT_TOKENS`."""
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
    """Which split of the block it is. The split results of a block are adjacent."""
    var num_splits: Int
    """Splits of the block."""
    var head: Int
    """The KV head of a prefill segment, else `ALL_HEADS`."""

    def __init__(out self, row: Int, num_rows: Int, begin: Int, end: Int, head: Int = ALL_HEADS):
        """A whole block."""
        self.row = row
        self.num_rows = num_rows
        self.begin = begin
        self.end = end
        self.split_result = -1
        self.split = 0
        self.num_splits = 1
        self.head = head

    @staticmethod
    def none() -> Self:
        """A segment without rows."""
        return Self(0, 0, 0, 0)

    def is_prefill(self) -> Bool:
        """Whether it holds one KV head of a prefill block."""
        return self.head != ALL_HEADS


@fieldwise_init
struct BlockSizes(TrivialRegisterPassable):
    """How many rows of one request make a block, and which blocks are prefill: one KV head a segment."""

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


def max_segment_tokens(total: Int) -> Int:
    """Tokens of a segment, at most, from the tokens of all blocks together: whole spans.

    It does not depend on the number of threads, so the result does not either.
    """
    return max(MIN_SEGMENT_TOKENS, ceildiv(ceildiv(total, SEGMENTS_PER_CALL), SPAN_TOKENS) * SPAN_TOKENS)


struct SegmentPlan(Movable):
    """The segments of one call, in the order of rows and tokens."""

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

    def add_block(mut self, block: Segment, max_tokens: Int):
        """Adds a block, split at every multiple of `max_tokens` from the beginning of its first span."""
        if block.end - block.begin <= max_tokens:
            self.segments.append(block)
            return
        var first = block.begin // SPAN_TOKENS * SPAN_TOKENS
        var num_splits = ceildiv(block.end - first, max_tokens)
        for split in range(num_splits):
            var segment = block
            segment.begin = max(block.begin, first + split * max_tokens)
            segment.end = min(block.end, first + (split + 1) * max_tokens)
            segment.split_result = self.num_split_results
            segment.split = split
            segment.num_splits = num_splits
            self.segments.append(segment)
            self.num_split_results += 1


def plan_segments(
    row_batch: RowPointer, row_lengths: RowPointer, num_rows: Int, logits: Logits, sizes: BlockSizes
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
                block.begin = min(block.begin, logits.first_token(length))
                block.end = max(block.end, length)
            block.num_rows += 1
            row += 1
        block.begin = min(block.begin, block.end)
        # A prefill block is read once for every KV head.
        var passes = sizes.kv_heads if block.num_rows >= sizes.prefill_rows else 1
        total += (block.end - block.begin) * passes
        blocks.append(block)

    var plan = SegmentPlan()
    var max_tokens = max_segment_tokens(total)
    for block in blocks:
        if block.num_rows < sizes.prefill_rows:
            plan.max_rows = max(plan.max_rows, block.num_rows)
            plan.add_block(block, max_tokens)
            continue
        plan.max_prefill_rows = max(plan.max_prefill_rows, block.num_rows)
        for head in range(sizes.kv_heads):
            plan.add_block(Segment(block.row, block.num_rows, block.begin, block.end, head), max_tokens)
    return plan^
