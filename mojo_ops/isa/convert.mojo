"""Stored elements as float32 vectors, one chunk at a time, in the lane order that takes the fewest instructions.

bfloat16 becomes its even and its odd elements (a shift and a mask), and so do pairs of int4 codes. float8 becomes
bfloat16 first, where the target looks up 64 bytes at once. Queries are packed in the same order and outputs unpacked
from it, so no other code depends on the order.
"""

from std.memory import bitcast
from std.sys import CompilationTarget, llvm_intrinsic
from std.utils import IndexList

from .bf16_lookup import HAS_BYTE_LOOKUP, LookupTables, bf16_words, is_looked_up, word_order
from .codes import STEP, is_codes, load_codes
from .held import held

comptime LANES = 16
"""Float32 lanes of a vector. A target with narrower registers takes several registers for each."""
comptime CHUNK_ELEMENTS = 2 * LANES
"""Elements of a chunk, but of types that are looked up (`chunk_of`)."""
comptime FloatVector = SIMD[DType.float32, LANES]
comptime HAS_NUMBER_LOOKUP = CompilationTarget.is_x86() and CompilationTarget._has_feature["avx512f"]()
"""True if the CPU target looks up 16 float32 with one instruction."""
comptime CONVERTS_TO_BF16 = not CompilationTarget.is_x86() or CompilationTarget._has_feature["avx512bf16"]()
"""True if the CPU target has an instruction that rounds float32 to bfloat16, or is left to the compiler."""


def is_float8(dtype: DType) -> Bool:
    return dtype == DType.float8_e4m3fn or dtype == DType.float8_e5m2


def chunk_of(dtype: DType) -> Int:
    """Elements that `load_chunk` takes."""
    return 2 * CHUNK_ELEMENTS if is_looked_up(dtype) else CHUNK_ELEMENTS


struct ChunkConstants[dtype: DType](TrivialRegisterPassable):
    """The constants of `load_chunk`, made once before the loop that loads (`held.mojo`)."""

    var tables: LookupTables[Self.dtype]
    var odd: SIMD[DType.uint32, LANES]
    """The upper half of each 32 bits: the odd element of a pair of bfloat16."""
    var int4: FloatVector
    """The number of each int4 code, by its bits."""

    @always_inline
    def __init__(out self):
        self.tables = LookupTables[Self.dtype]().held()
        self.odd = held(SIMD[DType.uint32, LANES](0xFFFF0000))
        self.int4 = held(FloatVector(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1))


@always_inline
def load_chunk[
    dtype: DType, //, full: Bool
](source: Pointer[Scalar[dtype], _], count: Int, constants: ChunkConstants[dtype]) -> SIMD[
    DType.float32, chunk_of(dtype)
]:
    """Loads the chunk at `source`: all of it, or unless `full` only the first `count` elements, then zeros.

    Nothing past `count` is read: it may belong to another head, and be NaN.
    """
    comptime length = chunk_of(dtype)
    comptime Out = SIMD[DType.float32, length]
    comptime if dtype == DType.bfloat16:
        return rebind[Out](split_even_odd(load_bits[DType.uint16, full](source, count), constants.odd))
    elif is_float8(dtype):
        comptime if HAS_BYTE_LOOKUP:
            var bytes = load_bits[DType.uint8, full, 2 * CHUNK_ELEMENTS](source, count)
            var words = bf16_words(bytes, constants.tables)
            return rebind[Out](split_even_odd(words[0], constants.odd).join(split_even_odd(words[1], constants.odd)))
        else:
            var bits = load_bits[DType.uint8, full](source, count)
            return rebind[Out](
                widen_float8[dtype](bits.slice[LANES, offset=0]()).join(
                    widen_float8[dtype](bits.slice[LANES, offset=LANES]())
                )
            )
    elif dtype == DType.int8:
        # In their order: a cast takes fewer instructions than a look-up of bfloat16, which is made float32 after it.
        return bitcast[DType.int8, length](load_bits[DType.uint8, full, length](source, count)).cast[DType.float32]()
    elif dtype == DType.uint8:
        var first = split_halves(load_pairs[LANES, full](source, count).cast[DType.uint32](), constants)
        comptime if length == CHUNK_ELEMENTS:
            return rebind[Out](first)
        else:
            var rest = load_pairs[LANES, full](source.unsafe_offset(LANES), count - CHUNK_ELEMENTS)
            return rebind[Out](first.join(split_halves(rest.cast[DType.uint32](), constants)))
    elif is_codes(dtype):
        comptime if full:
            return load_codes[length](source, 0)
        else:
            var out = Out(0)
            comptime for i in range(length // STEP):
                if STEP * i < count:
                    out = out.insert[offset=STEP * i](load_codes[STEP](source, STEP * i))
            return out
    elif full:
        return source.unsafe_load[width=length]().cast[DType.float32]()
    else:
        comptime bits_type = DType.uint16 if dtype == DType.float16 else DType.uint32
        return bitcast[dtype, length](load_bits[bits_type, full, length](source, count)).cast[DType.float32]()


@always_inline
def split_even_odd(
    words: SIMD[DType.uint16, CHUNK_ELEMENTS], odd: SIMD[DType.uint32, LANES]
) -> SIMD[DType.float32, CHUNK_ELEMENTS]:
    """The even bfloat16 elements, then the odd ones."""
    var pairs = bitcast[DType.uint32, LANES](words)
    return rebind[SIMD[DType.float32, CHUNK_ELEMENTS]](
        bitcast[DType.float32, LANES](pairs << 16).join(bitcast[DType.float32, LANES](pairs & odd))
    )


@always_inline
def load_pairs[
    dtype: DType, //, width: Int, full: Bool
](source: Pointer[Scalar[dtype], _], count: Int) -> SIMD[DType.uint8, width]:
    """Loads `width` bytes with two int4 codes each; unless `full`, only those of the first `count` codes, then
    zeros.
    """
    var bytes = source.unsafe_bitcast[UInt8]()
    comptime if full:
        return bytes.unsafe_load[width=width, alignment=1]()
    else:
        var out = SIMD[DType.uint8, width](0)
        comptime for i in range(width // 4):
            if 8 * i < count:
                out = out.insert[offset=4 * i](bytes.unsafe_load[width=4, alignment=1](4 * i))
        return out


@always_inline
def split_halves(pairs: SIMD[DType.uint32, LANES], constants: ChunkConstants) -> SIMD[DType.float32, CHUNK_ELEMENTS]:
    """The even int4 codes, in the low halves of bytes, then the odd ones."""
    comptime if HAS_NUMBER_LOOKUP:
        # By the low 4 bits of each index.
        var even = llvm_intrinsic["llvm.x86.avx512.permvar.sf.512", FloatVector](
            constants.int4, bitcast[DType.int32, LANES](pairs)
        )
        var odd = llvm_intrinsic["llvm.x86.avx512.permvar.sf.512", FloatVector](
            constants.int4, bitcast[DType.int32, LANES](pairs >> 4)
        )
        return rebind[SIMD[DType.float32, CHUNK_ELEMENTS]](even.join(odd))
    else:
        var words = bitcast[DType.int32, LANES](pairs)
        var even = ((words << 28) >> 28).cast[DType.float32]()
        var odd = ((words << 24) >> 28).cast[DType.float32]()
        return rebind[SIMD[DType.float32, CHUNK_ELEMENTS]](even.join(odd))


@always_inline
def load_bits[
    dtype: DType, //, out_type: DType, full: Bool, length: Int = CHUNK_ELEMENTS
](source: Pointer[Scalar[dtype], _], count: Int) -> SIMD[out_type, length]:
    """Loads the bits of `length` elements; unless `full`, only of the first `count`, then zeros."""
    var raw = source.unsafe_bitcast[Scalar[out_type]]()
    comptime if full:
        return raw.unsafe_load[width=length]()
    else:
        var out = SIMD[out_type, length](0)
        comptime for i in range(length // 8):
            if 8 * i < count:
                out = out.insert[offset=8 * i](raw.unsafe_load[width=8](8 * i))
        return out


@always_inline
def widen[dtype: DType, //, width: Int](source: Pointer[Scalar[dtype], _]) -> SIMD[DType.float32, width]:
    """Loads `width` elements in their natural order."""
    comptime if dtype == DType.bfloat16:
        var words = source.unsafe_bitcast[UInt16]().unsafe_load[width=width]().cast[DType.uint32]()
        return bitcast[DType.float32, width](words << 16)
    elif is_float8(dtype):
        return widen_float8[dtype](source.unsafe_bitcast[UInt8]().unsafe_load[width=width]())
    else:
        return source.unsafe_load[width=width]().cast[DType.float32]()


@always_inline
def widen_float8[dtype: DType](bits: SIMD[DType.uint8, _]) -> SIMD[DType.float32, bits.length]:
    """Converts float8 numbers to float32 by way of float16, whose exponent range includes theirs."""
    comptime Out = SIMD[DType.float32, bits.length]
    var wide = bits.cast[DType.uint16]()
    comptime if dtype == DType.float8_e5m2:
        return bitcast[DType.float16, bits.length](wide << 8).cast[DType.float32]()
    else:
        # seeeemmm -> s0eeeemmm0000000: the exponent bias is 7 there and 15 here.
        var half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        var value = bitcast[DType.float16, bits.length](half).cast[DType.float32]() * 256
        return (wide & 0x7F).eq(0x7F).select(Out(0) / Out(0), value)


@always_inline
def narrow[dtype: DType](x: SIMD[DType.float32, _]) -> SIMD[dtype, x.length]:
    """Rounds float32 to `dtype`, ties to even, in vectors.

    Without an instruction for it, LLVM calls a function for every element that becomes bfloat16.
    """
    comptime if dtype == DType.bfloat16 and not CONVERTS_TO_BF16:
        var bits = bitcast[DType.uint32, x.length](x)
        var rounded = bits + 0x7FFF + (bits >> 16 & 1)
        # A NaN keeps its sign and upper bits, and becomes quiet.
        rounded = x.eq(x).select(rounded, bits | 0x400000)
        return bitcast[dtype, x.length]((rounded >> 16).cast[DType.uint16]())
    else:
        return x.cast[dtype]()


@always_inline
def to_chunk_order[kv_dtype: DType](x: SIMD[DType.float32, chunk_of(kv_dtype)]) -> type_of(x):
    """Elements in their natural order, put into the lane order of a `kv_dtype` chunk."""
    return x.shuffle[mask=lane_order[kv_dtype]()](x)


@always_inline
def to_natural_order[kv_dtype: DType](x: SIMD[DType.float32, chunk_of(kv_dtype)]) -> type_of(x):
    """The lanes of a `kv_dtype` chunk, put into their natural order."""
    return x.shuffle[mask=inverse_order(lane_order[kv_dtype]())](x)


def lane_order[dtype: DType]() -> IndexList[chunk_of(dtype)]:
    """Return which element of a chunk each lane of `load_chunk` holds."""
    comptime length = chunk_of(dtype)
    var elements = IndexList[length]()
    for lane in range(length):
        elements[lane] = lane
    comptime is_float8_words = is_float8(dtype) and is_looked_up(dtype)
    comptime if dtype == DType.bfloat16 or dtype == DType.uint8 or is_float8_words:
        comptime stored = word_order(dtype)
        for lane in range(length):
            var word = lane // CHUNK_ELEMENTS * CHUNK_ELEMENTS + lane % LANES * 2 + lane % CHUNK_ELEMENTS // LANES
            elements[lane] = stored[word] if is_float8_words else word
    return elements


def inverse_order(order: IndexList) -> type_of(order):
    """The inverse of a permutation."""
    var lanes = type_of(order)()
    comptime for lane in range(order.size):
        lanes[order[lane]] = lane
    return lanes


@always_inline
def reduce_each[lanes: Int = LANES](x: Array[SIMD[DType.float32, lanes], lanes]) -> SIMD[DType.float32, lanes]:
    """Sums the lanes of each of 4, 8 or 16 vectors: lane `i` is the sum of `x[i]`.

    For 16 it takes 15 vector additions instead of 16 times 4. Each round adds halves of shrinking groups of lanes, by
    shuffles that are one instruction each. `fold_source` undoes the order that they leave.
    """
    comptime assert lanes == 4 or lanes == 8 or lanes == 16, "the shuffles are written for 4, 8 and 16 lanes"
    comptime rounds = 2 if lanes == 4 else (3 if lanes == 8 else 4)
    var y = Array[SIMD[DType.float32, lanes], lanes](fill=0)
    comptime for i in range(lanes):
        y[i] = x[fold_source(i, lanes)]
    comptime for step in range(rounds):
        comptime width = lanes >> (step + 1)
        comptime for i in range(width):
            comptime low = fold_mask[lanes](width, 0)
            comptime high = fold_mask[lanes](width, width)
            y[i] = y[i].shuffle[mask=low](y[i + width]) + y[i].shuffle[mask=high](y[i + width])
    return y[0]


def fold_source(i: Int, lanes: Int) -> Int:
    """The vector whose sum the rounds leave in lane `i`: bits 0 and 1 of `i` are swapped, and with 16 lanes bits 2 and
    3."""
    var upper = (i & 4) << 1 | (i & 8) >> 1 if lanes == 16 else i & ~3
    return upper | (i & 1) << 1 | (i & 2) >> 1


def fold_mask[lanes: Int](width: Int, shift: Int) -> IndexList[lanes]:
    """Take of every run of `2 * width` lanes its half from `shift` on, within 4 lanes, or all where `width` is 4 or
    more.

    The first operand's come first, then the second's.
    """
    var span = lanes if width >= 4 else 4
    var half = span // 2
    var mask = IndexList[lanes]()
    for lane in range(lanes):
        var start = lane // span * span
        var i = lane % half
        mask[lane] = start + i // width * 2 * width + i % width + shift + (lane % span // half) * lanes
    return mask
