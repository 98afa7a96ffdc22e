"""Linear layer on the CPU: `y = x w^T` with the weights as checkpoints store them, `[out, in]`.

Both operands run along K, so dot products need no packing. A block of `MR` rows of x times `NR` rows of w is
held in `MR * NR` vector accumulators. With few rows of x the weights are read once, straight from memory; with
many, a panel of weights is widened to float32 in cache and meets all rows there.
"""

from max.algorithm import sync_parallelize
from std.math import ceildiv
from std.sys import simd_width_of

comptime WIDTH = simd_width_of[DType.float32]()
comptime MR = 4
comptime NR = 4
comptime DIRECT_ROWS = 8
"""Up to this many rows of x the weights are not widened first."""
comptime PANEL_BYTES = 512 * 1024
"""Of widened weights at once: a share of the second-level cache."""
comptime TASKS_PER_WORKER = 4


@fieldwise_init
struct Linear[dtype: DType, weight_dtype: DType](TrivialRegisterPassable):
    """The operands of one call; `x` is already float32."""

    var y: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[M, N]`."""
    var x: Pointer[Float32, MutUntrackedOrigin]
    """`[M, K]`."""
    var w: Pointer[Scalar[Self.weight_dtype], MutUntrackedOrigin]
    """`[N, K]`."""
    var m: Int
    var n: Int
    var k: Int

    def run(self, workers: Int):
        """Splits the rows of w over tasks; the result does not depend on how many."""
        var blocks = ceildiv(self.n, NR)
        var tasks = min(blocks, max(1, workers) * TASKS_PER_WORKER)

        def task(index: Int) {var self, var blocks, var tasks}:
            var begin = index * blocks // tasks * NR
            var end = min(self.n, (index + 1) * blocks // tasks * NR)
            if self.m <= DIRECT_ROWS:
                self.block(self.w.unsafe_offset(begin * self.k), begin, end)
            else:
                self.panels(begin, end)

        sync_parallelize(task, tasks)

    def panels(self, begin: Int, end: Int):
        """Rows `[begin, end)` of w, widened panel by panel."""
        var rows = max(NR, PANEL_BYTES // (4 * max(1, self.k)) // NR * NR)
        var panel = List[Float32](length=min(rows, end - begin) * self.k, fill=0)
        var widened = panel.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
        for start in range(begin, end, rows):
            var stop = min(end, start + rows)
            widen(self.w.unsafe_offset(start * self.k), widened, (stop - start) * self.k)
            self.block(widened, start, stop)
        _ = panel^

    @always_inline
    def block[w_dtype: DType](self, w: Pointer[Scalar[w_dtype], MutUntrackedOrigin], begin: Int, end: Int):
        """All rows of x against rows `[begin, end)` of w, which `w` points at."""
        for i in range(0, self.m, MR):
            for j in range(begin, end, NR):
                var at = w.unsafe_offset((j - begin) * self.k)
                if i + MR <= self.m and j + NR <= end:
                    self.tile[MR, NR](at, i, j)
                else:
                    self.edge(at, i, j, min(self.m, i + MR), min(end, j + NR))

    @always_inline
    def edge[
        w_dtype: DType
    ](self, w: Pointer[Scalar[w_dtype], MutUntrackedOrigin], i: Int, j: Int, i_end: Int, j_end: Int):
        """The ragged rim of the output: full in one direction where that is possible."""
        if j + NR == j_end:
            comptime for rows in range(1, MR):
                if i + rows == i_end:
                    self.tile[rows, NR](w, i, j)
        else:
            for row in range(i, i_end):
                for column in range(j, j_end):
                    self.tile[1, 1](w.unsafe_offset((column - j) * self.k), row, column)

    @always_inline
    def tile[
        rows: Int, columns: Int, w_dtype: DType
    ](self, w: Pointer[Scalar[w_dtype], MutUntrackedOrigin], i: Int, j: Int):
        """`y[i : i + rows, j : j + columns]`, the dot products along K."""
        var sums = Array[SIMD[DType.float32, WIDTH], rows * columns](fill=0)
        var x = self.x.unsafe_offset(i * self.k)
        var whole = self.k // WIDTH * WIDTH
        for p in range(0, whole, WIDTH):
            var ws = Array[SIMD[DType.float32, WIDTH], columns](fill=0)
            comptime for c in range(columns):
                ws[c] = w.unsafe_load[width=WIDTH](c * self.k + p).cast[DType.float32]()
            comptime for r in range(rows):
                var xs = x.unsafe_load[width=WIDTH](r * self.k + p)
                comptime for c in range(columns):
                    sums[r * columns + c] = xs.fma(ws[c], sums[r * columns + c])
        comptime for r in range(rows):
            comptime for c in range(columns):
                var sum = sums[r * columns + c].reduce_add()
                for p in range(whole, self.k):
                    sum += x[unsafe_offset=r * self.k + p] * w[unsafe_offset=c * self.k + p].cast[DType.float32]()
                self.y[unsafe_offset=(i + r) * self.n + j + c] = sum.cast[Self.dtype]()


def widen[
    dtype: DType, //
](source: Pointer[Scalar[dtype], MutUntrackedOrigin], target: Pointer[Float32, MutUntrackedOrigin], count: Int):
    """Float32 of `count` stored elements."""
    var whole = count // WIDTH * WIDTH
    for i in range(0, whole, WIDTH):
        target.unsafe_store(i, source.unsafe_load[width=WIDTH](i).cast[DType.float32]())
    for i in range(whole, count):
        target[unsafe_offset=i] = source[unsafe_offset=i].cast[DType.float32]()
