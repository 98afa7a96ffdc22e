"""Rotary position embedding of rows of heads, by cosines and sines that are given."""

from ..isa.convert import LANES, narrow, widen
from ..isa.memory import FloatPointer
from ..isa.threads import Workers, for_rows


@fieldwise_init
struct RotaryRows[dtype: DType](TrivialRegisterPassable):
    """Rotates the first `2 half` dimensions of every head, two by two, each by the angle `[row, i]`; the rest is copied.

    Dimension `i < half` is rotated with dimension `half + i`. Of `pairs`, it is dimension `2 i` with `2 i + 1`, which
    become dimensions `i` and `half + i` of y. x, y `[rows, heads, head_dim]`; cos, sin `[rows, half]`.
    """

    var y: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    var x: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    var cos: FloatPointer
    var sin: FloatPointer
    var rows: Int
    var heads: Int
    var head_dim: Int
    var half: Int
    var pairs: Bool

    @no_inline
    def run(self, workers: Workers):
        """Rotates all rows on up to `workers` threads."""

        def task(begin: Int, end: Int) {var self}:
            for row in range(begin, end):
                for head in range(self.heads):
                    self.rotate_head(row, (row * self.heads + head) * self.head_dim)

        for_rows(task, self.rows, self.heads * self.head_dim, workers)

    @always_inline
    def rotate_head(self, row: Int, at: Int):
        """Rotates the head that begins with element `at`."""
        var whole = self.half // LANES * LANES
        for d in range(0, whole, LANES):
            self.rotate_part[LANES](row, at, d)
        for d in range(whole, self.half):
            self.rotate_part[1](row, at, d)
        for d in range(2 * self.half, self.head_dim):
            self.y[unsafe_offset=at + d] = self.x[unsafe_offset=at + d]

    @always_inline
    def rotate_part[width: Int](self, row: Int, at: Int, d: Int):
        var cos = self.cos.unsafe_load[width=width](row * self.half + d)
        var sin = self.sin.unsafe_load[width=width](row * self.half + d)
        var a: SIMD[DType.float32, width]
        var b: SIMD[DType.float32, width]
        if self.pairs:
            var both = widen[2 * width](self.x.unsafe_offset(at + 2 * d)).deinterleave()
            a = rebind[type_of(a)](both[0])
            b = rebind[type_of(b)](both[1])
        else:
            a = widen[width](self.x.unsafe_offset(at + d))
            b = widen[width](self.x.unsafe_offset(at + self.half + d))
        self.y.unsafe_store(at + d, narrow[Self.dtype](a * cos - b * sin))
        self.y.unsafe_store(at + self.half + d, narrow[Self.dtype](b * cos + a * sin))
