"""Attention on Hopper (sm_90a): TMA copies pages, and K and V are the large operand of the tensor cores.

A block of five warps (nine for a float8 cache) serves one split item for one KV head, in tiles of 64 tokens:

    producer, 1 warp     page table -> boxes of K and V -> ring of stages in shared memory
    consumers, 4 warps   S^T [64 tokens, heads] = K Q^T       wgmma, both operands in shared memory
                         P = 2^(score - greatest)             in registers; the warps exchange their greatest
                         O^T [head_dim, heads] += V^T P^T     wgmma, P is stored to shared memory

With a float8 cache another 4 warps have V, and the first ones K alone (`float8_consumers.mojo`).

With the operands this way round, a group of up to 8 (or 16) query heads is padded to 8 (or 16) and not to 64.
`shared_memory.mojo` draws the memory, `pipeline.mojo` explains the ring; `README.md` describes the whole.
"""

from std.sys import size_of
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, lane_id, thread_idx
from max.gpu.host import DeviceContext, FuncAttribute
from max.gpu.host.nvidia.tma import TMADescriptor
from max.gpu.memory import AddressSpace, external_memory

from ....cache.paged_kv_cache import DynamicKVCache
from ....cache.tensor_map import PageBoxes, create_box_descriptor
from ..combine import enqueue_combine
from ..row_page_table import RowPageTable
from ..params import GpuAttentionParams
from ..scheduler import PartialOutputs, Schedule, Workspace, enqueue_schedule, multiprocessors, needs_list
from ..split_kv import NO_ROW, ScheduleBounds
from .consumer import Consumer
from .float8_consumers import attend_keys, attend_values
from .pipeline import BlockSharedMemory
from .producer import produce
from .shared_memory import SharedMemoryMap
from .tiles import CopyBox, ItemTiles
from .wgmma import CONSUMER_THREADS, CONSUMER_WARPS


@always_inline
def block_threads(warpgroups: Int) -> Int:
    """The consumer warpgroups and the producer warp."""
    return warpgroups * CONSUMER_THREADS + 32


# On the host


def attend_hopper[
    dtype: DType, o_dtype: DType, kv_dtype: DType, //
](
    ctx: DeviceContext,
    params: GpuAttentionParams[dtype, o_dtype],
    k: DynamicKVCache[kv_dtype],
    v: DynamicKVCache[kv_dtype],
    batch_invariant: Bool,
) raises:
    """Enqueues attention of every row over the pages of its request, where `hopper_refusal` is empty.

    As `attend_generic`: the host waits for nothing; a page id outside the pool makes its row NaN.
    """
    if params.num_rows == 0 or params.num_heads == 0:
        return
    var dim = Int(params.head_dim)
    if dim == 64:
        launch_hopper_for_group[64](ctx, params, k, v, batch_invariant)
    elif dim == 128:
        launch_hopper_for_group[128](ctx, params, k, v, batch_invariant)
    elif dim == 256:
        launch_hopper_for_group[256](ctx, params, k, v, batch_invariant)
    else:
        raise Error("head_dim must be 64, 128 or 256, not ", dim)


def launch_hopper_for_group[
    dtype: DType, o_dtype: DType, kv_dtype: DType, //, head_dim: Int
](
    ctx: DeviceContext,
    params: GpuAttentionParams[dtype, o_dtype],
    k: DynamicKVCache[kv_dtype],
    v: DynamicKVCache[kv_dtype],
    batch_invariant: Bool,
) raises:
    if Int(params.num_heads) <= 8 * k.num_heads():
        launch_hopper[head_dim, 8](ctx, params, k, v, batch_invariant)
    else:
        launch_hopper[head_dim, 16](ctx, params, k, v, batch_invariant)


def launch_hopper[
    dtype: DType, o_dtype: DType, kv_dtype: DType, //, head_dim: Int, heads: Int
](
    ctx: DeviceContext,
    params: GpuAttentionParams[dtype, o_dtype],
    k: DynamicKVCache[kv_dtype],
    v: DynamicKVCache[kv_dtype],
    batch_invariant: Bool,
) raises:
    comptime Map = SharedMemoryMap[kv_dtype, head_dim, heads]
    Map.check()
    var kv_heads = k.num_heads()
    var box = CopyBox.of_page(k.slots())
    var slots = Int(box.slots())
    var k_boxes = PageBoxes.of(Int(k.blocks.ptr), k.shape(), k.strides(), slots, size_of[kv_dtype]())
    var v_boxes = PageBoxes.of(Int(v.blocks.ptr), v.shape(), v.strides(), slots, size_of[kv_dtype]())
    var k_map = create_box_descriptor(ctx, k.blocks.ptr, k_boxes)
    var v_map = create_box_descriptor(ctx, v.blocks.ptr, v_boxes)
    var bounds = ScheduleBounds.of(
        Int(params.num_rows), Int(params.capacity), kv_heads, multiprocessors(ctx), batch_invariant
    )
    var workspace = Workspace(ctx, bounds, Int(params.num_heads), head_dim, needs_list(Int(params.num_rows)))
    var schedule = workspace.schedule()
    var partials = workspace.partials()
    enqueue_schedule(ctx, params, schedule)
    comptime kernel = attend_item_on_hopper[dtype, o_dtype, kv_dtype, head_dim, heads]
    ctx.enqueue_function[kernel](
        k_map,
        v_map,
        params,
        k,
        schedule,
        partials,
        box.bits,
        Int32(k_boxes.head_step),
        Int32(v_boxes.head_step),
        # The KV heads of an item are adjacent blocks: in the NHD layout they read the same range of memory.
        grid_dim=bounds.items * kv_heads,
        block_dim=block_threads(Map.WARPGROUPS),
        shared_mem_bytes=Map.BYTES,
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(Map.BYTES)),
        attributes=schedule.attributes_of_attention(),
    )
    enqueue_combine(ctx, params, schedule, partials)
    _ = workspace^


# On the device


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(block_threads(SharedMemoryMap[kv_dtype, head_dim, heads].WARPGROUPS))
    ),
    `nvvm.minctasm`=SIMDLength(SharedMemoryMap[kv_dtype, head_dim, heads].BLOCKS_PER_SM),
)
@__llvm_arg_metadata(k_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(v_map, `nvvm.grid_constant`)
def attend_item_on_hopper[
    dtype: DType, o_dtype: DType, kv_dtype: DType, head_dim: Int, heads: Int
](
    k_map: TMADescriptor,
    v_map: TMADescriptor,
    params: GpuAttentionParams[dtype, o_dtype],
    cache: DynamicKVCache[kv_dtype],
    schedule: Schedule,
    partials: PartialOutputs,
    box_bits: Int32,
    k_head_step: Int32,
    v_head_step: Int32,
):
    """One block: item `block_idx.x // kv_heads` of the schedule for KV head `block_idx.x % kv_heads`.

    `cache` is K's view, for the page table and the sizes, which V shares; the steps are those of `PageBoxes`.
    """
    comptime Map = SharedMemoryMap[kv_dtype, head_dim, heads]
    comptime consumers = Map.WARPGROUPS * CONSUMER_THREADS
    var memory = external_memory[UInt8, address_space=AddressSpace.SHARED, alignment=1024]()
    var shared = BlockSharedMemory[kv_dtype, head_dim, heads](memory)
    var ring = shared.ring()
    if thread_idx.x == 0:
        ring.init(CONSUMER_WARPS)
        comptime if Map.WARPGROUPS > 1:
            shared.buffers().init(CONSUMER_WARPS, CONSUMER_WARPS)
        shared.status()[] = 0
    # What is above overlaps with the kernel that makes the schedule.
    schedule.begin_attention()
    var kv_heads = UInt32(cache.num_heads())
    var index = UInt32(block_idx.x) // kv_heads
    var kv_head = Int32(UInt32(block_idx.x) - index * kv_heads)
    if thread_idx.x >= consumers:
        # For all: the search for it would take registers that the consumers have not.
        var found = schedule.find_item(params, Int(index))
        if lane_id() == 0:
            shared.item()[] = found
    barrier()
    var item = shared.item()[]
    if item.row == NO_ROW:
        return
    var box = CopyBox(box_bits)
    var tiles = ItemTiles.of(item.begin, item.end, box)
    if thread_idx.x >= consumers:
        var pages = RowPageTable(item.row, params, cache)
        produce(k_map, v_map, shared, ring, tiles, pages, box, kv_head * k_head_step, kv_head * v_head_step)
    else:
        var consumer = Consumer[dtype, o_dtype, kv_dtype, head_dim, heads](
            shared, params, item, kv_head, Int32(kv_heads)
        )
        comptime if Map.WARPGROUPS > 1:
            if thread_idx.x < CONSUMER_THREADS:
                attend_keys(consumer, tiles)
            else:
                attend_values(consumer, tiles, partials)
        else:
            consumer.load_query()
            for tile in range(tiles.count):
                consumer.score_tile(ring, tiles, tile)
                consumer.add_values(ring, tiles, tile)
            consumer.finish(partials)
