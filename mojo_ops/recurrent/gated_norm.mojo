"""The RMS norm of a recurrent layer's outputs, with a gate beside it."""

from std.math import sqrt

from ..isa.convert import FloatVector, LANES, narrow, widen
from ..isa.memory import FloatPointer
from ..isa.threads import Workers, for_rows
from ..layers.elementwise import SILU, activated
from ..layers.rms_norm import rounded


@fieldwise_init
struct GatedNorm[dtype: DType, weight_dtype: DType, gate_first: Bool](TrivialRegisterPassable):
    """`y = weight * norm(x) * silu(z)`, or where `gate_first` `y = weight * norm(x * silu(z))`, each group of `columns`
    columns apart: x `[rows * groups, columns]` float32, z and y likewise in `dtype`, weight `[parts, columns]`, of which
    row i has part `i % parts`. Norms, products and gates are float32; the norm is rounded to `dtype` before the weight
    and, without `gate_first`, the product with it as well.
    """

    var y: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    var x: FloatPointer
    var z: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    var weight: Pointer[Scalar[Self.weight_dtype], MutUntrackedOrigin]
    var rows: Int
    var columns: Int
    var parts: Int
    var eps: Float32

    @no_inline
    def run(self, workers: Workers):
        """Computes all rows on up to `workers` threads."""

        def task(begin: Int, end: Int) {var self}:
            for row in range(begin, end):
                self.norm(row)

        for_rows(task, self.rows, 4 * self.columns, workers)

    @always_inline
    def input[width: Int](self, at: Int) -> SIMD[DType.float32, width]:
        var x = rounded[Self.dtype](self.x.unsafe_load[width=width](at))
        comptime if Self.gate_first:
            return x * activated[SILU](widen[width](self.z.unsafe_offset(at)))
        else:
            return x

    @always_inline
    def norm(self, row: Int):
        var first = row * self.columns
        var whole = self.columns // LANES * LANES
        var sums = FloatVector(0)
        for d in range(0, whole, LANES):
            var x = self.input[LANES](first + d)
            sums = x.fma(x, sums)
        var total = sums.reduce_add()
        for d in range(whole, self.columns):
            var x = self.input[1](first + d)[0]
            total += x * x
        var scale = 1 / sqrt(total / Float32(self.columns) + self.eps)
        for d in range(0, whole, LANES):
            self.part[LANES](row, d, scale)
        for d in range(whole, self.columns):
            self.part[1](row, d, scale)

    @always_inline
    def part[width: Int](self, row: Int, d: Int, scale: Float32):
        """Computes `width` elements of a row."""
        var at = row * self.columns + d
        var weight = widen[width](self.weight.unsafe_offset(row % self.parts * self.columns + d))
        var y = weight * rounded[Self.dtype](self.input[width](at) * scale)
        comptime if not Self.gate_first:
            y = rounded[Self.dtype](y) * activated[SILU](widen[width](self.z.unsafe_offset(at)))
        self.y.unsafe_store(at, narrow[Self.dtype](y))
