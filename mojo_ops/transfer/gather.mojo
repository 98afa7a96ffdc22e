"""Gather: the tokens of every request, out of their pages into one contiguous ragged array."""

from max.algorithm import sync_parallelize
from std.math import ceildiv
from std.memory import unsafe_memcpy

from ..cache.paged_kv_cache import PagedKVCache
from ..cache.pointers import RowPointer
from .slot_layout import SlotLayout, rows_per_task


def gather_rows(
    k_cache: PagedKVCache,
    v_cache: type_of(k_cache),
    k: k_cache.BlocksPointer,
    v: k_cache.BlocksPointer,
    indptr: RowPointer,
    batch: Int,
):
    """Copies request `b`'s first tokens to rows `[indptr[b], indptr[b + 1])` of k and v `[N, kv_heads, head_dim]`.

    `indptr` was checked, and so were the pages (`check_gather`).
    """
    var count = Int(indptr[unsafe_offset=batch])
    var task_rows = rows_per_task(k_cache)
    var tasks = ceildiv(count, task_rows)

    def task(index: Int) {var k_cache, var v_cache, var k, var v, var indptr, var count, var task_rows, var tasks}:
        var begin = index % tasks * task_rows
        var end = min(count, begin + task_rows)
        if index < tasks:
            gather_range(k_cache, k, indptr, begin, end)
        else:
            gather_range(v_cache, v, indptr, begin, end)

    if tasks == 1:
        task(0)
        task(1)
    else:
        sync_parallelize(task, 2 * tasks)


def gather_range(cache: PagedKVCache, output: cache.BlocksPointer, indptr: RowPointer, begin: Int, end: Int):
    """Rows `[begin, end)`, a page's slots in one copy where they are adjacent."""
    var layout = SlotLayout.of(cache)
    var request = 0
    var row = begin
    while row < end:
        while Int(indptr[unsafe_offset=request + 1]) <= row:
            request += 1
        var token = row - Int(indptr[unsafe_offset=request])
        var at = output.unsafe_offset(row * layout.elements())
        var length = 1
        if layout.adjacent_slots:
            var last = min(end, Int(indptr[unsafe_offset=request + 1]))
            length = min(last - row, cache.slots() - token % cache.slots())
        if layout.adjacent_heads:
            unsafe_memcpy(dest=at, src=cache.block_paged_ptr[1](request, token, 0), count=length * layout.elements())
        else:
            for head in range(layout.num_heads):
                unsafe_memcpy(
                    dest=at.unsafe_offset(head * layout.head_dim),
                    src=cache.block_paged_ptr[1](request, token, head),
                    count=layout.head_dim,
                )
        row += length
