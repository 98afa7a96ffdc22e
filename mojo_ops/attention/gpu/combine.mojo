"""Merges the partial results of the rows that the schedule has split, always in the order of their tokens."""

from std.math import exp2
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext

from ..softmax import MINUS_INFINITY
from .params import DecodeRows
from .scheduler import Partials, WorkList
from .split_kv import NO_ROW

comptime COMBINE_THREADS = 128


def enqueue_combine[
    dtype: DType, //
](ctx: DeviceContext, rows: DecodeRows[dtype], work: WorkList, partials: Partials) raises:
    """Finishes o and lse of every split row; nothing to do where the schedule can split none."""
    if work.max_splits > 0:
        comptime kernel = combine_rows[dtype]
        ctx.enqueue_function[kernel](
            rows, work, partials, grid_dim=(Int(work.max_splits), Int(rows.num_heads)), block_dim=COMBINE_THREADS
        )


def combine_rows[dtype: DType](rows: DecodeRows[dtype], work: WorkList, partials: Partials):
    """One CTA a split row and query head.

    Every thread computes the state by itself, from the same numbers in the same order: the result depends on the
    partial results alone, bit for bit.
    """
    var split = work.splits[unsafe_offset=Int(block_idx.x)]
    if split.row == NO_ROW:
        return
    var head = Int32(block_idx.y)
    var heads = Int(rows.num_heads)
    var dim = Int(rows.head_dim)
    var first = Int(split.first) * heads + Int(head)

    var greatest = MINUS_INFINITY
    for i in range(Int(split.count)):
        greatest = max(greatest, partials.greatest[unsafe_offset=first + i * heads])
    var total = Float32(0)
    for i in range(Int(split.count)):
        var state = first + i * heads
        total += weight(partials.greatest[unsafe_offset=state], greatest) * partials.total[unsafe_offset=state]
    var factor = rows.finish(split.row, head, greatest, total, writes_lse=thread_idx.x == 0)

    for d in range(Int(thread_idx.x), dim, COMBINE_THREADS):
        var sum = Float32(0)
        for i in range(Int(split.count)):
            var state = first + i * heads
            var share = weight(partials.greatest[unsafe_offset=state], greatest)
            sum = share.fma(partials.acc[unsafe_offset=state * dim + d], sum)
        rows.o.unsafe_store(rows.element(split.row, head, Int32(d)), (sum * factor).cast[dtype]())


@always_inline
def weight(greatest: Float32, common: Float32) -> Float32:
    """What sums relative to `greatest` are multiplied by to be relative to `common`; 0 where no token had a score."""
    return exp2(greatest - common) if greatest != MINUS_INFINITY else 0
