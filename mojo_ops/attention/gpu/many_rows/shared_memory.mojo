"""The shared memory of a block that serves a tile of rows: where everything lies, and how the tensor cores see it."""

from max.gpu.compute.mma import WGMMADescriptor
from max.gpu.memory import AddressSpace
from layout.tma_async import SharedMemBarrier

from ..hopper.pipeline import Ring, SharedBytes
from ..hopper.shared_memory import SharedMemoryMap
from ..hopper.tiles import MIN_BOX_BITS, WGMMA_TILE_TOKENS
from ..hopper.wgmma import ATOM_ELEMENTS, MatrixOperand
from ..row_tiles import WARPGROUP_HEADS, WARPGROUPS

comptime MAX_STAGES = 12
comptime MATRICES_BYTES = 224 * 1024
"""Of the ring and the queries, at most."""


struct RowsSharedMemory[dtype: DType, head_dim: Int]:
    """Byte offsets from the start, which is a multiple of 1024.

    ```
    0              +----------------------------------------------------------------+
                   | ring      STAGES x one tile of K or V                          |
    QUERY          +----------------------------------------------------------------+
                   | query     WARPGROUPS x 64 heads of rows                        |
    OUTSIDE        +----------------------------------------------------------------+
                   | outside   [STAGES, boxes of a tile] bytes                       |
    SPECIAL        +----------------------------------------------------------------+
                   | special   [STAGES] 64 bits, one a token of a tile of V         |
    FULL           +----------------------------------------------------------------+
                   | full      [STAGES] mbarriers                                   |
    EMPTY          +----------------------------------------------------------------+
                   | empty     [STAGES] mbarriers                                   |
    BYTES          +----------------------------------------------------------------+
    ```

    Tiles of K and V are those of the decode kernel (`Tile`), 64 tokens each; a warpgroup's queries lie as such a tile
    does, with 64 heads of rows for the tokens.

    Parameters:
        dtype: 16-bit.
        head_dim: 64 or 128.
    """

    comptime Tile = SharedMemoryMap[Self.dtype, Self.head_dim, 8]
    """Of this map, where boxes and operands lie in a tile; its own regions are not used."""
    comptime ATOMS = Self.Tile.ATOMS
    comptime TILE_BYTES = Self.Tile.TILE_BYTES
    comptime STAGES = min(MAX_STAGES, MATRICES_BYTES // Self.TILE_BYTES - WARPGROUPS)
    comptime QUERY = Self.STAGES * Self.TILE_BYTES
    comptime OUTSIDE = Self.QUERY + WARPGROUPS * Self.TILE_BYTES
    comptime SPECIAL = Self.OUTSIDE + 8 * Self.STAGES
    comptime FULL = Self.SPECIAL + 8 * Self.STAGES
    comptime EMPTY = Self.FULL + 8 * Self.STAGES
    comptime BYTES = Self.EMPTY + 8 * Self.STAGES

    @staticmethod
    def check():
        """Fails to compile where the map does not fit."""
        comptime assert not Self.Tile.WIDENED, "elements of 16 bits"
        comptime assert Self.head_dim % ATOM_ELEMENTS == 0, "head_dim is a multiple of 64"
        comptime assert WARPGROUP_HEADS == WGMMA_TILE_TOKENS, "queries lie as tiles of K and V do"
        # Below four stages the copies of the next tile could not start before this tile is done.
        comptime assert WGMMA_TILE_TOKENS >> Int(MIN_BOX_BITS) == 8, "a tile has up to 8 boxes"
        comptime assert Self.STAGES >= 4, "a ring of at least four stages"
        comptime assert Self.BYTES <= 227 * 1024, "a block has at most 227 KB of shared memory"

    @staticmethod
    @always_inline
    def query(warpgroup: Int) -> Int:
        """Where a warpgroup's queries begin."""
        return Self.QUERY + warpgroup * Self.TILE_BYTES

    @staticmethod
    @always_inline
    def value_operand(tile: Int, atom: Int, step: Int) -> MatrixOperand:
        """B of O = P V: `[64 dims of an atom, 16 tokens from 16 * step on]`, dims adjacent.

        The same bytes are A of O^T = V^T P^T in the decode kernel: an operand with its other dimension adjacent is
        described in the same way on both sides.
        """
        return Self.Tile.value_operand(tile, atom, step)


@fieldwise_init
struct RowsMemory[dtype: DType, head_dim: Int](TrivialRegisterPassable):
    """Pointers into the block's shared memory, as `RowsSharedMemory` lays it out."""

    comptime Map = RowsSharedMemory[Self.dtype, Self.head_dim]
    var base: SharedBytes

    @always_inline
    def at[T: AnyType](self, offset: Int) -> Pointer[T, MutUntrackedOrigin, address_space=AddressSpace.SHARED]:
        return self.base.unsafe_offset(offset).unsafe_bitcast[T]()

    @always_inline
    def ring(self) -> Ring[Self.Map.STAGES]:
        return Ring[Self.Map.STAGES](
            self.at[SharedMemBarrier](Self.Map.FULL), self.at[SharedMemBarrier](Self.Map.EMPTY)
        )

    @always_inline
    def outside(self, tile: Int32) -> Pointer[UInt8, MutUntrackedOrigin, address_space=AddressSpace.SHARED]:
        """Of the `tile`-th tile of the block: byte i is 1 where the page of box i is outside the pool.

        Written before K of the tile is announced, read before it is released. A stage of the ring is used twice as
        often as one of these numbers, so that the last readers of this one are done.
        """
        return self.at[UInt8](Self.Map.OUTSIDE + Int(UInt32(tile) % UInt32(Self.Map.STAGES)) * 8)

    @always_inline
    def special(self, stage: Int) -> Pointer[UInt8, MutUntrackedOrigin, address_space=AddressSpace.SHARED]:
        """Of the tile of V in a stage: bit i of these 64 is 1 where the i-th token has a value that is not finite.

        Written and read while the stage is not released.
        """
        return self.at[UInt8](Self.Map.SPECIAL + stage * 8)

    @always_inline
    def descriptor(self, operand: MatrixOperand) -> WGMMADescriptor[Self.dtype]:
        return WGMMADescriptor[Self.dtype](operand.descriptor(UInt32(Int(self.base))))
