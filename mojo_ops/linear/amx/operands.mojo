"""The operands of a linear layer on matrix tiles: packs rows of x, copies rows of w, stores sums."""

from std.math import ceildiv
from std.memory import bitcast

from ...cache.pointers import untracked
from ...isa.amx import tile_store
from ...isa.amx_tiles import AMX_ROW_BYTES, AMX_SUM_ELEMENTS, AMX_TILE_K, AMX_TILE_ROWS
from ...isa.memory import Bf16Pointer
from ...isa.transpose import transpose_16x16

comptime LINE_ELEMENTS = 32
"""Elements (bfloat16) of a cache line."""


@fieldwise_init
struct AmxLinear(TrivialRegisterPassable):
    """The operands of one call, or of some of its rows."""

    var y: Bf16Pointer
    """`[m, n]`."""
    var x: Bf16Pointer
    """Packed by `pack_columns`: `[panels, steps, 16, columns, 2]`."""
    var w: Bf16Pointer
    """`[n, k]`."""
    var m: Int
    var n: Int
    var k: Int
    var steps: Int
    """Steps of 32 elements of K; the last may be padded with zeros."""
    var panels: Int
    """Panels of 16 rows of x."""
    var columns: Int
    """Columns of a packed tile: 16, or fewer where x has fewer rows."""

    @always_inline
    def packed(self, panel: Int, step: Int) -> Bf16Pointer:
        """The tile of x of one step of K."""
        return self.x.unsafe_offset((panel * self.steps + step) * AMX_TILE_K * self.columns)

    @always_inline
    def store[index: Int, rows: Int](self, first: Int, end: Int, panel: Int):
        """Transposes the sums in `tmm<index>`, `[rows, columns]`, and writes them to columns `first` and on of y,
        before `end`."""
        var sums = Array[Float32, AMX_SUM_ELEMENTS](fill=0)
        var at = untracked(Pointer(to=sums[0]))
        tile_store[index](at, AMX_ROW_BYTES)
        var transposed = Array[SIMD[DType.float32, 16], 16](fill=0)
        comptime for row in range(rows):
            transposed[row] = at.unsafe_load[width=16](16 * row)
        transpose_16x16(transposed)
        var begin = panel * AMX_TILE_ROWS
        var y = self.y.unsafe_offset(begin * self.n + first)
        comptime for row in range(16):
            if begin + row < self.m:
                var rounded = transposed[row].cast[DType.bfloat16]().slice[rows]()
                if first + rows <= end:
                    y.unsafe_store(row * self.n, rounded)
                else:
                    for column in range(end - first):
                        y[unsafe_offset=row * self.n + column] = rounded[column]
        _ = sums


def pack_columns(x: Bf16Pointer, rows: Int, k: Int, packed: Bf16Pointer, columns: Int):
    """Packs up to 16 rows of x in pairs, one tile `[16, columns, 2]` for each step of K, padded with zeros.

    There must be memory for 16 columns in the last row of the last tile.
    """
    for step in range(ceildiv(k, AMX_TILE_K)):
        var tile = Array[SIMD[DType.uint32, 16], 16](fill=0)
        comptime for row in range(16):
            if row < rows:
                tile[row] = bitcast[DType.uint32, 16](
                    load_step(x.unsafe_offset(row * k + step * AMX_TILE_K), k - step * AMX_TILE_K)
                )
        transpose_16x16(tile)
        var target = packed.unsafe_offset(step * columns * AMX_TILE_K).unsafe_bitcast[UInt32]()
        # In ascending order: the zeros past a narrow row are overwritten by the next row.
        comptime for row in range(16):
            target.unsafe_store(columns * row, tile[row])


def copy_rows[
    rows: Int
](w: Bf16Pointer, present: Int, pitch: Int, left: Int, steps: Int, copy: Bf16Pointer, copy_pitch: Int):
    """Copies `steps` steps of K of `rows` rows of w, `copy_pitch` elements apart, padded with zeros.

    Args:
        w: The first row, at the first step.
        present: How many of the rows there are.
        pitch: Elements from one row of w to the next.
        left: Elements of K from the first step on.
        steps: Steps to copy.
        copy: The destination.
        copy_pitch: Elements from one row of the copy to the next.
    """
    for row in range(rows):
        var source = w.unsafe_offset(row * pitch)
        var target = copy.unsafe_offset(row * copy_pitch)
        var whole = min(steps, left // AMX_TILE_K) if row < present else 0
        for step in range(whole):
            target.unsafe_store(step * AMX_TILE_K, source.unsafe_load[width=AMX_TILE_K](step * AMX_TILE_K))
        for step in range(whole, steps):
            var elements = SIMD[DType.bfloat16, AMX_TILE_K](0)
            if row < present:
                elements = load_step(source.unsafe_offset(step * AMX_TILE_K), left - step * AMX_TILE_K)
            target.unsafe_store(step * AMX_TILE_K, elements)


@always_inline
def load_step(at: Bf16Pointer, left: Int) -> SIMD[DType.bfloat16, AMX_TILE_K]:
    """Loads one row of a tile, zeros after its first `left` elements."""
    if left >= AMX_TILE_K:
        return at.unsafe_load[width=AMX_TILE_K]()
    var elements = SIMD[DType.bfloat16, AMX_TILE_K](0)
    for i in range(left):
        elements[i] = at[unsafe_offset=i]
    return elements
