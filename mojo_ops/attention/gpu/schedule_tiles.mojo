"""The schedule of a call with many rows a request, made on the device: rows -> tiles -> items."""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from max.gpu import barrier, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from max.gpu.primitives import block

from .dependent_launch import admit_next_launch
from .params import GpuAttentionParams
from .scheduler import SCHEDULE_THREADS, Schedule
from .split_kv import NO_ROW, RowPartition, SplitRow, max_item_tiles
from .row_tiles import TileItem, TileWalk, begins_run


@always_inline
def tile_items(schedule: Schedule) -> Pointer[TileItem, MutUntrackedOrigin]:
    """`[items]`: the list of this schedule, of which `schedule.count` are filled."""
    return schedule.items.unsafe_bitcast[TileItem]()


@fieldwise_init
struct BlockWork(TrivialRegisterPassable):
    """An item and a KV head: what a block serves at one time."""

    var item: TileItem
    var kv_head: Int32

    @staticmethod
    @always_inline
    def of(schedule: Schedule, kv_heads: Int32, index: Int32) -> Self:
        """The `index`-th pair of the call; by whole warps.

        The list is walked from its end, where the items of a prefill are longest; KV heads of an item are adjacent.
        """
        var before = UInt32(index) // UInt32(kv_heads)
        var at = Int(schedule.count[]) - 1 - Int(before)
        return Self(tile_items(schedule)[unsafe_offset=at], index - Int32(before) * kv_heads)


def enqueue_tile_schedule[
    dtype: DType, o_dtype: DType, //
](ctx: DeviceContext, params: GpuAttentionParams[dtype, o_dtype], schedule: Schedule, most_rows: Int) raises:
    """Fills `schedule` from requests and lengths as the device finds them."""
    comptime kernel = schedule_row_tiles[dtype, o_dtype]
    ctx.enqueue_function[kernel](params, schedule, Int32(most_rows), grid_dim=1, block_dim=SCHEDULE_THREADS)


def schedule_row_tiles[
    dtype: DType, o_dtype: DType
](params: GpuAttentionParams[dtype, o_dtype], schedule: Schedule, most_rows: Int32):
    """One CTA of `SCHEDULE_THREADS`; each thread has adjacent rows, and the tiles that begin there."""
    admit_next_launch()
    var thread = Int32(thread_idx.x)
    var share = ceildiv(params.num_rows, Int32(SCHEDULE_THREADS))
    var begin = min(thread * share, params.num_rows)
    var end = min(begin + share, params.num_rows)
    var run = Int32(-1)
    for row in range(begin, end):
        if begins_run(params, row):
            run = row
    var walk = TileWalk(begin, end, latest_before(run))

    var mine = Int32(0)
    var sizes = walk
    var tile = sizes.next(params, most_rows)
    while tile.rows > 0:
        mine += tile.tokens().tiles()
        tile = sizes.next(params, most_rows)
    var longest = max_item_tiles(block.sum[block_size=SCHEDULE_THREADS](mine), schedule.wanted_items)
    barrier()

    var items = Int32(0)
    var partials = Int32(0)
    var splits = Int32(0)
    var counts = walk
    tile = counts.next(params, most_rows)
    while tile.rows > 0:
        var split = RowPartition.of(tile.tokens(), longest)
        items += split.count
        if split.count > 1:
            partials += split.count * tile.rows
            splits += tile.rows
        tile = counts.next(params, most_rows)

    var at = block.prefix_sum[block_size=SCHEDULE_THREADS, exclusive=True](items)
    barrier()
    var partial = block.prefix_sum[block_size=SCHEDULE_THREADS, exclusive=True](partials)
    barrier()
    var split_at = block.prefix_sum[block_size=SCHEDULE_THREADS, exclusive=True](splits)
    barrier()
    var all_items = block.sum[block_size=SCHEDULE_THREADS](items)
    barrier()
    var all_splits = block.sum[block_size=SCHEDULE_THREADS](splits)

    tile = walk.next(params, most_rows)
    while tile.rows > 0:
        var split = RowPartition.of(tile.tokens(), longest)
        for i in range(split.count):
            tile_items(schedule)[unsafe_offset=Int(at)] = TileItem.of(tile, split, i, partial)
            at += 1
        if split.count > 1:
            for row in range(tile.rows):
                schedule.splits[unsafe_offset=Int(split_at)] = SplitRow(tile.first_row + row, partial, split.count, 0)
                partial += split.count
                split_at += 1
        tile = walk.next(params, most_rows)
    for i in range(all_splits + thread, schedule.max_splits, Int32(SCHEDULE_THREADS)):
        schedule.splits[unsafe_offset=Int(i)] = SplitRow(NO_ROW, 0, 0, 0)
    if thread == 0:
        schedule.count.unsafe_store(0, all_items)


@always_inline
def latest_before(mine: Int32) -> Int32:
    """The greatest `mine` of all threads before this one, -1 where there is none; by all threads of the block."""
    var latest = unsafe_stack_allocation[SCHEDULE_THREADS, Int32, address_space=AddressSpace.SHARED]()
    var thread = Int(thread_idx.x)
    var found = mine
    latest[unsafe_offset=thread] = found
    barrier()
    var distance = 1
    while distance < SCHEDULE_THREADS:
        if thread >= distance:
            found = max(found, latest[unsafe_offset=thread - distance])
        barrier()
        latest[unsafe_offset=thread] = found
        barrier()
        distance *= 2
    return latest[unsafe_offset=thread - 1] if thread > 0 else -1
