"""Attention on Hopper (sm_90a) of calls with many rows a request: prefill, and decode of several new tokens.

A block of twelve warps serves items of tiles of rows, each for one KV head:

    producer, 1 warp          page table -> boxes of K and V -> ring of stages in shared memory
    consumers, 2 warpgroups   S [64 heads of rows, 64 tokens] = Q K^T     wgmma, both operands in shared memory
                              P = 2^(score - greatest)                    in registers
                              O [64 heads of rows, head_dim] += P V       wgmma, P in registers

`README.md` describes the whole. Compiled for sm_90a, not yet run on a GPU.
"""

from std.sys import size_of
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceContext, FuncAttribute
from max.gpu.host.nvidia.tma import TMADescriptor
from max.gpu.intrinsics import warpgroup_reg_alloc, warpgroup_reg_dealloc
from max.gpu.memory import AddressSpace, external_memory

from ....cache.paged_kv_cache import DynamicKVCache
from ....cache.tensor_map import PageBoxes, create_box_descriptor
from ..combine import enqueue_combine
from ..params import GpuAttentionParams
from ..row_page_table import RowPageTable
from ..scheduler import PartialOutputs, Schedule, Workspace, multiprocessors
from ..hopper.tiles import CopyBox, ItemTiles
from ..hopper.wgmma import CONSUMER_THREADS, CONSUMER_WARPS
from .consumer import RowsConsumer
from .head_rows import HeadRows
from .producer import produce_tiles
from .register_operand import pinned
from ..row_tiles import TileBounds, WARPGROUPS
from ..schedule_tiles import BlockWork, enqueue_tile_schedule
from .shared_memory import RowsMemory, RowsSharedMemory

comptime CONSUMERS = WARPGROUPS * CONSUMER_THREADS
comptime BLOCK_THREADS = CONSUMERS + CONSUMER_THREADS
"""The producer warp is in a warpgroup of its own, three of whose warps are idle: registers are handed over between
warpgroups."""
comptime PRODUCER_REGISTERS = 56
comptime CONSUMER_REGISTERS = 224


# On the host


def attend_many_rows_on_hopper[
    dtype: DType, o_dtype: DType, //
](
    ctx: DeviceContext,
    params: GpuAttentionParams[dtype, o_dtype],
    k: DynamicKVCache[dtype],
    v: DynamicKVCache[dtype],
) raises:
    """Enqueues attention of every row over the pages of its request, where `many_rows_refusal` is empty.

    As `attend_hopper`: the host waits for nothing. A row that sees a token in a page outside the pool is NaN.
    """
    if params.num_rows == 0 or params.num_heads == 0:
        return
    var dim = Int(params.head_dim)
    if dim == 64:
        launch_many_rows[64](ctx, params, k, v)
    elif dim == 128:
        launch_many_rows[128](ctx, params, k, v)
    else:
        raise Error("head_dim must be 64 or 128, not ", dim)


def launch_many_rows[
    dtype: DType, o_dtype: DType, //, head_dim: Int
](
    ctx: DeviceContext,
    params: GpuAttentionParams[dtype, o_dtype],
    k: DynamicKVCache[dtype],
    v: DynamicKVCache[dtype],
) raises:
    comptime Map = RowsSharedMemory[dtype, head_dim]
    Map.check()
    var kv_heads = k.num_heads()
    var box = CopyBox.of_page(k.slots())
    var slots = Int(box.slots())
    var k_boxes = PageBoxes.of(Int(k.blocks.ptr), k.shape(), k.strides(), slots, size_of[dtype]())
    var v_boxes = PageBoxes.of(Int(v.blocks.ptr), v.shape(), v.strides(), slots, size_of[dtype]())
    var k_map = create_box_descriptor(ctx, k.blocks.ptr, k_boxes)
    var v_map = create_box_descriptor(ctx, v.blocks.ptr, v_boxes)
    var bounds = TileBounds.of(
        Int(params.num_rows),
        Int(params.batch),
        Int(params.num_heads) // kv_heads,
        kv_heads,
        multiprocessors(ctx),
    )
    var workspace = Workspace(ctx, bounds.schedule, Int(params.num_heads), head_dim)
    var schedule = workspace.schedule()
    var partials = workspace.partials()
    enqueue_tile_schedule(ctx, params, schedule, bounds.most_rows)
    comptime kernel = attend_tiles_on_hopper[dtype, o_dtype, head_dim]
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
        grid_dim=bounds.usual_items * kv_heads,
        block_dim=BLOCK_THREADS,
        shared_mem_bytes=Map.BYTES,
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(Map.BYTES)),
        attributes=schedule.attributes_of_attention(),
    )
    enqueue_combine(ctx, params, schedule, partials)
    _ = workspace^


# On the device


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK_THREADS)),
    `nvvm.minctasm`=SIMDLength(1),
)
@__llvm_arg_metadata(k_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(v_map, `nvvm.grid_constant`)
def attend_tiles_on_hopper[
    dtype: DType, o_dtype: DType, head_dim: Int
](
    k_map: TMADescriptor,
    v_map: TMADescriptor,
    params: GpuAttentionParams[dtype, o_dtype],
    cache: DynamicKVCache[dtype],
    schedule: Schedule,
    partials: PartialOutputs,
    box_bits: Int32,
    k_head_step: Int32,
    v_head_step: Int32,
):
    """One block: from the `block_idx.x`-th pair of an item and a KV head on, every `grid_dim.x`-th.

    `cache` is K's view, for the page table and the sizes, which V shares; the steps are those of `PageBoxes`.
    """
    var memory = external_memory[UInt8, address_space=AddressSpace.SHARED, alignment=1024]()
    var shared = RowsMemory[dtype, head_dim](memory)
    if thread_idx.x == 0:
        shared.ring().init(WARPGROUPS * CONSUMER_WARPS)
    barrier()

    # What is above overlaps with the schedule's kernel.
    schedule.begin_attention()
    var box = CopyBox(box_bits)
    var kv_heads = Int32(cache.num_heads())
    var pairs = schedule.count[] * kv_heads
    var tiles_before = Int32(0)
    if thread_idx.x >= CONSUMERS:
        warpgroup_reg_dealloc[PRODUCER_REGISTERS]()
        if thread_idx.x < CONSUMERS + 32:
            for index in range(Int32(block_idx.x), pairs, Int32(grid_dim.x)):
                var work = BlockWork.of(schedule, kv_heads, index)
                var tiles = ItemTiles.of(work.item.begin, work.item.end, box)
                var pages = RowPageTable(work.item.first_row, params, cache)
                var k_atom = work.kv_head * k_head_step
                var v_atom = work.kv_head * v_head_step
                produce_tiles(k_map, v_map, shared, tiles_before, tiles, pages, box, k_atom, v_atom)
                tiles_before += tiles.count
    else:
        warpgroup_reg_alloc[CONSUMER_REGISTERS]()
        for index in range(Int32(block_idx.x), pairs, Int32(grid_dim.x)):
            var work = BlockWork.of(schedule, kv_heads, index)
            var tiles = ItemTiles.of(work.item.begin, work.item.end, box)
            var rows = HeadRows[dtype, o_dtype].of(params, work, kv_heads)
            rows.load(shared)
            var consumer = RowsConsumer[dtype, o_dtype, head_dim](shared, rows)
            consumer.attend(tiles_before, tiles, box)
            # Read again: kept all along, the item would take registers that the sums need.
            work = BlockWork.of(schedule, kv_heads, Int32(pinned(Int(index))))
            consumer.finish(HeadRows[dtype, o_dtype].of(params, work, kv_heads), partials)
            tiles_before += tiles.count
