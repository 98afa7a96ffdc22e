"""The rows of a ragged step that are of use, and the tokens they see."""

from ..cache.pointers import RowPointer, TablePointer


def fill_lengths_and_last_rows(
    lengths: Pointer[Int32, MutUntrackedOrigin],
    last: Pointer[Int32, MutUntrackedOrigin],
    positions: RowPointer,
    rows: Int,
    row_offsets: TablePointer,
    batch: Int,
):
    """A row sees the tokens before it and itself; a request's last row is the one before the next request's first."""
    for row in range(rows):
        lengths[unsafe_offset=row] = positions[unsafe_offset=row] + 1
    for request in range(batch):
        last[unsafe_offset=request] = Int32(row_offsets[unsafe_offset=request + 1]) - 1
