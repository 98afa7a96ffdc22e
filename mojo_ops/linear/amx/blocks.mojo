"""`y = x w^T` in bfloat16 on matrix tiles: weights as they are stored, rows of x packed once.

A tile of weights is up to 16 rows of w by 32 elements of K. A tile of x is packed in pairs. So the sums are `y^T`, and
they are transposed when they are stored. Every sum adds its products in one order, whatever the number of rows or
threads, so a row's result does not depend on the other rows.

With few rows of x the memory is the limit (`stream.mojo`). With many (`multiply_blocks`) the arithmetic is: blocks of
weights are copied to an odd pitch, so that their lines fall into different sets of the cache, and K is cut so that all
operands of a block stay in the second-level cache.
"""

from std.atomic import Atomic
from std.math import ceildiv
from std.sys.intrinsics import PrefetchOptions, prefetch

from ...cache.pointers import untracked
from ...isa.amx import tile_release
from ...isa.amx_tiles import (
    AMX_SUM_ELEMENTS,
    AMX_TILE_ROWS,
    AMX_TILE_K,
    configure_tiles,
    load_sum,
    multiply_2x2,
    store_sum,
    zero_sums,
)
from ...isa.line_counter import LineCounter
from ...isa.memory import Bf16Pointer, FloatPointer, align_to_line
from ...isa.threads import Workers, run_tasks
from .operands import AmxLinear, LINE_ELEMENTS, copy_rows, pack_columns
from .stream import MAX_STREAM_ROWS, stream_weights

comptime PACKED_ROWS = 512
"""Rows of x that are packed at once."""
comptime BLOCK_STEPS = 32
"""Steps of K in a block: 32 rows of weights are then 32 KB."""
comptime BLOCK_COLUMNS = 512
"""Columns of y whose unfinished sums are kept: a section, at most."""
comptime SECTIONS_EACH = 4
"""Sections of a thread, at least, where y has so many columns."""
comptime COPY_PITCH = (BLOCK_STEPS + 1) * AMX_TILE_K
"""Elements from one copied row of weights to the next: an odd number of lines, so that rows fall into different
sets."""


@no_inline
def linear_amx(y: Bf16Pointer, x: Bf16Pointer, w: Bf16Pointer, m: Int, n: Int, k: Int, workers: Workers):
    """Computes `y = x w^T` on up to `workers` threads: y `[m, n]`, x `[m, k]`, w `[n, k]`."""
    var steps = ceildiv(k, AMX_TILE_K)
    var columns = min(m, AMX_TILE_ROWS)
    var most = ceildiv(min(m, PACKED_ROWS), AMX_TILE_ROWS)
    # The last row of a narrow tile is written 16 columns wide.
    var memory = List[BFloat16](capacity=most * steps * columns * AMX_TILE_K + 2 * LINE_ELEMENTS)
    var packed = align_to_line(untracked(memory.unsafe_ptr()))
    for start in range(0, m, PACKED_ROWS):
        var rows = min(PACKED_ROWS, m - start)
        var panels = ceildiv(rows, AMX_TILE_ROWS)
        var source = x.unsafe_offset(start * k)

        def pack(panel: Int) {var source, var rows, var k, var steps, var packed, var columns}:
            var first = panel * AMX_TILE_ROWS
            pack_columns(
                source.unsafe_offset(first * k),
                min(AMX_TILE_ROWS, rows - first),
                k,
                packed.unsafe_offset(panel * steps * columns * AMX_TILE_K),
                columns,
            )

        if m == 1 and k % AMX_TILE_K == 0:
            # One column in pairs is the row itself.
            packed = x
        elif panels == 1:
            pack(0)
        else:
            run_tasks(pack, panels, workers)
        var call = AmxLinear(y.unsafe_offset(start * n), packed, w, rows, n, k, steps, panels, columns)
        if m <= MAX_STREAM_ROWS:
            stream_weights(call, workers)
            break
        # The next idle thread takes the next section: a thread that shares its core would else make all others wait.
        var columns_each = BLOCK_COLUMNS
        while columns_each > 2 * AMX_TILE_ROWS and columns_each * workers.count * SECTIONS_EACH > n:
            columns_each //= 2
        var taken = LineCounter()
        var sections = taken.at()

        def compute(index: Int) {var call, var columns_each, var sections}:
            multiply_blocks(call, columns_each, sections)

        run_tasks(compute, max(1, min(ceildiv(n, columns_each), workers.count)), workers)
        _ = taken^
    _ = memory^


def multiply_blocks(call: AmxLinear, columns: Int, taken: Pointer[Atomic[Int64], MutUntrackedOrigin]):
    """Takes and computes sections of `columns` columns of y until none is left."""
    configure_tiles()
    var weights = List[BFloat16](capacity=2 * AMX_TILE_ROWS * COPY_PITCH + LINE_ELEMENTS)
    var copy = align_to_line(untracked(weights.unsafe_ptr()))
    var unfinished = List[Float32](
        capacity=ceildiv(columns, 32) * (call.panels + 1) * 2 * AMX_SUM_ELEMENTS + LINE_ELEMENTS
    )
    var sums = align_to_line(untracked(unfinished.unsafe_ptr()))
    while True:
        var first = Int(taken[].fetch_add(1)) * columns
        if first >= call.n:
            break
        var last = min(call.n, first + columns)
        for step in range(0, max(1, call.steps), BLOCK_STEPS):
            for block in range(first, last, 2 * AMX_TILE_ROWS):
                multiply_block(
                    call,
                    block,
                    last,
                    step,
                    copy,
                    sums.unsafe_offset((block - first) // 32 * (call.panels + 1) * 2 * AMX_SUM_ELEMENTS),
                )
    tile_release()
    _ = weights^
    _ = unfinished^


@always_inline
def multiply_block(call: AmxLinear, block: Int, end: Int, first: Int, copy: Bf16Pointer, sums: FloatPointer):
    """Adds the products of up to `BLOCK_STEPS` steps of K, from `first` on, for up to 32 columns from `block` on."""
    var steps = min(BLOCK_STEPS, call.steps - first)
    var w = call.w.unsafe_offset(block * call.k + first * AMX_TILE_K)
    var left = call.k - first * AMX_TILE_K
    copy_rows[2 * AMX_TILE_ROWS](w, end - block, call.k, left, steps, copy, COPY_PITCH)
    # The next block's rows are prefetched line by line while this block is multiplied.
    var next_rows = max(0, min(2 * AMX_TILE_ROWS, end - block - 2 * AMX_TILE_ROWS))
    var next = w.unsafe_offset(2 * AMX_TILE_ROWS * call.k)
    var lines = next_rows * steps
    var row = 0
    var at_step = 0
    var lines_each = ceildiv(lines, max(1, ceildiv(call.panels, 2) * steps))
    for panel in range(0, call.panels, 2):
        var at = sums.unsafe_offset(panel * 2 * AMX_SUM_ELEMENTS)
        if first == 0:
            zero_sums()
        else:
            comptime for i in range(4):
                load_sum[i](at.unsafe_offset(i * AMX_SUM_ELEMENTS))
        # The last panel of an odd number is multiplied twice; its second result is not used.
        var second = min(panel + 1, call.panels - 1)
        var x = call.packed(panel, first)
        var second_x = call.packed(second, first)
        for step in range(steps):
            multiply_2x2(
                copy.unsafe_offset(step * AMX_TILE_K),
                copy.unsafe_offset(AMX_TILE_ROWS * COPY_PITCH + step * AMX_TILE_K),
                2 * COPY_PITCH,
                x.unsafe_offset(step * AMX_TILE_ROWS * AMX_TILE_K),
                second_x.unsafe_offset(step * AMX_TILE_ROWS * AMX_TILE_K),
            )
            if row < next_rows:
                for _ in range(lines_each):
                    prefetch[PrefetchOptions().for_read().medium_locality().to_data_cache()](
                        next.unsafe_offset(row * call.k + at_step * AMX_TILE_K)
                    )
                    at_step += 1
                if at_step >= steps:
                    at_step = 0
                    row += 1
        if first + steps < call.steps:
            comptime for i in range(4):
                store_sum[i](at.unsafe_offset(i * AMX_SUM_ELEMENTS))
        else:
            comptime for i in range(2):
                call.store[2 * i, AMX_TILE_ROWS](block + i * AMX_TILE_ROWS, end, panel)
                if panel + 1 < call.panels:
                    call.store[2 * i + 1, AMX_TILE_ROWS](block + i * AMX_TILE_ROWS, end, panel + 1)
