"""The rows of trees on a GPU: request, slot, position and mask."""

from std.math import ceildiv
from max.gpu import global_idx
from max.gpu.host import DeviceContext

from ...cache.pointers import RowPointer, TablePointer
from ..tree_rows import TreeRows, parent_of
from .ragged_rows import request_of_row
from .token_copy import COPY_THREADS


def tree_rows_on_gpu(
    ctx: DeviceContext,
    rows: TreeRows,
    parents: RowPointer,
    row_offsets: TablePointer,
    cache_lengths: TablePointer,
    batch: Int,
    window_left: Int,
) raises:
    """`fill_tree_rows` on the device, where nothing is refused: a parent that is not before its row counts as -1, and a
    row past the mask's bits is padding."""
    if rows.num_rows > 0:
        ctx.enqueue_function[tree_rows_kernel](
            rows,
            parents,
            row_offsets,
            cache_lengths,
            Int32(batch),
            Int32(window_left),
            grid_dim=ceildiv(Int(rows.num_rows), COPY_THREADS),
            block_dim=COPY_THREADS,
        )


def tree_rows_kernel(
    rows: TreeRows,
    parents: RowPointer,
    row_offsets: TablePointer,
    cache_lengths: TablePointer,
    batch: Int32,
    window_left: Int32,
):
    """One thread a row; it walks to the root twice, for the depth and for the mask."""
    var row = Int(global_idx.x)
    if row >= Int(rows.num_rows):
        return
    var request = request_of_row[DType.uint32](row_offsets, Int(batch), row)
    if request < 0:
        rows.pad(row)
        return
    var first = Int(row_offsets[unsafe_offset=request])
    var index = row - first
    var depth = -1
    var seen = index
    while seen >= 0:
        depth += 1
        seen = parent_of(parents, first, seen)
    if depth != index and index >= rows.mask_bits():
        rows.pad(row)
        return
    rows.set(row, request, index, depth, Int(cache_lengths[unsafe_offset=request]))
    rows.clear_mask(row)
    if depth != index:
        rows.set_mask(row, index, parents, Int(window_left))
