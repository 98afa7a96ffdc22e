"""Gather on a GPU: the tokens of every request, out of their pages into one contiguous ragged array."""

from std.memory import bitcast
from std.sys import size_of
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext

from ...cache.gpu_loads import CODE_BYTES
from ...cache.paged_kv_cache import DynamicKVCache
from ...cache.pointers import RowPointer
from ...isa.codes import STEP, is_codes, load_codes, scale_of, units_of
from .ragged_rows import request_of_row
from .token_copy import COPY_THREADS, codes_are_aligned, copy_width, token_offset


def gather_on_gpu[
    row_dtype: DType, dtype: DType, //
](
    ctx: DeviceContext,
    k: DynamicKVCache[dtype],
    v: DynamicKVCache[dtype],
    k_rows: Pointer[Scalar[row_dtype], MutUntrackedOrigin],
    v_rows: Pointer[Scalar[row_dtype], MutUntrackedOrigin],
    indptr: RowPointer,
    num_rows: Int,
) raises:
    """Copies request `b`'s first tokens to rows `[indptr[b], indptr[b + 1])` of K and V `[num_rows, Hk, D]`.

    Rows of the cache's dtype are copies; others are the numbers that codes and scales stand for.
    """
    var elements = k.num_heads() * k.head_dim()
    if num_rows == 0 or elements == 0:
        return
    comptime if row_dtype == dtype:
        var k_bits = k_rows.unsafe_bitcast[Scalar[dtype]]()
        var v_bits = v_rows.unsafe_bitcast[Scalar[dtype]]()
        copy_tokens(ctx, k, v, k_bits, v_bits, indptr, num_rows)
    else:
        if codes_are_aligned(k, v, Int(k_rows), Int(v_rows)):
            comptime kernel = widen_kernel[row_dtype, dtype, True]
            ctx.enqueue_function[kernel](k, v, k_rows, v_rows, indptr, grid_dim=(num_rows, 2), block_dim=COPY_THREADS)
        else:
            comptime kernel = widen_kernel[row_dtype, dtype, False]
            ctx.enqueue_function[kernel](k, v, k_rows, v_rows, indptr, grid_dim=(num_rows, 2), block_dim=COPY_THREADS)


def copy_tokens[
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
    """The tokens as they are."""
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
    var at = row_offset(cache, indptr, row)
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


def widen_kernel[
    row_dtype: DType, dtype: DType, aligned: Bool
](
    k: DynamicKVCache[dtype],
    v: DynamicKVCache[dtype],
    k_rows: Pointer[Scalar[row_dtype], MutUntrackedOrigin],
    v_rows: Pointer[Scalar[row_dtype], MutUntrackedOrigin],
    indptr: RowPointer,
):
    """One CTA a row, for K (`block_idx.y` 0) or V; codes times their scales."""
    comptime assert is_codes(dtype), "only codes become rows of another dtype"
    comptime row_alignment = 16 if aligned else size_of[row_dtype]()
    comptime code_alignment = CODE_BYTES if aligned else 1
    # Of what is not aligned one stored number a thread: two bytes would go through local memory.
    comptime width = STEP if aligned else STEP // units_of(dtype, STEP)
    var row = Int(block_idx.x)
    var cache = k if block_idx.y == 0 else v
    var output = k_rows if block_idx.y == 0 else v_rows
    var at = row_offset(cache, indptr, row)
    var dim = cache.head_dim()
    var count = cache.num_heads() * dim
    for i in range(Int(thread_idx.x) * width, count, COPY_THREADS * width):
        var head, d = divmod(i, dim)
        var value = all_ones[row_dtype, width]()
        if at >= 0:
            var stored = cache.blocks.ptr.unsafe_offset(at + head * cache.strides().head)
            var x = load_codes[width, code_alignment](stored, d) * scale_of[code_alignment](stored, dim)
            value = x.cast[row_dtype]()
        output.unsafe_store[alignment=row_alignment](row * count + i, value)


@always_inline
def row_offset[dtype: DType, //](cache: DynamicKVCache[dtype], indptr: RowPointer, row: Int) -> Int:
    """`token_offset` of the token that goes to a row; -1 where no request has the row."""
    var request = request_of_row[DType.int32](indptr, Int(cache.lookup_table.dim[0]()), row)
    return token_offset(cache, request, row - Int(indptr[unsafe_offset=request])) if request >= 0 else -1


@always_inline
def all_ones[dtype: DType, width: Int]() -> SIMD[dtype, width]:
    comptime bits = DType.uint8 if size_of[dtype]() == 1 else (DType.uint16 if size_of[dtype]() == 2 else DType.uint32)
    return bitcast[dtype, width](~SIMD[bits, width](0))
