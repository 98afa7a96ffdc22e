"""Weights by rows of x: a tile by any number of them, or blocks by one row as they are unpacked."""

from std.bit import count_trailing_zeros
from std.math import ceildiv
from std.memory import bitcast

from ...isa.amx_tiles import AMX_TILE_ROWS
from ...isa.convert import FloatVector
from ...isa.int8_dot import ByteVector, DOT_ROWS, HAS_AVX512, IntVector, int16_pair_dot, int8_dot
from .activations import (
    RECORD_BYTES,
    RECORD_SCALES,
    RECORD_STARTS_16,
    RECORD_STARTS_32,
    RECORD_SUMS,
    RECORD_SUM_PAIRS_16,
    RECORD_SUM_PAIRS_32,
    STARTS_16_OFFSET,
    STARTS_32_OFFSET,
)
from .amx import multiply_group
from .encoding import Encoding
from .tile import BytePointer, CHUNK_LINES, Coming, Raw, TILE_ELEMENTS, Tile, Unpacked, Words, lines_of

comptime Sums = Pointer[FloatVector, MutUntrackedOrigin]
comptime MOST_ROWS = 8 if HAS_AVX512 else 4
"""Rows of x side by side: as many sums as fit the registers, and of vectors as hide the latency of the instruction."""
comptime FUSED_ROWS = 8 if HAS_AVX512 else 2
"""Rows of x up to which blocks are multiplied as they are unpacked, without a tile in memory."""


def multiply[E: Encoding](tile: Tile, x: BytePointer, rows: Int, sums: Sums, coming: Coming):
    """Adds the products of the tile by `rows` rows of x, up to `MOST_ROWS`, to `sums` `[rows]`.

    Parameters:
        E: The encoding.

    Args:
        tile: The weights.
        x: The rows' records of these 256 elements.
        rows: The rows of x.
        sums: The sums of each row of x.
        coming: What to prefetch the second half of.
    """
    var row = 0
    comptime for side in [8, 4, 2, 1]:
        comptime if side <= MOST_ROWS:
            while row + side <= rows:
                multiply_side[E, side](tile, x.unsafe_offset(row * RECORD_BYTES), sums.unsafe_offset(row), coming, x)
                row += side


def multiply_on_tiles[E: Encoding](tile: Tile, x: BytePointer, sums: Sums, coming: Coming, scratch: BytePointer):
    """Does what `multiply` does with `AMX_TILE_ROWS` rows of x, by AMX.

    Args:
        tile: The weights, without the offset of the encoding (`has_start`).
        x: The rows' records of these 256 elements.
        sums: The sums of each row of x.
        coming: What to prefetch the second half of.
        scratch: `2 TURN_BYTES`, from the start of a cache line on.
    """
    multiply_side[E, AMX_TILE_ROWS, on_tiles=True](tile, x, sums, coming, scratch)


@always_inline
def multiply_side[
    E: Encoding, rows: Int, *, on_tiles: Bool = False
](tile: Tile, x: BytePointer, sums: Sums, coming: Coming, scratch: BytePointer):
    comptime groups = 256 // E.GROUP
    var totals = Array[FloatVector, rows](fill=0)
    comptime if not E.ROUNDS_BLOCKS:
        comptime for r in range(rows):
            totals[r] = sums[unsafe_offset=r]
    comptime begun = CHUNK_LINES * (E.BYTES // 16)
    comptime lines = ceildiv(lines_of(E.BYTES) - begun, groups)
    comptime turns = 2 if on_tiles else 1
    comptime if on_tiles:
        multiply_group[E.GROUP, 0](tile.at, x, scratch)
    for first in range(0, groups, turns):
        comptime for turn in range(turns):
            var group = first + turn
            comptime if on_tiles:
                if group + 1 < groups:
                    multiply_group[E.GROUP, 1 - turn](
                        tile.at.unsafe_offset((group + 1) * E.GROUP * DOT_ROWS),
                        x.unsafe_offset((group + 1) * E.GROUP),
                        scratch,
                    )
            comptime for line in range(lines):
                coming.prefetch(begun + lines * group + line)
            var products = Array[IntVector, rows](fill=0)
            comptime for r in range(rows):
                comptime if on_tiles:
                    products[r] = scratch.unsafe_bitcast[Int32]().unsafe_load[width=DOT_ROWS](
                        (turn * AMX_TILE_ROWS + r) * DOT_ROWS
                    )
                else:
                    products[r] = start_of[E](x.unsafe_offset(r * RECORD_BYTES), group)
            comptime for step in range(0 if on_tiles else E.GROUP // 4):
                var w = tile.step(group * (E.GROUP // 4) + step)
                comptime for r in range(rows):
                    var quad = quad_of(x.unsafe_offset(r * RECORD_BYTES), group * (E.GROUP // 4) + step)
                    products[r] = int8_dot[E.SIGNED](products[r], w, quad)
            var scale = tile.scale(group)
            var least = tile.min(group) if E.HAS_MINS and not E.ROUNDS_BLOCKS else FloatVector(0)
            comptime for r in range(rows):
                add_group[E](totals[r], products[r], scale, least, x.unsafe_offset(r * RECORD_BYTES), group)
    comptime for r in range(rows):
        var record = x.unsafe_offset(r * RECORD_BYTES)
        comptime if E.ROUNDS_BLOCKS:
            var least = IntVector(0)
            comptime if E.HAS_MINS:
                comptime for i in range(groups // 2):
                    least = int16_pair_dot(least, tile.min_pair(i), sum_pair_of[E](record, i))
            sums[unsafe_offset=r] = with_block[E](
                sums[unsafe_offset=r], totals[r], tile.factor(), least, tile.min_factor(), record
            )
        else:
            sums[unsafe_offset=r] = totals[r]


struct RowProducts[E: Encoding, rows: Int, elements: Int](Unpacked):
    """A few rows of x by `elements` of 16 rows of w, which are multiplied as they are unpacked.

    Sums are added in the order of `multiply_side`, so the bits are the same.
    """

    var x: BytePointer
    """The rows' records, from the first of these elements on."""
    var numbers: BytePointer
    """The same records, moved on so that number 0 of each field is that of the first of these groups."""
    var coming: Coming
    """The blocks to prefetch the second half of."""
    var totals: Array[FloatVector, Self.rows]
    var products: Array[IntVector, Self.rows * Self.GROUPS]
    """A few of them at a time are in use."""
    var scales: Array[FloatVector, Self.GROUPS]
    var mins: Array[FloatVector, Self.GROUPS]
    var factors: FloatVector
    var least: Array[IntVector, Self.rows]
    """The sums of minimums by those of x."""
    var min_factors: FloatVector

    comptime GROUPS = Self.elements // Self.E.GROUP
    comptime BYTES = Self.E.BYTES * Self.elements // TILE_ELEMENTS
    comptime STEPS = Self.elements // 4
    comptime BEGUN = CHUNK_LINES * (Self.BYTES // 16)
    comptime LINES_OF_STEP = ceildiv(lines_of(Self.BYTES) - Self.BEGUN, Self.STEPS)
    """Lines that are prefetched with a step, if any."""
    comptime STEPS_OF_LINES = max(1, Self.STEPS // (lines_of(Self.BYTES) - Self.BEGUN))
    """Every so many steps they are."""

    @always_inline
    def __init__(out self, x: BytePointer, numbers: BytePointer, coming: Coming):
        self.x = x
        self.numbers = numbers
        self.coming = coming
        self.totals = Array[FloatVector, Self.rows](fill=0)
        self.products = Array[IntVector, Self.rows * Self.GROUPS](fill=0)
        self.scales = Array[FloatVector, Self.GROUPS](fill=0)
        self.mins = Array[FloatVector, Self.GROUPS](fill=0)
        self.factors = 0
        self.least = Array[IntVector, Self.rows](fill=0)
        self.min_factors = 0

    @always_inline
    def record[r: Int](self) -> BytePointer:
        return self.numbers.unsafe_offset(r * RECORD_BYTES)

    @always_inline
    def set_step[step: Int](mut self, quads: Words):
        comptime group = 4 * step // Self.E.GROUP
        comptime if step % Self.STEPS_OF_LINES == 0:
            comptime for line in range(Self.LINES_OF_STEP):
                self.coming.prefetch(Self.BEGUN + step // Self.STEPS_OF_LINES * Self.LINES_OF_STEP + line)
        comptime for r in range(Self.rows):
            comptime at = group * Self.rows + r
            comptime if step % (Self.E.GROUP // 4) == 0:
                self.products[at] = start_of[Self.E](self.record[r](), group)
            self.products[at] = int8_dot[Self.E.SIGNED](
                self.products[at],
                bitcast[DType.uint8, 4 * DOT_ROWS](quads),
                quad_of(self.x.unsafe_offset(r * RECORD_BYTES), step),
            )
            comptime if step % (Self.E.GROUP // 4) == Self.E.GROUP // 4 - 1:
                add_group[Self.E](
                    self.totals[r], self.products[at], self.scales[group], self.mins[group], self.record[r](), group
                )

    @always_inline
    def set_scale[group: Int](mut self, scales: FloatVector):
        self.scales[group] = scales

    @always_inline
    def set_min[group: Int](mut self, mins: FloatVector):
        self.mins[group] = mins

    @always_inline
    def set_factor(mut self, factors: FloatVector):
        self.factors = factors

    @always_inline
    def set_min_pairs[count: Int](mut self, pairs: Array[Words, count], factors: FloatVector):
        self.min_factors = factors
        comptime for r in range(Self.rows):
            comptime for i in range(count):
                self.least[r] = int16_pair_dot(self.least[r], pairs[i], sum_pair_of[Self.E](self.record[r](), i))


@always_inline
def multiply_blocks[
    E: Encoding, rows: Int, elements: Int
](raw: Raw, x: BytePointer, part: Int, sums: Sums, coming: Coming):
    """Adds the products of what `raw` holds by `rows` rows of x to `sums` `[rows]`, as `multiply` does.

    Parameters:
        E: The encoding.
        rows: The rows of x.
        elements: Elements of each row of w: `TILE_ELEMENTS`, or `PART_ELEMENTS`.

    Args:
        raw: The blocks.
        x: The rows' records of the tile's elements.
        part: Which part of the tile the blocks are, 0 where they are all of it.
        sums: The sums of each row of x.
        coming: What to prefetch the second half of.
    """
    comptime assert elements == TILE_ELEMENTS or E.GROUP == 32, "numbers of a record are taken by groups of 32"
    var groups = part * (elements // 32)
    var products = RowProducts[E, rows, elements](x.unsafe_offset(part * elements), x.unsafe_offset(groups * 4), coming)
    comptime if not E.ROUNDS_BLOCKS:
        comptime for r in range(rows):
            products.totals[r] = sums[unsafe_offset=r]
    E.unpack[elements](raw, products)
    comptime for r in range(rows):
        comptime if E.ROUNDS_BLOCKS:
            sums[unsafe_offset=r] = with_block[E](
                sums[unsafe_offset=r],
                products.totals[r],
                products.factors,
                products.least[r],
                products.min_factors,
                products.record[r](),
            )
        else:
            sums[unsafe_offset=r] = products.totals[r]


def has_start[E: Encoding]() -> Bool:
    """Return whether the sums of a group begin with what takes the offset of its weights away."""
    return E.OFFSET > 0 and not E.OFFSET_BY_MINS


@always_inline
def start_of[E: Encoding](record: BytePointer, group: Int) -> IntVector:
    """Return what a group's int32 sum begins with: what an offset of the weights is taken away by, or 0."""
    comptime if has_start[E]():
        comptime starts = RECORD_STARTS_16 if E.GROUP == 16 else RECORD_STARTS_32
        comptime offset = STARTS_16_OFFSET if E.GROUP == 16 else STARTS_32_OFFSET
        var start = record.unsafe_offset(starts).unsafe_bitcast[Int32]()[unsafe_offset=group]
        comptime if E.OFFSET > offset:
            return IntVector(start * Int32(E.OFFSET // offset))
        else:
            return IntVector(start >> Int32(count_trailing_zeros(offset // E.OFFSET)))
    else:
        return 0


@always_inline
def quad_of(record: BytePointer, step: Int) -> Int32:
    """Four elements of a row of x."""
    return record.unsafe_bitcast[Int32]()[unsafe_offset=step]


@always_inline
def sum_pair_of[E: Encoding](record: BytePointer, index: Int) -> Int32:
    """The sums of two groups of a block of 256."""
    comptime pairs = RECORD_SUM_PAIRS_16 if E.GROUP == 16 else RECORD_SUM_PAIRS_32
    return record.unsafe_offset(pairs).unsafe_bitcast[Int32]()[unsafe_offset=index]


@always_inline
def add_group[
    E: Encoding
](
    mut totals: FloatVector,
    products: IntVector,
    scales: FloatVector,
    mins: FloatVector,
    record: BytePointer,
    group: Int,
):
    """Adds the products of a group to those of a block; of 32 elements a scale of x, to those of all of K."""
    var product = products.cast[DType.float32]()
    comptime if E.ROUNDS_BLOCKS:
        totals = product.fma(scales, totals)
    else:
        comptime if E.HAS_MINS and E.MINS_IN_STEPS:  # both are integers below 2^24: their sum is exact
            product = mins.fma(float_of(record, RECORD_SUMS, group), product)
        product *= scales
        comptime if E.HAS_MINS and not E.MINS_IN_STEPS:
            product = mins.fma(float_of(record, RECORD_SUMS, group), product)
        totals = product.fma(float_of(record, RECORD_SCALES, group // (32 // E.GROUP)), totals)


@always_inline
def with_block[
    E: Encoding
](
    sums: FloatVector,
    totals: FloatVector,
    factors: FloatVector,
    least: IntVector,
    min_factors: FloatVector,
    record: BytePointer,
) -> FloatVector:
    """The sums after a block of 256: `totals` are in steps of `factors`, the sums of minimums of `min_factors`."""
    var block = totals * factors
    comptime if E.HAS_MINS:
        block = least.cast[DType.float32]().fma(min_factors, block)
    return block.fma(float_of(record, RECORD_SCALES, 0), sums)


@always_inline
def float_of(record: BytePointer, field: Int, index: Int) -> FloatVector:
    """A number of a row's record, in all lanes."""
    return FloatVector(record.unsafe_offset(field).unsafe_bitcast[Float32]()[unsafe_offset=index])
