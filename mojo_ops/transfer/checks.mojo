"""Checks of append, gather and ragged rows, before anything is written.

Every message names the argument, the request and the value.
"""

from ..cache.checks import check_equal
from ..cache.page_table import PageTable
from ..cache.pointers import RowPointer, TablePointer


@no_inline
def check_append(table: PageTable, batch_indices: RowPointer, positions: RowPointer, num_rows: Int) raises:
    """Checks the rows of an append: requests, positions, their pages, and that no two rows share a slot."""
    table.check_shape()
    var capacity = 16
    while capacity < 2 * num_rows:
        capacity *= 2
    # Open addressing: slot + 1 of each row seen, 0 = free.
    var seen = List[Int](length=capacity, fill=0)
    for row in range(num_rows):
        var request = Int(batch_indices[unsafe_offset=row])
        var position = Int(positions[unsafe_offset=row])
        if request == -1:
            continue
        if request < -1 or request >= table.batch:
            raise Error("batch_indices: row ", row, " names request ", request, " of ", table.batch)
        if position < 0:
            raise Error("positions: row ", row, " (request ", request, ") has position ", position)
        var page_slot, slot = divmod(position, table.page_size)
        if page_slot >= table.max_pages:
            raise Error(
                "positions: row ",
                row,
                " (request ",
                request,
                ") has position ",
                position,
                ", past the ",
                table.max_pages,
                " pages of ",
                table.page_size,
                " in lookup_table",
            )
        var page = table.page(request, page_slot)
        var key = page * table.page_size + slot + 1
        var probe = (key * 0x9E3779B97F4A7C15 >> 20) & (capacity - 1)
        while seen[probe] != 0:
            if seen[probe] == key:
                raise Error(
                    "positions: row ",
                    row,
                    " (request ",
                    request,
                    ", position ",
                    position,
                    ") writes slot ",
                    slot,
                    " of page ",
                    page,
                    ", which an earlier row already writes",
                )
            probe = (probe + 1) & (capacity - 1)
        seen[probe] = key


@no_inline
def check_gather(table: PageTable, indptr: RowPointer, num_rows: Int) raises:
    """Checks `indptr` `[batch + 1]` and every page that a gather reads."""
    table.check_shape()
    if indptr[unsafe_offset=0] != 0:
        raise Error("indptr must start at 0, not ", indptr[unsafe_offset=0])
    for request in range(table.batch):
        var length = Int(indptr[unsafe_offset=request + 1] - indptr[unsafe_offset=request])
        if length < 0:
            raise Error("indptr decreases at request ", request, ": ", length, " tokens")
        table.check_tokens("indptr", request, 0, length)
    check_equal("indptr: its last entry", Int(indptr[unsafe_offset=table.batch]), num_rows)


@no_inline
def check_offsets(row_offsets: TablePointer, batch: Int, num_rows: Int) raises:
    """Row offsets `[batch + 1]` start at 0, never decrease, and end within the rows."""
    if row_offsets[unsafe_offset=0] != 0:
        raise Error("row_offsets must start at 0, not ", row_offsets[unsafe_offset=0])
    for request in range(batch):
        if row_offsets[unsafe_offset=request + 1] < row_offsets[unsafe_offset=request]:
            raise Error("row_offsets decreases at request ", request)
    if Int(row_offsets[unsafe_offset=batch]) > num_rows:
        raise Error("row_offsets ends at ", row_offsets[unsafe_offset=batch], ", past the ", num_rows, " rows")
