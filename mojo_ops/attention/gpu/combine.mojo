"""Merges the partial results of split rows, in the order of their tokens."""

from std.math import ceildiv, exp2
from max.gpu import WARP_SIZE, block_idx, lane_id, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives import warp

from ..softmax import MINUS_INFINITY
from .dependent_launch import follows_closely
from .params import GpuAttentionParams
from .row_masks import GpuRowMasks
from .row_search import over_warp
from .scheduler import PartialOutputs, Schedule
from .split_kv import NO_ROW

comptime COMBINE_THREADS = 128
comptime LOADS_AHEAD = 16
"""A load takes some 0.6 us: one after the other, those of 64 partial results would take 45."""


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
    """One CTA a split row and query head; a thread has a dim, and every warp has the states on its lanes.

    A row's result depends on its partial results alone, bit for bit.
    """
    var split_row = schedule.begin_combine(params, Int(block_idx.x))
    if split_row.row == NO_ROW:
        return
    var head = Int32(block_idx.y)
    var heads = Int(params.num_heads)
    var dim = Int(params.value_dim())
    var count = Int(split_row.count)
    var first = Int(split_row.first) * heads + Int(head)
    var lane = Int(lane_id())

    var greatest = MINUS_INFINITY
    for i in range(lane, count, WARP_SIZE):
        greatest = max(greatest, partials.greatest[unsafe_offset=first + i * heads])
    greatest = over_warp[greatest=True](greatest)
    var total = Float32(0)
    for i in range(lane, count, WARP_SIZE):
        var state = first + i * heads
        total += rescale_factor(partials.greatest[unsafe_offset=state], greatest) * partials.total[unsafe_offset=state]
    var factor = params.finish(
        split_row.row, head, greatest, over_warp[greatest=False](total), writes_lse=thread_idx.x == 0
    )

    # Whole warps: the factors of partial results are on their lanes.
    for d in range(Int(thread_idx.x), ceildiv(dim, COMBINE_THREADS) * COMBINE_THREADS, COMBINE_THREADS):
        var sum = Float32(0)
        for begin in range(0, count, WARP_SIZE):
            var mine = first + min(begin + lane, count - 1) * heads
            var part_factor = rescale_factor(partials.greatest[unsafe_offset=mine], greatest)
            for i in range(begin, min(begin + WARP_SIZE, count), LOADS_AHEAD):
                var loaded = SIMD[DType.float32, LOADS_AHEAD](0)
                comptime for j in range(LOADS_AHEAD):
                    if d < dim and i + j < count:
                        loaded[j] = partials.acc[unsafe_offset=(first + (i + j) * heads) * dim + d]
                comptime for j in range(LOADS_AHEAD):
                    var of_part = warp.shuffle_idx(part_factor, UInt32(i + j - begin))
                    if i + j < count:
                        sum = of_part.fma(loaded[j], sum)
        if d < dim:
            params.o.unsafe_store(params.o_element(split_row.row, head, Int32(d)), (sum * factor).cast[o_dtype]())


@always_inline
def rescale_factor(greatest: Float32, common: Float32) -> Float32:
    """The factor that makes sums relative to `greatest` relative to `common`; 0 where no token had a score."""
    return exp2(greatest - common) if greatest != MINUS_INFINITY else 0
