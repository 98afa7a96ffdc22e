"""Request and position of each row of a ragged step, on a GPU."""

from std.math import ceildiv
from max.gpu import global_idx
from max.gpu.host import DeviceContext

from ...cache.pointers import TablePointer
from .token_copy import COPY_THREADS


def ragged_rows_on_gpu(
    ctx: DeviceContext,
    batch_indices: Pointer[Int32, MutUntrackedOrigin],
    positions: Pointer[Int32, MutUntrackedOrigin],
    num_rows: Int,
    row_offsets: TablePointer,
    cache_lengths: TablePointer,
    batch: Int,
) raises:
    """`fill_ragged_rows` on the device: a row that no request holds is padding, -1."""
    if num_rows > 0:
        ctx.enqueue_function[ragged_rows_kernel](
            batch_indices,
            positions,
            Int32(num_rows),
            row_offsets,
            cache_lengths,
            Int32(batch),
            grid_dim=ceildiv(num_rows, COPY_THREADS),
            block_dim=COPY_THREADS,
        )


def ragged_rows_kernel(
    batch_indices: Pointer[Int32, MutUntrackedOrigin],
    positions: Pointer[Int32, MutUntrackedOrigin],
    num_rows: Int32,
    row_offsets: TablePointer,
    cache_lengths: TablePointer,
    batch: Int32,
):
    """One thread a row."""
    var row = Int(global_idx.x)
    if row >= Int(num_rows):
        return
    var request = request_of_row[DType.uint32](row_offsets, Int(batch), row)
    var position = 0
    if request >= 0:
        position = Int(cache_lengths[unsafe_offset=request]) + row - Int(row_offsets[unsafe_offset=request])
    batch_indices.unsafe_store(row, Int32(request))
    positions.unsafe_store(row, Int32(position))


@always_inline
def request_of_row[dtype: DType](offsets: Pointer[Scalar[dtype], ImmUntrackedOrigin], count: Int, row: Int) -> Int:
    """The request b of `count` whose rows `[offsets[b], offsets[b + 1])` hold `row`; -1 where none does."""
    var low = 0
    var high = count
    while low < high:  # the first request whose rows end past this one
        var middle = (low + high) // 2
        if Int(offsets[unsafe_offset=middle + 1]) > row:
            high = middle
        else:
            low = middle + 1
    if low == count or Int(offsets[unsafe_offset=low]) > row:
        return -1
    return low
