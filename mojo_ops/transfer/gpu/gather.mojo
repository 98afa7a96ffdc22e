"""Gather on a GPU: the tokens of every request, out of their pages into one contiguous ragged array."""

from std.memory import bitcast
from std.sys import size_of
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext

from ...cache.paged_kv_cache import DynamicKVCache
from ...cache.pointers import RowPointer
from .ragged_rows import request_of_row
from .token_copy import COPY_THREADS, copy_width, token_offset


def gather_on_gpu[
    dtype: DType, //
](
    ctx: DeviceContext,
    k: DynamicKVCache[dtype],
    v: DynamicKVCache[dtype],
    k_rows: k.BlocksPointer,
    v_rows: k.BlocksPointer,
    indptr: RowPointer,
    num_rows: Int,
) raises:
    """Copies request `b`'s first tokens to rows `[indptr[b], indptr[b + 1])` of K and V `[num_rows, Hk, D]`."""
    var elements = k.num_heads() * k.head_dim()
    if num_rows == 0 or elements == 0:
        return
    comptime width = 16 // size_of[dtype]()
    if copy_width(k, v, Int(k_rows), Int(v_rows)) == width:
        comptime kernel = gather_kernel[dtype, width]
        ctx.enqueue_function[kernel](k, v, k_rows, v_rows, indptr, grid_dim=(num_rows, 2), block_dim=COPY_THREADS)
    else:
        comptime kernel = gather_kernel[dtype, 1]
        ctx.enqueue_function[kernel](k, v, k_rows, v_rows, indptr, grid_dim=(num_rows, 2), block_dim=COPY_THREADS)


def gather_kernel[
    dtype: DType, width: Int
](
    k: DynamicKVCache[dtype],
    v: DynamicKVCache[dtype],
    k_rows: Pointer[Scalar[dtype], MutUntrackedOrigin],
    v_rows: Pointer[Scalar[dtype], MutUntrackedOrigin],
    indptr: RowPointer,
):
    """One CTA a row, for K (`block_idx.y` 0) or V."""
    var row = Int(block_idx.x)
    var cache = k if block_idx.y == 0 else v
    var output = k_rows if block_idx.y == 0 else v_rows
    var batch = Int(cache.lookup_table.dim[0]())
    var request = request_of_row[DType.int32](indptr, batch, row)
    var at = -1
    if request >= 0:
        at = token_offset(cache, request, row - Int(indptr[unsafe_offset=request]))
    var dim = cache.head_dim()
    var count = cache.num_heads() * dim
    for i in range(Int(thread_idx.x) * width, count, COPY_THREADS * width):
        var head, d = divmod(i, dim)
        var value = all_ones[dtype, width]()
        if at >= 0:
            value = cache.blocks.ptr.unsafe_load[width=width, alignment=width * size_of[dtype]()](
                at + head * cache.strides().head + d
            )
        output.unsafe_store[alignment=width * size_of[dtype]()](row * count + i, value)


@always_inline
def all_ones[dtype: DType, width: Int]() -> SIMD[dtype, width]:
    comptime bits = DType.uint8 if size_of[dtype]() == 1 else (DType.uint16 if size_of[dtype]() == 2 else DType.uint32)
    return bitcast[dtype, width](~SIMD[bits, width](0))
