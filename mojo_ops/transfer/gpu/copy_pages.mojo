"""Copies of pages on a GPU.

Sources and targets lie on the device, where nothing can be refused without a wait: a pair with a page outside the pool
is skipped, and the content of a page that two pairs write, or that one reads and another writes, is undefined.
"""

from std.math import ceildiv
from std.sys import size_of
from std.utils import IndexList
from max.gpu import block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceContext

from ...cache.paged_kv_cache import DynamicKVCache
from ...cache.pointers import RowPointer, TablePointer
from ...cache.strides import PageStrides
from .token_copy import COPY_THREADS, copy_width

comptime COPIES_PER_THREAD = 16
"""About: a large page takes several CTAs."""
comptime MAX_CTAS_PER_PAGE = 1024


def whole_pages[
    dtype: DType, //
](
    blocks: Pointer[Scalar[dtype], MutUntrackedOrigin],
    pages: Int,
    page_elements: Int,
    slot_elements: Int,
    table: TablePointer,
) -> DynamicKVCache[dtype]:
    """The whole pages of a contiguous array, at rank 6 with every layer, as slots of `slot_elements` elements."""
    var shape = IndexList[4](pages, page_elements // max(1, slot_elements), 1, slot_elements)
    return DynamicKVCache[dtype](
        blocks, shape, PageStrides(0, page_elements, slot_elements, slot_elements), table, 0, 0
    )


def copy_pages_on_gpu[
    dtype: DType, //
](
    ctx: DeviceContext,
    k: DynamicKVCache[dtype],
    v: DynamicKVCache[dtype],
    num_arrays: Int,
    sources: RowPointer,
    targets: RowPointer,
    count: Int,
) raises:
    """Copies page `sources[i]` to page `targets[i]` in `k`, and where `num_arrays` is 2 in `v`, of the same shape."""
    if count == 0 or k.slots() == 0 or k.num_heads() * k.head_dim() == 0:
        return
    comptime width = 16 // size_of[dtype]()
    var elements = k.slots() * k.num_heads() * k.head_dim()
    var parts = min(ceildiv(elements, COPY_THREADS * COPIES_PER_THREAD * width), MAX_CTAS_PER_PAGE)
    if copy_width(k, v, 0, 0) == width:
        comptime kernel = copy_pages_kernel[dtype, width]
        ctx.enqueue_function[kernel](
            k, v, sources, targets, grid_dim=(count, num_arrays, parts), block_dim=COPY_THREADS
        )
    else:
        comptime kernel = copy_pages_kernel[dtype, 1]
        ctx.enqueue_function[kernel](
            k, v, sources, targets, grid_dim=(count, num_arrays, parts), block_dim=COPY_THREADS
        )


def copy_pages_kernel[
    dtype: DType, width: Int
](k: DynamicKVCache[dtype], v: DynamicKVCache[dtype], sources: RowPointer, targets: RowPointer):
    """A pair, K or V of it (`block_idx.y`), and one of the page's parts."""
    var cache = k if block_idx.y == 0 else v
    var source = Int(sources[unsafe_offset=Int(block_idx.x)])
    var target = Int(targets[unsafe_offset=Int(block_idx.x)])
    var pages = cache.num_pages()
    if source < 0 or source >= pages or target < 0 or target >= pages:
        return
    var dim = cache.head_dim()
    var heads = cache.num_heads()
    var row = heads * dim
    var first = (Int(block_idx.z) * COPY_THREADS + Int(thread_idx.x)) * width
    for i in range(first, cache.slots() * row, Int(grid_dim.z) * COPY_THREADS * width):
        var slot, rest = divmod(i, row)
        var head, d = divmod(rest, dim)
        var value = cache.blocks.ptr.unsafe_load[width=width, alignment=width * size_of[dtype]()](
            cache.offset(source, slot, head, d)
        )
        cache.blocks.ptr.unsafe_store[alignment=width * size_of[dtype]()](cache.offset(target, slot, head, d), value)
