"""Append on a GPU: rows of new K and V go to their slots in the pages."""

from std.sys import size_of
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext

from ...cache.paged_kv_cache import DynamicKVCache
from ...cache.pointers import RowPointer
from .token_copy import COPY_THREADS, copy_width, token_offset


def append_on_gpu[
    dtype: DType, //
](
    ctx: DeviceContext,
    k: DynamicKVCache[dtype],
    v: DynamicKVCache[dtype],
    k_rows: k.BlocksPointer,
    v_rows: k.BlocksPointer,
    batch_indices: RowPointer,
    positions: RowPointer,
    num_rows: Int,
) raises:
    """Writes row `i` of K and V `[num_rows, kv_heads, head_dim]`, each of its own width, to token `positions[i]`.

    Two rows for one slot are not found: the last writer wins.
    """
    var elements = k.num_heads() * k.head_dim()
    if num_rows == 0 or elements == 0:
        return
    comptime width = 16 // size_of[dtype]()
    if copy_width(k, v, Int(k_rows), Int(v_rows)) == width:
        comptime kernel = append_kernel[dtype, width]
        ctx.enqueue_function[kernel](
            k, v, k_rows, v_rows, batch_indices, positions, grid_dim=(num_rows, 2), block_dim=COPY_THREADS
        )
    else:
        comptime kernel = append_kernel[dtype, 1]
        ctx.enqueue_function[kernel](
            k, v, k_rows, v_rows, batch_indices, positions, grid_dim=(num_rows, 2), block_dim=COPY_THREADS
        )


def append_kernel[
    dtype: DType, width: Int
](
    k: DynamicKVCache[dtype],
    v: DynamicKVCache[dtype],
    k_rows: Pointer[Scalar[dtype], MutUntrackedOrigin],
    v_rows: Pointer[Scalar[dtype], MutUntrackedOrigin],
    batch_indices: RowPointer,
    positions: RowPointer,
):
    """One CTA a row, for K (`block_idx.y` 0) or V."""
    var row = Int(block_idx.x)
    var cache = k if block_idx.y == 0 else v
    var source = k_rows if block_idx.y == 0 else v_rows
    var at = token_offset(cache, Int(batch_indices[unsafe_offset=row]), Int(positions[unsafe_offset=row]))
    if at < 0:
        return
    var dim = cache.head_dim()
    var count = cache.num_heads() * dim
    for i in range(Int(thread_idx.x) * width, count, COPY_THREADS * width):
        var head, d = divmod(i, dim)
        cache.blocks.ptr.unsafe_store[alignment=width * size_of[dtype]()](
            at + head * cache.strides().head + d,
            source.unsafe_load[width=width, alignment=width * size_of[dtype]()](row * count + i),
        )
