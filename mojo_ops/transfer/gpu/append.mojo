"""Append, gather and ragged rows on a GPU.

Requests, positions, offsets and page ids lie on the device, where nothing can be refused without waiting. So a row
that the table has no place for is not written by append, and comes out of gather with all its bits set, which is NaN
in every float type.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.sys import size_of
from max.gpu import block_idx, global_idx, thread_idx
from max.gpu.host import DeviceContext

from ...cache.gpu_loads import DeviceCache
from ...cache.pointers import RowPointer, TablePointer

comptime THREADS = 128


def copy_width[dtype: DType, //](k: DeviceCache[dtype], v: DeviceCache[dtype], k_rows: Int, v_rows: Int) -> Int:
    """Elements that one thread moves at once: 16 bytes where everything is aligned for that, else one."""
    comptime width = 16 // size_of[dtype]()
    var bits = k_rows | v_rows | Int(k.blocks.ptr) | Int(v.blocks.ptr)
    var elements = k.head_dim()
    for at in [k.strides(), v.strides()]:
        elements |= at.page | at.slot | at.head
    return width if bits % 16 == 0 and elements % width == 0 else 1


def append_on_gpu[
    dtype: DType, //
](
    ctx: DeviceContext,
    k: DeviceCache[dtype],
    v: DeviceCache[dtype],
    k_rows: k.BlocksPointer,
    v_rows: k.BlocksPointer,
    batch_indices: RowPointer,
    positions: RowPointer,
    num_rows: Int,
) raises:
    """Writes row `i` of K and V `[num_rows, kv_heads, head_dim]` to token `positions[i]` of its request.

    Two rows for one slot are not found: the last writer wins.
    """
    var elements = k.num_heads() * k.head_dim()
    if num_rows == 0 or elements == 0:
        return
    comptime width = 16 // size_of[dtype]()
    if copy_width(k, v, Int(k_rows), Int(v_rows)) == width:
        comptime kernel = append_kernel[dtype, width]
        ctx.enqueue_function[kernel](
            k, v, k_rows, v_rows, batch_indices, positions, grid_dim=(num_rows, 2), block_dim=THREADS
        )
    else:
        comptime kernel = append_kernel[dtype, 1]
        ctx.enqueue_function[kernel](
            k, v, k_rows, v_rows, batch_indices, positions, grid_dim=(num_rows, 2), block_dim=THREADS
        )


def append_kernel[
    dtype: DType, width: Int
](
    k: DeviceCache[dtype],
    v: DeviceCache[dtype],
    k_rows: Pointer[Scalar[dtype], MutUntrackedOrigin],
    v_rows: Pointer[Scalar[dtype], MutUntrackedOrigin],
    batch_indices: RowPointer,
    positions: RowPointer,
):
    """One CTA a row, for K (`block_idx.y` 0) or V."""
    var row = Int(block_idx.x)
    var cache = k if block_idx.y == 0 else v
    var source = k_rows if block_idx.y == 0 else v_rows
    var at = place(cache, Int(batch_indices[unsafe_offset=row]), Int(positions[unsafe_offset=row]))
    if at < 0:
        return
    var dim = cache.head_dim()
    var count = cache.num_heads() * dim
    for i in range(Int(thread_idx.x) * width, count, THREADS * width):
        var head, d = divmod(i, dim)
        cache.blocks.ptr.unsafe_store[alignment=width * size_of[dtype]()](
            at + head * cache.strides().head + d,
            source.unsafe_load[width=width, alignment=width * size_of[dtype]()](row * count + i),
        )


def gather_on_gpu[
    dtype: DType, //
](
    ctx: DeviceContext,
    k: DeviceCache[dtype],
    v: DeviceCache[dtype],
    k_rows: k.BlocksPointer,
    v_rows: k.BlocksPointer,
    indptr: RowPointer,
    num_rows: Int,
) raises:
    """Copies request `b`'s first tokens to rows `[indptr[b], indptr[b + 1])` of K and V `[num_rows, kv_heads, head_dim]`."""
    var elements = k.num_heads() * k.head_dim()
    if num_rows == 0 or elements == 0:
        return
    comptime width = 16 // size_of[dtype]()
    if copy_width(k, v, Int(k_rows), Int(v_rows)) == width:
        comptime kernel = gather_kernel[dtype, width]
        ctx.enqueue_function[kernel](k, v, k_rows, v_rows, indptr, grid_dim=(num_rows, 2), block_dim=THREADS)
    else:
        comptime kernel = gather_kernel[dtype, 1]
        ctx.enqueue_function[kernel](k, v, k_rows, v_rows, indptr, grid_dim=(num_rows, 2), block_dim=THREADS)


def gather_kernel[
    dtype: DType, width: Int
](
    k: DeviceCache[dtype],
    v: DeviceCache[dtype],
    k_rows: Pointer[Scalar[dtype], MutUntrackedOrigin],
    v_rows: Pointer[Scalar[dtype], MutUntrackedOrigin],
    indptr: RowPointer,
):
    """One CTA a row, for K (`block_idx.y` 0) or V."""
    var row = Int(block_idx.x)
    var cache = k if block_idx.y == 0 else v
    var target = k_rows if block_idx.y == 0 else v_rows
    var batch = Int(cache.lookup_table.dim[0]())
    var request = segment_of[DType.int32](indptr, batch, row)
    var at = -1
    if request >= 0:
        at = place(cache, request, row - Int(indptr[unsafe_offset=request]))
    var dim = cache.head_dim()
    var count = cache.num_heads() * dim
    for i in range(Int(thread_idx.x) * width, count, THREADS * width):
        var head, d = divmod(i, dim)
        var value = all_ones[dtype, width]()
        if at >= 0:
            value = cache.blocks.ptr.unsafe_load[width=width, alignment=width * size_of[dtype]()](
                at + head * cache.strides().head + d
            )
        target.unsafe_store[alignment=width * size_of[dtype]()](row * count + i, value)


@always_inline
def all_ones[dtype: DType, width: Int]() -> SIMD[dtype, width]:
    comptime bits = DType.uint8 if size_of[dtype]() == 1 else (DType.uint16 if size_of[dtype]() == 2 else DType.uint32)
    return bitcast[dtype, width](~SIMD[bits, width](0))


@always_inline
def place[dtype: DType, //](cache: DeviceCache[dtype], request: Int, position: Int) -> Int:
    """Elements from the start of the cache to head 0 of a token; -1 where the table or the pool has no such token."""
    if request < 0 or request >= Int(cache.lookup_table.dim[0]()) or position < 0:
        return -1
    var column, slot = divmod(position, cache.slots())
    if column >= Int(cache.lookup_table.dim[1]()):
        return -1
    var page = cache.page(request, column)
    return cache.offset(page, slot, 0) if page < cache.num_pages() else -1


@always_inline
def segment_of[dtype: DType](offsets: Pointer[Scalar[dtype], ImmUntrackedOrigin], count: Int, row: Int) -> Int:
    """The segment `[offsets[s], offsets[s + 1])` of `count` that holds `row`; -1 where none does."""
    var low = 0
    var high = count
    while low < high:  # the first segment that ends past the row
        var middle = (low + high) // 2
        if Int(offsets[unsafe_offset=middle + 1]) > row:
            high = middle
        else:
            low = middle + 1
    if low == count or Int(offsets[unsafe_offset=low]) > row:
        return -1
    return low


def ragged_rows_on_gpu(
    ctx: DeviceContext,
    batch_indices: Pointer[Int32, MutUntrackedOrigin],
    positions: Pointer[Int32, MutUntrackedOrigin],
    num_rows: Int,
    row_offsets: TablePointer,
    cache_lengths: TablePointer,
    batch: Int,
) raises:
    """`fill_rows` on the device: a row that no request holds is padding, -1."""
    if num_rows > 0:
        ctx.enqueue_function[ragged_rows_kernel](
            batch_indices,
            positions,
            Int32(num_rows),
            row_offsets,
            cache_lengths,
            Int32(batch),
            grid_dim=ceildiv(num_rows, THREADS),
            block_dim=THREADS,
        )


def ragged_rows_kernel(
    batch_indices: Pointer[Int32, MutUntrackedOrigin],
    positions: Pointer[Int32, MutUntrackedOrigin],
    num_rows: Int32,
    row_offsets: TablePointer,
    cache_lengths: TablePointer,
    batch: Int32,
):
    """One thread a row."""
    var row = Int(global_idx.x)
    if row >= Int(num_rows):
        return
    var request = segment_of[DType.uint32](row_offsets, Int(batch), row)
    var position = 0
    if request >= 0:
        position = Int(cache_lengths[unsafe_offset=request]) + row - Int(row_offsets[unsafe_offset=request])
    batch_indices.unsafe_store(row, Int32(request))
    positions.unsafe_store(row, Int32(position))
