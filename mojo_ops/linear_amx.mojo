"""`y = x w^T` in bfloat16 on matrix tiles: weights as they are stored, rows of x packed once.

A tile of weights is 16 rows of w by 32 elements of K; a tile of x is packed in pairs. So the sums are `y^T`, turned
when they are stored. Every sum runs along K in one order, whatever the number of rows or threads: a row alone gives
the bits it gives in company.

With few rows of x (`stream`), memory is the limit: a block of weights meets all rows of x while the next block is
prefetched, line by line in several streams. With many (`multiply_blocks`), the tiles are: blocks of weights are
copied, so that no two of their lines fight for one place in the cache, and K is cut so that all operands of a
block stay in the second-level cache.
"""

from max.algorithm import sync_parallelize
from std.math import ceildiv
from std.memory import bitcast
from std.sys import size_of
from std.sys.intrinsics import PrefetchOptions, prefetch

from .amx import tile_release
from .matrix_tiles import (
    SUM_ELEMENTS,
    TILE_ELEMENTS,
    TILE_ROWS,
    TILE_STEP,
    Elements,
    Sums,
    configure_tiles,
    load_sum,
    multiply,
    store_sum,
    transpose,
    zero_sums,
)

comptime STREAM_ROWS = 64
"""Up to this many rows of x, weights are streamed."""
comptime CHUNK_ROWS = 512
"""Rows of x that are packed at once."""
comptime BLOCK_STEPS = 32
"""Steps of K in a block: 32 rows of weights are then 32 KB."""
comptime BLOCK_COLUMNS = 512
"""Columns of y whose unfinished sums are kept."""
comptime COPY_PITCH = (BLOCK_STEPS + 1) * TILE_STEP
"""Elements from one copied row of weights to the next: an odd number of lines, so that rows spread over the cache."""
comptime PREFETCH_STREAMS = 8
comptime LINE = 32
"""Elements of a cache line."""


def tile_linear(y: Elements, x: Elements, w: Elements, m: Int, n: Int, k: Int, workers: Int):
    """Computes `y = x w^T`: y `[m, n]`, x `[m, k]`, w `[n, k]`."""
    var steps = ceildiv(k, TILE_STEP)
    var most = ceildiv(min(m, CHUNK_ROWS), TILE_ROWS)
    var memory = List[BFloat16](capacity=most * steps * TILE_ELEMENTS + LINE)
    var packed = aligned(memory.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]())
    for start in range(0, m, CHUNK_ROWS):
        var rows = min(CHUNK_ROWS, m - start)
        var panels = ceildiv(rows, TILE_ROWS)
        var source = x.unsafe_offset(start * k)

        def pack(panel: Int) {var source, var rows, var k, var steps, var packed}:
            var first = panel * TILE_ROWS
            pack_columns(
                source.unsafe_offset(first * k),
                min(TILE_ROWS, rows - first),
                k,
                packed.unsafe_offset(panel * steps * TILE_ELEMENTS),
            )

        if panels == 1:
            pack(0)
        else:
            sync_parallelize(pack, panels)
        var call = TileLinear(y.unsafe_offset(start * n), packed, w, rows, n, k, steps, panels)
        var blocks = ceildiv(n, 2 * TILE_ROWS)
        var tasks = min(blocks, max(1, workers))

        def columns(index: Int) {var call, var blocks, var tasks, var m}:
            var begin = index * blocks // tasks * 2 * TILE_ROWS
            var end = min(call.n, (index + 1) * blocks // tasks * 2 * TILE_ROWS)
            configure_tiles()
            if m > STREAM_ROWS:
                call.multiply_blocks(begin, end)
            elif m > TILE_ROWS:
                call.stream[2](begin, end)
            else:
                call.stream[1](begin, end)
            tile_release()

        sync_parallelize(columns, tasks)
    _ = memory^


@always_inline
def aligned[
    dtype: DType, //
](at: Pointer[Scalar[dtype], MutUntrackedOrigin]) -> Pointer[Scalar[dtype], MutUntrackedOrigin]:
    """The next start of a cache line."""
    return at.unsafe_offset((-Int(at) & 63) // size_of[dtype]())


def pack_columns(x: Elements, rows: Int, k: Int, packed: Elements):
    """Up to 16 rows of x, in pairs, as one tile for each step of K; zeros where there is no element."""
    for step in range(ceildiv(k, TILE_STEP)):
        var tile = Array[SIMD[DType.uint32, 16], 16](fill=0)
        comptime for row in range(16):
            if row < rows:
                tile[row] = bitcast[DType.uint32, 16](
                    load_step(x.unsafe_offset(row * k + step * TILE_STEP), k - step * TILE_STEP)
                )
        transpose(tile)
        var target = packed.unsafe_offset(step * TILE_ELEMENTS).unsafe_bitcast[UInt32]()
        comptime for row in range(16):
            target.unsafe_store(16 * row, tile[row])


def copy_rows[rows: Int](w: Elements, present: Int, pitch: Int, left: Int, steps: Int, copy: Elements):
    """Steps of K of `rows` rows of w, `COPY_PITCH` elements apart; zeros past the rows and elements that there are."""
    for row in range(rows):
        var source = w.unsafe_offset(row * pitch)
        var target = copy.unsafe_offset(row * COPY_PITCH)
        var whole = min(steps, left // TILE_STEP) if row < present else 0
        for step in range(whole):
            target.unsafe_store(step * TILE_STEP, source.unsafe_load[width=TILE_STEP](step * TILE_STEP))
        for step in range(whole, steps):
            var elements = SIMD[DType.bfloat16, TILE_STEP](0)
            if row < present:
                elements = load_step(source.unsafe_offset(step * TILE_STEP), left - step * TILE_STEP)
            target.unsafe_store(step * TILE_STEP, elements)


@always_inline
def load_step(at: Elements, left: Int) -> SIMD[DType.bfloat16, TILE_STEP]:
    """One row of a tile, with zeros after the first `left` elements."""
    if left >= TILE_STEP:
        return at.unsafe_load[width=TILE_STEP]()
    var elements = SIMD[DType.bfloat16, TILE_STEP](0)
    for i in range(left):
        elements[i] = at[unsafe_offset=i]
    return elements


@fieldwise_init
struct TileLinear(TrivialRegisterPassable):
    """The operands of one call, or of one chunk of its rows."""

    var y: Elements
    """`[m, n]`."""
    var x: Elements
    """Packed by `pack_columns`: `[panels, steps, 16, 16, 2]`."""
    var w: Elements
    """`[n, k]`."""
    var m: Int
    var n: Int
    var k: Int
    var steps: Int
    """Of K, the last of which may be partly zeros."""
    var panels: Int
    """Of 16 rows of x."""

    def stream[a_tiles: Int](self, begin: Int, end: Int):
        """Columns `[begin, end)` of y, the weights straight from memory."""
        comptime width = a_tiles * TILE_ROWS
        for block in range(begin, end, width):
            var next_rows = max(0, min(width, end - block - width))
            var passes = ceildiv(self.panels, 2) * (self.k // TILE_STEP)
            var ahead = Ahead.of(self.w.unsafe_offset((block + width) * self.k), next_rows * self.k, passes)
            var panel = 0
            while panel + 2 <= self.panels:
                self.stream_block[a_tiles, 2](block, end, panel, ahead)
                panel += 2
            if panel < self.panels:
                self.stream_block[a_tiles, 1](block, end, panel, ahead)

    @always_inline
    def stream_block[a_tiles: Int, b_tiles: Int](self, block: Int, end: Int, panel: Int, mut ahead: Ahead):
        """Up to `16 a_tiles` columns of y, from `block` on, for the rows of `b_tiles` panels."""
        zero_sums()
        var x = self.x.unsafe_offset(panel * self.steps * TILE_ELEMENTS)
        var second_x = x.unsafe_offset(self.steps * TILE_ELEMENTS)
        var w = self.w.unsafe_offset(block * self.k)
        var second_w = w.unsafe_offset(TILE_ROWS * self.k)
        var rows = end - block
        var whole = self.k // TILE_STEP if rows >= a_tiles * TILE_ROWS else 0
        for step in range(whole):
            multiply[a_tiles, b_tiles](
                w.unsafe_offset(step * TILE_STEP),
                second_w.unsafe_offset(step * TILE_STEP),
                2 * self.k,
                x.unsafe_offset(step * TILE_ELEMENTS),
                second_x.unsafe_offset(step * TILE_ELEMENTS),
            )
            ahead.step()
        if whole < self.steps:
            self.edge[a_tiles, b_tiles](w, rows, whole, x, second_x)
        self.store[a_tiles, b_tiles](block, end, panel)

    def edge[a_tiles: Int, b_tiles: Int](self, w: Elements, rows: Int, first: Int, x: Elements, second_x: Elements):
        """The steps from `first` on, where w ends within a tile: tiles are copied, with zeros around what is there."""
        var memory = Array[BFloat16, 2 * TILE_ROWS * COPY_PITCH](fill=0)
        var copy = Pointer(to=memory[0]).unsafe_mut_cast[True]().unsafe_origin_cast[MutUntrackedOrigin]()
        for step in range(first, self.steps):
            var left = self.k - step * TILE_STEP
            copy_rows[a_tiles * TILE_ROWS](w.unsafe_offset(step * TILE_STEP), rows, self.k, left, 1, copy)
            multiply[a_tiles, b_tiles](
                copy,
                copy.unsafe_offset(TILE_ROWS * COPY_PITCH),
                2 * COPY_PITCH,
                x.unsafe_offset(step * TILE_ELEMENTS),
                second_x.unsafe_offset(step * TILE_ELEMENTS),
            )
        _ = memory

    def multiply_blocks(self, begin: Int, end: Int):
        """Columns `[begin, end)` of y; the weights are copied block by block."""
        var weights = List[BFloat16](capacity=2 * TILE_ROWS * COPY_PITCH + LINE)
        var copy = aligned(weights.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]())
        var columns = min(BLOCK_COLUMNS, end - begin)
        var unfinished = List[Float32](capacity=ceildiv(columns, 32) * (self.panels + 1) * 2 * SUM_ELEMENTS + LINE)
        var sums = aligned(unfinished.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]())
        for first in range(begin, end, BLOCK_COLUMNS):
            var last = min(end, first + BLOCK_COLUMNS)
            for step in range(0, max(1, self.steps), BLOCK_STEPS):
                for block in range(first, last, 2 * TILE_ROWS):
                    self.multiply_block(
                        block,
                        last,
                        step,
                        copy,
                        sums.unsafe_offset((block - first) // 32 * (self.panels + 1) * 2 * SUM_ELEMENTS),
                    )
        _ = weights^
        _ = unfinished^

    @always_inline
    def multiply_block(self, block: Int, end: Int, first: Int, copy: Elements, sums: Sums):
        """Adds the products of up to `BLOCK_STEPS` steps of K, from `first` on, for up to 32 columns from `block` on."""
        var steps = min(BLOCK_STEPS, self.steps - first)
        var w = self.w.unsafe_offset(block * self.k + first * TILE_STEP)
        var left = self.k - first * TILE_STEP
        copy_rows[2 * TILE_ROWS](w, end - block, self.k, left, steps, copy)
        # The next block's rows, a line of each in turn, while this one is multiplied.
        var next_rows = max(0, min(2 * TILE_ROWS, end - block - 2 * TILE_ROWS))
        var next = w.unsafe_offset(2 * TILE_ROWS * self.k)
        var lines = next_rows * steps
        var row = 0
        var at_step = 0
        var lines_each = ceildiv(lines, max(1, ceildiv(self.panels, 2) * steps))
        for panel in range(0, self.panels, 2):
            var at = sums.unsafe_offset(panel * 2 * SUM_ELEMENTS)
            if first == 0:
                zero_sums()
            else:
                comptime for i in range(4):
                    load_sum[i](at.unsafe_offset(i * SUM_ELEMENTS))
            # A panel without a partner is its own: the second result is not used.
            var second = min(panel + 1, self.panels - 1)
            var x = self.x.unsafe_offset((panel * self.steps + first) * TILE_ELEMENTS)
            var second_x = self.x.unsafe_offset((second * self.steps + first) * TILE_ELEMENTS)
            for step in range(steps):
                multiply[2, 2](
                    copy.unsafe_offset(step * TILE_STEP),
                    copy.unsafe_offset(TILE_ROWS * COPY_PITCH + step * TILE_STEP),
                    2 * COPY_PITCH,
                    x.unsafe_offset(step * TILE_ELEMENTS),
                    second_x.unsafe_offset(step * TILE_ELEMENTS),
                )
                if row < next_rows:
                    for _ in range(lines_each):
                        fetch(next.unsafe_offset(row * self.k + at_step * TILE_STEP))
                        at_step += 1
                    if at_step >= steps:
                        at_step = 0
                        row += 1
            if first + steps < self.steps:
                comptime for i in range(4):
                    store_sum[i](at.unsafe_offset(i * SUM_ELEMENTS))
            elif panel + 1 < self.panels:
                self.store[2, 2](block, end, panel)
            else:
                self.store[2, 1](block, end, panel)

    @always_inline
    def store[a_tiles: Int, b_tiles: Int](self, block: Int, end: Int, panel: Int):
        """Writes the sums to the columns of y from `block` on that are before `end`."""
        var sums = Array[Float32, SUM_ELEMENTS](fill=0)
        var at = Pointer(to=sums[0]).unsafe_mut_cast[True]().unsafe_origin_cast[MutUntrackedOrigin]()
        comptime for i in range(a_tiles):
            var first = block + i * TILE_ROWS
            comptime for j in range(b_tiles):
                store_sum[2 * i + j](at)
                var turned = Array[SIMD[DType.float32, 16], 16](fill=0)
                comptime for row in range(16):
                    turned[row] = at.unsafe_load[width=16](16 * row)
                transpose(turned)
                var begin = (panel + j) * TILE_ROWS
                var y = self.y.unsafe_offset(begin * self.n + first)
                comptime for row in range(16):
                    if begin + row < self.m:
                        var rounded = turned[row].cast[DType.bfloat16]()
                        if first + 16 <= end:
                            y.unsafe_store(row * self.n, rounded)
                        else:
                            for column in range(end - first):
                                y[unsafe_offset=row * self.n + column] = rounded[column]
        _ = sums


@always_inline
def fetch(at: Elements):
    """Prefetches a line into the second-level cache."""
    prefetch[PrefetchOptions().for_read().medium_locality().to_data_cache()](at)


@fieldwise_init
struct Ahead(TrivialRegisterPassable):
    """A block of weights that is prefetched step by step, in streams."""

    var at: Elements
    var lines: Int
    """Of one stream."""
    var next: Int
    var per_step: Int

    @staticmethod
    def of(at: Elements, elements: Int, steps: Int) -> Self:
        """A block of `elements` that is to be there after so many steps."""
        var lines = ceildiv(elements, LINE * PREFETCH_STREAMS)
        return Self(at, lines, 0, ceildiv(lines, max(1, steps)))

    @always_inline
    def step(mut self):
        """The next line of each stream, or the next few."""
        for line in range(self.next, min(self.lines, self.next + self.per_step)):
            comptime for stream in range(PREFETCH_STREAMS):
                fetch(self.at.unsafe_offset((stream * self.lines + line) * LINE))
        self.next += self.per_step
