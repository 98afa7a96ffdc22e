"""The schedule of a call of few rows without a list: each warp finds its item, or its split row, one row a lane.

It is the arithmetic of `schedule_rows` on the lanes of one warp. A launch less, and no list in memory, for 1 us at the
start of each CTA (`README.md`, "Schedule").
"""

from max.gpu import WARP_SIZE, lane_id
from max.gpu.primitives import warp

from .params import GpuAttentionParams
from .row_masks import GpuRowMasks
from .split_kv import (
    NO_ROW,
    RowPartition,
    RowTokens,
    SplitItem,
    SplitRow,
    fixed_max_item_tiles,
    max_item_tiles,
)

comptime MAX_SEARCHED_ROWS = 32
"""The lanes of the smallest warp."""


struct LaneRow(TrivialRegisterPassable):
    """The row of this lane, and what the rows before it have. By a whole warp."""

    var row: Int32
    var split: RowPartition
    """The row's partition; of 0 items past the last row."""
    var first_item: Int32
    var split_index: Int32
    """Split rows before this one."""

    @always_inline
    def __init__[
        dtype: DType, o_dtype: DType, Masks: GpuRowMasks, //
    ](out self, params: GpuAttentionParams[dtype, o_dtype, Masks], wanted_items: Int32, batch_invariant: Bool,):
        self.row = Int32(lane_id())
        var tokens = RowTokens(0, 0)
        if self.row < params.num_rows:
            tokens = params.tokens(self.row)
        var longest = fixed_max_item_tiles(tokens.tiles())
        if not batch_invariant:
            longest = max_item_tiles(over_warp[greatest=False](tokens.tiles()), wanted_items)
        self.split = RowPartition.of(tokens, longest)
        if self.row >= params.num_rows:
            self.split.count = 0
        # Items and split rows in one number, below 2^16 each: one sum serves both.
        var both = self.split.count | Int32(1 if self.split.count > 1 else 0) << 16
        var before = warp.prefix_sum[exclusive=True](both)
        self.first_item = before & 0xFFFF
        self.split_index = before >> 16

    @always_inline
    def first_partial(self) -> Int32:
        # Of the rows before this one, those that are not split have an item each and no partial result.
        return self.first_item - (self.row - self.split_index)

    @always_inline
    def item(self, index: Int32) -> SplitItem:
        """The `index`-th item of the call; its row is `NO_ROW` past the last. By a whole warp."""
        var at = index - self.first_item
        var owner = lane_where(at >= 0 and at < self.split.count)
        if owner < 0:
            return SplitItem(NO_ROW, 0, 0, 0)
        var mine = self.split.item(self.row, at, self.first_partial())
        return SplitItem(
            warp.shuffle_idx(mine.row, UInt32(owner)),
            warp.shuffle_idx(mine.begin, UInt32(owner)),
            warp.shuffle_idx(mine.end, UInt32(owner)),
            warp.shuffle_idx(mine.partial, UInt32(owner)),
        )

    @always_inline
    def split_row(self, index: Int32) -> SplitRow:
        """The `index`-th split row of the call; its row is `NO_ROW` past the last. By a whole warp."""
        var owner = lane_where(self.split.count > 1 and self.split_index == index)
        if owner < 0:
            return SplitRow(NO_ROW, 0, 0, 0)
        return SplitRow(
            owner,
            warp.shuffle_idx(self.first_partial(), UInt32(owner)),
            warp.shuffle_idx(self.split.count, UInt32(owner)),
            0,
        )


@always_inline
def lane_where(here: Bool) -> Int32:
    """The one lane where it is true, -1 where there is none; in every lane."""
    return over_warp[greatest=True](Int32(lane_id()) if here else -1)


@always_inline
def over_warp[dtype: DType, //, *, greatest: Bool](x: Scalar[dtype]) -> Scalar[dtype]:
    """The greatest of the lanes' numbers, or their sum; in every lane."""
    var result = x
    comptime for bit in range(6):
        comptime if (1 << bit) < WARP_SIZE:
            var other = warp.shuffle_xor(result, UInt32(1 << bit))
            result = max(result, other) if greatest else result + other
    return result
