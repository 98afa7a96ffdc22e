"""Linear layer in vectors: `y = x w^T` in float32 with the weights as checkpoints store them, `[out, in]`, not
repacked.

Both operands are contiguous along K, so y is dot products of rows. Every row of w is read from memory once: a group of
rows is multiplied with every block of rows of x while it is in the cache, and the next group is prefetched.
"""

from max.algorithm import sync_parallelize
from std.math import ceildiv
from std.memory import bitcast
from std.sys import CompilationTarget, simd_width_of, size_of
from std.sys.intrinsics import PrefetchOptions, prefetch

from ..cache.pointers import untracked
from ..isa.memory import CACHE_LINE_BYTES, align_to_line

comptime FLOAT_LANES = simd_width_of[DType.float32]()
"""Float32 numbers in a vector register of the CPU target."""
comptime WEIGHT_CHUNK = 2 * FLOAT_LANES
"""Elements of w that are loaded and widened at once."""
comptime HAS_32_REGISTERS = CompilationTarget.has_avx512f() or CompilationTarget.has_neon()
"""Whether there are 32 vector registers of this width, or 16."""
comptime BLOCK_X_ROWS = 8 if HAS_32_REGISTERS else 4
"""Rows of x in a full block of sums."""
comptime GROUP_W_ROWS = 8
"""Rows of w in a group. They are read side by side while the next group is prefetched."""
comptime K_BLOCK = 512
"""Elements of K after which the next rows of w follow, so that a block of x stays in the first-level cache."""
comptime WIDENED_ROWS = 64
"""Rows of x that are widened to float32 at once."""


def block_w_rows(rows: Int) -> Int:
    """Rows of w in a block of sums with `rows` rows of x, so that sums and operands fit the registers."""
    comptime if HAS_32_REGISTERS:
        return 2 if rows >= 8 else (4 if rows >= 2 else 8)
    else:
        return 2 if rows >= 2 else 4


def linear_vectors[
    dtype: DType, weight_dtype: DType, //
](
    y: Pointer[Scalar[dtype], MutUntrackedOrigin],
    x: Pointer[Scalar[dtype], MutUntrackedOrigin],
    w: Pointer[Scalar[weight_dtype], MutUntrackedOrigin],
    m: Int,
    n: Int,
    k: Int,
    workers: Int,
):
    """Computes `y = x w^T`: y `[m, n]`, x `[m, k]`, w `[n, k]`. The result does not depend on `workers`."""
    # An odd number of lines, so that the rows of a block fall into different sets of the cache.
    var pitch = (ceildiv(k, 16) | 1) * 16
    var memory = List[Float32](capacity=min(m, WIDENED_ROWS) * pitch + 16)
    var wide = align_to_line(untracked(memory.unsafe_ptr()))
    for start in range(0, m, WIDENED_ROWS):
        var rows = min(WIDENED_ROWS, m - start)
        var source = x.unsafe_offset(start * k)

        def widen(row: Int) {var source, var wide, var k, var pitch}:
            widen_x_row[weight_dtype](source.unsafe_offset(row * k), wide.unsafe_offset(row * pitch), k)

        if rows <= BLOCK_X_ROWS:
            for row in range(rows):
                widen(row)
        else:
            sync_parallelize(widen, rows)
        var call = VectorLinear[dtype, weight_dtype](y.unsafe_offset(start * n), wide, w, rows, n, k, pitch)
        var groups = ceildiv(n, GROUP_W_ROWS)
        var tasks = min(groups, max(1, workers))

        def columns(index: Int) {var call, var groups, var tasks}:
            var begin = index * groups // tasks * GROUP_W_ROWS
            var end = min(call.n, (index + 1) * groups // tasks * GROUP_W_ROWS)
            for group in range(begin, end, GROUP_W_ROWS):
                call.multiply_group(group, min(end, group + GROUP_W_ROWS))

        sync_parallelize(columns, tasks)
    _ = memory^


@always_inline
def widen_weights[
    dtype: DType, //
](
    at: Pointer[Scalar[dtype], MutUntrackedOrigin],
    mut first: SIMD[DType.float32, FLOAT_LANES],
    mut second: SIMD[DType.float32, FLOAT_LANES],
):
    """Widens `WEIGHT_CHUNK` elements: of bfloat16 the even and the odd ones, by a shift and a mask; else the first and
    the second half."""
    comptime if dtype == DType.bfloat16:
        var pairs = at.unsafe_bitcast[UInt32]().unsafe_load[width=FLOAT_LANES]()
        first = bitcast[DType.float32, FLOAT_LANES](pairs << 16)
        second = bitcast[DType.float32, FLOAT_LANES](pairs & 0xFFFF0000)
    else:
        first = at.unsafe_load[width=FLOAT_LANES]().cast[DType.float32]()
        second = at.unsafe_load[width=FLOAT_LANES](FLOAT_LANES).cast[DType.float32]()


def widen_x_row[
    dtype: DType, //, weight_dtype: DType
](source: Pointer[Scalar[dtype], MutUntrackedOrigin], target: Pointer[Float32, MutUntrackedOrigin], k: Int):
    """Widens a row of x to float32, its whole chunks in the element order of `widen_weights`."""
    var whole = k // WEIGHT_CHUNK * WEIGHT_CHUNK
    for p in range(0, whole, WEIGHT_CHUNK):
        var low = source.unsafe_load[width=FLOAT_LANES](p).cast[DType.float32]()
        var high = source.unsafe_load[width=FLOAT_LANES](p + FLOAT_LANES).cast[DType.float32]()
        comptime if weight_dtype == DType.bfloat16:
            var even, odd = low.join(high).deinterleave()
            low = rebind[SIMD[DType.float32, FLOAT_LANES]](even)
            high = rebind[SIMD[DType.float32, FLOAT_LANES]](odd)
        target.unsafe_store(p, low)
        target.unsafe_store(p + FLOAT_LANES, high)
    for p in range(whole, k):
        target[unsafe_offset=p] = source[unsafe_offset=p].cast[DType.float32]()


@fieldwise_init
struct VectorLinear[dtype: DType, weight_dtype: DType](TrivialRegisterPassable):
    """The operands of one call, or of `WIDENED_ROWS` of its rows."""

    var y: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[m, n]`."""
    var x: Pointer[Float32, MutUntrackedOrigin]
    """`[m, k]`, as `widen_x_row` makes it."""
    var w: Pointer[Scalar[Self.weight_dtype], MutUntrackedOrigin]
    """`[n, k]`."""
    var m: Int
    var n: Int
    var k: Int
    var pitch: Int
    """Elements from one row of x to the next."""

    comptime LINES = max(1, WEIGHT_CHUNK * size_of[Self.weight_dtype]() // CACHE_LINE_BYTES)
    """Cache lines of a chunk of weights."""

    def multiply_group(self, begin: Int, end: Int):
        """Multiplies all rows of x with rows `[begin, end)` of w. The first block of x prefetches the next group."""
        var row = 0
        while row + BLOCK_X_ROWS <= self.m:
            self.multiply_rows[BLOCK_X_ROWS](row, begin, end)
            row += BLOCK_X_ROWS
        comptime for rows in [4, 2, 1]:
            if row + rows <= self.m:
                self.multiply_rows[rows](row, begin, end)
                row += rows

    def multiply_rows[count: Int](self, row: Int, begin: Int, end: Int):
        """Multiplies rows `[row, row + count)` of x with rows `[begin, end)` of w, at most `GROUP_W_ROWS`."""
        comptime columns = block_w_rows(count)
        # [GROUP_W_ROWS, count]: the sums of each pair of rows, one vector each.
        var memory = Array[SIMD[DType.float32, FLOAT_LANES], GROUP_W_ROWS * count](fill=0)
        var sums = untracked(Pointer(to=memory[0]))
        var whole = self.k // WEIGHT_CHUNK * WEIGHT_CHUNK
        for first in range(0, whole, K_BLOCK):
            var last = min(whole, first + K_BLOCK)
            var column = begin
            while column + columns <= end:
                if row == 0:
                    self.add_products[count, columns, True](
                        row, column, first, last, sums.unsafe_offset((column - begin) * count)
                    )
                else:
                    self.add_products[count, columns, False](
                        row, column, first, last, sums.unsafe_offset((column - begin) * count)
                    )
                column += columns
            while column < end:
                self.add_products[count, 1, False](
                    row, column, first, last, sums.unsafe_offset((column - begin) * count)
                )
                column += 1
        for column in range(begin, end):
            var w = self.w.unsafe_offset(column * self.k)
            for r in range(count):
                var x = self.x.unsafe_offset((row + r) * self.pitch)
                var sum = sums[unsafe_offset=(column - begin) * count + r].reduce_add()
                for p in range(whole, self.k):
                    sum += x[unsafe_offset=p] * w[unsafe_offset=p].cast[DType.float32]()
                self.y[unsafe_offset=(row + r) * self.n + column] = sum.cast[Self.dtype]()
        _ = memory

    @always_inline
    def add_products[
        rows: Int, columns: Int, fetch: Bool
    ](
        self,
        row: Int,
        column: Int,
        first: Int,
        last: Int,
        partial: Pointer[SIMD[DType.float32, FLOAT_LANES], MutUntrackedOrigin],
    ):
        """Adds elements `[first, last)` of K to the sums of `rows` rows of x by `columns` rows of w."""
        var sums = Array[SIMD[DType.float32, FLOAT_LANES], rows * columns](fill=0)
        comptime for i in range(rows * columns):
            sums[i] = partial[unsafe_offset=i]
        var x = self.x.unsafe_offset(row * self.pitch)
        var w = self.w.unsafe_offset(column * self.k)
        for p in range(first, last, WEIGHT_CHUNK):
            var low = Array[SIMD[DType.float32, FLOAT_LANES], columns](fill=0)
            var high = Array[SIMD[DType.float32, FLOAT_LANES], columns](fill=0)
            comptime for c in range(columns):
                widen_weights(w.unsafe_offset(c * self.k + p), low[c], high[c])
                comptime if fetch:
                    comptime for line in range(Self.LINES):
                        prefetch[PrefetchOptions().for_read().medium_locality().to_data_cache()](
                            w.unsafe_offset((c + GROUP_W_ROWS) * self.k + p + line * (WEIGHT_CHUNK // Self.LINES))
                        )
            comptime for r in range(rows):
                var xs = x.unsafe_load[width=FLOAT_LANES](r * self.pitch + p)
                comptime for c in range(columns):
                    sums[c * rows + r] = xs.fma(low[c], sums[c * rows + r])
            comptime for r in range(rows):
                var xs = x.unsafe_load[width=FLOAT_LANES](r * self.pitch + p + FLOAT_LANES)
                comptime for c in range(columns):
                    sums[c * rows + r] = xs.fma(high[c], sums[c * rows + r])
        comptime for i in range(rows * columns):
            partial[unsafe_offset=i] = sums[i]
