"""`y = x w^T` for few rows of x on matrix tiles: the weights come from memory once, straight into the tiles.

Memory is the limit, and what counts is how it is asked. The rows of a tile of weights lie `depth` rows of w apart, and
the tile moves down from row to row: each of its rows is a stream of ascending lines, which the hardware follows from
memory page to page. A line is prefetched a fixed number of steps before its use, so that some are always on their way.
Whoever is free takes the next section of w (`depth` rows of every stream): threads rarely start at the same time.
"""

from max.algorithm import sync_parallelize
from std.atomic import Atomic
from std.math import ceildiv
from std.sys.intrinsics import PrefetchOptions, prefetch

from ...isa.amx import TileShapes, tile_dot, tile_load, tile_release, tile_store, tile_zero
from ...isa.amx_tiles import Elements, ROW_BYTES, Sums, TILE_ROWS, TILE_STEP, transpose
from .operands import TileLinear, copy_rows

comptime STREAM_ROWS = 64
"""Up to this many rows of x, weights are streamed."""
comptime DEPTH = 16
"""Rows of w in a stream, at most: their sums are one vector of a row of y."""
comptime SECTION_BYTES = 2**17
"""Of weights in one stream of a section, at most."""
comptime WEIGHTS = 4
"""The tile register of weights; 0 to 3 are sums."""
comptime X = 6
"""The tile register of x, and the one after it: they take turns."""


def stream(call: TileLinear, workers: Int):
    """Computes y for 1 to `STREAM_ROWS` rows of x."""
    if call.panels == 1:
        Stream[8, 1].start(call, workers)
    elif call.panels == 2:
        Stream[16, 2].start(call, workers)
    elif call.panels == 3:
        Stream[16, 3].start(call, workers)
    else:
        Stream[16, 4].start(call, workers)


@fieldwise_init
struct Stream[streams: Int, panels: Int](TrivialRegisterPassable):
    """Tiles of `streams` rows of w against all panels of x."""

    var call: TileLinear
    var depth: Int
    """Rows of w in a stream of a section."""
    var taken: Pointer[Atomic[Int64], MutUntrackedOrigin]
    """The next section of w that nobody works on. Which thread computes one leaves no trace in it."""

    comptime NEAR = Self.panels == 1
    """Whether few enough lines are in use that they can be prefetched into the first-level cache."""
    comptime AHEAD = 32 if Self.NEAR else 64
    """Steps of K from the prefetch of a line to its use: 2 or 4 KB of each stream."""

    @staticmethod
    def start(call: TileLinear, workers: Int):
        """Computes y on all workers; where w is small, in shorter sections, so that each may take some."""
        var depth = DEPTH
        while depth > 1 and (depth * call.k * 2 > SECTION_BYTES or depth * Self.streams * workers * 4 > call.n):
            depth //= 2
        var taken = Atomic[Int64](0)
        var own = Self(call, depth, Pointer(to=taken).unsafe_origin_cast[MutUntrackedOrigin]())

        def task(index: Int) {var own}:
            own.run()

        sync_parallelize(task, max(1, min(own.sections(), workers)))
        _ = taken

    def sections(self) -> Int:
        return ceildiv(self.call.n, self.depth * Self.streams)

    def take(self) -> Int:
        """The first row of a section of w, or the end of w."""
        return min(self.call.n, Int(self.taken[].fetch_add(1)) * self.depth * Self.streams)

    def run(self):
        """Works on sections until there are none."""
        var shapes = TileShapes()
        comptime for panel in range(Self.panels):
            shapes.set(panel, Self.streams, 4 * self.call.columns)
        shapes.set(WEIGHTS, Self.streams, ROW_BYTES)
        comptime for x in range(2):
            shapes.set(X + x, TILE_ROWS, 4 * self.call.columns)
        shapes.apply()
        # Of every tile, [DEPTH, panels, streams, 16].
        var memory = Array[Float32, DEPTH * Self.panels * Self.streams * 16](fill=0)
        var sums = Pointer(to=memory[0]).unsafe_mut_cast[True]().unsafe_origin_cast[MutUntrackedOrigin]()
        var first = self.take()
        while first < self.call.n:
            var end = min(self.call.n, first + self.depth * Self.streams)
            var next = first
            while first < end:
                # Where w ends, the streams are shorter; where less than a tile is left, some are missing.
                var depth = max(1, (end - first) // Self.streams)
                var present = min(Self.streams, end - first)
                var after = first + depth * present
                for row in range(depth):
                    # As late as the prefetches allow: a section that was taken is nobody else's.
                    if row + 1 == depth and after == end:
                        next = self.take()
                        after = next
                    self.multiply(first, depth, row, present, after, sums)
                self.store(first, depth, present, sums)
                first += depth * present
            first = next
        tile_release()
        _ = memory

    @always_inline
    def multiply(self, first: Int, depth: Int, row: Int, present: Int, next: Int, sums: Sums):
        """The sums of row `row` of every stream. The first stream begins at row `first` of w, later at row `next`."""
        var call = self.call
        comptime for panel in range(Self.panels):
            tile_zero[panel]()
        var pitch = depth * call.k
        var w = call.w.unsafe_offset((first + row) * call.k)
        var whole = call.k // TILE_STEP if present == Self.streams else 0
        # Past the streams' end the next section's begin; after the last one, these once more.
        var turn = (depth - row) * call.k
        var jump = ((next if next < call.n else first) - first - depth) * call.k
        for step in range(whole):
            var ahead = (step + Self.AHEAD) * TILE_STEP
            if ahead >= turn:
                ahead += jump
            comptime for s in range(Self.streams):
                self.fetch(w.unsafe_offset(ahead + s * pitch))
            self.step(w.unsafe_offset(step * TILE_STEP), 2 * pitch, step)
        if whole < call.steps:
            self.edge(w, pitch, present, whole)
        comptime for panel in range(Self.panels):
            tile_store[panel](sums.unsafe_offset((row * Self.panels + panel) * Self.streams * 16), ROW_BYTES)

    @always_inline
    def step(self, w: Elements, pitch: Int, step: Int):
        """Adds the products of one step of K; rows of w lie `pitch` bytes apart."""
        tile_load[WEIGHTS](w, pitch)
        comptime for panel in range(Self.panels):
            tile_load[X + panel % 2](self.call.packed(panel, step), 4 * self.call.columns)
            tile_dot[panel, WEIGHTS, X + panel % 2]()

    def edge(self, w: Elements, pitch: Int, present: Int, first: Int):
        """The steps from `first` on, where w ends within a tile: it is copied, with zeros around what is there."""
        var memory = Array[BFloat16, Self.streams * TILE_STEP](fill=0)
        var copy = Pointer(to=memory[0]).unsafe_mut_cast[True]().unsafe_origin_cast[MutUntrackedOrigin]()
        for step in range(first, self.call.steps):
            var left = self.call.k - step * TILE_STEP
            copy_rows[Self.streams](w.unsafe_offset(step * TILE_STEP), present, pitch, left, 1, copy, TILE_STEP)
            self.step(copy, ROW_BYTES, step)
        _ = memory

    def store(self, first: Int, depth: Int, present: Int, sums: Sums):
        """Writes the sums of `present` streams: `depth` adjacent columns of y each, from `first` on."""
        var call = self.call
        comptime for panel in range(Self.panels):
            for s in range(present):
                var turned = Array[SIMD[DType.float32, 16], 16](fill=0)
                comptime for row in range(DEPTH):
                    turned[row] = sums.unsafe_load[width=16](((row * Self.panels + panel) * Self.streams + s) * 16)
                transpose(turned)
                var begin = panel * TILE_ROWS
                var y = call.y.unsafe_offset(begin * call.n + first + s * depth)
                if depth == DEPTH:
                    self.write[DEPTH](y, begin, turned)
                elif depth == DEPTH // 2:
                    self.write[DEPTH // 2](y, begin, turned)
                elif depth == DEPTH // 4:
                    self.write[DEPTH // 4](y, begin, turned)
                else:
                    comptime for row in range(TILE_ROWS):
                        if begin + row < call.m:
                            for column in range(depth):
                                y[unsafe_offset=row * call.n + column] = turned[row][column].cast[DType.bfloat16]()

    @always_inline
    def write[width: Int](self, y: Elements, begin: Int, turned: Array[SIMD[DType.float32, 16], 16]):
        """The first `width` columns of the rows of y from `begin` on that there are."""
        comptime for row in range(TILE_ROWS):
            if begin + row < self.call.m:
                y.unsafe_store(row * self.call.n, turned[row].cast[DType.bfloat16]().slice[width]())

    @always_inline
    def fetch(self, at: Elements):
        """Prefetches a line of weights."""
        comptime if Self.NEAR:
            prefetch[PrefetchOptions().for_read().high_locality().to_data_cache()](at)
        else:
            prefetch[PrefetchOptions().for_read().medium_locality().to_data_cache()](at)
