"""Merges the partial results of split rows, in the order of their tokens."""

from std.math import ceildiv, exp2
from std.memory import unsafe_stack_allocation
from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from max.gpu.primitives import block

from ..softmax import MINUS_INFINITY
from .dependent_launch import follows_closely
from .params import GpuAttentionParams
from .row_masks import GpuRowMasks
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
    """One CTA a split row and query head: threads have partial results first, then dims.

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
    var thread = Int(thread_idx.x)

    var greatest = MINUS_INFINITY
    for i in range(thread, count, COMBINE_THREADS):
        greatest = max(greatest, partials.greatest[unsafe_offset=first + i * heads])
    greatest = block.max[block_size=COMBINE_THREADS](greatest)
    barrier()
    var total = Float32(0)
    for i in range(thread, count, COMBINE_THREADS):
        var state = first + i * heads
        total += rescale_factor(partials.greatest[unsafe_offset=state], greatest) * partials.total[unsafe_offset=state]
    total = block.sum[block_size=COMBINE_THREADS](total)
    var factor = params.finish(split_row.row, head, greatest, total, writes_lse=thread == 0)

    # Of `COMBINE_THREADS` partial results at a time.
    var factors = unsafe_stack_allocation[COMBINE_THREADS, Float32, address_space=AddressSpace.SHARED]()
    for d in range(thread, ceildiv(dim, COMBINE_THREADS) * COMBINE_THREADS, COMBINE_THREADS):
        var sum = Float32(0)
        for begin in range(0, count, COMBINE_THREADS):
            barrier()
            if begin + thread < count:
                var state = first + (begin + thread) * heads
                factors[unsafe_offset=thread] = rescale_factor(partials.greatest[unsafe_offset=state], greatest)
            barrier()
            if d < dim:
                var values = partials.acc.unsafe_offset((first + begin * heads) * dim + d)
                sum = add_weighted(sum, values, heads * dim, factors, min(COMBINE_THREADS, count - begin))
        if d < dim:
            params.o.unsafe_store(params.o_element(split_row.row, head, Int32(d)), (sum * factor).cast[o_dtype]())


@always_inline
def add_weighted(
    start: Float32,
    values: Pointer[Float32, _],
    stride: Int,
    factors: Pointer[Float32, _, address_space=AddressSpace.SHARED],
    count: Int,
) -> Float32:
    """`start` plus the sum of `factors[i] * values[i * stride]`, in their order; `LOADS_AHEAD` loads are under way."""
    var sum = start
    for i in range(0, count, LOADS_AHEAD):
        var loaded = SIMD[DType.float32, LOADS_AHEAD](0)
        comptime for j in range(LOADS_AHEAD):
            if i + j < count:
                loaded[j] = values[unsafe_offset=(i + j) * stride]
        comptime for j in range(LOADS_AHEAD):
            if i + j < count:
                sum = factors[unsafe_offset=i + j].fma(loaded[j], sum)
    return sum


@always_inline
def rescale_factor(greatest: Float32, common: Float32) -> Float32:
    """The factor that makes sums relative to `greatest` relative to `common`; 0 where no token had a score."""
    return exp2(greatest - common) if greatest != MINUS_INFINITY else 0
