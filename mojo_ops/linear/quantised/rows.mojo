"""Some rows of a quantised matrix in float32: embeddings of tokens. A value is exactly what the format says it is."""

from std.math import ceildiv
from std.memory import bitcast, unsafe_memcpy, unsafe_memset_zero

from ...cache.pointers import RowPointer, untracked
from ...isa.int8_dot import DOT_ROWS
from ...isa.memory import CACHE_LINE_BYTES, FloatPointer, align_to_line
from ...isa.threads import Workers, for_rows
from .encoding import Encoding
from .tile import Coming, BytePointer, MAX_BLOCK_BYTES, RAW_BYTES, Raw, STEPS, TILE_BYTES, TILE_ELEMENTS, Tile


@fieldwise_init
struct QuantisedRows(TrivialRegisterPassable):
    """`y[i] = w[rows[i]]`."""

    var y: FloatPointer
    """`[count, k]`."""
    var w: BytePointer
    """`[n, row_bytes]`."""
    var rows: RowPointer
    var count: Int
    var k: Int
    var row_bytes: Int

    @no_inline
    def unpack[E: Encoding](self, workers: Workers):
        """Computes them on up to `workers` threads. The rows were checked."""
        var columns = ceildiv(self.k, TILE_ELEMENTS)

        def task(begin: Int, end: Int) {var self, var columns}:
            comptime copy = TILE_BYTES + RAW_BYTES
            var memory = List[UInt8](capacity=copy + DOT_ROWS * MAX_BLOCK_BYTES + CACHE_LINE_BYTES)
            var own = align_to_line(untracked(memory.unsafe_ptr()))
            for index in range(begin, end):
                self.unpack_tile[E](
                    index // columns * DOT_ROWS,
                    index % columns,
                    Tile(own),
                    Raw(own.unsafe_offset(TILE_BYTES).unsafe_bitcast[UInt32]()),
                    own.unsafe_offset(copy),
                )
            _ = memory^

        for_rows(task, ceildiv(self.count, DOT_ROWS) * columns, DOT_ROWS * TILE_ELEMENTS, workers)

    def unpack_tile[E: Encoding](self, first: Int, column: Int, tile: Tile, raw: Raw, copy: BytePointer):
        """256 elements of up to 16 rows, from `rows[first]` on."""
        var present = min(DOT_ROWS, self.count - first)
        unsafe_memset_zero(copy, count=DOT_ROWS * E.BYTES)
        for r in range(present):
            var row = Int(self.rows[unsafe_offset=first + r])
            unsafe_memcpy(
                dest=copy.unsafe_offset(r * E.BYTES),
                src=self.w.unsafe_offset(row * self.row_bytes + column * E.BYTES),
                count=min(E.BYTES, self.row_bytes - column * E.BYTES),
            )
        raw.transpose[E.BYTES](copy, E.BYTES, Coming(copy, E.BYTES))
        var unpacked = tile
        E.unpack[TILE_ELEMENTS](raw, unpacked)
        var left = self.k - column * TILE_ELEMENTS
        for r in range(present):
            var target = self.y.unsafe_offset((first + r) * self.k + column * TILE_ELEMENTS)
            for step in range(min(STEPS, left // 4)):
                var bytes = tile.at.unsafe_load[width=4](4 * (step * DOT_ROWS + r))
                var group = 4 * step // E.GROUP
                var whole = bytes.cast[DType.int32]() - Int32(E.OFFSET)
                comptime if E.SIGNED:
                    whole = bitcast[DType.int8, 4](bytes).cast[DType.int32]()
                var values = whole.cast[DType.float32]()
                comptime if E.ROUNDS_BLOCKS:
                    values *= tile.factor()[r] * tile.scale(group)[r]
                    comptime if E.HAS_MINS:
                        var pair = tile.min_pair(group // 4 * 2 + group % 2)[r]
                        var least = (pair >> UInt32(group % 4 // 2 * 16)) & 0xFFFF
                        values += tile.min_factor()[r] * least.cast[DType.float32]()
                else:
                    comptime if E.HAS_MINS and E.MINS_IN_STEPS and not E.OFFSET_BY_MINS:
                        values += tile.min(group)[r]
                    values *= tile.scale(group)[r]
                    comptime if E.HAS_MINS and not E.MINS_IN_STEPS:
                        values += tile.min(group)[r]
                target.unsafe_store(4 * step, values)
