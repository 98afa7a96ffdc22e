"""Products of bfloat16 matrices on AMX (`amx.mojo`): 2 x 2 tiles of sums, all of 16 rows of 64 bytes.

A kernel configures, uses and releases the registers itself. In between it calls no function that might use them.
"""

from std.sys.intrinsics import inlined_assembly

from .amx import TileShapes, tile_load, tile_store, tile_zero
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
    comptime first = "tileloadd ($0,$2,1), %tmm4\ntileloadd ($3,$5,1), %tmm6\ntdpbf16ps %tmm6, %tmm4, %tmm0\n"
    comptime second_column = "tileloadd ($4,$5,1), %tmm7\ntdpbf16ps %tmm7, %tmm4, %tmm1\n"
    comptime second_row = "tileloadd ($1,$2,1), %tmm5\ntdpbf16ps %tmm6, %tmm5, %tmm2\ntdpbf16ps %tmm7, %tmm5, %tmm3\n"
    comptime text = first + second_column + second_row
    inlined_assembly[text, NoneType, constraints="r,r,r,r,r,r,~{memory}", has_side_effect=True](
        a, second_a, a_pitch, b, second_b, Int(AMX_ROW_BYTES)
    )


@always_inline
def load_sum[index: Int](source: FloatPointer):
    """Sets sum `index` to 16 rows of 16 numbers."""
    tile_load[index](source, AMX_ROW_BYTES)


@always_inline
def store_sum[index: Int](target: FloatPointer):
    """Writes sum `index` as 16 rows of 16 numbers."""
    tile_store[index](target, AMX_ROW_BYTES)
