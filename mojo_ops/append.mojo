"""Append: rows of new K and V go to their slots in the pages."""

from max.algorithm import sync_parallelize
from std.math import ceildiv
from std.memory import unsafe_memcpy
from std.sys import size_of

from .checks import RowPointer
from .kv_cache import PagedKVCache

comptime BYTES_PER_TASK = 256 * 1024


def append_rows(
    cache: PagedKVCache,
    rows: cache.BlocksPointer,
    batch_indices: RowPointer,
    positions: RowPointer,
    num_rows: Int,
):
    """Writes row `i` of `rows` `[num_rows, kv_heads, head_dim]` to token `positions[i]` of its request.

    A row whose batch index is -1 is skipped. The rows were checked (`check_append`).
    """
    var heads = cache.num_heads()
    var dim = cache.head_dim()
    var row_bytes = max(1, heads * dim * size_of[cache.dtype]())
    var rows_per_task = max(1, BYTES_PER_TASK // row_bytes)

    def task(
        index: Int,
    ) {var cache, var rows, var batch_indices, var positions, var num_rows, var heads, var dim, var rows_per_task}:
        for row in range(index * rows_per_task, min(num_rows, (index + 1) * rows_per_task)):
            var request = Int(batch_indices[unsafe_offset=row])
            if request < 0:
                continue
            var src = rows.unsafe_offset(row * heads * dim)
            var position = Int(positions[unsafe_offset=row])
            if cache.strides().head == dim:
                unsafe_memcpy(dest=cache.block_paged_ptr[1](request, position, 0), src=src, count=heads * dim)
            else:
                for head in range(heads):
                    unsafe_memcpy(
                        dest=cache.block_paged_ptr[1](request, position, head),
                        src=src.unsafe_offset(head * dim),
                        count=dim,
                    )

    sync_parallelize(task, ceildiv(num_rows, rows_per_task))
