"""Products of bfloat16 matrices on AMX (`amx.mojo`): 2 x 2 tiles of sums, all of 16 rows of 64 bytes.

A kernel configures, uses and releases the registers itself. In between it calls no function that might use them.
"""

from .amx import TileShapes, tile_dot_2x2, tile_load, tile_store, tile_zero
from .memory import Bf16Pointer, FloatPointer

comptime AMX_TILE_ROWS = 16
comptime AMX_ROW_BYTES = 64
comptime AMX_TILE_K = 32
"""Elements (bfloat16) in a row of a tile: one step of the reduced dimension K."""
comptime AMX_TILE_ELEMENTS = AMX_TILE_ROWS * AMX_TILE_K
"""Elements (bfloat16) in a tile."""
comptime AMX_SUM_ELEMENTS = AMX_TILE_ROWS * 16
"""Float32 numbers in a tile of sums."""


@always_inline
def configure_tiles():
    """Makes all eight tiles of this thread 16 rows of 64 bytes, and zero."""
    var shapes = TileShapes()
    comptime for tile in range(8):
        shapes.set(tile, AMX_TILE_ROWS, AMX_ROW_BYTES)
    shapes.apply()


@always_inline
def zero_sums():
    """Zeroes the sums, `tmm0` to `tmm3`."""
    comptime for index in range(4):
        tile_zero[index]()


@always_inline
def multiply_2x2(a: Bf16Pointer, second_a: Bf16Pointer, a_pitch: Int, b: Bf16Pointer, second_b: Bf16Pointer):
    """`tmm[2 i + j] += a_i b_j` for one step of K.

    The rows of an `a` lie `a_pitch` bytes apart. A `b` is packed: 16 rows of 16 pairs, pair `(k, k + 1)` of each of 16
    columns.
    """
    tile_dot_2x2(a, second_a, a_pitch, b, second_b, AMX_ROW_BYTES)


@always_inline
def load_sum[index: Int](source: FloatPointer):
    """Sets sum `index` to 16 rows of 16 numbers."""
    tile_load[index](source, AMX_ROW_BYTES)


@always_inline
def store_sum[index: Int](target: FloatPointer):
    """Writes sum `index` as 16 rows of 16 numbers."""
    tile_store[index](target, AMX_ROW_BYTES)
