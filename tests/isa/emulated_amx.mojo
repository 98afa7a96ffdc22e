"""Stands in for `mojo_ops/isa/amx.mojo`: the same names, and tile registers in memory, on any CPU with AVX-512.

Each statement does what Intel's manual says of the instruction, and stops the process where the instruction would fault:
registers that are not configured, or shapes that do not fit. Instructions that the kernels do not use are left out.
"""

from std.ffi import external_call
from std.memory import bitcast
from std.os import abort

comptime HAS_AMX = True
comptime HAS_AMX_INT8 = True

comptime NUM_TILES = 8
comptime MAX_ROWS = 16
comptime ROW_BYTES = 64
comptime TILE_BYTES = MAX_ROWS * ROW_BYTES
comptime CONFIG_BYTES = 64
comptime THREAD_BYTES = 2**14
"""Address space of a thread's registers: whole memory pages."""
comptime FIRST_THREAD = 2**44
"""Address of thread 0's registers, if it had some. Linux places nothing there by itself, and has 2^22 thread numbers."""

comptime BytePointer = Pointer[UInt8, MutUntrackedOrigin]
comptime FloatRow = SIMD[DType.float32, 16]
comptime PairRow = SIMD[DType.uint32, 16]


def amx_permitted() -> Bool:
    return True


def registers() -> BytePointer:
    """This thread's eight tiles, `[8, 16, 64]` bytes, then its configuration. `TileShapes.apply` makes the memory."""
    var thread = Int(external_call["gettid", Int32]())
    return BytePointer(unsafe_from_address=FIRST_THREAD + thread * THREAD_BYTES)


struct TileShapes(Movable):
    """The number of rows and the bytes of a row of the eight tile registers: the 64 bytes that `ldtilecfg` reads."""

    var memory: Array[UInt8, CONFIG_BYTES]

    def __init__(out self):
        self.memory = Array[UInt8, CONFIG_BYTES](fill=0)
        self.memory[0] = 1

    def set(mut self, tile: Int, rows: Int, row_bytes: Int):
        self.memory[16 + 2 * tile] = UInt8(row_bytes)
        self.memory[48 + tile] = UInt8(rows)

    def apply(self):
        """Configures this thread's registers and zeroes them."""
        for tile in range(NUM_TILES):
            if self.memory[48 + tile] > MAX_ROWS or self.memory[16 + 2 * tile] > ROW_BYTES:
                abort("ldtilecfg: a tile is too large")
        var target = registers()
        comptime READ_AND_WRITE = 3
        comptime PRIVATE_ANONYMOUS_FIXED_NOREPLACE = 0x100022
        # It fails where the thread, or an earlier one of the same number, has the memory already.
        _ = external_call["mmap", Int](
            target,
            Int(THREAD_BYTES),
            Int32(READ_AND_WRITE),
            Int32(PRIVATE_ANONYMOUS_FIXED_NOREPLACE),
            Int32(-1),
            Int(0),
        )
        for i in range(NUM_TILES * TILE_BYTES):
            target[unsafe_offset=i] = 0
        for i in range(CONFIG_BYTES):
            target[unsafe_offset=NUM_TILES * TILE_BYTES + i] = self.memory[i]


@fieldwise_init
struct Tile(TrivialRegisterPassable):
    """One register of this thread."""

    var data: BytePointer
    """`[16, 64]` bytes."""
    var rows: Int
    var row_bytes: Int

    @staticmethod
    def of(index: Int) -> Self:
        var all = registers()
        var config = all.unsafe_offset(NUM_TILES * TILE_BYTES)
        var rows = Int(config[unsafe_offset=48 + index])
        var row_bytes = Int(config[unsafe_offset=16 + 2 * index])
        if config[unsafe_offset=0] != 1 or rows == 0 or row_bytes == 0:
            abort("a tile register is used that is not configured")
        return Self(all.unsafe_offset(index * TILE_BYTES), rows, row_bytes)

    def clear(self):
        for i in range(TILE_BYTES):
            self.data[unsafe_offset=i] = 0

    def pairs(self, row: Int) -> PairRow:
        return self.data.unsafe_offset(row * ROW_BYTES).unsafe_bitcast[UInt32]().unsafe_load[width=16]()


@no_inline
def tile_release():
    """Every later use of this thread's registers stops the process, until they are configured again."""
    # They need not be configured, nor have memory.
    TileShapes().apply()
    registers()[unsafe_offset=NUM_TILES * TILE_BYTES] = 0


@always_inline
def tile_zero[tile: Int]():
    zero(tile)


@always_inline
def tile_load[tile: Int](source: Pointer[_, _], stride: Int):
    load(tile, Int(source), stride)


@always_inline
def tile_store[tile: Int](target: Pointer[_, _], stride: Int):
    store(tile, Int(target), stride)


@always_inline
def tile_dot[c: Int, a: Int, b: Int]():
    dot(c, a, b)


@always_inline
def tile_dot_int8[c: Int, a: Int, b: Int]():
    dot_int8(c, a, b)


@always_inline
def tile_dot_2x2(
    a: Pointer[_, _], second_a: Pointer[_, _], a_stride: Int, b: Pointer[_, _], second_b: Pointer[_, _], b_stride: Int
):
    load(4, Int(a), a_stride)
    load(6, Int(b), b_stride)
    dot(0, 4, 6)
    load(7, Int(second_b), b_stride)
    dot(1, 4, 7)
    load(5, Int(second_a), a_stride)
    dot(2, 5, 6)
    dot(3, 5, 7)


@no_inline
def zero(tile: Int):
    Tile.of(tile).clear()


@no_inline
def load(tile: Int, source: Int, stride: Int):
    var target = Tile.of(tile)
    target.clear()
    for row in range(target.rows):
        var at = BytePointer(unsafe_from_address=source + row * stride)
        for i in range(target.row_bytes):
            target.data[unsafe_offset=row * ROW_BYTES + i] = at[unsafe_offset=i]


@no_inline
def store(tile: Int, target: Int, stride: Int):
    var source = Tile.of(tile)
    for row in range(source.rows):
        var at = BytePointer(unsafe_from_address=target + row * stride)
        for i in range(source.row_bytes):
            at[unsafe_offset=i] = source.data[unsafe_offset=row * ROW_BYTES + i]


@no_inline
def dot(c: Int, a: Int, b: Int):
    """`tdpbf16ps`: even and odd elements of K are summed apart, by FMA, and then added to C."""
    check_operands(c, a, b)
    var sums = Tile.of(c)
    var left = Tile.of(a)
    var right = Tile.of(b)
    for row in range(sums.rows):
        var even = FloatRow(0)
        var odd = FloatRow(0)
        var pairs = left.pairs(row)
        for k in range(right.rows):
            var columns = right.pairs(k)
            even = without_denormals(first_of_pair(PairRow(pairs[k])).fma(first_of_pair(columns), even))
            odd = without_denormals(second_of_pair(PairRow(pairs[k])).fma(second_of_pair(columns), odd))
        var at = sums.data.unsafe_offset(row * ROW_BYTES).unsafe_bitcast[Float32]()
        var old = without_denormals(at.unsafe_load[width=16]())
        var new = without_denormals(old + without_denormals(even + odd))
        for column in range(sums.row_bytes // 4):
            at[unsafe_offset=column] = new[column]


@no_inline
def dot_int8(c: Int, a: Int, b: Int):
    """`tdpbssd`: each four signed bytes of a row of A by those of all columns of B."""
    check_operands(c, a, b)
    var sums = Tile.of(c)
    var left = Tile.of(a)
    var right = Tile.of(b)
    for row in range(sums.rows):
        var at = sums.data.unsafe_offset(row * ROW_BYTES).unsafe_bitcast[Int32]()
        var new = at.unsafe_load[width=16]()
        for k in range(right.rows):
            for i in range(4):
                var x = left.data.unsafe_bitcast[Int8]()[unsafe_offset=row * ROW_BYTES + 4 * k + i]
                var column = bitcast[DType.int32, 16](right.pairs(k) << UInt32(24 - 8 * i)) >> 24
                new += column * x.cast[DType.int32]()
        for column in range(sums.row_bytes // 4):
            at[unsafe_offset=column] = new[column]


def check_operands(c: Int, a: Int, b: Int):
    """Stops the process where a product of these registers would fault."""
    var sums = Tile.of(c)
    var left = Tile.of(a)
    var right = Tile.of(b)
    if left.rows != sums.rows or right.row_bytes != sums.row_bytes or left.row_bytes != 4 * right.rows:
        abort("a product of tiles: the shapes do not fit")
    if a == b or a == c or b == c:
        abort("a product of tiles: two operands are one register")


@always_inline
def first_of_pair(pairs: PairRow) -> FloatRow:
    """The lower of two bfloat16, as float32."""
    return without_denormals(bitcast[DType.float32, 16](pairs << 16))


@always_inline
def second_of_pair(pairs: PairRow) -> FloatRow:
    return without_denormals(bitcast[DType.float32, 16](pairs & 0xFFFF0000))


@always_inline
def without_denormals(x: FloatRow) -> FloatRow:
    """Zero of the same sign for denormals, which the instruction neither reads nor writes."""
    var bits = bitcast[DType.uint32, 16](x)
    return bitcast[DType.float32, 16]((bits & 0x7F800000).eq(0).select(bits & 0x80000000, bits))
