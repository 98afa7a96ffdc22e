"""`y_i = x w_i^T` for weights in GGUF's blocks: x rounded once for all, sections of rows of w for the threads."""

from std.math import ceildiv

from ...cache.pointers import untracked
from ...isa.convert import FloatVector, narrow
from ...isa.int8_dot import DOT_ROWS
from ...isa.line_counter import LineCounter
from ...isa.memory import CACHE_LINE_BYTES, align_to_line
from ...isa.threads import run_tasks
from .activations import RECORD_BYTES, round_rows
from .encodings import BLOCK_ENCODINGS, Encoding, IQ4_NL, IQ4_XS, MXFP4, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0
from .multiply import MOST_ROWS, Sums, multiply
from .tile import (
    BytePointer,
    MAX_BLOCK_BYTES,
    RAW_BYTES,
    Raw,
    TILE_BYTES,
    TILE_ELEMENTS,
    Tile,
    VECTOR_BYTES,
    copy_blocks,
)

comptime ROUNDED_ROWS = 512
"""Rows of x that are rounded at once."""
comptime FEW_ROWS = 16
"""Rows of x up to which the memory is the limit: sections of one tile, which prefetch the next section."""
comptime SECTION_TILES = 4
"""Tiles of a section for more rows of x."""


@fieldwise_init
struct QuantisedMember[dtype: DType](TrivialRegisterPassable):
    """The weights of one of several layers of the same x, and its result."""

    var y: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[m, n]`."""
    var w: BytePointer
    """`[n, row_bytes]`."""
    var n: Int
    var row_bytes: Int
    var encoding: Int
    """An index of `encodings.mojo`."""


def linear_quantised[
    dtype: DType, count: Int, //, mask: Int
](
    members: Array[QuantisedMember[dtype], count],
    x: Pointer[Scalar[dtype], MutUntrackedOrigin],
    m: Int,
    k: Int,
    workers: Int,
):
    """Computes every member's `y = x w^T` on up to `workers` threads: x `[m, k]`.

    Parameters:
        dtype: Of x and y.
        count: Of the members.
        mask: The bits of the encodings that members may have.
    """
    linear_members[mask](untracked(Pointer(to=members[0]).unsafe_mut_cast[True]()), count, x, m, k, workers)
    _ = members


@no_inline
def linear_members[
    dtype: DType, //, mask: Int
](
    members: Pointer[QuantisedMember[dtype], MutUntrackedOrigin],
    count: Int,
    x: Pointer[Scalar[dtype], MutUntrackedOrigin],
    m: Int,
    k: Int,
    workers: Int,
):
    """As `linear_quantised`."""
    comptime kinds = Int(mask & BLOCK_ENCODINGS != 0) + Int(mask & ~BLOCK_ENCODINGS != 0)
    var columns = ceildiv(k, TILE_ELEMENTS)
    var bytes = columns * min(m, ROUNDED_ROWS) * RECORD_BYTES
    var memory = List[UInt8](capacity=kinds * bytes + CACHE_LINE_BYTES)
    var records = align_to_line(untracked(memory.unsafe_ptr()))
    # The records of Q8_K are the second ones where both are needed.
    var records_of_blocks = records.unsafe_offset((kinds - 1) * bytes)
    for first in range(0, m, ROUNDED_ROWS):
        var present = min(ROUNDED_ROWS, m - first)
        var rows = x.unsafe_offset(first * k)
        comptime if mask & ~BLOCK_ENCODINGS:
            round_rows[False](rows, present, k, records, workers)
        comptime if mask & BLOCK_ENCODINGS:
            round_rows[True](rows, present, k, records_of_blocks, workers)
        QuantisedGroup[dtype, mask](members, count, records, records_of_blocks, first, present, columns).run(workers)
    _ = memory^


@fieldwise_init
struct Section[dtype: DType](TrivialRegisterPassable):
    """Rows of w of one member, and what a thread needs to multiply them."""

    var member: QuantisedMember[Self.dtype]
    var begin: Int
    """The first row of w."""
    var end: Int
    var x: BytePointer
    """Records `[columns, m]`."""
    var first: Int
    """The row of y that the first row of x belongs to."""
    var m: Int
    var columns: Int
    """Tiles along K."""
    var memory: BytePointer
    """The thread's: `Section.bytes`."""
    var coming: BytePointer
    """The next section, to be prefetched: as many bytes as this one has."""

    comptime COPY = RAW_BYTES
    comptime TILES = Self.COPY + DOT_ROWS * MAX_BLOCK_BYTES

    @staticmethod
    def bytes(tiles: Int, m: Int) -> Int:
        """Of a thread's memory."""
        return Self.TILES + tiles * (TILE_BYTES + m * VECTOR_BYTES)

    @no_inline
    def multiply[E: Encoding](self):
        """Computes columns `[begin, end)` of y."""
        var tiles = ceildiv(self.end - self.begin, DOT_ROWS)
        var sums = self.memory.unsafe_offset(Self.TILES + tiles * TILE_BYTES).unsafe_bitcast[Float32]()
        var vectors = sums.unsafe_bitcast[FloatVector]()
        for i in range(tiles * self.m):
            vectors[unsafe_offset=i] = 0
        for column in range(self.columns):
            for i in range(tiles):
                self.unpack[E](i, column, self.coming_tile[E](i, column, tiles))
            var x = self.x.unsafe_offset(column * self.m * RECORD_BYTES)
            for row in range(0, self.m, MOST_ROWS):
                for i in range(tiles):
                    multiply[E](
                        self.tile(i),
                        x.unsafe_offset(row * RECORD_BYTES),
                        min(MOST_ROWS, self.m - row),
                        vectors.unsafe_offset(i * self.m + row),
                        self.coming_tile[E](i, column, tiles),
                    )
        self.store(tiles, vectors)

    @always_inline
    def coming_tile[E: Encoding](self, index: Int, column: Int, tiles: Int) -> BytePointer:
        """What to prefetch beside a tile: as many bytes of the next section, in the order of their addresses."""
        return self.coming.unsafe_offset((column * tiles + index) * DOT_ROWS * E.BYTES)

    @always_inline
    def tile(self, index: Int) -> Tile:
        return Tile(self.memory.unsafe_offset(Self.TILES + index * TILE_BYTES))

    @always_inline
    def unpack[E: Encoding](self, index: Int, column: Int, coming: BytePointer):
        """Makes tile `index` of the section's rows and of the 256 elements from `256 column` on."""
        var row = self.begin + DOT_ROWS * index
        var rows = self.end - row
        var first = self.member.w.unsafe_offset(row * self.member.row_bytes + column * E.BYTES)
        var left = self.member.row_bytes - column * E.BYTES
        var raw = Raw(self.memory.unsafe_bitcast[UInt32]())
        if rows >= DOT_ROWS and left >= E.BYTES:
            raw.transpose[E.BYTES](first, self.member.row_bytes, coming)
        else:
            var copy = self.memory.unsafe_offset(Self.COPY)
            copy_blocks(first, self.member.row_bytes, min(rows, DOT_ROWS), min(left, E.BYTES), copy, E.BYTES)
            raw.transpose[E.BYTES](copy, E.BYTES, coming)
        E.unpack(raw, self.tile(index))

    def store(self, tiles: Int, sums: Sums):
        """Writes the sums `[tiles, m]` to y."""
        for i in range(tiles):
            var column = self.begin + DOT_ROWS * i
            for row in range(self.m):
                var target = self.member.y.unsafe_offset((self.first + row) * self.member.n + column)
                var values = narrow[Self.dtype](sums[unsafe_offset=i * self.m + row])
                if self.end - column >= DOT_ROWS:
                    target.unsafe_store(values)
                else:
                    for c in range(self.end - column):
                        target[unsafe_offset=c] = values[c]


@fieldwise_init
struct QuantisedGroup[dtype: DType, mask: Int](TrivialRegisterPassable):
    """The operands of one call, or of `ROUNDED_ROWS` of its rows."""

    var members: Pointer[QuantisedMember[Self.dtype], MutUntrackedOrigin]
    var count: Int
    var records: BytePointer
    """Q8_0 `[columns, m]`."""
    var records_of_blocks: BytePointer
    """Q8_K `[columns, m]`."""
    var first: Int
    """The row of each y that the first row of x belongs to."""
    var m: Int
    var columns: Int

    def run(self, workers: Int):
        """Computes every y on all workers. The next idle thread takes the next section of rows of any w."""
        var n = 0
        for i in range(self.count):
            n += self.members[unsafe_offset=i].n
        var depth = DOT_ROWS
        if self.m > FEW_ROWS:
            depth *= SECTION_TILES
            while depth > DOT_ROWS and depth * workers * 4 > n:
                depth //= 2
        var sections = 0
        for i in range(self.count):
            sections += ceildiv(self.members[unsafe_offset=i].n, depth)
        var counter = LineCounter()
        var taken = counter.at()

        def task(index: Int) {var self, var depth, var sections, var taken}:
            var memory = List[UInt8](capacity=Section[Self.dtype].bytes(depth // DOT_ROWS, self.m) + CACHE_LINE_BYTES)
            var own = align_to_line(untracked(memory.unsafe_ptr()))
            var section = Int(taken[].fetch_add(1))
            while section < sections:
                # Taken early, so that it can be prefetched.
                var next = Int(taken[].fetch_add(1))
                self.multiply(section, next, depth, own)
                section = next
            _ = memory^

        run_tasks(task, max(1, min(sections, workers)), workers)
        _ = counter^

    @always_inline
    def multiply(self, section: Int, next: Int, depth: Int, memory: BytePointer):
        """Computes a section while the next one is prefetched."""
        var at = self.member_of(section, depth)
        var member = self.members[unsafe_offset=at[0]]
        var coming = member.w.unsafe_offset(at[1] * member.row_bytes)
        var after = self.member_of(next, depth)
        if after[0] < self.count:
            ref other = self.members[unsafe_offset=after[0]]
            coming = other.w.unsafe_offset(after[1] * other.row_bytes)
        var x = self.records_of_blocks if (BLOCK_ENCODINGS >> member.encoding) & 1 else self.records
        var own = Section[Self.dtype](
            member,
            at[1],
            min(member.n, at[1] + depth),
            x,
            self.first,
            self.m,
            self.columns,
            memory,
            coming,
        )
        self.start[Q4_0](own)
        self.start[Q8_0](own)
        self.start[IQ4_NL](own)
        self.start[Q4_K](own)
        self.start[Q5_K](own)
        self.start[Q6_K](own)
        self.start[IQ4_XS](own)
        self.start[MXFP4](own)

    @always_inline
    def start[E: Encoding](self, section: Section[Self.dtype]):
        """Multiplies a section whose weights are in this encoding; others are no part of the mask's code."""
        comptime if (Self.mask >> E.INDEX) & 1:
            if section.member.encoding == E.INDEX:
                section.multiply[E]()

    @always_inline
    def member_of(self, section: Int, depth: Int) -> Tuple[Int, Int]:
        """The member that a section belongs to, and its first row there; `(count, 0)` past the last."""
        var left = section
        for i in range(self.count):
            var sections = ceildiv(self.members[unsafe_offset=i].n, depth)
            if left < sections:
                return (i, left * depth)
            left -= sections
        return (self.count, 0)
