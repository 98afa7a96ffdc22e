"""How the work of one attention call is cut into segments: pure arithmetic."""

from std.math import ceildiv

from .checks import RowPointer
from .logits import Logits

comptime MAX_BLOCK_ROWS = 8
"""Rows of one request that share every load of its K and V."""
comptime MIN_SEGMENT = 256
"""Tokens below which a block is not split: a partial result costs as much as a few tokens."""
comptime MAX_SEGMENTS = 32


@fieldwise_init
struct Segment(TrivialRegisterPassable):
    """Some tokens of some rows of one request."""

    var row: Int
    """The first row; the block's other rows follow it."""
    var num_rows: Int
    var begin: Int
    var end: Int
    """Tokens `[begin, end)`."""
    var partial: Int
    """Where its unfinished result goes; -1 = it is the block's only segment, and finishes it."""
    var part: Int
    """Which of the block's segments it is: their partial results are neighbours."""
    var parts: Int
    """How many the block has."""

    @staticmethod
    def none() -> Self:
        """A segment without rows."""
        return Self(0, 0, 0, 0, -1, 0, 1)


def segment_length(total: Int) -> Int:
    """Tokens of a segment, from the tokens of all blocks together.

    It depends on no number of threads, and so neither does the result.
    """
    return max(MIN_SEGMENT, ceildiv(ceildiv(total, MAX_SEGMENTS), 16) * 16)


struct Plan(Movable):
    """The segments of one call, in the order of rows and tokens."""

    var segments: List[Segment]
    var partials: Int
    """How many of them leave a partial result."""
    var max_rows: Int
    """Rows of the largest block."""

    def __init__(out self):
        self.segments = List[Segment]()
        self.partials = 0
        self.max_rows = 0


def plan_segments(row_batch: RowPointer, row_lengths: RowPointer, num_rows: Int, logits: Logits) -> Plan:
    """Blocks are runs of at most `MAX_BLOCK_ROWS` rows of one request; long blocks are cut along their tokens."""
    var blocks = List[Segment]()
    var total = 0
    var row = 0
    while row < num_rows:
        var request = row_batch[unsafe_offset=row]
        var block = Segment(row, 0, Int.MAX, 0, -1, 0, 1)
        while block.num_rows < MAX_BLOCK_ROWS and row < num_rows and row_batch[unsafe_offset=row] == request:
            var length = Int(row_lengths[unsafe_offset=row]) if request >= 0 else 0
            if length > 0:
                block.begin = min(block.begin, logits.first_token(length))
                block.end = max(block.end, length)
            block.num_rows += 1
            row += 1
        block.begin = min(block.begin, block.end)
        total += block.end - block.begin
        blocks.append(block)

    var plan = Plan()
    var longest = segment_length(total)
    for block in blocks:
        plan.max_rows = max(plan.max_rows, block.num_rows)
        if block.end - block.begin <= longest:
            plan.segments.append(block)
            continue
        var parts = ceildiv(block.end - block.begin, longest)
        for part in range(parts):
            var begin = block.begin + part * longest
            var end = min(block.end, begin + longest)
            plan.segments.append(Segment(block.row, block.num_rows, begin, end, plan.partials, part, parts))
            plan.partials += 1
    return plan^
