"""Activations rounded to int8 by blocks, as llama.cpp rounds them on x86-64, with the sums that a product needs."""

from std.math import ceildiv
from std.memory import bitcast
from std.sys import llvm_intrinsic

from ...isa.convert import FloatVector, LANES
from ...isa.int8_dot import IntVector
from ...isa.threads import Workers, run_tasks
from .tile import BytePointer, TILE_ELEMENTS

comptime RECORD_BYTES = 448
"""Bytes of 256 elements of one row of x: an odd number of cache lines, so that rows do not meet in a set of the
cache.
"""
comptime RECORD_STARTS_16 = 256
"""`[16]` int32: `-STARTS_16_OFFSET` times the sum of 16 elements, what a sum of Q6_K begins with."""
comptime STARTS_16_OFFSET = 32
comptime RECORD_STARTS_32 = 320
"""`[8]` int32: `-STARTS_32_OFFSET` times the sum of 32 elements."""
comptime STARTS_32_OFFSET = 128
comptime RECORD_SUMS = 352
"""`[8]` float32: the sum of 32 elements (Q8_0)."""
comptime RECORD_SUM_PAIRS_16 = 352
"""`[8]` pairs of int16 in the same place (Q8_K): the sums of 16 elements, in the order of `RECORD_SUM_PAIRS_32`."""
comptime RECORD_SCALES = 384
"""`[8]` float32: of each 32 elements (Q8_0); the first one of all (Q8_K)."""
comptime RECORD_SUM_PAIRS_32 = 416
"""`[4]` pairs of int16: the sums of 32 elements of groups (0, 2), (1, 3), (4, 6), (5, 7)."""

comptime INFINITE_BITS = 0x7F800000


@always_inline
def rounded(x: FloatVector) -> IntVector:
    """The nearest integers, ties to even. An addition of 1.5 x 2^23 in its place would be fused with the product that x
    is, which llama.cpp rounds to float32 first.
    """
    return llvm_intrinsic["llvm.lrint", IntVector](x)


@fieldwise_init
struct Scale(TrivialRegisterPassable):
    """The rounding of a block of x: the meant value is the scale times the integer."""

    var factor: Float32
    """The factor of x, before it is rounded."""
    var scale: Float32

    @staticmethod
    @always_inline
    def of[blocks: Bool](largest: IntVector) -> Self:
        """From the bits of magnitudes, whose order is that of the numbers.

        A block in which a number is not finite has the scale NaN; one whose factor overflows, all of whose numbers are
        as good as zero, the scale 0.
        """
        var bits = largest.reduce_max()
        var magnitude = bitcast[DType.float32, 1](bits)
        var factor = Float32(127) / magnitude
        var is_finite = bitcast[DType.int32, 1](factor) < INFINITE_BITS
        var scale: Float32
        comptime if blocks:
            scale = Float32(1) / factor
        else:
            scale = (magnitude / 127).cast[DType.float16]().cast[DType.float32]()
        if bits >= INFINITE_BITS:
            return Self(0, bitcast[DType.float32, 1](Int32(0x7FC00000)))
        if not is_finite:
            return Self(0, 0)
        return Self(factor, scale)


def round_block[
    dtype: DType, //, blocks: Bool
](x: Pointer[Scalar[dtype], MutUntrackedOrigin], present: Int, record: BytePointer):
    """Rounds 256 elements, of which the first `present`, whole groups of 32, are x's and the others 0."""
    var numbers = Array[FloatVector, 16](fill=0)
    var bits = Array[IntVector, 16](fill=0)
    comptime for i in range(16):
        if LANES * i < present:
            numbers[i] = x.unsafe_load[width=LANES](LANES * i).cast[DType.float32]()
            bits[i] = bitcast[DType.int32, LANES](numbers[i]) & 0x7FFFFFFF
    var scales = record.unsafe_offset(RECORD_SCALES).unsafe_bitcast[Float32]()
    var scale = Scale(0, 0)
    comptime if blocks:
        var largest = IntVector(0)
        comptime for i in range(16):
            largest = max(largest, bits[i])
        scale = Scale.of[blocks](largest)
    comptime for group in range(8):
        comptime if not blocks:
            scale = Scale.of[blocks](max(bits[2 * group], bits[2 * group + 1]))
        scales[unsafe_offset=group] = scale.scale
        var both = Int32(0)
        comptime for i in range(2 * group, 2 * group + 2):
            # A number that is not finite has factor 0, and their product must not be rounded.
            var whole = rounded(numbers[i] * scale.factor) if scale.factor > 0 else IntVector(0)
            record.unsafe_bitcast[Int8]().unsafe_store(LANES * i, whole.cast[DType.int8]())
            var sum = whole.reduce_add()
            record.unsafe_offset(RECORD_STARTS_16).unsafe_bitcast[Int32]()[unsafe_offset=i] = -STARTS_16_OFFSET * sum
            comptime if blocks:
                set_paired[i](record.unsafe_offset(RECORD_SUM_PAIRS_16), sum)
            both += sum
        record.unsafe_offset(RECORD_STARTS_32).unsafe_bitcast[Int32]()[unsafe_offset=group] = -STARTS_32_OFFSET * both
        comptime if blocks:
            set_paired[group](record.unsafe_offset(RECORD_SUM_PAIRS_32), both)
        else:
            record.unsafe_offset(RECORD_SUMS).unsafe_bitcast[Float32]()[unsafe_offset=group] = both.cast[
                DType.float32
            ]()


@always_inline
def set_paired[group: Int](pairs: BytePointer, sum: Int32):
    """Writes the sum of a group's elements beside that of the group two before or after it."""
    comptime place = group // 4 * 4 + group % 2 * 2 + group % 4 // 2
    pairs.unsafe_bitcast[Int16]()[unsafe_offset=place] = sum.cast[DType.int16]()


@fieldwise_init
struct RoundedRows(TrivialRegisterPassable):
    """Some rows of x that meet the same weights."""

    var order: Pointer[Int, MutUntrackedOrigin]
    """`[m]`: the row of y that each makes. The row of x is this one, divided by the rows of y that a row of x makes."""
    var m: Int
    var records: BytePointer
    """`[columns, m, RECORD_BYTES]`: as `round_rows` leaves them."""


def round_rows[
    dtype: DType, //, blocks: Bool
](
    x: Pointer[Scalar[dtype], MutUntrackedOrigin],
    share: Int,
    k: Int,
    batches: Pointer[RoundedRows, MutUntrackedOrigin],
    rows: Int,
    workers: Workers,
):
    """Makes the records of all batches on up to `workers` threads.

    Parameters:
        dtype: The dtype of x.
        blocks: Whether 256 elements share a scale, else 32.

    Args:
        x: `[., k]`.
        share: Rows of y that a row of x makes.
        k: Elements of a row.
        batches: Rows that follow one another.
        rows: The rows of all batches.
        workers: Threads.
    """
    var columns = ceildiv(k, TILE_ELEMENTS)
    # A block takes 100 ns: a task takes longer than a thread takes to begin.
    var tasks = max(1, min(workers.count, rows * columns // 256))

    def task(index: Int) {var x, var share, var k, var batches, var rows, var columns, var tasks}:
        var batch = 0
        var first = 0
        for row in range(index * rows // tasks, (index + 1) * rows // tasks):
            while row - first >= batches[unsafe_offset=batch].m:
                first += batches[unsafe_offset=batch].m
                batch += 1
            var own = batches[unsafe_offset=batch]
            var source = x.unsafe_offset(own.order[unsafe_offset=row - first] // share * k)
            for column in range(columns):
                var at = column * TILE_ELEMENTS
                round_block[blocks](
                    source.unsafe_offset(at),
                    min(TILE_ELEMENTS, k - at),
                    own.records.unsafe_offset((column * own.m + row - first) * RECORD_BYTES),
                )

    run_tasks(task, tasks, workers.at_most(tasks))
