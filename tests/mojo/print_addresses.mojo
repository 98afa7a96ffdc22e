"""Prints where PagedKVCache says each token's heads lie, for test_mojo.py to compare with NumPy's views.

Its arguments are the page table, `[BATCH, pages of a request]`, over a pool of as many pages and one more.
A line is: kv_layout rank half layer page_size request token head row_idx col_idx row_pitch byte
"""

from std.sys import argv
from std.utils import IndexList

from mojo_ops.cache.paged_kv_cache import DynamicKVCache
from mojo_ops.cache.strides import PageStrides, page_shape
from support import untracked, untracked_mutable

comptime BATCH = 2
comptime LAYERS = 3
comptime HEADS = 3
comptime DIM = 8


def print_view[kv_layout: StaticString, rank: Int](table: List[UInt32], page_size: Int, half: Int, layer: Int):
    var shape = IndexList[rank](fill=2)
    shape[0] = len(table) + 1
    comptime if rank == 6:
        shape[2] = LAYERS
    shape[rank - 3] = page_size if kv_layout == "NHD" else HEADS
    shape[rank - 2] = HEADS if kv_layout == "NHD" else page_size
    shape[rank - 1] = DIM
    var storage = List[BFloat16](length=shape.flattened_length(), fill=0)
    var base = untracked_mutable(storage)
    var max_pages = len(table) // BATCH
    var cache = DynamicKVCache[DType.bfloat16](
        base,
        page_shape[kv_layout](shape),
        PageStrides.of[kv_layout](shape, half == 1, layer),
        untracked(table),
        BATCH,
        max_pages,
    )
    for request in range(BATCH):
        for token in range(max_pages * page_size):
            for head in range(HEADS):
                print(
                    kv_layout,
                    rank,
                    half,
                    layer,
                    page_size,
                    request,
                    token,
                    head,
                    cache.row_idx(UInt32(request), UInt32(token)),
                    cache.col_idx(UInt32(head)),
                    cache.row_pitch(),
                    Int(cache.block_paged_ptr[1](request, token, head)) - Int(base),
                )
    _ = storage^


def main() raises:
    var table = List[UInt32]()
    for i in range(1, len(argv())):
        table.append(UInt32(Int(argv()[i])))
    for page_size in [1, 5, 16]:
        comptime for kv_layout in [StaticString("NHD"), StaticString("HND")]:
            print_view[kv_layout, 4](table, page_size, 0, 0)
            for half in range(2):
                print_view[kv_layout, 5](table, page_size, half, 0)
                for layer in range(LAYERS):
                    print_view[kv_layout, 6](table, page_size, half, layer)
