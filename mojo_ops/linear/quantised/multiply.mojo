"""A tile of weights by rows of x."""

from std.math import ceildiv

from ...isa.convert import FloatVector
from ...isa.int8_dot import HAS_AVX512, IntVector, int8_dot
from ...isa.memory import CACHE_LINE_BYTES
from .activations import (
    RECORD_BYTES,
    RECORD_SCALES,
    RECORD_STARTS_16,
    RECORD_STARTS_32,
    RECORD_SUMS,
)
from .encodings import Encoding
from .tile import BytePointer, CHUNK_LINES, Tile, prefetch_line

comptime Sums = Pointer[FloatVector, MutUntrackedOrigin]
comptime MOST_ROWS = 8 if HAS_AVX512 else 4
"""Rows of x side by side: as many sums as hide the latency of the instruction, and fit the registers."""


def multiply[E: Encoding](tile: Tile, x: BytePointer, rows: Int, sums: Sums, coming: BytePointer):
    """Adds the products of the tile by `rows` rows of x to `sums` `[rows]`: x are their records of these 256 elements.

    Prefetches the second half of as many bytes as the tile's blocks have, from `coming` on.
    """
    var row = 0
    comptime for side in [8, 4, 2, 1]:
        comptime if side <= MOST_ROWS:
            while row + side <= rows:
                multiply_side[E, side](tile, x.unsafe_offset(row * RECORD_BYTES), sums.unsafe_offset(row), coming)
                row += side


@always_inline
def multiply_side[E: Encoding, rows: Int](tile: Tile, x: BytePointer, sums: Sums, coming: BytePointer):
    comptime groups = 256 // E.GROUP
    comptime starts = RECORD_STARTS_16 if E.GROUP == 16 else RECORD_STARTS_32
    comptime begins = E.OFFSET > 0 and not E.OFFSET_BY_MINS
    var totals = Array[FloatVector, rows](fill=0)
    comptime if not E.ROUNDS_BLOCKS:
        comptime for r in range(rows):
            totals[r] = sums[unsafe_offset=r]
    comptime begun = CHUNK_LINES * (E.BYTES // 16)
    comptime lines = ceildiv(E.BYTES // 4 - begun, groups)
    for group in range(groups):
        comptime for line in range(lines):
            prefetch_line(coming.unsafe_offset(CACHE_LINE_BYTES * (begun + lines * group + line)))
        var products = Array[IntVector, rows](fill=0)
        comptime if begins:
            comptime for r in range(rows):
                products[r] = IntVector(
                    x.unsafe_offset(r * RECORD_BYTES + starts).unsafe_bitcast[Int32]()[unsafe_offset=group]
                )
        comptime for step in range(E.GROUP // 4):
            var w = tile.step(group * (E.GROUP // 4) + step)
            comptime for r in range(rows):
                var quad = x.unsafe_offset(r * RECORD_BYTES + 4 * step).unsafe_bitcast[Int32]()[
                    unsafe_offset=group * (E.GROUP // 4)
                ]
                products[r] = int8_dot[E.SIGNED](products[r], w, quad)
        var scale = tile.scale(group)
        comptime for r in range(rows):
            var product = products[r].cast[DType.float32]()
            comptime if E.ROUNDS_BLOCKS:
                totals[r] = product.fma(scale, totals[r])
                comptime if E.HAS_MINS:
                    totals[r] = tile.min(group).fma(float_of[r](x, RECORD_SUMS, group), totals[r])
            else:
                comptime if E.HAS_MINS:  # both are integers below 2^24: their sum is exact
                    product = tile.min(group).fma(float_of[r](x, RECORD_SUMS, group), product)
                product *= scale
                totals[r] = product.fma(float_of[r](x, RECORD_SCALES, group), totals[r])
    comptime for r in range(rows):
        comptime if E.ROUNDS_BLOCKS:
            totals[r] = totals[r].fma(float_of[r](x, RECORD_SCALES, 0), sums[unsafe_offset=r])
        sums[unsafe_offset=r] = totals[r]


@always_inline
def float_of[row: Int](x: BytePointer, field: Int, index: Int) -> FloatVector:
    """A number of a row's record, in all lanes."""
    return FloatVector(x.unsafe_offset(row * RECORD_BYTES + field).unsafe_bitcast[Float32]()[unsafe_offset=index])
