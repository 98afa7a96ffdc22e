"""Append on a GPU: rows of new K and V go to their slots in the pages."""

from std.sys import size_of
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives import warp

from ...cache.gpu_loads import CODE_BYTES
from ...cache.paged_kv_cache import DynamicKVCache
from ...cache.pointers import RowPointer
from ...isa.codes import HeadRange, STEP, head_scale, is_codes, store_codes, store_scale
from .token_copy import COPY_THREADS, codes_are_aligned, copy_width, token_offset

comptime HEAD_LANES = 16
"""That quantise a head together: one step of theirs takes 128 elements."""


def append_on_gpu[
    row_dtype: DType, dtype: DType, //
](
    ctx: DeviceContext,
    k: DynamicKVCache[dtype],
    v: DynamicKVCache[dtype],
    k_rows: Pointer[Scalar[row_dtype], MutUntrackedOrigin],
    v_rows: Pointer[Scalar[row_dtype], MutUntrackedOrigin],
    batch_indices: RowPointer,
    positions: RowPointer,
    num_rows: Int,
) raises:
    """Writes row `i` of K and V `[num_rows, kv_heads, head_dim]`, each of its own width, to token `positions[i]`.

    Rows of the cache's dtype are copied; others are quantised. Two rows for one slot are not found: the last writer
    wins.
    """
    var elements = k.num_heads() * k.head_dim()
    if num_rows == 0 or elements == 0:
        return
    comptime if row_dtype == dtype:
        var k_bits = k_rows.unsafe_bitcast[Scalar[dtype]]()
        var v_bits = v_rows.unsafe_bitcast[Scalar[dtype]]()
        copy_rows(ctx, k, v, k_bits, v_bits, batch_indices, positions, num_rows)
    else:
        if codes_are_aligned(k, v, Int(k_rows), Int(v_rows)):
            comptime kernel = quantise_kernel[row_dtype, dtype, True]
            ctx.enqueue_function[kernel](
                k, v, k_rows, v_rows, batch_indices, positions, grid_dim=(num_rows, 2), block_dim=COPY_THREADS
            )
        else:
            comptime kernel = quantise_kernel[row_dtype, dtype, False]
            ctx.enqueue_function[kernel](
                k, v, k_rows, v_rows, batch_indices, positions, grid_dim=(num_rows, 2), block_dim=COPY_THREADS
            )


def copy_rows[
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
    """The rows as they are."""
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


def quantise_kernel[
    row_dtype: DType, dtype: DType, aligned: Bool
](
    k: DynamicKVCache[dtype],
    v: DynamicKVCache[dtype],
    k_rows: Pointer[Scalar[row_dtype], MutUntrackedOrigin],
    v_rows: Pointer[Scalar[row_dtype], MutUntrackedOrigin],
    batch_indices: RowPointer,
    positions: RowPointer,
):
    """One CTA a row, for K (`block_idx.y` 0) or V; `HEAD_LANES` lanes a head, which read it twice."""
    comptime assert is_codes(dtype), "only codes are made of rows of another dtype"
    comptime row_alignment = 16 if aligned else size_of[row_dtype]()
    comptime code_alignment = CODE_BYTES if aligned else 1
    var row = Int(block_idx.x)
    var cache = k if block_idx.y == 0 else v
    var source = k_rows if block_idx.y == 0 else v_rows
    var at = token_offset(cache, Int(batch_indices[unsafe_offset=row]), Int(positions[unsafe_offset=row]))
    if at < 0:
        return
    var dim = cache.head_dim()
    var heads = cache.num_heads()
    var team, lane = divmod(Int(thread_idx.x), HEAD_LANES)
    # The same number of heads for every team: lanes of one warp shuffle together.
    for first in range(0, heads, COPY_THREADS // HEAD_LANES):
        var head = first + team
        var length = dim if head < heads else 0
        var elements = source.unsafe_offset((row * heads + head) * dim)
        var seen = HeadRange[STEP]()
        for d in range(lane * STEP, length, HEAD_LANES * STEP):
            seen.include(elements.unsafe_load[width=STEP, alignment=row_alignment](d).cast[DType.float32]())
        var of_head = seen.reduced()
        comptime for i in range(4):
            comptime other = UInt32(HEAD_LANES >> (i + 1))
            var others = HeadRange[1]()
            others.highest = warp.shuffle_xor(of_head.highest, other)
            others.lowest = warp.shuffle_xor(of_head.lowest, other)
            others.not_finite = warp.shuffle_xor(of_head.not_finite, other)
            of_head.merge(others)
        var scale = head_scale[dtype](of_head)
        var target = cache.blocks.ptr.unsafe_offset(at + head * cache.strides().head)
        for d in range(lane * STEP, length, HEAD_LANES * STEP):
            var x = elements.unsafe_load[width=STEP, alignment=row_alignment](d).cast[DType.float32]()
            store_codes[alignment=code_alignment](target, d, x, scale.inverse)
        if lane == 0 and head < heads:
            store_scale[alignment=code_alignment](target, dim, scale.scale)
