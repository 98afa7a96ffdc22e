"""Low-rank adapters: `y + (x a^T) b`, each row with the a and b of its own adapter, out of stacks.

The products by a are sums along K, those by b sums of rows of b: each streams its matrix once a row, so a few rows of
several adapters cost the memory of their matrices. Rows of one adapter find them in the caches. A row's result does not
depend on other rows.
"""

from std.math import ceildiv

from ..cache.pointers import untracked
from ..isa.convert import narrow, widen
from ..isa.memory import FloatPointer, prefetch_line
from ..isa.registers import REGISTER_LANES, RegisterVector
from ..isa.threads import Workers, for_rows

comptime SUMS = 8
"""Rows of a whose sums are made side by side, and registers of y to which rows of b are added."""
comptime SECTION = SUMS * REGISTER_LANES
"""Columns of b that one block covers."""


@fieldwise_init
struct AdapterLinear[dtype: DType, weight_dtype: DType](TrivialRegisterPassable):
    """The operands of a call; sums are float32, and the result is rounded once."""

    var result: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[m, n]`."""
    var y: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[m, n]`."""
    var x: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[m, k]`."""
    var a: Pointer[Scalar[Self.weight_dtype], MutUntrackedOrigin]
    """`[count, rank, k]`."""
    var b: Pointer[Scalar[Self.weight_dtype], MutUntrackedOrigin]
    """`[count, rank, n]`."""
    var adapters: Pointer[Int32, MutUntrackedOrigin]
    """`[m]`: each below `count`; a row of -1 is y's own."""
    var m: Int
    var n: Int
    var k: Int
    var rank: Int

    @no_inline
    def run(self, workers: Workers):
        """Computes the result on up to `workers` threads: whole rows where there are enough of them, else all products
        by a, then those by b.
        """
        var memory = List[Float32](capacity=max(1, self.m * self.rank))
        var inner = untracked(memory.unsafe_ptr())  # x a^T: [m, rank]
        var ranks, sections = ceildiv(self.rank, SUMS), ceildiv(self.n, SECTION)
        if self.m >= workers.count:

            def rows(begin: Int, end: Int) {var self, var inner, var ranks, var sections}:
                for row in range(begin, end):
                    self.shrink(row, 0, ranks, inner)
                    self.expand(row, 0, sections, inner)

            for_rows(rows, self.m, self.rank * (self.k + self.n), workers)
        else:
            for row in range(self.m):

                def shrink(begin: Int, end: Int) {var self, var inner, var row}:
                    self.shrink(row, begin, end, inner)

                def expand(begin: Int, end: Int) {var self, var inner, var row}:
                    self.expand(row, begin, end, inner)

                for_rows(shrink, ranks, SUMS * self.k, workers)
                for_rows(expand, sections, SECTION * self.rank, workers)
        _ = memory^

    @always_inline
    def of_row(
        self, stack: Pointer[Scalar[Self.weight_dtype], MutUntrackedOrigin], row: Int, columns: Int
    ) -> Pointer[Scalar[Self.weight_dtype], MutUntrackedOrigin]:
        """The matrix of a row's adapter in a stack `[count, rank, columns]`."""
        return stack.unsafe_offset(Int(self.adapters[unsafe_offset=row]) * self.rank * columns)

    def shrink(self, row: Int, begin: Int, end: Int, inner: FloatPointer):
        """The products of a row of x by blocks `[begin, end)` of `SUMS` rows of a."""
        if self.adapters[unsafe_offset=row] < 0:
            return
        var x = self.x.unsafe_offset(row * self.k)
        for first in range(begin * SUMS, min(end * SUMS, self.rank), SUMS):
            var a = self.of_row(self.a, row, self.k).unsafe_offset(first * self.k)
            var to = inner.unsafe_offset(row * self.rank + first)
            if first + SUMS <= self.rank:
                self.products[SUMS](x, a, to)
            else:
                for j in range(self.rank - first):
                    self.products[1](x, a.unsafe_offset(j * self.k), to.unsafe_offset(j))

    @always_inline
    def products[
        rows: Int
    ](
        self,
        x: Pointer[Scalar[Self.dtype], MutUntrackedOrigin],
        a: Pointer[Scalar[Self.weight_dtype], MutUntrackedOrigin],
        to: FloatPointer,
    ):
        """The products of x `[k]` by `rows` rows of a; as many after them are prefetched."""
        var sums = Array[RegisterVector, rows](fill=0)
        var whole = self.k // REGISTER_LANES * REGISTER_LANES
        for p in range(0, whole, REGISTER_LANES):
            var part = widen[REGISTER_LANES](x.unsafe_offset(p))
            comptime for j in range(rows):
                prefetch_line[2](a.unsafe_offset((rows + j) * self.k + p))
                sums[j] = part.fma(widen[REGISTER_LANES](a.unsafe_offset(j * self.k + p)), sums[j])
        comptime for j in range(rows):
            var total = sums[j].reduce_add()
            for p in range(whole, self.k):
                total += widen[1](x.unsafe_offset(p))[0] * widen[1](a.unsafe_offset(j * self.k + p))[0]
            to[unsafe_offset=j] = total

    def expand(self, row: Int, begin: Int, end: Int, inner: FloatPointer):
        """The result of a row in blocks `[begin, end)` of `SECTION` columns."""
        var last = min(end * SECTION, self.n)
        for first in range(begin * SECTION, last, SECTION):
            if first + SECTION <= last:
                self.columns[SUMS, REGISTER_LANES](row, first, inner)
                continue
            var whole = (last - first) // REGISTER_LANES * REGISTER_LANES
            for d in range(first, first + whole, REGISTER_LANES):
                self.columns[1, REGISTER_LANES](row, d, inner)
            for d in range(first + whole, last):
                self.columns[1, 1](row, d, inner)

    @always_inline
    def columns[parts: Int, width: Int](self, row: Int, first: Int, inner: FloatPointer):
        """The result of a row in `parts` times `width` columns; as many after them are prefetched."""
        var at = row * self.n + first
        var sums = Array[SIMD[DType.float32, width], parts](fill=0)
        var has_adapter = self.adapters[unsafe_offset=row] >= 0
        if has_adapter:
            var b = self.of_row(self.b, row, self.n).unsafe_offset(first)
            for j in range(self.rank):
                var factor = SIMD[DType.float32, width](inner[unsafe_offset=row * self.rank + j])
                comptime for part in range(parts):
                    prefetch_line[2](b.unsafe_offset(j * self.n + (parts + part) * width))
                    sums[part] = factor.fma(widen[width](b.unsafe_offset(j * self.n + part * width)), sums[part])
        comptime for part in range(parts):
            var own = widen[width](self.y.unsafe_offset(at + part * width))
            # A row without an adapter has y's own bits, -0 too.
            var total = own + sums[part] if has_adapter else own
            self.result.unsafe_store(at + part * width, narrow[Self.dtype](total))
