"""Gather: the tokens of every request, out of their pages into one contiguous ragged array."""

from std.math import ceildiv
from std.memory import unsafe_memcpy

from ..cache.paged_kv_cache import PagedKVCache
from ..cache.pointers import RowPointer
from ..isa.codes import STEP, is_codes, load_codes, scale_of
from ..isa.convert import narrow
from ..isa.threads import Workers, run_tasks
from .slot_layout import SlotLayout, rows_per_task


def gather_rows[
    dtype: DType, //
](
    k_cache: PagedKVCache,
    v_cache: type_of(k_cache),
    k: Pointer[Scalar[dtype], MutUntrackedOrigin],
    v: Pointer[Scalar[dtype], MutUntrackedOrigin],
    indptr: RowPointer,
    batch: Int,
    workers: Workers,
):
    """Copies request `b`'s first tokens to rows `[indptr[b], indptr[b + 1])` of k and v `[N, kv_heads, head_dim]`.

    `indptr` was checked, and so were the pages (`check_gather`). Rows of the cache's dtype are copies; others are the
    numbers that codes and scales stand for.
    """
    var count = Int(indptr[unsafe_offset=batch])
    var task_rows = rows_per_task[dtype](k_cache)
    var tasks = ceildiv(count, task_rows)

    def task(index: Int) {var k_cache, var v_cache, var k, var v, var indptr, var count, var task_rows, var tasks}:
        var begin = index % tasks * task_rows
        var end = min(count, begin + task_rows)
        if index < tasks:
            gather_range(k_cache, k, indptr, begin, end)
        else:
            gather_range(v_cache, v, indptr, begin, end)

    # K and V of a small gather are copied sooner than a thread begins.
    run_tasks(task, 2 * tasks, workers.at_most(1 if tasks == 1 else 2 * tasks))


def gather_range[
    dtype: DType, //
](cache: PagedKVCache, rows: Pointer[Scalar[dtype], MutUntrackedOrigin], indptr: RowPointer, begin: Int, end: Int):
    """Rows `[begin, end)`, a page's slots in one copy where they are adjacent."""
    comptime if dtype != cache.dtype:
        widen_range(cache, rows, indptr, begin, end)
        return
    var output = rows.unsafe_bitcast[Scalar[cache.dtype]]()
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


def widen_range[
    dtype: DType, //
](cache: PagedKVCache, rows: Pointer[Scalar[dtype], MutUntrackedOrigin], indptr: RowPointer, begin: Int, end: Int):
    """Rows `[begin, end)`, codes times their scales."""
    comptime assert is_codes(cache.dtype), "only codes become rows of another dtype"
    var heads = cache.num_heads()
    var dim = cache.head_dim()
    var request = 0
    for row in range(begin, end):
        while Int(indptr[unsafe_offset=request + 1]) <= row:
            request += 1
        var token = row - Int(indptr[unsafe_offset=request])
        for head in range(heads):
            var source = cache.block_paged_ptr[1](request, token, head)
            var target = rows.unsafe_offset((row * heads + head) * dim)
            var scale = scale_of(source, dim)
            for d in range(0, dim, STEP):
                target.unsafe_store(d, narrow[dtype](load_codes[STEP](source, d) * scale))
