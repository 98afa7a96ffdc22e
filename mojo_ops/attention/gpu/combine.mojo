"""Merges the partial results of split rows, in the order of their tokens."""

from std.math import exp2
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext

from ..softmax import MINUS_INFINITY
from .dependent_launch import follows_closely
from .params import GpuAttentionParams
from .row_masks import GpuRowMasks
from .scheduler import PartialOutputs, Schedule
from .split_kv import NO_ROW

comptime COMBINE_THREADS = 128


def enqueue_combine[
    dtype: DType, o_dtype: DType, Masks: GpuRowMasks, //
](
    ctx: DeviceContext, params: GpuAttentionParams[dtype, o_dtype, Masks], schedule: Schedule, partials: PartialOutputs
) raises:
    """Finishes o and lse of every split row; nothing to do where the schedule can split none."""
    if schedule.max_splits > 0:
        comptime kernel = combine_rows[dtype, o_dtype, Masks]
        ctx.enqueue_function[kernel](
            params,
            schedule,
            partials,
            grid_dim=(Int(schedule.max_splits), Int(params.num_heads)),
            block_dim=COMBINE_THREADS,
            attributes=follows_closely(),
        )


def combine_rows[
    dtype: DType, o_dtype: DType, Masks: GpuRowMasks
](params: GpuAttentionParams[dtype, o_dtype, Masks], schedule: Schedule, partials: PartialOutputs):
    """One CTA a split row and query head.

    Every thread computes the state by itself, from the same numbers in the same order: the result depends on the
    partial results alone, bit for bit.
    """
    var split_row = schedule.begin_combine(params, Int(block_idx.x))
    if split_row.row == NO_ROW:
        return
    var head = Int32(block_idx.y)
    var heads = Int(params.num_heads)
    var dim = Int(params.value_dim())
    var first = Int(split_row.first) * heads + Int(head)

    var greatest = MINUS_INFINITY
    for i in range(Int(split_row.count)):
        greatest = max(greatest, partials.greatest[unsafe_offset=first + i * heads])
    var total = Float32(0)
    for i in range(Int(split_row.count)):
        var state = first + i * heads
        total += rescale_factor(partials.greatest[unsafe_offset=state], greatest) * partials.total[unsafe_offset=state]
    var factor = params.finish(split_row.row, head, greatest, total, writes_lse=thread_idx.x == 0)

    for d in range(Int(thread_idx.x), dim, COMBINE_THREADS):
        var sum = Float32(0)
        for i in range(Int(split_row.count)):
            var state = first + i * heads
            var part_factor = rescale_factor(partials.greatest[unsafe_offset=state], greatest)
            sum = part_factor.fma(partials.acc[unsafe_offset=state * dim + d], sum)
        params.o.unsafe_store(params.o_element(split_row.row, head, Int32(d)), (sum * factor).cast[o_dtype]())


@always_inline
def rescale_factor(greatest: Float32, common: Float32) -> Float32:
    """The factor that makes sums relative to `greatest` relative to `common`; 0 where no token had a score."""
    return exp2(greatest - common) if greatest != MINUS_INFINITY else 0
