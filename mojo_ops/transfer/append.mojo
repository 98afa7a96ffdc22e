"""Append: rows of new K and V go to their slots in the pages."""

from max.algorithm import sync_parallelize
from std.math import ceildiv
from std.memory import unsafe_memcpy
from std.sys import size_of

from ..cache.paged_kv_cache import PagedKVCache
from ..cache.pointers import RowPointer

comptime BYTES_PER_TASK = 256 * 1024


@fieldwise_init
struct NewRows(TrivialRegisterPassable):
    """Where the rows of one append go; they were checked (`check_append`)."""

    var batch_indices: RowPointer
    """`[count]`; -1 skips the row."""
    var positions: RowPointer
    """`[count]`."""
    var count: Int

    def run(self, first: Int, end: Int, page_size: Int) -> Int:
        """How many rows from `first` on are one request's adjacent slots of one page."""
        var request = self.batch_indices[unsafe_offset=first]
        var position = self.positions[unsafe_offset=first]
        var most = min(end - first, page_size - Int(position) % page_size)
        var length = 1
        while (
            length < most
            and self.batch_indices[unsafe_offset=first + length] == request
            and Int(self.positions[unsafe_offset=first + length]) == Int(position) + length
        ):
            length += 1
        return length


def append_rows(
    k_cache: PagedKVCache, v_cache: type_of(k_cache), k: k_cache.BlocksPointer, v: k_cache.BlocksPointer, rows: NewRows
):
    """Writes row `i` of k and v `[count, kv_heads, head_dim]` to token `positions[i]` of its request."""
    var row_bytes = max(1, k_cache.num_heads() * k_cache.head_dim() * size_of[k_cache.dtype]())
    var rows_per_task = max(1, BYTES_PER_TASK // row_bytes)
    var tasks = ceildiv(rows.count, rows_per_task)

    def task(index: Int) {var k_cache, var v_cache, var k, var v, var rows, var rows_per_task, var tasks}:
        var begin = index % tasks * rows_per_task
        var end = min(rows.count, begin + rows_per_task)
        if index < tasks:
            append_some(k_cache, k, rows, begin, end)
        else:
            append_some(v_cache, v, rows, begin, end)

    if tasks == 1:
        task(0)
        task(1)
    else:
        sync_parallelize(task, 2 * tasks)


def append_some(cache: PagedKVCache, source: cache.BlocksPointer, rows: NewRows, begin: Int, end: Int):
    """Rows `[begin, end)`, adjacent slots in one copy where a slot's heads are adjacent."""
    var heads = cache.num_heads()
    var dim = cache.head_dim()
    var whole_slots = cache.strides().head == dim or heads == 1
    var whole_runs = whole_slots and cache.strides().slot == heads * dim
    var row = begin
    while row < end:
        var request = Int(rows.batch_indices[unsafe_offset=row])
        if request < 0:
            row += 1
            continue
        var position = Int(rows.positions[unsafe_offset=row])
        var length = rows.run(row, end, cache.slots()) if whole_runs else 1
        var at = source.unsafe_offset(row * heads * dim)
        if whole_slots:
            unsafe_memcpy(dest=cache.block_paged_ptr[1](request, position, 0), src=at, count=length * heads * dim)
        else:
            for head in range(heads):
                unsafe_memcpy(
                    dest=cache.block_paged_ptr[1](request, position, head), src=at.unsafe_offset(head * dim), count=dim
                )
        row += length
