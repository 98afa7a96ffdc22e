"""Gather: the tokens of every request, out of their pages into one contiguous ragged array."""

from max.algorithm import sync_parallelize
from std.memory import unsafe_memcpy

from .checks import RowPointer
from .kv_cache import PagedKVCache


def gather_rows(cache: PagedKVCache, rows: cache.BlocksPointer, indptr: RowPointer, batch: Int):
    """Copies request `b`'s first tokens to rows `[indptr[b], indptr[b + 1])` of `rows` `[N, kv_heads, head_dim]`.

    `indptr` was checked, and so were the pages (`check_gather`).
    """
    var heads = cache.num_heads()
    var dim = cache.head_dim()

    def task(request: Int) {var cache, var rows, var indptr, var heads, var dim}:
        var begin = Int(indptr[unsafe_offset=request])
        for token in range(Int(indptr[unsafe_offset=request + 1]) - begin):
            var dst = rows.unsafe_offset((begin + token) * heads * dim)
            for head in range(heads):
                unsafe_memcpy(
                    dest=dst.unsafe_offset(head * dim), src=cache.block_paged_ptr[1](request, token, head), count=dim
                )

    sync_parallelize(task, batch)
