"""The tensor maps of a paged cache, through which Hopper's TMA unit copies boxes of a page to shared memory.

`PageTensorMap`, for kernels of MAX's kind, has four dimensions, innermost first: (dim, head, slot, page). A box is some
slots of one page and one head, and as many dims as one swizzle atom holds; in shared memory it is `[slot, dim]`, one row
an atom wide. Since slot is a dimension of its own, a box that reaches past its page is filled with zeros, not with a
neighbour.

`PageBoxes`, for the kernels of this package, has five, so that one copy fetches whole heads of up to 64 slots:
(dim of an atom, slot of 8, atom of a head, group of 8 slots, page). In shared memory a box is `[slots / 8, D / 64, 8, 64]`.
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
comptime GROUP_SLOTS = 8
"""Slots whose rows of an atom make one period of the swizzle: boxes of `PageBoxes` have whole groups."""
comptime ATOM_BYTES = 128
"""A row of a box of 16-bit elements: the widest swizzle."""
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


@fieldwise_init
struct PageBoxes(TrivialRegisterPassable):
    """The five dimensions of a map whose box holds a head of some slots of a page, innermost first; strides in
    elements.

    | | extent | stride | box, 16-bit | box, 8-bit |
    |---|---|---|---|---|
    | dim | 64; D | 1 | 64: one swizzle atom | D, not swizzled |
    | slot of a group | 8 | slot | 8: the period of the swizzle | 8 |
    | atom; head | | 64; head | D / 64 | 1 |
    | group of 8 slots | page / 8 | 8 slots | slots / 8 | slots / 8 |
    | page | pages | page | 1 | 1 |

    The third counts atoms of all heads: atom `a` of head `h` is `h * head_step + a`, which takes a head stride of whole
    atoms, adjacent heads or not. Its extent may pass the stride of the dimensions after it (heads outside of slots).
    The hardware takes any strides that are multiples of 16 bytes, in any order.
    """

    var shape: IndexList[5]
    """Extents, outermost first, as of all lists here."""
    var strides: IndexList[5]
    var box: IndexList[5]
    var head_step: Int
    """From one head to the next in the third dimension."""

    @staticmethod
    def of(address: Int, shape: IndexList[4], strides: PageStrides, slots: Int, element_bytes: Int) raises -> Self:
        """For a view `[page, slot, head, dim]` at `address`, boxes of `slots` and elements of 1 or 2 bytes.

        Raises:
            Where the hardware does not take it, the slots are no multiple of 8 that divides the page, or the heads of
            16-bit elements lie no whole atoms apart.
        """
        check_tensor_map(address, shape, strides, element_bytes)
        var is_swizzled = element_bytes > 1
        var atom = ATOM_BYTES // element_bytes if is_swizzled else shape[3]
        var atoms = shape[3] // atom
        var stride = atom if is_swizzled else strides.head
        if shape[2] > 1 and strides.head % stride != 0:
            raise Error(t"create_tma_tile: the head stride of {strides.head} elements is no multiple of {atom}")
        if slots % GROUP_SLOTS != 0 or shape[1] % slots != 0:
            raise Error(t"create_tma_tile: boxes of {slots} slots do not fill pages of {shape[1]}")
        if slots > MAX_BOX_SIDE or atom > MAX_BOX_SIDE:
            raise Error(t"create_tma_tile: a box of {slots} slots and {atom} dims has over {MAX_BOX_SIDE} on a side")
        var head_step = strides.head // stride
        return Self(
            IndexList[5](shape[0], shape[1] // GROUP_SLOTS, (shape[2] - 1) * head_step + atoms, GROUP_SLOTS, atom),
            IndexList[5](strides.page, GROUP_SLOTS * strides.slot, stride, strides.slot, 1),
            IndexList[5](1, slots // GROUP_SLOTS, atoms, GROUP_SLOTS, atom),
            head_step,
        )


def create_box_descriptor[
    dtype: DType, //
](ctx: DeviceContext, first: Pointer[Scalar[dtype], MutUntrackedOrigin], boxes: PageBoxes) raises -> TMADescriptor:
    """The map of a view whose element 0 is `first`; its boxes are known at run time, so that one kernel serves all.

    Raises:
        Where the driver refuses it.
    """
    comptime swizzle = TensorMapSwizzle.SWIZZLE_NONE if size_of[dtype]() == 1 else TensorMapSwizzle.SWIZZLE_128B
    # Copied as bits: tensor maps have no float8.
    comptime bits_dtype = DType.uint8 if size_of[dtype]() == 1 else dtype
    return create_tma_descriptor[bits_dtype, 5, swizzle, L2_PROMOTION](
        # The map takes the address alone from the buffer.
        DeviceBuffer[bits_dtype](ctx, first.unsafe_bitcast[Scalar[bits_dtype]](), 1, owning=False),
        boxes.shape,
        boxes.strides,
        boxes.box,
    )


@always_inline
def copy_box(
    map: TMADescriptor,
    destination: Pointer[UInt8, MutUntrackedOrigin, address_space=AddressSpace.SHARED],
    barrier: Pointer[SharedMemBarrier, MutUntrackedOrigin, address_space=AddressSpace.SHARED],
    page: Int32,
    first_slot: Int32,
    first_atom: Int32,
):
    """Starts the copy of the box that begins at a slot, a multiple of 8, and at a head's first atom.

    Lanes of a warp may each start one. The map must be a constant parameter of the kernel.
    """
    cp_async_bulk_tensor_shared_cluster_global(
        destination,
        Pointer(to=map).unsafe_bitcast[NoneType](),
        barrier,
        # A shift: slots are not negative.
        IndexList[5](0, 0, Int(first_atom), Int(first_slot >> 3), Int(page)),
    )
