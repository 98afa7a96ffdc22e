"""The RMS norm of rows, in float32."""

from std.math import sqrt

from ..isa.convert import FloatVector, LANES, narrow, widen
from ..isa.threads import Workers, for_rows


@fieldwise_init
struct RmsNorm[dtype: DType, weight_dtype: DType, rounds_once: Bool](TrivialRegisterPassable):
    """`y = (offset + weight) * x / sqrt(mean(x^2) + eps)`: x, y `[rows, columns]`, weight `[columns]`."""

    var y: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    var x: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    var weight: Pointer[Scalar[Self.weight_dtype], MutUntrackedOrigin]
    var rows: Int
    var columns: Int
    var eps: Float32
    var offset: Float32

    @no_inline
    def run(self, workers: Workers):
        """Computes all rows on up to `workers` threads. A row's result does not depend on them."""

        def task(begin: Int, end: Int) {var self}:
            for row in range(begin, end):
                self.norm(row)

        for_rows(task, self.rows, self.columns, workers)

    @always_inline
    def norm(self, row: Int):
        var x = self.x.unsafe_offset(row * self.columns)
        var whole = self.columns // LANES * LANES
        var sums = FloatVector(0)
        for d in range(0, whole, LANES):
            var wide = widen[LANES](x.unsafe_offset(d))
            sums = wide.fma(wide, sums)
        var total = sums.reduce_add()
        for d in range(whole, self.columns):
            var wide = widen[1](x.unsafe_offset(d))[0]
            total += wide * wide
        var scale = 1 / sqrt(total / Float32(self.columns) + self.eps)
        for d in range(0, whole, LANES):
            self.scale_part[LANES](row, d, scale)
        for d in range(whole, self.columns):
            self.scale_part[1](row, d, scale)

    @always_inline
    def scale_part[width: Int](self, row: Int, d: Int, scale: Float32):
        """Computes `width` elements of a row."""
        var at = row * self.columns + d
        var scaled = widen[width](self.x.unsafe_offset(at)) * scale
        var weight = widen[width](self.weight.unsafe_offset(d)) + self.offset
        comptime if not Self.rounds_once:
            weight = rounded[Self.dtype](rounded[Self.weight_dtype](weight))
            scaled = rounded[Self.dtype](scaled)
        self.y.unsafe_store(at, narrow[Self.dtype](weight * scaled))


@always_inline
def rounded[dtype: DType](x: SIMD[DType.float32, _]) -> type_of(x):
    """The nearest numbers of `dtype`, as float32."""
    comptime if dtype == DType.float32:
        return x
    else:
        return narrow[dtype](x).cast[DType.float32]()
