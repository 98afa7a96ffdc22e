"""Decode attention for Hopper (sm_90a): pages come by TMA, the tensor cores take keys and values as the large operand.

A block of five warps serves one work item for one KV head, in tiles of 64 tokens:

    producer, 1 warp     page table -> boxes of K and V -> ring of slots in shared memory
    consumers, 4 warps   S^T [64 tokens, heads] = K Q^T       wgmma, both operands in shared memory
                         P = 2^(score - greatest)             in registers; each warp tells the others its greatest
                         O^T [head_dim, heads] += V^T P^T     wgmma, P comes through shared memory

With the operands this way round, a group of up to 8 (or 16) query heads is padded to 8 (or 16) and not to 64.
`smem.mojo` draws the memory, `pipeline.mojo` explains the ring, `hopper_tiles.mojo` is the consumers. Compiled for sm_90a, not yet run.
"""

from std.sys import size_of
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, lane_id, thread_idx
from max.gpu.host import DeviceContext, FuncAttribute
from max.gpu.host.info import H100
from max.gpu.host.nvidia.tma import TMADescriptor
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.primitives import warp

from ....cache.gpu_loads import DeviceCache
from ....cache.tensor_map import copy_box
from ..combine import enqueue_combine
from ..row_page_table import Pages, Place
from ..params import DecodeRows
from ..scheduler import Partials, WorkList, Workspace, enqueue_schedule, multiprocessors
from ..split_kv import NO_ROW, WorkBounds
from .consumer import Consumer
from .pipeline import Ring, Shared, Slot
from .shared_memory import ATOM, Box, CONSUMERS, CONSUMER_WARPS, LEAST_BOX_BITS, SharedMemory, Tiles

comptime BLOCK = CONSUMERS + 32
"""Threads: the warpgroup that computes, and the warp that copies."""


# The host's part

comptime ON_HOPPER = DeviceContext.default_device_info.compute == H100.compute
"""Whether the program is compiled for a GPU that this kernel runs on."""


def hopper_takes[dtype: DType, kv_dtype: DType]() -> Bool:
    """Whether the kernel exists for such a query and cache: only then can it be instantiated."""
    comptime is_16_bit = dtype == DType.bfloat16 or dtype == DType.float16
    comptime is_float8 = kv_dtype == DType.float8_e4m3fn or kv_dtype == DType.float8_e5m2
    return is_16_bit and (kv_dtype == dtype or is_float8)


def hopper_refusal[
    dtype: DType, kv_dtype: DType, //
](rows: DecodeRows[dtype], k: DeviceCache[kv_dtype], v: DeviceCache[kv_dtype]) -> String:
    """Why this kernel does not serve a call, from shapes, strides and dtypes; empty where it does."""
    if not hopper_takes[dtype, kv_dtype]():
        return String(
            "it takes bfloat16 or float16 with a cache of the same or float8, not ", dtype, " with ", kv_dtype
        )
    var dim = Int(rows.head_dim)
    if dim != 64 and dim != 128 and dim != 256:
        return String("it takes head_dim 64, 128 and 256, not ", dim)
    var group = Int(rows.num_heads) // max(1, k.num_heads())
    if group > 16:
        return String("it takes up to 16 query heads a KV head, not ", group)
    var page_size = k.slots()
    if page_size < 1 or Box.of_page(page_size).bits < LEAST_BOX_BITS:
        return String("it copies 8 slots of a page and more at once; page_size ", page_size, " is no multiple of 8")
    return String(map_refusal("k_blocks", k), map_refusal("v_blocks", v))


def map_refusal[kv_dtype: DType, //](what: StaticString, cache: DeviceCache[kv_dtype]) -> String:
    """What the copy engine asks of a cache: `check_page_map`, as a reason."""
    if cache.num_pages() < 1 or cache.num_heads() < 1:
        return String(what, " has no page or no head")
    var at = cache.strides()
    comptime bytes = size_of[kv_dtype]()
    if Int(cache.blocks.ptr) % 16 != 0:
        return String(what, " begins at an address that is no multiple of 16 bytes")
    for elements in [at.page, at.slot, at.head]:
        if elements * bytes % 16 != 0:
            return String(what, " has a stride of ", elements * bytes, " bytes, no multiple of 16")
        if elements * bytes >= 1 << 40:
            return String(what, " has a stride of ", elements * bytes, " bytes, which takes more than 40 bits")
    return ""


def attend_hopper[
    dtype: DType, kv_dtype: DType, //
](
    ctx: DeviceContext,
    rows: DecodeRows[dtype],
    k: DeviceCache[kv_dtype],
    v: DeviceCache[kv_dtype],
    batch_invariant: Bool,
) raises:
    """Enqueues attention of every row over the pages of its request, where `hopper_refusal` has nothing to say.

    Like `attend_gpu`: the host waits for nothing; a page id outside the pool makes its row NaN.
    """
    if rows.num_rows == 0 or rows.num_heads == 0:
        return
    var dim = Int(rows.head_dim)
    if dim == 64:
        launch_for_group[64](ctx, rows, k, v, batch_invariant)
    elif dim == 128:
        launch_for_group[128](ctx, rows, k, v, batch_invariant)
    elif dim == 256:
        launch_for_group[256](ctx, rows, k, v, batch_invariant)
    else:
        raise Error("head_dim must be 64, 128 or 256, not ", dim)


def launch_for_group[
    dtype: DType, kv_dtype: DType, //, head_dim: Int
](
    ctx: DeviceContext,
    rows: DecodeRows[dtype],
    k: DeviceCache[kv_dtype],
    v: DeviceCache[kv_dtype],
    batch_invariant: Bool,
) raises:
    if Int(rows.num_heads) <= 8 * k.num_heads():
        launch[head_dim, 8](ctx, rows, k, v, batch_invariant)
    else:
        launch[head_dim, 16](ctx, rows, k, v, batch_invariant)


def launch[
    dtype: DType, kv_dtype: DType, //, head_dim: Int, heads: Int
](
    ctx: DeviceContext,
    rows: DecodeRows[dtype],
    k: DeviceCache[kv_dtype],
    v: DeviceCache[kv_dtype],
    batch_invariant: Bool,
) raises:
    comptime Map = SharedMemory[kv_dtype, head_dim, heads]
    Map.check()
    var kv_heads = k.num_heads()
    var box = Box.of_page(k.slots())
    var k_map = k.create_tma_boxes(ctx, Int(box.slots()))
    var v_map = v.create_tma_boxes(ctx, Int(box.slots()))
    var bounds = WorkBounds.of(Int(rows.num_rows), Int(rows.capacity), kv_heads, multiprocessors(ctx), batch_invariant)
    var workspace = Workspace(ctx, bounds, Int(rows.num_heads), head_dim)
    var work = workspace.work()
    var partials = workspace.partials()
    enqueue_schedule(ctx, rows, work)
    comptime kernel = attend_item[dtype, kv_dtype, head_dim, heads]
    ctx.enqueue_function[kernel](
        k_map,
        v_map,
        rows,
        k,
        work,
        partials,
        box.bits,
        # The KV heads of an item next to each other: in the NHD layout they read the same stretch of memory.
        grid_dim=bounds.items * kv_heads,
        block_dim=BLOCK,
        shared_mem_bytes=Map.BYTES,
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(Map.BYTES)),
    )
    enqueue_combine(ctx, rows, work, partials)
    _ = workspace^


# The device's part


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK)),
    `nvvm.minctasm`=SIMDLength(SharedMemory[kv_dtype, head_dim, heads].BLOCKS_PER_SM),
)
@__llvm_arg_metadata(k_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(v_map, `nvvm.grid_constant`)
def attend_item[
    dtype: DType, kv_dtype: DType, head_dim: Int, heads: Int
](
    k_map: TMADescriptor,
    v_map: TMADescriptor,
    rows: DecodeRows[dtype],
    cache: DeviceCache[kv_dtype],
    work: WorkList,
    partials: Partials,
    box_bits: Int32,
):
    """One block: item `block_idx.x // kv_heads` of the schedule for KV head `block_idx.x % kv_heads`.

    `cache` is K's view, for the page table and the sizes, which V shares.
    """
    var kv_heads = UInt32(cache.num_heads())
    var index = UInt32(block_idx.x) // kv_heads
    var kv_head = Int32(UInt32(block_idx.x) - index * kv_heads)
    var item = work.item(Int(index))
    if item.row == NO_ROW:
        return
    var memory = external_memory[UInt8, address_space=AddressSpace.SHARED, alignment=1024]()
    var shared = Shared[kv_dtype, head_dim, heads](memory)
    var ring = shared.ring()
    if thread_idx.x == 0:
        ring.init(CONSUMER_WARPS)
        shared.status()[] = 0
    barrier()

    var box = Box(box_bits)
    var tiles = Tiles.of(item.begin, item.end, box)
    if thread_idx.x >= CONSUMERS:
        produce(k_map, v_map, shared, ring, tiles, Pages(item.row, rows, cache), box, kv_head)
    else:
        var consumer = Consumer[dtype, kv_dtype, head_dim, heads](shared, rows, item, kv_head, Int32(kv_heads))
        consumer.load_query()
        for tile in range(tiles.count):
            consumer.score(ring, tiles, tile)
            consumer.weigh(ring, tiles, tile)
        consumer.finish(partials)


# Producer


@always_inline
def produce[
    kv_dtype: DType, head_dim: Int, heads: Int, //
](
    k_map: TMADescriptor,
    v_map: TMADescriptor,
    shared: Shared[kv_dtype, head_dim, heads],
    ring: Ring[SharedMemory[kv_dtype, head_dim, heads].SLOTS],
    tiles: Tiles,
    pages: Pages,
    box: Box,
    kv_head: Int32,
):
    """By one warp: copies K and V of every tile into the ring, K of tile t as filling 2 t, V as 2 t + 1.

    Lane i looks up the page of the tile's i-th box, one tile ahead; lane 0 starts the copies.
    """
    var lane = Int32(lane_id())
    var places = find_boxes(tiles, 0, pages, box, lane)
    for tile in range(tiles.count):
        var place = places
        if place.page < 0:
            # The copy engine fills a page outside the map with zeros; the row becomes NaN.
            shared.status()[] = 1
        places = find_boxes(tiles, tile + 1, pages, box, lane)
        var boxes = tiles.wanted(tile).boxes(box)
        var bytes = (boxes << box.bits) * Int32(head_dim * size_of[kv_dtype]())
        with ring.produce(2 * tile, bytes) as slot:
            copy_boxes(k_map, shared, slot, place, boxes, box, kv_head)
        with ring.produce(2 * tile + 1, bytes) as slot:
            copy_boxes(v_map, shared, slot, place, boxes, box, kv_head)


@always_inline
def find_boxes(tiles: Tiles, tile: Int32, pages: Pages, box: Box, lane: Int32) -> Place:
    """Where the tile's `lane`-th box lies; (0, 0) where the tile does not need it."""
    if tile < tiles.count:
        if lane < tiles.wanted(tile).boxes(box):
            # The box's first token may lie before `begin`: in the same page, which the row has.
            return pages.place(tiles.token(tile) + (lane << box.bits))
    return Place(0, 0)


@always_inline
def copy_boxes[
    kv_dtype: DType, head_dim: Int, heads: Int, //
](
    map: TMADescriptor,
    shared: Shared[kv_dtype, head_dim, heads],
    slot: Slot,
    place: Place,
    boxes: Int32,
    box: Box,
    kv_head: Int32,
):
    """Starts the copies of a tile's boxes; lane i knows the place of box i."""
    comptime Map = SharedMemory[kv_dtype, head_dim, heads]
    for i in range(boxes):
        var page = warp.shuffle_idx(place.page, UInt32(i))
        var first_slot = warp.shuffle_idx(place.slot, UInt32(i))
        if lane_id() == 0:
            comptime for copy in range(1 if Map.WIDENED else Map.ATOMS):
                copy_box(
                    map,
                    shared.at[UInt8](slot.index * Map.SLOT_BYTES + Map.box(Int(i << box.bits), copy)),
                    slot.full,
                    Int(page),
                    Int(first_slot),
                    Int(kv_head),
                    copy * ATOM,
                )
