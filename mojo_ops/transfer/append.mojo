"""Append: rows of new K and V go to their slots in the pages."""

from std.math import ceildiv
from std.memory import unsafe_memcpy

from ..cache.paged_kv_cache import PagedKVCache
from ..cache.pointers import RowPointer
from ..isa.codes import is_codes, store_head
from ..isa.threads import Workers, run_tasks
from .slot_layout import SlotLayout, rows_per_task


@fieldwise_init
struct AppendRows(TrivialRegisterPassable):
    """The requests and positions of the rows of one append; they were checked (`check_append`)."""

    var batch_indices: RowPointer
    """`[count]`; -1 skips the row."""
    var positions: RowPointer
    """`[count]`."""
    var count: Int

    def adjacent(self, first: Int, end: Int, page_size: Int) -> Int:
        """Return how many rows from `first` on are one request's adjacent slots of one page; at least 1."""
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


def append_rows[
    dtype: DType, //
](
    k_cache: PagedKVCache,
    v_cache: type_of(k_cache),
    k: Pointer[Scalar[dtype], MutUntrackedOrigin],
    v: Pointer[Scalar[dtype], MutUntrackedOrigin],
    rows: AppendRows,
    workers: Workers,
):
    """Writes row `i` of k and v `[count, kv_heads, head_dim]` to token `positions[i]` of its request, on up to
    `workers` threads.

    Rows of the cache's dtype are copied; others are quantised.
    """
    var task_rows = rows_per_task[dtype](k_cache)
    var tasks = ceildiv(rows.count, task_rows)

    def task(index: Int) {var k_cache, var v_cache, var k, var v, var rows, var task_rows, var tasks}:
        var begin = index % tasks * task_rows
        var end = min(rows.count, begin + task_rows)
        if index < tasks:
            append_range(k_cache, k, rows, begin, end)
        else:
            append_range(v_cache, v, rows, begin, end)

    # K and V of a small append are copied sooner than a thread begins.
    run_tasks(task, 2 * tasks, workers.at_most(1 if tasks == 1 else 2 * tasks))


def append_range[
    dtype: DType, //
](cache: PagedKVCache, rows_of: Pointer[Scalar[dtype], MutUntrackedOrigin], rows: AppendRows, begin: Int, end: Int):
    """Rows `[begin, end)`, adjacent slots in one copy where a slot's heads are adjacent."""
    comptime if dtype != cache.dtype:
        quantise_range(cache, rows_of, rows, begin, end)
        return
    var source = rows_of.unsafe_bitcast[Scalar[cache.dtype]]()
    var layout = SlotLayout.of(cache)
    var row = begin
    while row < end:
        var request = Int(rows.batch_indices[unsafe_offset=row])
        if request < 0:
            row += 1
            continue
        var position = Int(rows.positions[unsafe_offset=row])
        var length = rows.adjacent(row, end, cache.slots()) if layout.adjacent_slots else 1
        var at = source.unsafe_offset(row * layout.elements())
        if layout.adjacent_heads:
            unsafe_memcpy(dest=cache.block_paged_ptr[1](request, position, 0), src=at, count=length * layout.elements())
        else:
            for head in range(layout.num_heads):
                unsafe_memcpy(
                    dest=cache.block_paged_ptr[1](request, position, head),
                    src=at.unsafe_offset(head * layout.head_dim),
                    count=layout.head_dim,
                )
        row += length


def quantise_range[
    dtype: DType, //
](cache: PagedKVCache, source: Pointer[Scalar[dtype], MutUntrackedOrigin], rows: AppendRows, begin: Int, end: Int):
    """Rows `[begin, end)` as codes and scales."""
    comptime assert is_codes(cache.dtype), "only codes are made of rows of another dtype"
    var heads = cache.num_heads()
    var dim = cache.head_dim()
    for row in range(begin, end):
        var request = Int(rows.batch_indices[unsafe_offset=row])
        if request < 0:
            continue
        var target = cache.block_paged_ptr[1](request, Int(rows.positions[unsafe_offset=row]), 0)
        for head in range(heads):
            store_head(
                target.unsafe_offset(head * cache.strides().head), source.unsafe_offset((row * heads + head) * dim), dim
            )
