"""Makes the tensor maps of some caches, without a GPU; a library loaded before MAX's prints what the driver would be told.

Before each map a line: MAP_OF, dtype, layout, pages, page size, heads, head_dim. Boxes are 16 slots, swizzled 128 bytes
where there is more than one head and not swizzled otherwise.
"""

from std.utils import IndexList
from max.gpu.host import DeviceContext
from max.gpu.host.nvidia.tma import TensorMapSwizzle

from mojo_ops.cache.strides import PageStrides
from mojo_ops.cache.tensor_map import create_tensor_map

comptime PAGES = 7
comptime ADDRESS = 1 << 40


def make_maps[dtype: DType, swizzle: TensorMapSwizzle](ctx: DeviceContext, page_size: Int, heads: Int, dim: Int) raises:
    """Print the maps of `[page, slot, head, dim]` and of `[page, head, slot, dim]`."""
    var first = Pointer[Scalar[dtype], MutUntrackedOrigin](unsafe_from_address=ADDRESS)
    var shape = IndexList[4](PAGES, page_size, heads, dim)
    var page = page_size * heads * dim
    for is_hnd in [False, True]:
        var strides = PageStrides(
            start=0, page=page, slot=dim if is_hnd else heads * dim, head=page_size * dim if is_hnd else dim
        )
        var layout = "HND" if is_hnd else "NHD"
        print("MAP_OF", dtype, layout, PAGES, page_size, heads, dim, flush=True)
        _ = create_tensor_map[16, 128, swizzle, is_k_major=True](ctx, first, shape, strides)


def main() raises:
    var ctx = DeviceContext(api="cpu")
    make_maps[DType.bfloat16, TensorMapSwizzle.SWIZZLE_128B](ctx, 16, 3, 128)
    make_maps[DType.float16, TensorMapSwizzle.SWIZZLE_128B](ctx, 48, 2, 256)
    make_maps[DType.bfloat16, TensorMapSwizzle.SWIZZLE_NONE](ctx, 128, 1, 128)
