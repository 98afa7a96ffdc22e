"""The schedule of one attention call, made on the device: lengths are never read by the host.

So a captured graph stays right while lengths grow up to what the page table can hold: grids and buffers depend on
shapes alone (`ScheduleBounds`). Launches on one stream run in order; nothing here waits.
"""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from max.gpu import barrier, thread_idx
from max.gpu.host import DeviceAttribute, DeviceBuffer, DeviceContext
from max.gpu.host.launch_attribute import LaunchAttribute
from max.gpu.primitives import block

from ...cache.pointers import untracked
from .dependent_launch import admit_next_launch, await_launch_before, follows_closely
from .params import GpuAttentionParams
from .row_search import LaneRow, MAX_SEARCHED_ROWS
from .row_masks import GpuRowMasks
from .split_kv import NO_ROW, RowPartition, SplitRow, ScheduleBounds, SplitItem, max_item_tiles, fixed_max_item_tiles

comptime SCHEDULE_THREADS = 1024


@fieldwise_init
struct Schedule(DevicePassable, TrivialRegisterPassable):
    """The schedule in device memory."""

    comptime device_type: AnyType = Self

    var items: Pointer[SplitItem, MutUntrackedOrigin]
    """`[max_items]`, in the order of rows and tokens; from the list's end on, `row` is `NO_ROW`. With a list alone."""
    var splits: Pointer[SplitRow, MutUntrackedOrigin]
    """`[max_splits]`: the rows of several items; from the end on, `row` is `NO_ROW`. With a list alone."""
    var max_items: Int32
    var max_splits: Int32
    var wanted_items: Int32
    var batch_invariant: Int32
    var is_listed: Int32
    """True if `schedule_rows` writes the lists; without them each warp searches the rows (`row_search.mojo`)."""

    def _to_device_type(self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "Schedule"

    @staticmethod
    def get_device_type_name() -> String:
        return Self.get_type_name()

    @always_inline
    def begin_attention(self):
        """By every thread of a kernel launched with `attributes_of_attention`, before it touches memory."""
        await_launch_before()
        # Without a split row nothing of this package follows.
        if self.max_splits > 0:
            admit_next_launch()

    @always_inline
    def item(self, index: Int) -> SplitItem:
        """The `index`-th item of the list, below `max_items`."""
        return self.items[unsafe_offset=index]

    @always_inline
    def find_item[
        dtype: DType, o_dtype: DType, Masks: GpuRowMasks, //
    ](self, params: GpuAttentionParams[dtype, o_dtype, Masks], index: Int) -> SplitItem:
        """The `index`-th item, below `max_items`, with a list or without; by whole warps, after `begin_attention`."""
        if self.is_listed != 0:
            return self.item(index)
        return LaneRow(params, self.wanted_items, self.batch_invariant != 0).item(Int32(index))

    @always_inline
    def begin_combine[
        dtype: DType, o_dtype: DType, Masks: GpuRowMasks, //
    ](self, params: GpuAttentionParams[dtype, o_dtype, Masks], index: Int) -> SplitRow:
        """The `index`-th row of several items, below `max_splits`. By every thread of the kernel that merges them."""
        if self.is_listed != 0:
            await_launch_before()
            return self.splits[unsafe_offset=index]
        # Attention, which does not write what the search reads, had no grid before it: lengths may be read at once.
        var row = LaneRow(params, self.wanted_items, self.batch_invariant != 0).split_row(Int32(index))
        await_launch_before()
        return row

    def attributes_of_attention(self) -> List[LaunchAttribute]:
        """Return the attributes of the attention kernel's launch: behind `schedule_rows` it may start early."""
        return follows_closely() if self.is_listed != 0 else List[LaunchAttribute]()


@fieldwise_init
struct PartialOutputs(DevicePassable, TrivialRegisterPassable):
    """Partial results in device memory, one for each item of a split row."""

    comptime device_type: AnyType = Self

    var acc: Pointer[Float32, MutUntrackedOrigin]
    """`[max_partials, Hq, D]`: sums of weighted values, relative to `greatest`, not normalised."""
    var greatest: Pointer[Float32, MutUntrackedOrigin]
    """`[max_partials, Hq]`: the base-2 score that the sums are relative to: the greatest."""
    var total: Pointer[Float32, MutUntrackedOrigin]
    """`[max_partials, Hq]`: the sum of `2^(score - greatest)`."""

    def _to_device_type(self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "PartialOutputs"

    @staticmethod
    def get_device_type_name() -> String:
        return Self.get_type_name()


struct Workspace(Movable):
    """The device memory of one call. It is freed in stream order: kernels in flight may still use it."""

    var bounds: ScheduleBounds
    var _is_listed: Bool
    var _items: DeviceBuffer[DType.int32]
    var _splits: DeviceBuffer[DType.int32]
    var _acc: DeviceBuffer[DType.float32]
    var _state: DeviceBuffer[DType.float32]
    var _states: Int

    def __init__(
        out self, ctx: DeviceContext, bounds: ScheduleBounds, num_heads: Int, head_dim: Int, is_listed: Bool = True
    ) raises:
        self.bounds = bounds
        self._is_listed = is_listed
        # A buffer has at least one element.
        self._items = ctx.enqueue_create_buffer[DType.int32](4 * bounds.items if is_listed else 1)
        self._splits = ctx.enqueue_create_buffer[DType.int32](4 * max(1, bounds.splits) if is_listed else 1)
        self._states = max(1, bounds.partials * num_heads)
        self._acc = ctx.enqueue_create_buffer[DType.float32](self._states * head_dim)
        self._state = ctx.enqueue_create_buffer[DType.float32](2 * self._states)

    def schedule(self) -> Schedule:
        """The schedule's memory, as kernels take it; valid while the workspace lives."""
        return Schedule(
            untracked(self._items.unsafe_ptr()).unsafe_bitcast[SplitItem](),
            untracked(self._splits.unsafe_ptr()).unsafe_bitcast[SplitRow](),
            Int32(self.bounds.items),
            Int32(self.bounds.splits),
            Int32(self.bounds.wanted_items),
            Int32(self.bounds.batch_invariant),
            Int32(self._is_listed),
        )

    def partials(self) -> PartialOutputs:
        """The memory of the partial results; valid while the workspace lives."""
        var state = untracked(self._state.unsafe_ptr())
        return PartialOutputs(untracked(self._acc.unsafe_ptr()), state, state.unsafe_offset(self._states))


def needs_list(rows: Int) -> Bool:
    """Return whether a call has more rows than a warp can search."""
    return rows > MAX_SEARCHED_ROWS


def multiprocessors(ctx: DeviceContext) raises -> Int:
    """The multiprocessors of the device (compute units on AMD)."""
    return Int(ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT))


def enqueue_schedule[
    dtype: DType, o_dtype: DType, Masks: GpuRowMasks, //
](ctx: DeviceContext, params: GpuAttentionParams[dtype, o_dtype, Masks], schedule: Schedule) raises:
    """Fills the lists of `schedule`, where it has them, from the lengths as the device finds them."""
    if schedule.is_listed != 0:
        comptime kernel = schedule_rows[dtype, o_dtype, Masks]
        ctx.enqueue_function[kernel](params, schedule, grid_dim=1, block_dim=SCHEDULE_THREADS)


def schedule_rows[
    dtype: DType, o_dtype: DType, Masks: GpuRowMasks
](params: GpuAttentionParams[dtype, o_dtype, Masks], schedule: Schedule):
    """One CTA of `SCHEDULE_THREADS`: sums the tiles of all rows, then writes items and split rows by prefix sums."""
    admit_next_launch()
    var thread = Int32(thread_idx.x)
    var longest = Int32(0)
    if schedule.batch_invariant == 0:
        var mine = Int32(0)
        for row in range(thread, params.num_rows, Int32(SCHEDULE_THREADS)):
            mine += params.tokens(row).tiles()
        longest = max_item_tiles(block.sum[block_size=SCHEDULE_THREADS](mine), schedule.wanted_items)
        barrier()

    # Of the rounds before.
    var items = Int32(0)
    var splits = Int32(0)
    # Every thread takes part in every round: the prefix sums need them all.
    for first_row in range(Int32(0), params.num_rows, Int32(SCHEDULE_THREADS)):
        var row = first_row + thread
        var split = RowPartition(params.tokens(0), 0, 0)
        if row < params.num_rows:
            var tokens = params.tokens(row)
            split = RowPartition.of(
                tokens, fixed_max_item_tiles(tokens.tiles()) if schedule.batch_invariant != 0 else longest
            )
        # Items and split rows in one number, below 2^31 each: one sum serves both.
        var both = Int64(split.count) | Int64(1 if split.count > 1 else 0) << 32
        var before = block.prefix_sum[block_size=SCHEDULE_THREADS, exclusive=True](both)
        barrier()
        var all = block.sum[block_size=SCHEDULE_THREADS](both)
        barrier()
        var at = items + Int32(before & 0xFFFFFFFF)
        var split_at = splits + Int32(before >> 32)
        # Of the rows before this one, those that are not split have an item each and no partial result.
        var partial = at - (row - split_at)
        for i in range(split.count):
            schedule.items[unsafe_offset=Int(at + i)] = split.item(row, i, partial)
        if split.count > 1:
            schedule.splits[unsafe_offset=Int(split_at)] = SplitRow(row, partial, split.count, 0)
        items += Int32(all & 0xFFFFFFFF)
        splits += Int32(all >> 32)

    for i in range(items + thread, schedule.max_items, Int32(SCHEDULE_THREADS)):
        schedule.items[unsafe_offset=Int(i)] = SplitItem(NO_ROW, 0, 0, 0)
    for i in range(splits + thread, schedule.max_splits, Int32(SCHEDULE_THREADS)):
        schedule.splits[unsafe_offset=Int(i)] = SplitRow(NO_ROW, 0, 0, 0)
