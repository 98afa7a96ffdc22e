"""Linear layer in vectors for several panels of x: a section of w is widened once and meets each panel.

The section and the unfinished sums stay in the second-level cache, a block of a panel and a group of rows of w in the
first-level cache. Meanwhile the next block of w is prefetched.
"""

from std.math import ceildiv
from std.sys import size_of
from std.sys.intrinsics import PrefetchOptions, prefetch

from ..cache.pointers import untracked
from ..isa.line_counter import LineCounter
from ..isa.memory import CACHE_LINE_BYTES, FloatPointer, align_to_line
from ..isa.registers import HAS_32_REGISTERS, REGISTER_LANES, RegisterVector
from ..isa.threads import Workers, run_tasks
from .vector_operands import (
    CHUNK,
    padded,
    section_rows,
    store_sums,
    widen_half,
    widen_part,
)

comptime PANEL_ROWS = 8 if HAS_32_REGISTERS else 4
"""Rows of x in a panel."""
comptime W_ROWS = 3
"""Rows of w in a group: the sums of a panel and a group, and their operands, fill the vector registers."""
comptime SECTION_ROWS = 24
"""Rows of w in a section, at most."""
comptime K_BLOCK = 512
"""Elements of K in a block."""
comptime MULTIPLIES = 0
"""`add_products` multiplies widened weights, no more."""
comptime WIDENS = 1
"""It widens the weights that it multiplies, for the panels that follow."""
comptime PREFETCHES = 2
"""It prefetches weights that are multiplied later."""


@fieldwise_init
struct BlockLinear[dtype: DType, weight_dtype: DType](TrivialRegisterPassable):
    """The operands of one call, or of some of its rows."""

    var y: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[m, n]`."""
    var x: FloatPointer
    """Packed by `pack_panel`: `[panels, padded(k) / REGISTER_LANES, PANEL_ROWS, REGISTER_LANES]`."""
    var w: Pointer[Scalar[Self.weight_dtype], MutUntrackedOrigin]
    """`[n, k]`."""
    var m: Int
    var n: Int
    var k: Int

    comptime LINES = max(1, CHUNK * size_of[Self.weight_dtype]() // CACHE_LINE_BYTES)
    """Cache lines of a chunk of weights."""

    def panels(self) -> Int:
        return ceildiv(self.m, PANEL_ROWS)

    def run(self, workers: Workers):
        """Computes y on all workers. The next idle thread takes the next section of rows of w."""
        var depth = section_rows[SECTION_ROWS, W_ROWS](self.n, workers.count)
        var sections = ceildiv(self.n, depth)
        var counter = LineCounter()
        var taken = counter.at()

        def task(index: Int) {var self, var depth, var taken}:
            var floats = self.panels() * SECTION_ROWS * PANEL_ROWS * REGISTER_LANES
            var memory = List[Float32](capacity=floats + SECTION_ROWS * K_BLOCK + CACHE_LINE_BYTES // 4)
            var sums = align_to_line(untracked(memory.unsafe_ptr()))
            var wide = sums.unsafe_offset(floats)
            var section = min(self.n, Int(taken[].fetch_add(1)) * depth)
            while section < self.n:
                # Taken early, so that it can be prefetched.
                var next = min(self.n, Int(taken[].fetch_add(1)) * depth)
                self.multiply_section(section, min(self.n, section + depth), next, wide, sums)
                section = next
            _ = memory^

        run_tasks(task, max(1, min(sections, workers.count)), workers)
        _ = counter^

    def multiply_section(self, begin: Int, end: Int, next: Int, wide: FloatPointer, sums: FloatPointer):
        """Computes columns `[begin, end)` of y, while what follows is prefetched: the section's next block of K, or the
        section that begins at column `next`.

        Args:
            begin: The first column.
            end: The column after the last one.
            next: The first column of the section that follows.
            wide: Memory for a block of w: `[groups, K_BLOCK / REGISTER_LANES, W_ROWS, REGISTER_LANES]`.
            sums: Memory for the sums: `[panels, SECTION_ROWS, PANEL_ROWS, REGISTER_LANES]`.
        """
        var panels = self.panels()
        var groups = ceildiv(end - begin, W_ROWS)
        for first in range(0, max(1, self.k), K_BLOCK):
            var length = min(K_BLOCK, self.k - first)
            var same = first + K_BLOCK < self.k
            var coming = begin if same else min(next, self.n - 1)
            for panel in range(panels):
                var few = self.m - panel * PANEL_ROWS <= PANEL_ROWS // 2
                for group in range(groups):
                    var row = begin + group * W_ROWS
                    var w = wide.unsafe_offset(group * W_ROWS * K_BLOCK)
                    var partial = sums.unsafe_offset(
                        (panel * SECTION_ROWS + group * W_ROWS) * PANEL_ROWS * REGISTER_LANES
                    )
                    if panel == 0 and row + W_ROWS <= end and length % CHUNK == 0:
                        var source = self.w.unsafe_offset(row * self.k + first)
                        self.add_products[PANEL_ROWS, WIDENS](panel, first, w, source, partial)
                        continue
                    if panel == 0:
                        self.widen_group(row, end, first, w)
                    if group % (panels - 1) == panel - 1:
                        var after = max(0, min(coming + group * W_ROWS, self.n - W_ROWS))
                        var source = self.w.unsafe_offset(after * self.k + (first + K_BLOCK if same else 0))
                        if few:
                            self.add_products[PANEL_ROWS // 2, PREFETCHES](panel, first, w, source, partial)
                        else:
                            self.add_products[PANEL_ROWS, PREFETCHES](panel, first, w, source, partial)
                    elif few:
                        self.add_products[PANEL_ROWS // 2, MULTIPLIES](panel, first, w, self.w, partial)
                    else:
                        self.add_products[PANEL_ROWS, MULTIPLIES](panel, first, w, self.w, partial)
        for panel in range(panels):
            store_sums[PANEL_ROWS](
                sums.unsafe_offset(panel * SECTION_ROWS * PANEL_ROWS * REGISTER_LANES).unsafe_bitcast[RegisterVector](),
                self.y.unsafe_offset(panel * PANEL_ROWS * self.n + begin),
                min(PANEL_ROWS, self.m - panel * PANEL_ROWS),
                self.n,
                end - begin,
            )

    def widen_group(self, row: Int, end: Int, first: Int, wide: FloatPointer):
        """Widens a block of K of a group of rows of w, from row `row` and element `first` on, with zeros for what is
        not before row `end` or is past the rows' ends."""
        var length = min(K_BLOCK, self.k - first)
        for c in range(W_ROWS):
            var source = self.w.unsafe_offset((row + c) * self.k + first)
            for p in range(0, length, CHUNK):
                var low = RegisterVector(0)
                var high = RegisterVector(0)
                if row + c < end:
                    if p + CHUNK <= length:
                        low = widen_half[0](source.unsafe_offset(p))
                        high = widen_half[1](source.unsafe_offset(p))
                    else:
                        widen_part(source.unsafe_offset(p), length - p, low, high)
                wide.unsafe_store(p * W_ROWS + c * REGISTER_LANES, low)
                wide.unsafe_store((p + REGISTER_LANES) * W_ROWS + c * REGISTER_LANES, high)

    @no_inline
    def add_products[
        rows: Int, task: Int
    ](
        self,
        panel: Int,
        first: Int,
        w: FloatPointer,
        source: Pointer[Scalar[Self.weight_dtype], MutUntrackedOrigin],
        partial: FloatPointer,
    ):
        """Adds a block of K, from `first` on, to the sums of the first `rows` rows of a panel by a group of rows of w.

        Args:
            panel: The panel of x.
            first: The first element of K.
            w: The group, widened: `[K_BLOCK / REGISTER_LANES, W_ROWS, REGISTER_LANES]`.
            source: Where the task is `WIDENS`, the group as it is stored, to be widened into `w`; where it is
                `PREFETCHES`, the rows of w to prefetch.
            partial: The sums, `[W_ROWS, PANEL_ROWS, REGISTER_LANES]`. They begin with zero where `first` is 0.
        """
        var sums = Array[RegisterVector, rows * W_ROWS](fill=0)
        if first > 0:
            comptime for c in range(W_ROWS):
                comptime for r in range(rows):
                    sums[c * rows + r] = partial.unsafe_load[width=REGISTER_LANES](
                        (c * PANEL_ROWS + r) * REGISTER_LANES
                    )
        var x = self.x.unsafe_offset((panel * padded(self.k) + first) * PANEL_ROWS)
        for p in range(0, min(K_BLOCK, padded(self.k) - first), CHUNK):
            comptime if task == PREFETCHES:
                comptime for c in range(W_ROWS):
                    comptime for line in range(Self.LINES):
                        prefetch[PrefetchOptions().for_read().medium_locality().to_data_cache()](
                            source.unsafe_offset(c * self.k + p + line * (CHUNK // Self.LINES))
                        )
            comptime for half in range(2):
                var ws = Array[RegisterVector, W_ROWS](fill=0)
                comptime for c in range(W_ROWS):
                    var at = w.unsafe_offset(p * W_ROWS + (half * W_ROWS + c) * REGISTER_LANES)
                    comptime if task == WIDENS:
                        ws[c] = widen_half[half](source.unsafe_offset(c * self.k + p))
                        at.unsafe_store(ws[c])
                    else:
                        ws[c] = at.unsafe_load[width=REGISTER_LANES]()
                comptime for r in range(rows):
                    var xs = x.unsafe_load[width=REGISTER_LANES](
                        p * PANEL_ROWS + (half * PANEL_ROWS + r) * REGISTER_LANES
                    )
                    comptime for c in range(W_ROWS):
                        sums[c * rows + r] = xs.fma(ws[c], sums[c * rows + r])
        comptime for c in range(W_ROWS):
            comptime for r in range(rows):
                partial.unsafe_store((c * PANEL_ROWS + r) * REGISTER_LANES, sums[c * rows + r])
