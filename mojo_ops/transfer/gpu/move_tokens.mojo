"""Moves of tokens inside their requests, on a GPU.

Requests and tokens lie on the device, where nothing can be refused without a wait: a move of a token that the table or
the pool has not is skipped. The moves are carried out in their order.
"""

from std.math import ceildiv
from std.sys import size_of
from max.gpu import block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceContext

from ...cache.paged_kv_cache import DynamicKVCache
from ...cache.pointers import RowPointer
from ..move_tokens import TokenMoves
from .token_copy import COPY_THREADS, copy_width, token_offset


def move_tokens_on_gpu[
    dtype: DType, //
](
    ctx: DeviceContext,
    k: DynamicKVCache[dtype],
    v: DynamicKVCache[dtype],
    num_layers: Int,
    layer_stride: Int,
    moves: TokenMoves,
) raises:
    """The moves in K and V of `num_layers` layers, which lie `layer_stride` elements apart."""
    var elements = k.num_heads() * k.head_dim()
    if moves.count == 0 or elements == 0 or num_layers == 0:
        return
    comptime wide = 16 // size_of[dtype]()
    if copy_width(k, v, layer_stride * size_of[dtype](), 0) == wide:
        comptime kernel = move_tokens_kernel[dtype, wide]
        ctx.enqueue_function[kernel](
            k,
            v,
            Int64(layer_stride),
            moves.batch_indices,
            moves.sources,
            moves.targets,
            Int32(moves.count),
            grid_dim=(ceildiv(elements, COPY_THREADS * wide), num_layers, 2),
            block_dim=COPY_THREADS,
        )
    else:
        comptime kernel = move_tokens_kernel[dtype, 1]
        ctx.enqueue_function[kernel](
            k,
            v,
            Int64(layer_stride),
            moves.batch_indices,
            moves.sources,
            moves.targets,
            Int32(moves.count),
            grid_dim=(ceildiv(elements, COPY_THREADS), num_layers, 2),
            block_dim=COPY_THREADS,
        )


def move_tokens_kernel[
    dtype: DType, width: Int
](
    k: DynamicKVCache[dtype],
    v: DynamicKVCache[dtype],
    layer_stride: Int64,
    batch_indices: RowPointer,
    sources: RowPointer,
    targets: RowPointer,
    count: Int32,
):
    """One thread an element of a slot, in every move: so a slot that is read is not yet written, on any schedule."""
    var cache = k if block_idx.z == 0 else v
    var dim = cache.head_dim()
    var element = (Int(block_idx.x) * COPY_THREADS + Int(thread_idx.x)) * width
    if element >= cache.num_heads() * dim:
        return
    var head, d = divmod(element, dim)
    var start = Int(block_idx.y) * Int(layer_stride) + head * cache.strides().head + d
    for move in range(Int(count)):
        var request = Int(batch_indices[unsafe_offset=move])
        var source = token_offset(cache, request, Int(sources[unsafe_offset=move]))
        var target = token_offset(cache, request, Int(targets[unsafe_offset=move]))
        if source < 0 or target < 0:
            continue
        cache.blocks.ptr.unsafe_store[alignment=width * size_of[dtype]()](
            target + start,
            cache.blocks.ptr.unsafe_load[width=width, alignment=width * size_of[dtype]()](source + start),
        )
