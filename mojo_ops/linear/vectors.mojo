"""Linear layer in vectors: `y = x w^T` in float32 with the weights as checkpoints store them, `[out, in]`, not
repacked.

Both operands are contiguous along K, so y is dot products of rows. A sum is one vector along all of K, folded at the
end. So its order depends on K alone, whatever the number of rows and threads.

Here is the entry, and one panel of x, where the memory is the limit: a group of rows of w is widened in registers while
the next group is prefetched. Several panels are in `vector_blocks.mojo`.
"""

from std.math import ceildiv
from std.sys import size_of

from ..cache.pointers import untracked
from ..isa.cpu_tuning import CPU_TUNING
from ..isa.line_counter import LineCounter
from ..isa.memory import CACHE_LINE_BYTES, FloatPointer, align_to_line, prefetch_line
from ..isa.registers import HAS_32_REGISTERS, REGISTER_LANES, RegisterVector
from ..isa.threads import Workers, run_tasks
from .vector_blocks import PANEL_ROWS, BlockLinear
from .vector_operands import (
    CHUNK,
    pack_panel,
    padded,
    section_rows,
    store_sums,
    widen_half,
    widen_part,
)

comptime FEWEST_STREAMS = 4
"""Rows of w side by side, at least: an addition to one sum has to wait for the one before."""
comptime GROUP_REUSE = 8
"""Rows of w that a block of a panel of more than 2 rows meets while it is in the first-level cache, at least."""
comptime PACKED_ROWS = 128
"""Rows of x that are packed at once."""
comptime SECTION_ROWS = 32
"""Rows of w in a section, at most."""
comptime PANEL_BYTES = 2**14
"""Bytes of a block of the panel, so that it stays in the first-level cache."""


@no_inline
def linear_vectors[
    dtype: DType, weight_dtype: DType, //
](
    y: Pointer[Scalar[dtype], MutUntrackedOrigin],
    x: Pointer[Scalar[dtype], MutUntrackedOrigin],
    w: Pointer[Scalar[weight_dtype], MutUntrackedOrigin],
    m: Int,
    n: Int,
    k: Int,
    workers: Workers,
):
    """Computes `y = x w^T`: y `[m, n]`, x `[m, k]`, w `[n, k]`. The result does not depend on `workers`."""
    for first in range(0, m, PACKED_ROWS):
        var present = min(PACKED_ROWS, m - first)
        var xs = x.unsafe_offset(first * k)
        var ys = y.unsafe_offset(first * n)
        if present > PANEL_ROWS:
            multiply_panels(ys, xs, w, present, n, k, workers)
        else:
            multiply_panel(ys, xs, w, present, n, k, workers)


def multiply_panel[
    dtype: DType, weight_dtype: DType, //
](
    y: Pointer[Scalar[dtype], MutUntrackedOrigin],
    x: Pointer[Scalar[dtype], MutUntrackedOrigin],
    w: Pointer[Scalar[weight_dtype], MutUntrackedOrigin],
    m: Int,
    n: Int,
    k: Int,
    workers: Workers,
):
    """`linear_vectors` for one panel."""
    comptime for rows in [1, 2, 4, 8]:
        comptime if rows <= PANEL_ROWS:
            if rows // 2 < m and m <= rows:
                var memory = List[Float32](capacity=rows * padded(k) + CACHE_LINE_BYTES // 4)
                var packed = align_to_line(untracked(memory.unsafe_ptr()))
                pack_panel[weight_dtype, rows](x, m, k, packed)
                PanelLinear[dtype, weight_dtype, rows](y, packed, w, m, n, k).run(workers)
                _ = memory^


def multiply_panels[
    dtype: DType, weight_dtype: DType, //
](
    y: Pointer[Scalar[dtype], MutUntrackedOrigin],
    x: Pointer[Scalar[dtype], MutUntrackedOrigin],
    w: Pointer[Scalar[weight_dtype], MutUntrackedOrigin],
    m: Int,
    n: Int,
    k: Int,
    workers: Workers,
):
    """`linear_vectors` for several panels."""
    var panels = ceildiv(m, PANEL_ROWS)
    var panel_elements = PANEL_ROWS * padded(k)
    var memory = List[Float32](capacity=panels * panel_elements + CACHE_LINE_BYTES // 4)
    var packed = align_to_line(untracked(memory.unsafe_ptr()))

    def pack(panel: Int) {var x, var m, var k, var packed, var panel_elements}:
        pack_panel[weight_dtype, PANEL_ROWS](
            x.unsafe_offset(panel * PANEL_ROWS * k),
            min(PANEL_ROWS, m - panel * PANEL_ROWS),
            k,
            packed.unsafe_offset(panel * panel_elements),
        )

    run_tasks(pack, panels, workers)
    BlockLinear[dtype, weight_dtype](y, packed, w, m, n, k).run(workers)
    _ = memory^


def block_w_rows(rows: Int) -> Int:
    """Rows of w in a block of sums with `rows` rows of x, so that sums and operands fit the registers."""
    comptime if HAS_32_REGISTERS:
        return 2 if rows >= 8 else (4 if rows >= 2 else 8)
    else:
        return 2 if rows >= 2 else 4


@fieldwise_init
struct PanelLinear[dtype: DType, weight_dtype: DType, rows: Int](TrivialRegisterPassable):
    """The operands of a call with one panel of x."""

    var y: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[m, n]`."""
    var x: FloatPointer
    """Packed by `pack_panel`: `[padded(k) / REGISTER_LANES, rows, REGISTER_LANES]`."""
    var w: Pointer[Scalar[Self.weight_dtype], MutUntrackedOrigin]
    """`[n, k]`."""
    var m: Int
    var n: Int
    var k: Int

    comptime STREAMS = max(
        FEWEST_STREAMS if Self.rows <= 2 else GROUP_REUSE,
        CPU_TUNING.linear_row_streams if Self.rows == 1 else CPU_TUNING.linear_streams,
    )
    """Rows of w that are read side by side."""
    comptime W_ROWS = min(Self.STREAMS, block_w_rows(Self.rows))
    """Rows of w in a block of sums."""
    comptime GROUP_ROWS = max(Self.STREAMS, Self.W_ROWS)
    """Rows of w that meet a block of K in turn, while the next group is prefetched."""
    comptime K_BLOCK = 512 if Self.GROUP_ROWS > Self.W_ROWS else PANEL_BYTES // (4 * Self.rows)
    """Elements of K after which the next rows of w follow."""
    comptime PREFETCHES = (CPU_TUNING.linear_row_prefetch if Self.rows == 1 else CPU_TUNING.linear_prefetch) > 0
    comptime LINES = max(1, CHUNK * size_of[Self.weight_dtype]() // CACHE_LINE_BYTES)
    """Cache lines of a chunk of weights."""

    def run(self, workers: Workers):
        """Computes y on all workers. The next idle thread takes the next section of rows of w."""
        var depth = section_rows[SECTION_ROWS, 8](self.n, workers.count)
        var sections = ceildiv(self.n, depth)
        var counter = LineCounter()
        var taken = counter.at()

        def task(index: Int) {var self, var depth, var taken}:
            # [SECTION_ROWS, rows]
            var memory = Array[RegisterVector, SECTION_ROWS * Self.rows](fill=0)
            var sums = untracked(Pointer(to=memory[0]))
            var section = min(self.n, Int(taken[].fetch_add(1)) * depth)
            while section < self.n:
                # Taken early, so that it can be prefetched.
                var next = min(self.n, Int(taken[].fetch_add(1)) * depth)
                var end = min(self.n, section + depth)
                for begin in range(section, end, Self.GROUP_ROWS):
                    var last = min(end, begin + Self.GROUP_ROWS)
                    self.multiply_group(
                        begin, last, last if last < end else next, sums.unsafe_offset((begin - section) * Self.rows)
                    )
                store_sums[Self.rows](sums, self.y.unsafe_offset(section), self.m, self.n, end - section)
                section = next
            _ = memory

        run_tasks(task, max(1, min(sections, workers.count)), workers)
        _ = counter^

    @always_inline
    def multiply_group(self, begin: Int, end: Int, next: Int, sums: Pointer[RegisterVector, MutUntrackedOrigin]):
        """Multiplies x with rows `[begin, end)` of w, and prefetches as many from row `next` on: sums
        `[end - begin, rows]`."""
        for first in range(0, max(1, self.k), Self.K_BLOCK):
            var column = begin
            while column + Self.W_ROWS <= end:
                self.add_products[Self.W_ROWS](
                    column, first, next + column - begin, sums.unsafe_offset((column - begin) * Self.rows)
                )
                column += Self.W_ROWS
            while column < end:
                self.add_products[1](
                    column, first, next + column - begin, sums.unsafe_offset((column - begin) * Self.rows)
                )
                column += 1

    @always_inline
    def add_products[
        columns: Int
    ](self, column: Int, first: Int, next: Int, partial: Pointer[RegisterVector, MutUntrackedOrigin]):
        """Adds up to `K_BLOCK` elements of K, from `first` on, to the sums of x by `columns` rows of w.

        Args:
            column: The first row of w.
            first: The first element of K.
            next: The first row of w to prefetch.
            partial: The sums, `[columns, rows]`. They begin with zero where `first` is 0.
        """
        var sums = Array[RegisterVector, Self.rows * columns](fill=0)
        if first > 0:
            comptime for i in range(Self.rows * columns):
                sums[i] = partial[unsafe_offset=i]
        var x = self.x.unsafe_offset(first * Self.rows)
        var w = self.w.unsafe_offset(column * self.k + first)
        var coming = self.w.unsafe_offset(max(0, min(next, self.n - columns)) * self.k + first)
        var length = min(Self.K_BLOCK, self.k - first)
        for p in range(0, length // CHUNK * CHUNK, CHUNK):
            var low = Array[RegisterVector, columns](fill=0)
            var high = Array[RegisterVector, columns](fill=0)
            comptime for c in range(columns):
                low[c] = widen_half[0](w.unsafe_offset(c * self.k + p))
                high[c] = widen_half[1](w.unsafe_offset(c * self.k + p))
                comptime if Self.PREFETCHES:
                    comptime for line in range(Self.LINES):
                        prefetch_line[2](coming.unsafe_offset(c * self.k + p + line * (CHUNK // Self.LINES)))
            Self.add_chunk[columns](x.unsafe_offset(p * Self.rows), low, high, sums)
        if length % CHUNK:
            var p = length // CHUNK * CHUNK
            var low = Array[RegisterVector, columns](fill=0)
            var high = Array[RegisterVector, columns](fill=0)
            comptime for c in range(columns):
                widen_part(w.unsafe_offset(c * self.k + p), length - p, low[c], high[c])
            Self.add_chunk[columns](x.unsafe_offset(p * Self.rows), low, high, sums)
        comptime for i in range(Self.rows * columns):
            partial[unsafe_offset=i] = sums[i]

    @staticmethod
    @always_inline
    def add_chunk[
        columns: Int
    ](
        x: FloatPointer,
        low: Array[RegisterVector, columns],
        high: Array[RegisterVector, columns],
        mut sums: Array[RegisterVector, Self.rows * columns],
    ):
        """Adds one chunk of K: x `[2, rows, REGISTER_LANES]`."""
        comptime for r in range(Self.rows):
            var xs = x.unsafe_load[width=REGISTER_LANES](r * REGISTER_LANES)
            comptime for c in range(columns):
                sums[c * Self.rows + r] = xs.fma(low[c], sums[c * Self.rows + r])
        comptime for r in range(Self.rows):
            var xs = x.unsafe_load[width=REGISTER_LANES]((Self.rows + r) * REGISTER_LANES)
            comptime for c in range(columns):
                sums[c * Self.rows + r] = xs.fma(high[c], sums[c * Self.rows + r])
