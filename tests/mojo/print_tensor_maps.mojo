"""Makes the tensor maps of some caches; the test's library, loaded before MAX's, prints what the driver would be told.

Arguments: none. Before each map a line: its kind, dtype, layout, pages, page size, heads, head_dim.
"""

from std.utils import IndexList
from max.gpu.host import DeviceContext
from max.gpu.host.nvidia.tma import TensorMapSwizzle

from mojo_ops.cache.strides import PageStrides
from mojo_ops.cache.tensor_map import PageBoxes, create_box_descriptor, create_tensor_map

comptime PAGES = 7
comptime ADDRESS = 1 << 40


def make_maps[dtype: DType, swizzle: TensorMapSwizzle](ctx: DeviceContext, page_size: Int, heads: Int, dim: Int) raises:
    """Of `[page, slot, head, dim]` and of `[page, head, slot, dim]`."""
    var first = Pointer[Scalar[dtype], MutUntrackedOrigin](unsafe_from_address=ADDRESS)
    var shape = IndexList[4](PAGES, page_size, heads, dim)
    var page = page_size * heads * dim
    for is_hnd in [False, True]:
        var strides = PageStrides(
            start=0, page=page, slot=dim if is_hnd else heads * dim, head=page_size * dim if is_hnd else dim
        )
        var layout = "HND" if is_hnd else "NHD"
        print("boxes", dtype, layout, PAGES, page_size, heads, dim, flush=True)
        var slots = min(64, page_size & -page_size)
        _ = create_box_descriptor(ctx, first, PageBoxes.of(ADDRESS, shape, strides, slots, dtype.size_of()))
        print("tile", dtype, layout, PAGES, page_size, heads, dim, flush=True)
        _ = create_tensor_map[16, 128, swizzle](ctx, first, shape, strides)


def main() raises:
    var ctx = DeviceContext(api="cpu")
    make_maps[DType.bfloat16, TensorMapSwizzle.SWIZZLE_128B](ctx, 16, 3, 128)
    make_maps[DType.float16, TensorMapSwizzle.SWIZZLE_128B](ctx, 48, 2, 256)
    make_maps[DType.bfloat16, TensorMapSwizzle.SWIZZLE_NONE](ctx, 128, 1, 128)
