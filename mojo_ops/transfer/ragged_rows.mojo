"""The request and the position of each row of a ragged step."""

from ..cache.pointers import TablePointer


def fill_ragged_rows(
    batch_indices: Pointer[Int32, MutUntrackedOrigin],
    positions: Pointer[Int32, MutUntrackedOrigin],
    num_rows: Int,
    row_offsets: TablePointer,
    cache_lengths: TablePointer,
    batch: Int,
):
    """Row `row_offsets[b] + i` is token `cache_lengths[b] + i` of request `b`; rows past the last are padding (-1)."""
    for request in range(batch):
        var begin = Int(row_offsets[unsafe_offset=request])
        for row in range(begin, Int(row_offsets[unsafe_offset=request + 1])):
            batch_indices[unsafe_offset=row] = Int32(request)
            positions[unsafe_offset=row] = Int32(cache_lengths[unsafe_offset=request]) + Int32(row - begin)
    for row in range(Int(row_offsets[unsafe_offset=batch]), num_rows):
        batch_indices[unsafe_offset=row] = -1
        positions[unsafe_offset=row] = 0
