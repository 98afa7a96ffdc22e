"""The operands of a linear layer on matrix tiles: rows of x packed, rows of weights copied where they end, sums stored."""

from std.math import ceildiv
from std.memory import bitcast
from std.sys import size_of

from ...isa.amx import tile_store
from ...isa.amx_tiles import Elements, ROW_BYTES, SUM_ELEMENTS, TILE_ROWS, TILE_STEP, transpose

comptime LINE = 32
"""Elements of a cache line."""


@fieldwise_init
struct TileLinear(TrivialRegisterPassable):
    """The operands of one call, or of one chunk of its rows."""

    var y: Elements
    """`[m, n]`."""
    var x: Elements
    """Packed by `pack_columns`: `[panels, steps, 16, columns, 2]`."""
    var w: Elements
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
    def packed(self, panel: Int, step: Int) -> Elements:
        """The tile of x of one step of K."""
        return self.x.unsafe_offset((panel * self.steps + step) * TILE_STEP * self.columns)

    @always_inline
    def store[index: Int, rows: Int](self, first: Int, end: Int, panel: Int):
        """Writes `tmm<index>`, `[rows, columns]` sums, turned, to the columns of y from `first` on that are before `end`."""
        var sums = Array[Float32, SUM_ELEMENTS](fill=0)
        var at = Pointer(to=sums[0]).unsafe_mut_cast[True]().unsafe_origin_cast[MutUntrackedOrigin]()
        tile_store[index](at, ROW_BYTES)
        var turned = Array[SIMD[DType.float32, 16], 16](fill=0)
        comptime for row in range(rows):
            turned[row] = at.unsafe_load[width=16](16 * row)
        transpose(turned)
        var begin = panel * TILE_ROWS
        var y = self.y.unsafe_offset(begin * self.n + first)
        comptime for row in range(16):
            if begin + row < self.m:
                var rounded = turned[row].cast[DType.bfloat16]().slice[rows]()
                if first + rows <= end:
                    y.unsafe_store(row * self.n, rounded)
                else:
                    for column in range(end - first):
                        y[unsafe_offset=row * self.n + column] = rounded[column]
        _ = sums


@always_inline
def aligned[
    dtype: DType, //
](at: Pointer[Scalar[dtype], MutUntrackedOrigin]) -> Pointer[Scalar[dtype], MutUntrackedOrigin]:
    """The next start of a cache line."""
    return at.unsafe_offset((-Int(at) & 63) // size_of[dtype]())


def pack_columns(x: Elements, rows: Int, k: Int, packed: Elements, columns: Int):
    """Up to 16 rows of x, in pairs, as one tile `[16, columns, 2]` for each step of K; zeros where there is no element.

    There must be room for 16 columns in the last row of the last tile.
    """
    for step in range(ceildiv(k, TILE_STEP)):
        var tile = Array[SIMD[DType.uint32, 16], 16](fill=0)
        comptime for row in range(16):
            if row < rows:
                tile[row] = bitcast[DType.uint32, 16](
                    load_step(x.unsafe_offset(row * k + step * TILE_STEP), k - step * TILE_STEP)
                )
        transpose(tile)
        var target = packed.unsafe_offset(step * columns * TILE_STEP).unsafe_bitcast[UInt32]()
        # In this order: the zeros past a narrow row are overwritten by the row after it.
        comptime for row in range(16):
            target.unsafe_store(columns * row, tile[row])


def copy_rows[rows: Int](w: Elements, present: Int, pitch: Int, left: Int, steps: Int, copy: Elements, copy_pitch: Int):
    """Steps of K of `rows` rows of w, `copy_pitch` elements apart; zeros past the rows and elements that there are."""
    for row in range(rows):
        var source = w.unsafe_offset(row * pitch)
        var target = copy.unsafe_offset(row * copy_pitch)
        var whole = min(steps, left // TILE_STEP) if row < present else 0
        for step in range(whole):
            target.unsafe_store(step * TILE_STEP, source.unsafe_load[width=TILE_STEP](step * TILE_STEP))
        for step in range(whole, steps):
            var elements = SIMD[DType.bfloat16, TILE_STEP](0)
            if row < present:
                elements = load_step(source.unsafe_offset(step * TILE_STEP), left - step * TILE_STEP)
            target.unsafe_store(step * TILE_STEP, elements)


@always_inline
def load_step(at: Elements, left: Int) -> SIMD[DType.bfloat16, TILE_STEP]:
    """One row of a tile, with zeros after the first `left` elements."""
    if left >= TILE_STEP:
        return at.unsafe_load[width=TILE_STEP]()
    var elements = SIMD[DType.bfloat16, TILE_STEP](0)
    for i in range(left):
        elements[i] = at[unsafe_offset=i]
    return elements
