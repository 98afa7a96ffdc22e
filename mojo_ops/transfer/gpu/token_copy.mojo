"""Parts that copies of rows and pages on a GPU share: their width, and the place of a token.

Requests, positions, offsets and page ids lie on the device, where nothing can be refused without a wait. So append does
not write a row whose token is not in the page table, and gather sets all bits of such a row: NaN in every float type.
"""

from std.sys import size_of

from ...cache.gpu_loads import CODE_BYTES
from ...cache.paged_kv_cache import DynamicKVCache

comptime COPY_THREADS = 128
"""Threads of a CTA."""


def copy_width[dtype: DType, //](k: DynamicKVCache[dtype], v: DynamicKVCache[dtype], k_rows: Int, v_rows: Int) -> Int:
    """Elements that one thread copies at once: 16 bytes where everything is aligned for that, else one."""
    comptime width = 16 // size_of[dtype]()
    var bits = k_rows | v_rows | Int(k.blocks.ptr) | Int(v.blocks.ptr)
    var elements = k.head_dim() | v.head_dim()
    for at in [k.strides(), v.strides()]:
        elements |= at.page | at.slot | at.head
    return width if bits % 16 == 0 and elements % width == 0 else 1


def codes_are_aligned[
    dtype: DType, //
](k: DynamicKVCache[dtype], v: DynamicKVCache[dtype], k_rows: Int, v_rows: Int) -> Bool:
    """Return whether heads of codes begin at multiples of `CODE_BYTES`, rows of elements at multiples of 16 bytes."""
    var bytes = Int(k.blocks.ptr) | Int(v.blocks.ptr)
    for at in [k.strides(), v.strides()]:
        bytes |= at.page | at.slot | at.head
    return bytes % CODE_BYTES == 0 and (k_rows | v_rows) % 16 == 0


@always_inline
def token_offset[dtype: DType, //](cache: DynamicKVCache[dtype], request: Int, position: Int) -> Int:
    """Elements from the start of the cache to head 0 of a token; -1 where the table or the pool has no such token."""
    if request < 0 or request >= Int(cache.lookup_table.dim[0]()) or position < 0:
        return -1
    var column, slot = divmod(position, cache.slots())
    if column >= Int(cache.lookup_table.dim[1]()):
        return -1
    var page = cache.page(request, column)
    return cache.offset(page, slot, 0) if page < cache.num_pages() else -1
