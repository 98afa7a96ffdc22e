"""The fast Walsh-Hadamard transform of heads, by which outliers of a few channels are spread over all of them."""

from std.math import sqrt
from std.utils import IndexList

from ..isa.convert import LANES, narrow, widen
from ..isa.threads import Workers, for_rows

comptime LEAST_HEAD_DIM = 8
comptime GREATEST_HEAD_DIM = 512


@fieldwise_init
struct HadamardRows[dtype: DType, head_dim: Int](TrivialRegisterPassable):
    """`y = x S / sqrt(head_dim)` of every head, S Sylvester's matrix: symmetric, and its own inverse so scaled.

    x, y `[rows, heads, head_dim]`. A head is loaded once, transformed in float32 in registers, and rounded once.
    """

    var y: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    var x: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    var rows: Int
    var heads: Int

    comptime WIDTH = min(LANES, Self.head_dim)
    comptime VECTORS = Self.head_dim // Self.WIDTH
    comptime Vector = SIMD[DType.float32, Self.WIDTH]

    @no_inline
    def run(self, workers: Workers):
        """Transforms all rows on up to `workers` threads."""

        def task(begin: Int, end: Int) {var self}:
            for head in range(begin * self.heads, end * self.heads):
                self.transform_head(head * Self.head_dim)

        for_rows(task, self.rows, self.heads * Self.head_dim, workers)

    @always_inline
    def transform_head(self, at: Int):
        """Transforms the head that begins with element `at`."""
        var parts = Array[Self.Vector, Self.VECTORS](fill=0)
        comptime for i in range(Self.VECTORS):
            var part = widen[Self.WIDTH](self.x.unsafe_offset(at + i * Self.WIDTH))
            comptime for step in range(4):
                comptime stride = 1 << step
                comptime if stride < Self.WIDTH:
                    part = part * Self.signs(stride) + part.shuffle[mask=Self.partners(stride)](part)
            parts[i] = part
        comptime for step in range(5):
            comptime stride = 1 << step
            comptime if stride < Self.VECTORS:
                comptime for i in range(Self.VECTORS):
                    comptime if i & stride == 0:
                        var sum = parts[i] + parts[i + stride]
                        parts[i + stride] = parts[i] - parts[i + stride]
                        parts[i] = sum
        var scale = 1 / sqrt(Float32(Self.head_dim))
        comptime for i in range(Self.VECTORS):
            self.y.unsafe_store(at + i * Self.WIDTH, narrow[Self.dtype](parts[i] * scale))

    @staticmethod
    def partners(stride: Int) -> IndexList[Self.WIDTH]:
        """The lane that each lane is added to, or subtracted from."""
        var lanes = IndexList[Self.WIDTH]()
        for lane in range(Self.WIDTH):
            lanes[lane] = lane ^ stride
        return lanes

    @staticmethod
    @always_inline
    def signs(stride: Int) -> Self.Vector:
        """-1 in the second lane of each pair, 1 in the first."""
        var signs = Self.Vector(1)
        comptime for lane in range(Self.WIDTH):
            if lane & stride:
                signs[lane] = -1
        return signs
