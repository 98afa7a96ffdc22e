"""Gather: the tokens of every request, out of their pages into one contiguous ragged array."""

from max.algorithm import sync_parallelize
from std.math import ceildiv
from std.memory import unsafe_memcpy
from std.sys import size_of

from ..cache.paged_kv_cache import PagedKVCache
from ..cache.pointers import RowPointer

comptime BYTES_PER_TASK = 256 * 1024


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
    var row_bytes = max(1, k_cache.num_heads() * k_cache.head_dim() * size_of[k_cache.dtype]())
    var rows_per_task = max(1, BYTES_PER_TASK // row_bytes)
    var tasks = ceildiv(count, rows_per_task)

    def task(index: Int) {var k_cache, var v_cache, var k, var v, var indptr, var count, var rows_per_task, var tasks}:
        var begin = index % tasks * rows_per_task
        var end = min(count, begin + rows_per_task)
        if index < tasks:
            gather_some(k_cache, k, indptr, begin, end)
        else:
            gather_some(v_cache, v, indptr, begin, end)

    if tasks == 1:
        task(0)
        task(1)
    else:
        sync_parallelize(task, 2 * tasks)


def gather_some(cache: PagedKVCache, target: cache.BlocksPointer, indptr: RowPointer, begin: Int, end: Int):
    """Rows `[begin, end)`, a page's slots in one copy where they are adjacent."""
    var heads = cache.num_heads()
    var dim = cache.head_dim()
    var whole_slots = cache.strides().head == dim or heads == 1
    var whole_runs = whole_slots and cache.strides().slot == heads * dim
    var request = 0
    var row = begin
    while row < end:
        while Int(indptr[unsafe_offset=request + 1]) <= row:
            request += 1
        var token = row - Int(indptr[unsafe_offset=request])
        var at = target.unsafe_offset(row * heads * dim)
        var length = 1
        if whole_runs:
            var last = min(end, Int(indptr[unsafe_offset=request + 1]))
            length = min(last - row, cache.slots() - token % cache.slots())
        if whole_slots:
            unsafe_memcpy(dest=at, src=cache.block_paged_ptr[1](request, token, 0), count=length * heads * dim)
        else:
            for head in range(heads):
                unsafe_memcpy(
                    dest=at.unsafe_offset(head * dim), src=cache.block_paged_ptr[1](request, token, head), count=dim
                )
        row += length
