"""Cosines and sines of the angles by which positions turn the dimensions of a head."""

from std.math import cos, sin

from ..cache.pointers import RowPointer
from ..isa.convert import LANES
from ..isa.memory import FloatPointer
from ..isa.threads import Workers, for_rows


@fieldwise_init
struct RotaryTables(TrivialRegisterPassable):
    """`cos[t, i] = amplitude cos(positions[t] frequencies[i])`, and sin: `[rows, half]`.

    Positions from `past` on have the second row of `frequencies` `[2, half]`.
    """

    var cos: FloatPointer
    var sin: FloatPointer
    var positions: RowPointer
    var frequencies: FloatPointer
    var rows: Int
    var half: Int
    var amplitude: Float32
    var past: Float32

    @no_inline
    def fill(self, workers: Workers):
        """Computes both tables on up to `workers` threads."""

        def task(begin: Int, end: Int) {var self}:
            for row in range(begin, end):
                self.fill_row(row)

        for_rows(task, self.rows, self.half, workers)

    @always_inline
    def fill_row(self, row: Int):
        var position = Float32(self.positions[unsafe_offset=row])
        var frequencies = self.frequencies.unsafe_offset(self.half if position >= self.past else 0)
        var whole = self.half // LANES * LANES
        for d in range(0, whole, LANES):
            self.fill_part[LANES](row * self.half + d, position * frequencies.unsafe_load[width=LANES](d))
        for d in range(whole, self.half):
            self.fill_part[1](row * self.half + d, position * frequencies.unsafe_load[width=1](d))

    @always_inline
    def fill_part[width: Int](self, at: Int, angles: SIMD[DType.float32, width]):
        self.cos.unsafe_store(at, cos(angles) * self.amplitude)
        self.sin.unsafe_store(at, sin(angles) * self.amplitude)
