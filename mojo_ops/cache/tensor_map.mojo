"""The tensor map of a paged cache, through which Hopper's TMA unit copies boxes of a page to shared memory.

The map has four dimensions, innermost first: (dim, head, slot, page). A box is some slots of one page and one
head, and as many dims as one swizzle atom holds; in shared memory it is `[slot, dim]`, one row an atom wide.
Since slot is a dimension of its own, a box that reaches past its page is filled with zeros, not with a neighbour.
"""

from std.sys import size_of
from std.utils import IndexList
from layout import ComptimeInt, Coord, UNKNOWN_VALUE
from layout.tma_async import SharedMemBarrier, TMATensorTile
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.host.nvidia.tma import TMADescriptor, TensorMapL2Promotion, TensorMapSwizzle, create_tma_descriptor
from max.gpu.memory import AddressSpace, cp_async_bulk_tensor_shared_cluster_global

from .strides import PageStrides

comptime MAP_ALIGNMENT = 16
"""Bytes: the hardware takes only addresses and strides that are multiples of this."""
comptime MAX_BOX_SIDE = 256
"""The most slots, heads or elements along one side of a box."""
comptime L2_PROMOTION = TensorMapL2Promotion.L2_128B


def box_slots(page_size: Int, tile_m: Int) -> Int:
    """Slots in a box: a tile's, but no more than a page has; a tile's where the page size is unknown."""
    return tile_m if page_size == UNKNOWN_VALUE else min(page_size, tile_m)


def atom_size[dtype: DType, swizzle_mode: TensorMapSwizzle]() -> Int:
    """Elements in a row of a box: 64 of bfloat16 for SWIZZLE_128B, 8 for SWIZZLE_NONE."""
    return swizzle_mode.bytes() // size_of[dtype]()


comptime PageTensorMap[
    dtype: DType, slots: Int, dims: Int, swizzle_mode: TensorMapSwizzle, is_k_major: Bool
] = TMATensorTile[
    dtype,
    # [page, slot, head, dim]
    tile_shape=Coord(ComptimeInt[1](), ComptimeInt[slots](), ComptimeInt[1](), ComptimeInt[dims]()),
    desc_shape=Coord(
        ComptimeInt[1](), ComptimeInt[slots](), ComptimeInt[1](), ComptimeInt[atom_size[dtype, swizzle_mode]()]()
    ),
    is_k_major=is_k_major,
]
"""A map whose `async_copy_4d` fetches `slots` slots of `dims` dims: `[dims / atom, slots, atom]` in shared memory."""


def check_tensor_map(address: Int, shape: IndexList[4], strides: PageStrides, element_bytes: Int) raises:
    """Refuses what the hardware does not support of a view `[page, slot, head, dim]` that begins at `address`."""
    for axis in range(4):
        if shape[axis] < 1:
            raise Error("create_tma_tile: no page, slot, head or dim to copy in a cache of shape ", shape)
    if address % MAP_ALIGNMENT != 0:
        raise Error("create_tma_tile: the address ", address, " is no multiple of ", MAP_ALIGNMENT, " bytes")
    check_map_stride("page", strides.page * element_bytes)
    check_map_stride("slot", strides.slot * element_bytes)
    check_map_stride("head", strides.head * element_bytes)


def check_map_stride(what: StaticString, stride: Int) raises:
    if stride % MAP_ALIGNMENT != 0:
        raise Error(t"create_tma_tile: the {what} stride of {stride} bytes is no multiple of {MAP_ALIGNMENT} bytes")


def create_tensor_map[
    dtype: DType, //, slots: Int, dims: Int, swizzle_mode: TensorMapSwizzle, *, is_k_major: Bool
](
    ctx: DeviceContext,
    first: Pointer[Scalar[dtype], MutUntrackedOrigin],
    shape: IndexList[4],
    strides: PageStrides,
) raises -> PageTensorMap[dtype, slots, dims, swizzle_mode, is_k_major]:
    """The map of a view `[page, slot, head, dim]` whose element 0 is `first` (`strides.start` is ignored)."""
    comptime atom = atom_size[dtype, swizzle_mode]()
    comptime assert slots >= 1 and slots <= MAX_BOX_SIDE, "a box has 1 to 256 slots"
    comptime assert dims % atom == 0, "the dims of a tile are whole swizzle atoms"
    check_tensor_map(Int(first), shape, strides, size_of[dtype]())
    return create_tma_descriptor[dtype, 4, swizzle_mode, L2_PROMOTION](
        # The map takes the address alone from the buffer.
        DeviceBuffer[dtype](ctx, first, 1, owning=False),
        shape,
        IndexList[4](strides.page, strides.slot, strides.head, 1),
        IndexList[4](1, slots, 1, atom),
    )


def create_box_descriptor[
    dtype: DType, //
](
    ctx: DeviceContext,
    first: Pointer[Scalar[dtype], MutUntrackedOrigin],
    shape: IndexList[4],
    strides: PageStrides,
    slots: Int,
) raises -> TMADescriptor:
    """The map of a view `[page, slot, head, dim]` with a box known at run time: one kernel serves every page size.

    `slots` divides the page, so that no box reaches past one. For 16-bit elements a box has one swizzle atom of dims,
    `SWIZZLE_128B`; for 8-bit ones all dims, not swizzled. Raises as `create_tensor_map`.
    """
    check_tensor_map(Int(first), shape, strides, size_of[dtype]())
    comptime swizzle = TensorMapSwizzle.SWIZZLE_NONE if size_of[dtype]() == 1 else TensorMapSwizzle.SWIZZLE_128B
    var dims = shape[3] if size_of[dtype]() == 1 else atom_size[dtype, swizzle]()
    # Copied as bits: tensor maps have no float8.
    comptime bits_dtype = DType.uint8 if size_of[dtype]() == 1 else dtype
    return create_tma_descriptor[bits_dtype, 4, swizzle, L2_PROMOTION](
        DeviceBuffer[bits_dtype](ctx, first.unsafe_bitcast[Scalar[bits_dtype]](), 1, owning=False),
        shape,
        IndexList[4](strides.page, strides.slot, strides.head, 1),
        IndexList[4](1, slots, 1, dims),
    )


@always_inline
def copy_box(
    map: TMADescriptor,
    destination: Pointer[UInt8, MutUntrackedOrigin, address_space=AddressSpace.SHARED],
    barrier: Pointer[SharedMemBarrier, MutUntrackedOrigin, address_space=AddressSpace.SHARED],
    page: Int,
    slot: Int,
    head: Int,
    dim: Int,
):
    """Starts the copy of one box; by one thread. The map must be a constant parameter of the kernel."""
    cp_async_bulk_tensor_shared_cluster_global(
        destination,
        Pointer(to=map).unsafe_bitcast[NoneType](),
        barrier,
        IndexList[4](dim, head, slot, page),
    )
