"""The rows of a warpgroup's matrices: which heads of which query rows they are, what they see, and their queries."""

from max.gpu import thread_idx
from max.gpu.memory import fence_async_view_proxy
from max.gpu.primitives import warp
from max.gpu.sync import named_barrier

from ..params import GpuAttentionParams
from ..hopper.tiles import TileRows
from ..hopper.wgmma import CHUNK_BYTES, CONSUMER_THREADS
from ..row_tiles import TileItem, WARPGROUP_HEADS
from ..schedule_tiles import BlockWork
from .shared_memory import RowsMemory

comptime OWN_BARRIER: Int32 = 2
"""The first of the barriers that each warpgroup has for itself."""


@fieldwise_init
struct HeadRow(TrivialRegisterPassable):
    """What one row of the matrices sees."""

    var begin: Int32
    var end: Int32
    """Tokens `[begin, end)` of the item; `end` is `INVALID_ROW` where the table has no such row."""
    var slope: Float32


@fieldwise_init
struct HeadPlace(TrivialRegisterPassable):
    """Which head of which query row it is."""

    var row: Int32
    """Of the tile; past its rows for padding."""
    var head: Int32
    """Of the group."""


@fieldwise_init
struct HeadRows[dtype: DType, o_dtype: DType](TrivialRegisterPassable):
    """64 heads of rows of an item, for one KV head."""

    var params: GpuAttentionParams[Self.dtype, Self.o_dtype]
    var item: TileItem
    var kv_head: Int32
    var group: Int32
    """Query heads of the KV head."""
    var warpgroup: Int

    @staticmethod
    @always_inline
    def of(params: GpuAttentionParams[Self.dtype, Self.o_dtype], work: BlockWork, kv_heads: Int32) -> Self:
        """Of this thread's warpgroup; by whole warps."""
        # From lane 0: the assembler then knows that whole warps take the branches that depend on it.
        var warpgroup = warp.shuffle_idx(UInt32(thread_idx.x) // UInt32(CONSUMER_THREADS), 0)
        return Self(params, work.item, work.kv_head, params.num_heads // kv_heads, Int(warpgroup))

    @always_inline
    def place(self, row: Int) -> HeadPlace:
        """Of the `row`-th row of the matrices."""
        var at = UInt32(self.warpgroup * WARPGROUP_HEADS + row)
        var query_row = at // UInt32(self.group)
        return HeadPlace(Int32(query_row), Int32(at - query_row * UInt32(self.group)))

    @always_inline
    def head(self, place: HeadPlace) -> Int32:
        """Of the call."""
        return self.kv_head * self.group + place.head

    @always_inline
    def limits(self, query_row: Int32) -> TileRows:
        """The item's tokens `[begin, end)` that a row of the tile sees; limits grow along the rows."""
        var tokens = self.params.tokens(self.item.first_row + query_row)
        return TileRows(max(tokens.begin, self.item.begin), min(tokens.end, self.item.end))

    @always_inline
    def row(self, row: Int) -> HeadRow:
        """The `row`-th row of the matrices; padding sees the whole item, so that no tile is an edge for its sake."""
        var place = self.place(row)
        if place.row >= self.item.rows:
            return HeadRow(self.item.begin, self.item.end, 0)
        var limits = self.limits(place.row)
        return HeadRow(limits.begin, limits.end, self.params.slope(self.head(place)))

    @always_inline
    def seen(self) -> TileRows:
        """The range of the tokens that some of these rows see; the same in the whole warpgroup."""
        var first = self.place(0).row
        if first >= self.item.rows:
            return TileRows(0, 0)
        var last = min(self.item.rows - 1, self.place(WARPGROUP_HEADS - 1).row)
        return TileRows(self.limits(first).begin, self.limits(last).end)

    @always_inline
    def seen_by_all(self) -> TileRows:
        """The tokens that every row of the item sees; the same in the whole block."""
        return TileRows(self.limits(self.item.rows - 1).begin, self.limits(0).end)

    @always_inline
    def load[head_dim: Int, //](self, shared: RowsMemory[Self.dtype, head_dim]):
        """Q of these rows to shared memory, by the warpgroup; zeros for the padding."""
        comptime Map = shared.Map
        comptime chunks = head_dim // 8
        var own_barrier = OWN_BARRIER + Int32(self.warpgroup)
        # All warps have done the last item's products.
        named_barrier[Int32(CONSUMER_THREADS)](own_barrier)
        for i in range(Int(thread_idx.x) % CONSUMER_THREADS, WARPGROUP_HEADS * chunks, CONSUMER_THREADS):
            var row, chunk = divmod(i, chunks)
            var place = self.place(row)
            var q = SIMD[Self.dtype, 8](0)
            if place.row < self.item.rows:
                var at = self.params.element(self.item.first_row + place.row, self.head(place), Int32(chunk * 8))
                q = self.params.q.unsafe_load[width=8](at)
            var to = Map.query(self.warpgroup) + Map.Tile.widened_offset(row, chunk)
            shared.at[Scalar[Self.dtype]](to).unsafe_store[alignment=CHUNK_BYTES](q)
        # Written by ordinary stores, read by the tensor cores (the async proxy): fence, then the barrier.
        fence_async_view_proxy()
        named_barrier[Int32(CONSUMER_THREADS)](own_barrier)
