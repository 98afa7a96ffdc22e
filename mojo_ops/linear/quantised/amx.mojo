"""The int32 sums of a group of K, of 16 rows of x by 16 rows of w, as one product of AMX's tile registers.

The steps of a tile of weights lie as the instruction wants them: four elements of K of each of 16 rows of w.
"""

from ...isa.amx import TileShapes, tile_dot_int8, tile_load, tile_store, tile_zero
from ...isa.amx_tiles import AMX_ROW_BYTES, AMX_TILE_ROWS
from .activations import RECORD_BYTES
from .tile import BytePointer, VECTOR_BYTES

comptime AMX_GROUPS = [32, 16]
"""Elements of a group, as encodings have them. x and w are in `tmm2` and `tmm3` for the first, in `tmm4` and `tmm5` for
the other; sums are in `tmm0` and `tmm1`, in turn."""
comptime TURN_BYTES = AMX_TILE_ROWS * AMX_ROW_BYTES
"""Bytes of the sums of a group, `[16 rows of x][16 rows of w]` int32."""


def configure_group_tiles():
    """Gives this thread's tile registers the shapes of `multiply_group`."""
    var shapes = TileShapes()
    comptime for i in range(2):
        comptime elements = AMX_GROUPS[i]
        shapes.set(i, AMX_TILE_ROWS, AMX_ROW_BYTES)
        shapes.set(2 + 2 * i, AMX_TILE_ROWS, elements)
        shapes.set(3 + 2 * i, elements // 4, VECTOR_BYTES)
    shapes.apply()


@always_inline
def multiply_group[elements: Int, turn: Int](w: BytePointer, x: BytePointer, sums: BytePointer):
    """Writes the sums of a group, from `sums + turn TURN_BYTES` on.

    Parameters:
        elements: The elements of the group.
        turn: 0 and 1 by turns, so that one group's sums are stored while the other's are scaled.

    Args:
        w: The group's steps of a tile.
        x: The group's elements in the first of 16 records.
        sums: `2 TURN_BYTES`, from the start of a cache line on.
    """
    comptime first = 2 if elements == AMX_GROUPS[0] else 4
    tile_zero[turn]()
    tile_load[first](x, RECORD_BYTES)
    tile_load[first + 1](w, VECTOR_BYTES)
    tile_dot_int8[turn, first, first + 1]()
    tile_store[turn](sums.unsafe_offset(turn * TURN_BYTES), AMX_ROW_BYTES)
