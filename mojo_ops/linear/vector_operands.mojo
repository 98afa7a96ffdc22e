"""The operands of the linear layer in vectors: x packed in panels, weights widened to float32, sums folded into y."""

from std.math import ceildiv
from std.memory import bitcast

from ..cache.pointers import untracked
from ..isa.convert import narrow, reduce_each
from ..isa.memory import FloatPointer
from ..isa.registers import REGISTER_LANES, RegisterVector

comptime CHUNK = 2 * REGISTER_LANES
"""Elements of w that are widened at once, to two vectors."""


def padded(k: Int) -> Int:
    """The depth of packed operands: whole chunks."""
    return ceildiv(k, CHUNK) * CHUNK


def section_rows[most: Int, least: Int](n: Int, workers: Int) -> Int:
    """Rows of w in a section: fewer where w is small, so that every worker has some."""
    var depth = most
    while depth > least and depth * workers * 4 > n:
        depth //= 2
    return depth if depth > least else balanced_rows(least, n, workers)


def balanced_rows(least: Int, n: Int, workers: Int) -> Int:
    """Rows of w in a section, from `least` to less than 4 times that, with which the longest of many workers has the
    fewest; the shortest of such sections."""
    var best = least
    var fewest = Int.MAX
    for depth in range(least, 4 * least):
        var longest = ceildiv(ceildiv(n, depth), workers) * depth
        if longest < fewest:
            best = depth
            fewest = longest
    return best


@always_inline
def widen_half[dtype: DType, //, half: Int](at: Pointer[Scalar[dtype], MutUntrackedOrigin]) -> RegisterVector:
    """Widens half of a chunk of weights: of bfloat16 the even or the odd elements, by a shift or a mask; else the first
    or the second half."""
    comptime if dtype == DType.bfloat16:
        var pairs = at.unsafe_bitcast[UInt32]().unsafe_load[width=REGISTER_LANES]()
        return bitcast[DType.float32, REGISTER_LANES](pairs << 16 if half == 0 else pairs & 0xFFFF0000)
    else:
        return at.unsafe_load[width=REGISTER_LANES](half * REGISTER_LANES).cast[DType.float32]()


def widen_part[
    dtype: DType, //
](at: Pointer[Scalar[dtype], MutUntrackedOrigin], count: Int, mut first: RegisterVector, mut second: RegisterVector):
    """As `widen_half`, both halves of `count` weights and then zeros. Nothing past them is read."""
    var memory = Array[Scalar[dtype], CHUNK](fill=0)
    for i in range(count):
        memory[i] = at[unsafe_offset=i]
    var whole = untracked(Pointer(to=memory[0]))
    first = widen_half[0](whole)
    second = widen_half[1](whole)
    _ = memory


def pack_panel[
    dtype: DType, //, weight_dtype: DType, rows: Int
](x: Pointer[Scalar[dtype], MutUntrackedOrigin], present: Int, k: Int, packed: FloatPointer):
    """Packs up to `rows` rows of x as float32 `[padded(k) / REGISTER_LANES, rows, REGISTER_LANES]`, padded with zeros; a
    row's elements in the order in which `widen_half` gives those of w."""
    for row in range(rows):
        var source = x.unsafe_offset(row * k)
        var target = packed.unsafe_offset(row * REGISTER_LANES)
        for p in range(0, k, CHUNK):
            var low = RegisterVector(0)
            var high = RegisterVector(0)
            if row < present:
                if p + CHUNK <= k:
                    low = source.unsafe_load[width=REGISTER_LANES](p).cast[DType.float32]()
                    high = source.unsafe_load[width=REGISTER_LANES](p + REGISTER_LANES).cast[DType.float32]()
                else:
                    for i in range(k - p):
                        var element = source[unsafe_offset=p + i].cast[DType.float32]()
                        if i < REGISTER_LANES:
                            low[i] = element
                        else:
                            high[i - REGISTER_LANES] = element
                comptime if weight_dtype == DType.bfloat16:
                    var even, odd = low.join(high).deinterleave()
                    low = rebind[RegisterVector](even)
                    high = rebind[RegisterVector](odd)
            target.unsafe_store(p * rows, low)
            target.unsafe_store((p + REGISTER_LANES) * rows, high)


def store_sums[
    dtype: DType, //, rows: Int
](
    sums: Pointer[RegisterVector, MutUntrackedOrigin],
    y: Pointer[Scalar[dtype], MutUntrackedOrigin],
    present: Int,
    pitch: Int,
    columns: Int,
):
    """Folds the sums of a panel, one vector each, and writes them to `present` rows of y.

    Args:
        sums: `[columns, rows]`.
        y: `[present, columns]`; from one row to the next are `pitch` elements.
        present: Rows of x in the panel, at most `rows`.
        pitch: Elements of a row of y.
        columns: Rows of w.
    """
    comptime BITS = DType.uint32 if dtype == DType.float32 else DType.uint16
    for row in range(present):
        var target = y.unsafe_offset(row * pitch)
        for column in range(0, columns, REGISTER_LANES):
            var each = Array[RegisterVector, REGISTER_LANES](fill=0)
            comptime for c in range(REGISTER_LANES):
                if column + c < columns:
                    each[c] = sums[unsafe_offset=(column + c) * rows + row]
            # As integers: without AVX-512 BF16, LLVM calls a function to take one bfloat16 out of a vector.
            var bits = bitcast[BITS, REGISTER_LANES](narrow[dtype](reduce_each[REGISTER_LANES](each)))
            var at = target.unsafe_offset(column).unsafe_bitcast[Scalar[BITS]]()
            var left = columns - column
            if left >= REGISTER_LANES:
                at.unsafe_store(bits)
            else:
                var stored = 0
                if left >= REGISTER_LANES // 2:
                    at.unsafe_store(bits.slice[REGISTER_LANES // 2]())
                    stored = REGISTER_LANES // 2
                for c in range(stored, left):
                    at[unsafe_offset=c] = bits[c]
