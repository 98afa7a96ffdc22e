"""`y = x w^T` for few rows of x on matrix tiles: each weight is read from memory once, straight into a tile.

Memory is the limit, so the order of reads decides. The rows of a tile of weights are `depth` rows of w apart, and the
tile goes down one row at a time: each of its rows is a stream of ascending lines, which the hardware prefetcher follows
from memory page to page. A line is prefetched a fixed number of steps before its use, so that requests are always
outstanding. The next idle thread takes the next section of w (`depth` rows of every stream), because threads rarely
start together.
"""

from std.atomic import Atomic
from std.math import ceildiv
from std.sys.intrinsics import PrefetchOptions, prefetch

from ...cache.pointers import untracked
from ...isa.amx import TileShapes, tile_dot, tile_load, tile_release, tile_store, tile_zero
from ...isa.amx_tiles import AMX_ROW_BYTES, AMX_TILE_K, AMX_TILE_ROWS
from ...isa.line_counter import LineCounter
from ...isa.memory import Bf16Pointer, FloatPointer
from ...isa.transpose import transpose_16x16
from ...isa.threads import Workers, run_tasks
from .operands import AmxLinear, copy_rows

comptime MAX_STREAM_ROWS = 64
"""Rows of x up to which weights are streamed."""
comptime STREAM_DEPTH = 16
"""Rows of w in a stream, at most: their sums are one vector of a row of y."""
comptime SECTION_STREAM_BYTES = 2**17
"""Bytes of weights in one stream of a section, at most."""
comptime TMM_W = 4
"""The tile register of weights; 0 to 3 are sums."""
comptime TMM_X = 6
"""The first of two tile registers of x, used in turn."""


def stream_weights(call: AmxLinear, workers: Workers):
    """Computes y for 1 to `MAX_STREAM_ROWS` rows of x."""
    if call.panels == 1:
        WeightStream[8, 1].start(call, workers)
    elif call.panels == 2:
        WeightStream[16, 2].start(call, workers)
    elif call.panels == 3:
        WeightStream[16, 3].start(call, workers)
    else:
        WeightStream[16, 4].start(call, workers)


@fieldwise_init
struct WeightStream[streams: Int, panels: Int](TrivialRegisterPassable):
    """Multiplies tiles of `streams` rows of w with all panels of x."""

    var call: AmxLinear
    var depth: Int
    """Rows of w in a stream of a section."""
    var taken: Pointer[Atomic[Int64], MutUntrackedOrigin]
    """The sections of w that threads have taken. The result does not depend on which thread takes which."""

    comptime TO_L1 = Self.panels == 1
    """True if so few lines are in use that they are prefetched into the first-level cache."""
    comptime PREFETCH_STEPS = 32 if Self.TO_L1 else 64
    """Prefetch distance in steps of K: 2 or 4 KB of each stream."""

    @staticmethod
    def start(call: AmxLinear, workers: Workers):
        """Computes y on all workers. Where w is small, sections are shorter, so that every worker has some."""
        var depth = STREAM_DEPTH
        while depth > 1 and (
            depth * call.k * 2 > SECTION_STREAM_BYTES or depth * Self.streams * workers.count * 4 > call.n
        ):
            depth //= 2
        var taken = LineCounter()
        var shared = Self(call, depth, taken.at())

        def task(index: Int) {var shared}:
            shared.run()

        run_tasks(task, max(1, min(shared.sections(), workers.count)), workers)
        _ = taken^

    def sections(self) -> Int:
        return ceildiv(self.call.n, self.depth * Self.streams)

    def take(self) -> Int:
        """The first row of a section of w, or the end of w."""
        return min(self.call.n, Int(self.taken[].fetch_add(1)) * self.depth * Self.streams)

    def run(self):
        """Takes and computes sections until none is left."""
        var shapes = TileShapes()
        comptime for panel in range(Self.panels):
            shapes.set(panel, Self.streams, 4 * self.call.columns)
        shapes.set(TMM_W, Self.streams, AMX_ROW_BYTES)
        comptime for x in range(2):
            shapes.set(TMM_X + x, AMX_TILE_ROWS, 4 * self.call.columns)
        shapes.apply()
        # [STREAM_DEPTH, panels, streams, 16]: the sums of every tile.
        var memory = Array[Float32, STREAM_DEPTH * Self.panels * Self.streams * 16](fill=0)
        var sums = untracked(Pointer(to=memory[0]))
        var first = self.take()
        while first < self.call.n:
            var end = min(self.call.n, first + self.depth * Self.streams)
            var next = first
            while first < end:
                # At the end of w the streams are shorter, and fewer where less than a tile is left.
                var depth = max(1, (end - first) // Self.streams)
                var present = min(Self.streams, end - first)
                var after = first + depth * present
                for row in range(depth):
                    # As late as the prefetches allow, so that the last sections are shared evenly.
                    if row + 1 == depth and after == end:
                        next = self.take()
                        after = next
                    self.multiply_row(first, depth, row, present, after, sums)
                self.store_section(first, depth, present, sums)
                first += depth * present
            first = next
        tile_release()
        _ = memory

    @always_inline
    def multiply_row(self, first: Int, depth: Int, row: Int, present: Int, next: Int, sums: FloatPointer):
        """Computes the sums of row `row` of every stream.

        The first stream of this section begins at row `first` of w, that of the next section at row `next`.
        """
        var call = self.call
        comptime for panel in range(Self.panels):
            tile_zero[panel]()
        var pitch = depth * call.k
        var w = call.w.unsafe_offset((first + row) * call.k)
        var whole = call.k // AMX_TILE_K if present == Self.streams else 0
        # Past the streams' end, the next section's are prefetched; after the last section, these once more.
        var stream_end = (depth - row) * call.k
        var jump = ((next if next < call.n else first) - first - depth) * call.k
        for step in range(whole):
            var prefetched = (step + Self.PREFETCH_STEPS) * AMX_TILE_K
            if prefetched >= stream_end:
                prefetched += jump
            comptime for s in range(Self.streams):
                self.prefetch_line(w.unsafe_offset(prefetched + s * pitch))
            self.add_step(w.unsafe_offset(step * AMX_TILE_K), 2 * pitch, step)
        if whole < call.steps:
            self.add_edge_steps(w, pitch, present, whole)
        comptime for panel in range(Self.panels):
            tile_store[panel](sums.unsafe_offset((row * Self.panels + panel) * Self.streams * 16), AMX_ROW_BYTES)

    @always_inline
    def add_step(self, w: Bf16Pointer, pitch: Int, step: Int):
        """Adds the products of one step of K; rows of w lie `pitch` bytes apart."""
        tile_load[TMM_W](w, pitch)
        comptime for panel in range(Self.panels):
            tile_load[TMM_X + panel % 2](self.call.packed(panel, step), 4 * self.call.columns)
            tile_dot[panel, TMM_W, TMM_X + panel % 2]()

    def add_edge_steps(self, w: Bf16Pointer, pitch: Int, present: Int, first: Int):
        """Adds the steps from `first` on, where w ends within a tile, by way of a copy that is padded with zeros."""
        var memory = Array[BFloat16, Self.streams * AMX_TILE_K](fill=0)
        var copy = untracked(Pointer(to=memory[0]))
        for step in range(first, self.call.steps):
            var left = self.call.k - step * AMX_TILE_K
            copy_rows[Self.streams](w.unsafe_offset(step * AMX_TILE_K), present, pitch, left, 1, copy, AMX_TILE_K)
            self.add_step(copy, AMX_ROW_BYTES, step)
        _ = memory

    def store_section(self, first: Int, depth: Int, present: Int, sums: FloatPointer):
        """Writes the sums of `present` streams: `depth` adjacent columns of y each, from `first` on."""
        var call = self.call
        comptime for panel in range(Self.panels):
            for s in range(present):
                var transposed = Array[SIMD[DType.float32, 16], 16](fill=0)
                comptime for row in range(STREAM_DEPTH):
                    transposed[row] = sums.unsafe_load[width=16](((row * Self.panels + panel) * Self.streams + s) * 16)
                transpose_16x16(transposed)
                var begin = panel * AMX_TILE_ROWS
                var y = call.y.unsafe_offset(begin * call.n + first + s * depth)
                if depth == STREAM_DEPTH:
                    self.write_columns[STREAM_DEPTH](y, begin, transposed)
                elif depth == STREAM_DEPTH // 2:
                    self.write_columns[STREAM_DEPTH // 2](y, begin, transposed)
                elif depth == STREAM_DEPTH // 4:
                    self.write_columns[STREAM_DEPTH // 4](y, begin, transposed)
                else:
                    comptime for row in range(AMX_TILE_ROWS):
                        if begin + row < call.m:
                            for column in range(depth):
                                y[unsafe_offset=row * call.n + column] = transposed[row][column].cast[DType.bfloat16]()

    @always_inline
    def write_columns[width: Int](self, y: Bf16Pointer, begin: Int, transposed: Array[SIMD[DType.float32, 16], 16]):
        """Writes `width` columns of up to 16 rows of y, from row `begin` on."""
        comptime for row in range(AMX_TILE_ROWS):
            if begin + row < self.call.m:
                y.unsafe_store(row * self.call.n, transposed[row].cast[DType.bfloat16]().slice[width]())

    @always_inline
    def prefetch_line(self, at: Bf16Pointer):
        """Prefetches a line of weights."""
        comptime if Self.TO_L1:
            prefetch[PrefetchOptions().for_read().high_locality().to_data_cache()](at)
        else:
            prefetch[PrefetchOptions().for_read().medium_locality().to_data_cache()](at)
