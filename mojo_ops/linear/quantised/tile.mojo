"""A tile of weights, 16 rows by 256 elements, and the transpose by which blocks become one."""

from std.math import ceildiv
from std.memory import bitcast, unsafe_memcpy, unsafe_memset_zero
from std.sys.intrinsics import PrefetchOptions, prefetch
from std.utils import IndexList

from ...isa.convert import FloatVector
from ...isa.cpu_tuning import CPU_TUNING
from ...isa.int8_dot import DOT_ROWS
from ...isa.memory import CACHE_LINE_BYTES

comptime BytePointer = Pointer[UInt8, MutUntrackedOrigin]
comptime Words = SIMD[DType.uint32, DOT_ROWS]
"""A dword of each of 16 rows."""
comptime TILE_ELEMENTS = 256
"""Elements of K."""
comptime STEPS = TILE_ELEMENTS // 4
comptime PART_ELEMENTS = 64
"""Elements of a part of a tile, which is unpacked by itself where K ends within a tile: two blocks of 32, so it begins
with a dword."""
comptime VECTOR_BYTES = 64
"""A vector of the tile: 16 rows of 4 bytes."""
comptime MAX_BLOCK_BYTES = 288
"""The most bytes of a row's 256 elements, in any encoding."""
comptime RAW_BYTES = MAX_BLOCK_BYTES // 4 * VECTOR_BYTES
comptime Q_BYTES = STEPS * VECTOR_BYTES
comptime CHUNK_LINES = 2
"""Cache lines that are prefetched while 16 bytes of 16 rows are transposed; as many more while they are multiplied."""
comptime TILE_BYTES = Q_BYTES + (16 + 8 + 2) * VECTOR_BYTES


trait Unpacked:
    """The target of 16 rows of blocks that are unpacked (`Encoding.unpack`): 256 elements a row, and what scales
    them.
    """

    def set_step[step: Int](mut self, quads: Words):
        """Elements `4 step` to `4 step + 3` of each row."""
        ...

    def set_scale[group: Int](mut self, scales: FloatVector):
        """Set the scales of a group; where the encoding has blocks of 256, an integer that `set_factor` scales."""
        ...

    def set_min[group: Int](mut self, mins: FloatVector):
        """Set what a group of 32 adds for each 1 of the sum of its x, in steps of its scale or as it is."""
        ...

    def set_factor(mut self, factors: FloatVector):
        """Set what scales all groups of a block of 256."""
        ...

    def set_min_pairs[count: Int](mut self, pairs: Array[Words, count], factors: FloatVector):
        """The minimums of the groups of a block of 256, integers from 0 to 63 in the order of the pairs of their sums
        of x (`RECORD_SUM_PAIRS_32`), and what scales them."""
        ...


@fieldwise_init
struct Tile(TrivialRegisterPassable, Unpacked):
    """16 rows of w by 256 elements of K: weights, and the scales and minimums of their groups (`README.md`)."""

    var at: BytePointer
    """`TILE_BYTES`, from the start of a cache line on."""

    @always_inline
    def set_step[step: Int](mut self, quads: Words):
        self.at.unsafe_bitcast[UInt32]().unsafe_store(step * DOT_ROWS, quads)

    @always_inline
    def step(self, step: Int) -> SIMD[DType.uint8, VECTOR_BYTES]:
        return self.at.unsafe_load[width=VECTOR_BYTES](step * VECTOR_BYTES)

    def take_offset[offset: Int](self):
        """Makes the weights signed: each is stored plus `offset`."""
        for step in range(STEPS):
            var at = self.at.unsafe_offset(step * VECTOR_BYTES)
            at.unsafe_store(at.unsafe_load[width=VECTOR_BYTES]() - UInt8(offset))

    @always_inline
    def set_scale[group: Int](mut self, scales: FloatVector):
        self.set_number(group, scales)

    @always_inline
    def scale(self, group: Int) -> FloatVector:
        return self.number(group)

    @always_inline
    def set_min[group: Int](mut self, mins: FloatVector):
        self.set_number(16 + group, mins)

    @always_inline
    def min(self, group: Int) -> FloatVector:
        return self.number(16 + group)

    @always_inline
    def set_factor(mut self, factors: FloatVector):
        self.set_number(24, factors)

    @always_inline
    def factor(self) -> FloatVector:
        return self.number(24)

    @always_inline
    def set_min_pairs[count: Int](mut self, pairs: Array[Words, count], factors: FloatVector):
        comptime for i in range(count):
            self.set_number(16 + i, bitcast[DType.float32, DOT_ROWS](pairs[i]))
        self.set_number(25, factors)

    @always_inline
    def min_pair(self, index: Int) -> Words:
        return bitcast[DType.uint32, DOT_ROWS](self.number(16 + index))

    @always_inline
    def min_factor(self) -> FloatVector:
        return self.number(25)

    @always_inline
    def set_number(self, index: Int, numbers: FloatVector):
        self.at.unsafe_offset(Q_BYTES).unsafe_bitcast[Float32]().unsafe_store(index * DOT_ROWS, numbers)

    @always_inline
    def number(self, index: Int) -> FloatVector:
        return self.at.unsafe_offset(Q_BYTES).unsafe_bitcast[Float32]().unsafe_load[width=DOT_ROWS](index * DOT_ROWS)


@fieldwise_init
struct Raw(TrivialRegisterPassable):
    """Blocks of 16 rows as they are stored, transposed: each dword of all rows is a vector."""

    var at: Pointer[UInt32, MutUntrackedOrigin]

    @always_inline
    def __getitem__(self, dword: Int) -> Words:
        return self.at.unsafe_load[width=DOT_ROWS](dword * DOT_ROWS)

    @always_inline
    def from_middle(self, dword: Int) -> Words:
        """The 4 bytes that begin in the middle of a dword."""
        return (self[dword] >> 16) | (self[dword + 1] << 16)

    @always_inline
    def at_byte[byte: Int, block_bytes: Int](self) -> Words:
        """The 4 bytes from `byte` on, of blocks of so many bytes; what lies past these is anything."""
        comptime whole = block_bytes // 16 * 16
        # Where blocks are no whole dwords, their last 16 bytes come once more.
        comptime is_again = block_bytes % 4 != 0 and byte + 4 > whole
        comptime assert not is_again or byte >= block_bytes - 16, "no dwords hold these 4 bytes"
        comptime place = byte + whole - (block_bytes - 16) if is_again else byte
        comptime end = ceildiv(block_bytes, 4) * 4 if block_bytes % 4 == 0 else whole + 16
        var low = self[place // 4]
        comptime if place % 4 == 0:
            return low
        else:
            var high = self[place // 4 + 1] if place // 4 * 4 + 4 < end else Words(0)
            return (low >> UInt32(place % 4 * 8)) | (high << UInt32(32 - place % 4 * 8))

    @always_inline
    def transpose[block_bytes: Int](self, first: BytePointer, pitch: Int, coming: Coming):
        """Takes the block at `first`, and those of the next 15 rows, each `pitch` bytes on, and prefetches the
        first half of `coming`.

        Dword `i` of a block becomes vector `i`. Where the bytes are no whole dwords, the last 16 of them come once more,
        as four vectors after those of whole 16.
        """
        comptime whole = block_bytes // 16
        for chunk in range(whole):
            comptime for line in range(CHUNK_LINES):
                coming.prefetch(CHUNK_LINES * chunk + line)
            self.transpose_chunk(first.unsafe_offset(16 * chunk), pitch, 4 * chunk)
        comptime if block_bytes % 16:
            comptime last = 4 * whole if block_bytes % 4 else block_bytes // 4 - 4
            self.transpose_chunk(first.unsafe_offset(block_bytes - 16), pitch, last)

    @always_inline
    def transpose_chunk(self, first: BytePointer, pitch: Int, dword: Int):
        """16 bytes of 16 rows."""
        # [4][rows i, i + 4, i + 8, i + 12]: four dwords of each of these rows.
        var rows = Array[Words, 4](fill=0)
        comptime for i in range(4):
            var low = load_dwords(first.unsafe_offset(i * pitch)).join(
                load_dwords(first.unsafe_offset((i + 4) * pitch))
            )
            var high = load_dwords(first.unsafe_offset((i + 8) * pitch)).join(
                load_dwords(first.unsafe_offset((i + 12) * pitch))
            )
            rows[i] = low.join(high)
        var low_01 = rows[0].shuffle[mask=pick(0, False)](rows[1])
        var high_01 = rows[0].shuffle[mask=pick(2, False)](rows[1])
        var low_23 = rows[2].shuffle[mask=pick(0, False)](rows[3])
        var high_23 = rows[2].shuffle[mask=pick(2, False)](rows[3])
        var target = self.at.unsafe_offset(dword * DOT_ROWS)
        target.unsafe_store(0, low_01.shuffle[mask=pick(0, True)](low_23))
        target.unsafe_store(DOT_ROWS, low_01.shuffle[mask=pick(2, True)](low_23))
        target.unsafe_store(2 * DOT_ROWS, high_01.shuffle[mask=pick(0, True)](high_23))
        target.unsafe_store(3 * DOT_ROWS, high_01.shuffle[mask=pick(2, True)](high_23))


@fieldwise_init
struct Coming(TrivialRegisterPassable):
    """Blocks to be prefetched while as many others are multiplied, some lines at a time: in one burst they would wait
    for the buffers of lines under way.
    """

    var first: BytePointer
    var pitch: Int
    """Bytes from a row to the next one."""

    @always_inline
    def after(self, bytes: Int) -> Self:
        """Those after the first `bytes` bytes of 16 rows."""
        comptime if CPU_TUNING.blocks_ahead > 0:
            return Self(self.first.unsafe_offset(bytes), self.pitch)
        else:
            return Self(self.first.unsafe_offset(DOT_ROWS * bytes), self.pitch)

    @always_inline
    def prefetch(self, line: Int):
        """Prefetches line `line` of all: of 16 rows in turn, or in the order of memory."""
        comptime if CPU_TUNING.blocks_ahead > 0:
            var at = self.first.unsafe_offset(line % DOT_ROWS * self.pitch + line // DOT_ROWS * CACHE_LINE_BYTES)
            prefetch[PrefetchOptions().for_read().high_locality().to_data_cache()](at)
        else:  # what is prefetched is larger than the first-level cache
            var at = self.first.unsafe_offset(CACHE_LINE_BYTES * line)
            prefetch[PrefetchOptions().for_read().medium_locality().to_data_cache()](at)


def lines_of(bytes: Int) -> Int:
    """Return the lines of `Coming` of blocks of so many bytes a row."""
    return ceildiv(bytes, CACHE_LINE_BYTES) * DOT_ROWS if CPU_TUNING.blocks_ahead > 0 else bytes // 4


@always_inline
def load_dwords(at: BytePointer) -> SIMD[DType.uint32, 4]:
    return at.unsafe_bitcast[UInt32]().unsafe_load[width=4]()


def pick(first: Int, pairs: Bool) -> IndexList[DOT_ROWS]:
    """In each four lanes those from `first` on of two vectors by turns: two single ones, or with `pairs` one pair."""
    var mask = IndexList[DOT_ROWS]()
    for lane in range(DOT_ROWS):
        var four = lane // 4 * 4
        var i = lane % 4
        if pairs:
            mask[lane] = four + first + i % 2 + i // 2 * DOT_ROWS
        else:
            mask[lane] = four + first + i // 2 + i % 2 * DOT_ROWS
    return mask


def copy_blocks(source: BytePointer, pitch: Int, rows: Int, bytes: Int, target: BytePointer, target_pitch: Int):
    """Copies `bytes` bytes of up to 16 rows, to memory in which 16 rows of `target_pitch` bytes end with zeros."""
    unsafe_memset_zero(target, count=DOT_ROWS * target_pitch)
    for row in range(rows):
        unsafe_memcpy(dest=target.unsafe_offset(row * target_pitch), src=source.unsafe_offset(row * pitch), count=bytes)
