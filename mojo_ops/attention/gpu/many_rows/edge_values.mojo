"""Tiles of V that not all rows see: a weight of 0 does not hide a value that is inf or NaN.

In such a tile, values of tokens outside the item become 0. A token with a value that is not finite, which is rare, is
added to the sums of the rows that see it without the tensor cores (`consumer.mojo`), then its values become 0, too. All
functions here are called by all threads of all warpgroups that compute.
"""

from max.gpu import thread_idx
from max.gpu.memory import fence_async_view_proxy
from max.gpu.primitives import warp
from max.gpu.sync import named_barrier

from ..hopper.tiles import TileRows, WGMMA_TILE_TOKENS
from ..hopper.wgmma import CHUNK_BYTES, CONSUMER_THREADS
from .register_operand import pinned
from ..row_tiles import WARPGROUPS
from .shared_memory import RowsMemory

comptime CONSUMERS = WARPGROUPS * CONSUMER_THREADS
comptime ALL_CONSUMERS: Int32 = 1
"""Their barrier; 0 is the whole block's."""
comptime LANES_OF_A_TOKEN = CONSUMERS // WGMMA_TILE_TOKENS


@fieldwise_init
struct OwnValues[dtype: DType, head_dim: Int](TrivialRegisterPassable):
    """The values of a tile that this thread looks after: a part of one token's."""

    comptime CHUNKS = Self.head_dim // 8 // LANES_OF_A_TOKEN
    """Of 8 values, 16 bytes, each."""

    var shared: RowsMemory[Self.dtype, Self.head_dim]
    var tile: Int
    """Where the tile begins."""
    var thread: Int

    @staticmethod
    @always_inline
    def of(shared: RowsMemory[Self.dtype, Self.head_dim], stage: Int) -> Self:
        return Self(shared, stage * shared.Map.TILE_BYTES, pinned(Int(thread_idx.x)))

    @always_inline
    def token(self) -> Int32:
        """Of the tile; a warp has 8 adjacent ones."""
        return Int32(self.thread // LANES_OF_A_TOKEN)

    @always_inline
    def offset(self, i: Int) -> Int:
        var chunk = self.thread % LANES_OF_A_TOKEN * Self.CHUNKS + i
        return self.tile + self.shared.Map.Tile.widened_offset(Int(self.token()), chunk)

    @always_inline
    def are_finite(self) -> Bool:
        comptime exponent = SIMD[DType.uint16, 8](0x7F80 if Self.dtype == DType.bfloat16 else 0x7C00)
        var found = True
        # A loop at run time: all at once would not fit into registers.
        for i in range(Self.CHUNKS):
            var bits = self.shared.at[UInt16](self.offset(i)).unsafe_load[width=8, alignment=CHUNK_BYTES]()
            if (bits & exponent).eq(exponent).reduce_or():
                found = False
        return found

    @always_inline
    def clear(self):
        comptime for i in range(Self.CHUNKS):
            self.shared.at[UInt32](self.offset(i)).unsafe_store[alignment=CHUNK_BYTES](SIMD[DType.uint32, 4](0))


@always_inline
def find_special_values[
    dtype: DType, head_dim: Int, //
](shared: RowsMemory[dtype, head_dim], stage: Int, valid: TileRows) -> UInt64:
    """Bit i is 1 where the tile's i-th token has a value that is not finite; the values of those not valid are 0 now."""
    var own = OwnValues[dtype, head_dim].of(shared, stage)
    var special = UInt32(0)
    if own.token() >= valid.begin and own.token() < valid.end:
        special = UInt32(0 if own.are_finite() else 1) << UInt32(own.token() % 8)
    else:
        own.clear()
    # The bits of a warp's tokens, in every lane.
    comptime for bit in range(5):
        special |= warp.shuffle_xor(special, UInt32(1 << bit))
    if Int(thread_idx.x) % 32 == 0:
        shared.special(stage).unsafe_store(Int(own.token() // 8), UInt8(special))
    meet_after_stores()
    return shared.special(stage).unsafe_bitcast[UInt64]()[]


@always_inline
def clear_special_values[
    dtype: DType, head_dim: Int, //
](shared: RowsMemory[dtype, head_dim], stage: Int, special: UInt64):
    """The values of these tokens become 0, once no thread reads them any more."""
    named_barrier[Int32(CONSUMERS)](ALL_CONSUMERS)
    var own = OwnValues[dtype, head_dim].of(shared, stage)
    if (special >> UInt64(own.token())) & 1 != 0:
        own.clear()
    meet_after_stores()


@always_inline
def meet_after_stores():
    """Ordinary stores of all consumers come before the products that follow, and before the copy that comes next."""
    fence_async_view_proxy()
    named_barrier[Int32(CONSUMERS)](ALL_CONSUMERS)
