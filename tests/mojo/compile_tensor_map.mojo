"""A kernel that fetches one tile of K through the cache's tensor map, compiled for sm_90a by tests/gpu/model.

It needs no GPU to compile; where there is one, it also checks what arrived.
"""

from std.memory import unsafe_stack_allocation
from std.sys import size_of
from std.testing import assert_equal
from std.utils import IndexList
from layout import row_major, stack_allocation
from layout.tma_async import SharedMemBarrier
from max.gpu import thread_idx
from max.gpu.host import DeviceContext
from max.gpu.host.nvidia.tma import TensorMapSwizzle
from max.gpu.memory import AddressSpace
from max.gpu.sync import barrier

from mojo_ops.cache.paged_kv_cache import KVCacheStaticParams, PagedKVCache
from mojo_ops.cache.strides import PageStrides, page_shape
from mojo_ops.cache.tensor_map import PageTensorMap

comptime PAGES = 6
comptime PAGE_SIZE = 16
comptime HEADS = 4
comptime DIM = 128
comptime SWIZZLE = TensorMapSwizzle.SWIZZLE_128B
comptime Cache = PagedKVCache[DType.bfloat16, KVCacheStaticParams(HEADS, DIM), PAGE_SIZE]
comptime Box = PageTensorMap[DType.bfloat16, PAGE_SIZE, DIM, SWIZZLE, True]
comptime BOX_SIZE = PAGE_SIZE * DIM

comptime REQUEST = 1
comptime TOKEN = PAGE_SIZE
comptime HEAD = 2


@__llvm_arg_metadata(box, `nvvm.grid_constant`)
def fetch(
    box: Box, cache: Cache, copied: MutPointer[BFloat16, MutAnyOrigin], loaded: MutPointer[BFloat16, MutAnyOrigin]
):
    """One box by TMA to `copied` `[DIM / 64, PAGE_SIZE, 64]`, as it lies swizzled; its rows by `load` to `loaded`."""
    var tile = stack_allocation[DType.bfloat16, address_space=AddressSpace.SHARED, alignment=1024](
        row_major[BOX_SIZE]()
    )
    var arrived = unsafe_stack_allocation[1, SharedMemBarrier, address_space=AddressSpace.SHARED, alignment=8]()
    if thread_idx.x == 0:
        arrived[].init()
        arrived[].expect_bytes(Int32(BOX_SIZE * size_of[DType.bfloat16]()))
        box.async_copy_4d(tile, arrived[], cache.tma_coords(REQUEST, TOKEN, HEAD))
    barrier()
    arrived[].wait()
    for slot in range(PAGE_SIZE):
        copied[unsafe_offset=slot * DIM + thread_idx.x] = tile.ptr[unsafe_offset=slot * DIM + thread_idx.x]
        loaded[unsafe_offset=slot * DIM + thread_idx.x] = cache.load[1](REQUEST, HEAD, TOKEN + slot, thread_idx.x)


def main() raises:
    var ctx = DeviceContext()
    comptime shape = IndexList[5](PAGES, 2, HEADS, PAGE_SIZE, DIM)
    var storage = ctx.enqueue_create_buffer[DType.bfloat16](shape.flattened_length())
    var table = ctx.enqueue_create_buffer[DType.uint32](4)
    with storage.map_to_host() as host:
        for i in range(shape.flattened_length()):
            host[i] = BFloat16(i % 251)
    with table.map_to_host() as host:
        # [2, 2]
        host[0] = 3
        host[1] = 0
        host[2] = 5
        host[3] = 1
    var cache = Cache(
        storage.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin](),
        page_shape["HND"](shape),
        PageStrides.of["HND"](shape, is_value=True),
        table.unsafe_ptr().unsafe_mut_cast[False]().unsafe_origin_cast[ImmUntrackedOrigin](),
        batch=2,
        max_pages=2,
    )
    var box = cache.create_tma_tile[64, DIM, SWIZZLE](ctx)
    var copied = ctx.enqueue_create_buffer[DType.bfloat16](BOX_SIZE)
    var loaded = ctx.enqueue_create_buffer[DType.bfloat16](BOX_SIZE)
    ctx.enqueue_function[fetch](box, cache, copied, loaded, grid_dim=1, block_dim=DIM)
    with copied.map_to_host() as found, loaded.map_to_host() as expected:
        for slot in range(PAGE_SIZE):
            for dim in range(DIM):
                var atom, column = divmod(dim, 64)
                # SWIZZLE_128B: 16-byte units of a row are XORed with the row's number, modulo 8.
                var unit = (column // 8) ^ (slot % 8)
                var at = (atom * PAGE_SIZE + slot) * 64 + unit * 8 + column % 8
                assert_equal(found[at], expected[slot * DIM + dim])
    _ = storage^
    _ = table^
    print("the box holds the tile that the table points to")
