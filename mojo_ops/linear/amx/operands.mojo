"""The operands of a linear layer on matrix tiles: rows of x packed, rows of weights copied where they end, sums stored."""

from std.math import ceildiv
from std.memory import bitcast
from std.sys import size_of

from ...isa.amx import tile_store
from ...isa.amx_tiles import Bf16Pointer, AMX_ROW_BYTES, AMX_SUM_ELEMENTS, AMX_TILE_ROWS, AMX_TILE_K, transpose_16x16

comptime LINE_ELEMENTS = 32
"""Bf16Pointer of a cache line."""


@fieldwise_init
struct AmxLinear(TrivialRegisterPassable):
    """The operands of one call, or of one chunk of its rows."""

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
    """Of K, the last of which may be partly zeros."""
    var panels: Int
    """Of 16 rows of x."""
    var columns: Int
    """Of a packed tile: 16, or fewer where x has fewer rows."""

    @always_inline
    def packed(self, panel: Int, step: Int) -> Bf16Pointer:
        """The tile of x of one step of K."""
        return self.x.unsafe_offset((panel * self.steps + step) * AMX_TILE_K * self.columns)

    @always_inline
    def store[index: Int, rows: Int](self, first: Int, end: Int, panel: Int):
        """Writes `tmm<index>`, `[rows, columns]` sums, transposed, to the columns of y from `first` on that are before `end`."""
        var sums = Array[Float32, AMX_SUM_ELEMENTS](fill=0)
        var at = Pointer(to=sums[0]).unsafe_mut_cast[True]().unsafe_origin_cast[MutUntrackedOrigin]()
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


@always_inline
def align_to_line[
    dtype: DType, //
](at: Pointer[Scalar[dtype], MutUntrackedOrigin]) -> Pointer[Scalar[dtype], MutUntrackedOrigin]:
    """The next start of a cache line."""
    return at.unsafe_offset((-Int(at) & 63) // size_of[dtype]())


def pack_columns(x: Bf16Pointer, rows: Int, k: Int, packed: Bf16Pointer, columns: Int):
    """Up to 16 rows of x, in pairs, as one tile `[16, columns, 2]` for each step of K; zeros where there is no element.

    There must be room for 16 columns in the last row of the last tile.
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
        # In this order: the zeros past a narrow row are overwritten by the row after it.
        comptime for row in range(16):
            target.unsafe_store(columns * row, tile[row])


def copy_rows[
    rows: Int
](w: Bf16Pointer, present: Int, pitch: Int, left: Int, steps: Int, copy: Bf16Pointer, copy_pitch: Int):
    """Steps of K of `rows` rows of w, `copy_pitch` elements apart; zeros past the rows and elements that there are."""
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
    """One row of a tile, with zeros after the first `left` elements."""
    if left >= AMX_TILE_K:
        return at.unsafe_load[width=AMX_TILE_K]()
    var elements = SIMD[DType.bfloat16, AMX_TILE_K](0)
    for i in range(left):
        elements[i] = at[unsafe_offset=i]
    return elements
