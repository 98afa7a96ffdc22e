"""A section of rows of w by all panels of x, in dot products of bfloat16 pairs.

With one panel of x the memory is the limit: each group of rows of w prefetches the next. With more panels the section
stays in the second-level cache, each panel of x meets it in turn, and together they prefetch the next section.
"""

from std.math import ceildiv, iota
from std.sys.intrinsics import masked_load

from ..isa.bf16_dot import BF16_DOT_ELEMENTS, BF16_DOT_LANES, bf16_dot
from ..isa.convert import FloatVector, reduce_each
from ..isa.cpu_tuning import CPU_TUNING
from ..isa.memory import Bf16Pointer, prefetch_line

comptime STEP = BF16_DOT_ELEMENTS
"""Elements of K that one instruction takes."""
comptime PANEL_ROWS = 8
"""Rows of x in a panel, where there are more than 4."""
comptime PANEL_W_ROWS = 3
"""Rows of w that meet such a panel side by side: 24 sums and their operands fill the 32 vector registers."""
comptime SECTION_ROWS = 48
"""Rows of w in a section, at most: whole groups of `PANEL_W_ROWS`, and whole vectors of a row of y."""
comptime PANEL_K = 1024
"""Elements of K of a panel of 8 rows of x in a block: 16 KB, a third of the first-level cache."""
comptime NARROW_PANEL_BYTES = 2**15
"""Bytes of a block of a panel of fewer rows: few rows of w are in use beside it."""


def prefetch_level(rows: Int) -> Int:
    """The cache that weights are prefetched into beside panels of `rows` rows of x, 0 for none.

    Panels of `PANEL_ROWS` always prefetch: with many sums for each line of w, too few lines are requested without.
    """
    var level = CPU_TUNING.linear_row_prefetch if rows == 1 else CPU_TUNING.linear_prefetch
    return max(1, level) if rows == PANEL_ROWS else level


def pack_panel[rows: Int](x: Bf16Pointer, present: Int, k: Int, packed: Bf16Pointer):
    """Packs up to `rows` rows of x as `[steps, rows, STEP]`, padded with zeros."""
    for row in range(rows):
        var target = packed.unsafe_offset(row * STEP)
        var source = x.unsafe_offset(row * k)
        for step in range(ceildiv(k, STEP)):
            var elements = SIMD[DType.bfloat16, STEP](0)
            if row < present:
                elements = load_step(source.unsafe_offset(step * STEP), k - step * STEP)
            target.unsafe_store(step * rows * STEP, elements)


@always_inline
def load_step(at: Bf16Pointer, left: Int) -> SIMD[DType.bfloat16, STEP]:
    """Loads one step of a row, zeros after its first `left` elements. Nothing past them is read."""
    if left >= STEP:
        return at.unsafe_load[width=STEP]()
    return masked_load[STEP](at, iota[DType.int32, STEP]().lt(Int32(left)), SIMD[DType.bfloat16, STEP](0))


@fieldwise_init
struct DotLinear[rows: Int](TrivialRegisterPassable):
    """One member and `PACKED_ROWS` rows of x at most."""

    var y: Bf16Pointer
    """`[m, n]`."""
    var x: Bf16Pointer
    """Packed by `pack_panel`: `[panels, steps, rows, STEP]`."""
    var w: Bf16Pointer
    """`[n, k]`."""
    var m: Int
    var n: Int
    var k: Int
    var panels: Int

    comptime STREAMS = CPU_TUNING.linear_row_streams if Self.rows == 1 else CPU_TUNING.linear_streams
    comptime W_ROWS = PANEL_W_ROWS if Self.rows == PANEL_ROWS else min(Self.STREAMS, 24 // Self.rows)
    """Rows of w in a group. They are read side by side."""
    comptime K_BLOCK = PANEL_K if Self.rows == PANEL_ROWS else NARROW_PANEL_BYTES // (2 * Self.rows)
    """Elements of K after which the section's next group of rows follows."""
    comptime PREFETCH_LEVEL = prefetch_level(Self.rows)
    """The cache that groups prefetch into, 0 where they do not."""

    def multiply_section(self, begin: Int, end: Int, next: Int, sums: Pointer[FloatVector, MutUntrackedOrigin]):
        """Computes columns `[begin, end)` of y, while the section that begins at column `next` is prefetched."""
        for panel in range(self.panels):
            for first in range(0, max(1, self.k), Self.K_BLOCK):
                var column = begin
                column = self.add_groups[Self.W_ROWS](panel, column, begin, end, first, next, sums)
                comptime for count in [4, 2, 1]:
                    comptime if count < Self.W_ROWS:
                        column = self.add_groups[count](panel, column, begin, end, first, next, sums)
            self.store(panel, begin, end, sums)

    @always_inline
    def add_groups[
        columns: Int
    ](
        self,
        panel: Int,
        column: Int,
        begin: Int,
        end: Int,
        first: Int,
        next: Int,
        sums: Pointer[FloatVector, MutUntrackedOrigin],
    ) -> Int:
        """Adds one block of K for groups of `columns` rows of w, from row `column` on. Returns the row after them."""
        var at = column
        while at + columns <= end:
            var coming = self.to_prefetch(panel, begin, end, at + columns, first, next)
            self.add_products[columns](panel, at, first, coming, sums.unsafe_offset((at - begin) * Self.rows))
            at += columns
        return at

    @always_inline
    def to_prefetch(self, panel: Int, begin: Int, end: Int, after: Int, first: Int, next: Int) -> Bf16Pointer:
        """Return what to prefetch in a group of rows that ends before row `after`, in the block of K from `first`
        on.
        """
        if self.panels > 1:
            # Each group of the next section by one panel; the others prefetch what is in the cache.
            var here = (after - begin) // Self.W_ROWS % self.panels == panel
            var row = min(next + after - begin, self.n) - Self.W_ROWS if here and next < self.n else begin
            return self.w.unsafe_offset(max(0, row) * self.k + first)
        if after < end:
            return self.w.unsafe_offset(after * self.k + first)
        if first + Self.K_BLOCK < self.k:
            return self.w.unsafe_offset(begin * self.k + first + Self.K_BLOCK)
        return self.w.unsafe_offset(min(next, self.n - 1) * self.k)

    @always_inline
    def add_products[
        columns: Int
    ](
        self,
        panel: Int,
        column: Int,
        first: Int,
        coming: Bf16Pointer,
        partial: Pointer[FloatVector, MutUntrackedOrigin],
    ):
        """Adds up to `K_BLOCK` elements of K, from `first` on, to the sums of a panel by `columns` rows of w.

        Args:
            panel: The panel of x.
            column: The first row of w.
            first: The first element of K.
            coming: The rows of w to prefetch, as many as a group has.
            partial: The sums, `[columns, rows]`. They begin with zero where `first` is 0.
        """
        var sums = Array[FloatVector, columns * Self.rows](fill=0)
        if first > 0:
            comptime for i in range(columns * Self.rows):
                sums[i] = partial[unsafe_offset=i]
        var x = self.x.unsafe_offset((panel * ceildiv(self.k, STEP) * STEP + first) * Self.rows)
        var w = self.w.unsafe_offset(column * self.k + first)
        var length = min(Self.K_BLOCK, self.k - first)
        for p in range(0, length // STEP * STEP, STEP):
            var ws = Array[SIMD[DType.bfloat16, STEP], columns](fill=0)
            comptime for c in range(columns):
                ws[c] = w.unsafe_load[width=STEP](c * self.k + p)
            comptime if Self.PREFETCH_LEVEL > 0:
                comptime for c in range(Self.W_ROWS):
                    prefetch_line[Self.PREFETCH_LEVEL](coming.unsafe_offset(c * self.k + p))
            Self.add_step[columns](x.unsafe_offset(p * Self.rows), ws, sums)
        if length % STEP:
            var p = length // STEP * STEP
            var ws = Array[SIMD[DType.bfloat16, STEP], columns](fill=0)
            comptime for c in range(columns):
                ws[c] = load_step(w.unsafe_offset(c * self.k + p), length - p)
            Self.add_step[columns](x.unsafe_offset(p * Self.rows), ws, sums)
        comptime for i in range(columns * Self.rows):
            partial[unsafe_offset=i] = sums[i]

    @staticmethod
    @always_inline
    def add_step[
        columns: Int
    ](
        x: Bf16Pointer,
        ws: Array[SIMD[DType.bfloat16, STEP], columns],
        mut sums: Array[FloatVector, columns * Self.rows],
    ):
        """Adds one step of K: x `[rows, STEP]`."""
        comptime for r in range(Self.rows):
            var xs = x.unsafe_load[width=STEP](r * STEP)
            comptime for c in range(columns):
                sums[c * Self.rows + r] = bf16_dot(sums[c * Self.rows + r], xs, ws[c])

    def store(self, panel: Int, begin: Int, end: Int, sums: Pointer[FloatVector, MutUntrackedOrigin]):
        """Folds the sums of a panel, and writes them to columns `[begin, end)` of y."""
        for row in range(min(Self.rows, self.m - panel * Self.rows)):
            var y = self.y.unsafe_offset((panel * Self.rows + row) * self.n)
            for column in range(begin, end, BF16_DOT_LANES):
                var each = Array[FloatVector, BF16_DOT_LANES](fill=0)
                comptime for c in range(BF16_DOT_LANES):
                    if column + c < end:
                        each[c] = sums[unsafe_offset=(column - begin + c) * Self.rows + row]
                var rounded = reduce_each(each).cast[DType.bfloat16]()
                if column + BF16_DOT_LANES <= end:
                    y.unsafe_store(column, rounded)
                else:
                    for c in range(end - column):
                        y[unsafe_offset=column + c] = rounded[c]
