"""How the work of one attention call is cut into segments, and handed out."""

from std.atomic import Atomic
from std.math import ceildiv

from ...cache.pointers import RowPointer
from ..logits import Logits
from .prefetch import SPAN_TOKENS

comptime MAX_BLOCK_ROWS = 8
"""Rows of one request that share every load of its K and V."""
comptime MIN_SEGMENT_TOKENS = 256
"""Tokens below which a block is not split: a partial result costs as much as a few tokens."""
comptime SEGMENTS_PER_CALL = 32
comptime ALL_HEADS = -1


struct Segment(TrivialRegisterPassable):
    """Some tokens of some rows of one request."""

    var row: Int
    """The first row; the block's other rows follow it."""
    var num_rows: Int
    var begin: Int
    var end: Int
    """Tokens `[begin, end)`."""
    var split_result: Int
    """Where its unfinished result goes; -1 = it is the block's only segment, and finishes it."""
    var split: Int
    """Which of the block's segments it is: their partial results are adjacent."""
    var num_splits: Int
    """How many the block has."""
    var head: Int
    """The KV head; `ALL_HEADS` = all of them."""

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
        """Whether it is of a block that goes head by head."""
        return self.head != ALL_HEADS


@fieldwise_init
struct BlockSizes(TrivialRegisterPassable):
    """How many rows of one request make a block, and which blocks go head by head."""

    var max_rows: Int
    """Rows of a block."""
    var prefill_rows: Int
    """Rows from which on each KV head of a block is a piece of work of its own."""
    var kv_heads: Int
    """How many there are then."""

    @staticmethod
    def without_prefill() -> Self:
        """All heads of at most `MAX_BLOCK_ROWS` rows."""
        return Self(MAX_BLOCK_ROWS, Int.MAX, 0)


@fieldwise_init
struct SegmentQueue(ImplicitlyCopyable):
    """The segments of a call, for whoever is free; which thread computes one leaves no trace in it."""

    var segments: Pointer[Segment, MutUntrackedOrigin]
    var count: Int
    var num_taken: Pointer[Atomic[Int64], MutUntrackedOrigin]

    @always_inline
    def take(self) -> Segment:
        """The next segment, or one without rows when there is none left."""
        var i = Int(self.num_taken[].fetch_add(1))
        return self.segments[unsafe_offset=i] if i < self.count else Segment.none()


def max_segment_tokens(total: Int) -> Int:
    """Tokens of a segment, whole fields, from the tokens of all blocks together.

    It depends on no number of threads, and so neither does the result.
    """
    return max(MIN_SEGMENT_TOKENS, ceildiv(ceildiv(total, SEGMENTS_PER_CALL), SPAN_TOKENS) * SPAN_TOKENS)


struct SegmentPlan(Movable):
    """The segments of one call, in the order of rows and tokens."""

    var segments: List[Segment]
    var split_results: Int
    """How many of them leave a partial result."""
    var max_rows: Int
    """Rows of the largest block whose heads go together."""
    var max_prefill_rows: Int
    """Rows of the largest block that goes head by head."""

    def __init__(out self):
        self.segments = List[Segment]()
        self.split_results = 0
        self.max_rows = 0
        self.max_prefill_rows = 0

    def add_block(mut self, block: Segment, max_tokens: Int):
        """Adds a block: as it is, or cut where the token is a multiple of `max_tokens` past a field's beginning."""
        if block.end - block.begin <= max_tokens:
            self.segments.append(block)
            return
        var first = block.begin // SPAN_TOKENS * SPAN_TOKENS
        var parts = ceildiv(block.end - first, max_tokens)
        for part in range(parts):
            var segment = block
            segment.begin = max(block.begin, first + part * max_tokens)
            segment.end = min(block.end, first + (part + 1) * max_tokens)
            segment.split_result = self.split_results
            segment.split = part
            segment.num_splits = parts
            self.segments.append(segment)
            self.split_results += 1


def plan_segments(
    row_batch: RowPointer, row_lengths: RowPointer, num_rows: Int, logits: Logits, sizes: BlockSizes
) -> SegmentPlan:
    """Blocks are runs of at most `sizes.max_rows` rows of one request; long blocks are cut along their tokens."""
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
        total += block.end - block.begin
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
