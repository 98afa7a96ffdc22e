"""One row of x by 16 rows of blocks of whole bytes, multiplied where they lie: neither a tile nor a transpose.

A group's products stay apart by rows of w, and are folded into one vector of 16 rows' int32 sums. So the integers that
are scaled, and their order, are those of a tile.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.utils import IndexList

from ...isa.convert import FloatVector
from ...isa.int8_dot import ByteVector, DOT_ROWS, IntVector, SIGNED_AS_UNSIGNED, int8_dot
from .activations import RECORD_BYTES
from .encoding import Encoding
from .multiply import Sums, add_group, start_of
from .tile import BytePointer, Coming, lines_of, pick

comptime GROUPS = 8
"""Blocks of a row in a tile's 256 elements."""
comptime SCALE_BYTES = GROUPS * DOT_ROWS * 2
"""Bytes of a tile's float16 scales, `[8 groups, 16 rows]`."""


@fieldwise_init
struct ByteRows(TrivialRegisterPassable):
    """The blocks of 16 rows of w and 256 elements of K."""

    var first: BytePointer
    """The first row's."""
    var pitch: Int
    """Bytes from a row to the next one."""

    @always_inline
    def at(self, row: Int, byte: Int) -> BytePointer:
        return self.first.unsafe_offset(row * self.pitch + byte)

    @always_inline
    def take_scales[E: Encoding](self, groups: Int, scales: BytePointer):
        """Writes the float16 with which each of `groups` blocks of a row begins to `scales`, 16 rows of a group side by
        side.

        By the integer registers, while the vectors' ports multiply.
        """
        for group in range(groups):
            comptime for row in range(DOT_ROWS):
                var scale = self.at(row, group * E.BYTES // GROUPS).unsafe_bitcast[UInt16]()[]
                scales.unsafe_bitcast[UInt16]()[unsafe_offset=group * DOT_ROWS + row] = scale

    @always_inline
    def sums[E: Encoding](self, x: BytePointer, group: Int) -> IntVector:
        """Return each row's sum of products of a group by the 32 elements at `x`."""
        comptime byte = E.BYTES_AT
        var half = x.unsafe_bitcast[Int8]().unsafe_load[width=32]()
        var both = half.join(half)
        var folded = Array[IntVector, 2](fill=0)
        comptime for side in range(2):
            # [row i][row i + 4], 8 sums each.
            var parts = Array[IntVector, 4](fill=0)
            comptime for i in range(4):
                comptime row = 8 * side + i
                var at = group * (E.BYTES // GROUPS) + byte
                var w = load_block(self.at(row, at)).join(load_block(self.at(row + 4, at)))
                comptime if SIGNED_AS_UNSIGNED:
                    w ^= 0x80
                parts[i] = int8_dot[E.SIGNED](IntVector(0), w, both)
            folded[side] = pair_sums[True](pair_sums[False](parts[0], parts[1]), pair_sums[False](parts[2], parts[3]))
        # [rows 0-3, 0-3, 4-7, 4-7] and the same of rows 8 to 15.
        return folded[0].shuffle[mask=quarters(0)](folded[1]) + folded[0].shuffle[mask=quarters(4)](folded[1])

    @always_inline
    def multiply[E: Encoding](self, groups: Int, scales: BytePointer, x: BytePointer, sums: Sums, coming: Coming):
        """Adds the products of `groups` blocks of each row by a row of x to `sums` `[1]`, as `multiply` does.

        Parameters:
            E: The encoding.

        Args:
            groups: The blocks of a row, up to `GROUPS`.
            scales: What `take_scales` wrote.
            x: The row's record of these 256 elements.
            sums: The sums.
            coming: What to prefetch.
        """
        comptime lines = ceildiv(lines_of(E.BYTES), GROUPS)
        var total = sums[unsafe_offset=0]
        for group in range(groups):  # unrolled, all groups' products would come before the first fold
            comptime for line in range(lines):
                coming.prefetch(lines * group + line)
            var products = start_of[E](x, group) + self.sums[E](x.unsafe_offset(32 * group), group)
            var scale = scales.unsafe_bitcast[Float16]().unsafe_load[width=DOT_ROWS](group * DOT_ROWS)
            add_group[E](total, products, scale.cast[DType.float32](), FloatVector(0), x, group)
        sums[unsafe_offset=0] = total


@always_inline
def load_block(at: BytePointer) -> SIMD[DType.uint8, 32]:
    return at.unsafe_load[width=32]()


@always_inline
def pair_sums[pairs: Bool](a: IntVector, b: IntVector) -> IntVector:
    """In each four lanes the sums of two vectors' neighbours by turns, of single lanes or of pairs of lanes."""
    return a.shuffle[mask=pick(0, pairs)](b) + a.shuffle[mask=pick(2, pairs)](b)


def quarters(first: Int) -> IndexList[DOT_ROWS]:
    """Lanes `[first, first + 4)` of both halves of two vectors."""
    var mask = IndexList[DOT_ROWS]()
    for lane in range(DOT_ROWS):
        mask[lane] = lane // 4 * 8 + first + lane % 4
    return mask
