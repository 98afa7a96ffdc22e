"""Stored bfloat16 and float8 elements as bfloat16, a chunk at a time, in whatever order is cheapest."""

from std.memory import bitcast
from std.sys import llvm_intrinsic
from std.utils import IndexList

from .lanes import Vec, load_bits

comptime Words = SIMD[DType.uint16, 32]
comptime Table = SIMD[DType.uint8, 64]


struct Widened[dtype: DType]:
    """The bfloat16 bits of one chunk: a cache line of `dtype`."""

    comptime length = 32 if Self.dtype == DType.bfloat16 else 64
    var words: Array[Words, Self.length // 32]

    def __init__(out self):
        self.words = Array[Words, Self.length // 32](fill=0)


@always_inline
def widen_chunk[
    dtype: DType, //, full: Bool
](source: Pointer[Scalar[dtype], _], count: Int, mut target: Widened[dtype]):
    """The chunk at `source`; where not `full` only its first `count` elements, then zeros."""
    comptime if dtype == DType.bfloat16:
        target.words[0] = load_bits[DType.uint16, full, 32](source, count)
    else:
        var bytes = load_bits[DType.uint8, full, 64](source, count)
        comptime low0 = fp8_table(dtype, 0, 0)
        comptime low1 = fp8_table(dtype, 64, 0)
        comptime high0 = fp8_table(dtype, 0, 8)
        comptime high1 = fp8_table(dtype, 64, 8)
        var low = look_up(low0, bytes, low1)
        var high = look_up(high0, bytes, high1) | (bytes & 0x80)
        target.words[0] = bitcast[DType.uint16, 32](low.shuffle[mask=byte_mask(0)](high))
        target.words[1] = bitcast[DType.uint16, 32](low.shuffle[mask=byte_mask(8)](high))


@always_inline
def look_up(first: Table, index: Table, second: Table) -> Table:
    """Byte `index % 128` of the 128 bytes of both tables."""
    return llvm_intrinsic["llvm.x86.avx512.vpermi2var.qi.512", Table](first, index, second)


def byte_mask(start: Int) -> IndexList[64]:
    """From each run of 16 bytes, bytes `start` to `start + 7` of both operands in turn."""
    var mask = IndexList[64]()
    for i in range(64):
        mask[i] = i // 16 * 16 + start + i % 16 // 2 + i % 2 * 64
    return mask


def fp8_table(dtype: DType, start: Int, shift: Int) -> Table:
    """8 bits, from bit `shift` on, of the bfloat16 of each of 64 magnitudes of a float8 type."""
    var table = Table(0)
    var mantissa_bits = 3 if dtype == DType.float8_e4m3fn else 2
    var bias = 7 if dtype == DType.float8_e4m3fn else 15
    for i in range(64):
        var magnitude = start + i
        var exponent = magnitude >> mantissa_bits
        var fraction = magnitude & ((1 << mantissa_bits) - 1)
        var bits: Int
        if dtype == DType.float8_e4m3fn and magnitude == 127:
            bits = 0x7FC0
        elif dtype == DType.float8_e5m2 and exponent == 31:
            bits = 0x7F80 if fraction == 0 else 0x7FC0
        elif exponent == 0 and fraction == 0:
            bits = 0
        else:
            if exponent == 0:
                # Subnormal: shift the leading one into its place.
                exponent = 1
                while fraction < (1 << mantissa_bits):
                    fraction *= 2
                    exponent -= 1
                fraction -= 1 << mantissa_bits
            bits = ((exponent - bias + 127) << 7) | (fraction << (7 - mantissa_bits))
        table[i] = UInt8((bits >> shift) & 0xFF)
    return table


@always_inline
def words_chunk[kv_dtype: DType, part: Int](source: Pointer[UInt16, _], count: Int) -> Words:
    """Words in the order of the lanes of part `part` of a `kv_dtype` chunk; zeros past the first `count`."""
    comptime if kv_dtype == DType.bfloat16:
        return load_bits[DType.uint16, False, 32](source, count)
    else:
        var all = load_bits[DType.uint16, False, 32](source, count).join(
            load_bits[DType.uint16, False, 32](source.unsafe_offset(32), count - 32)
        )
        return rebind[Words](all.shuffle[mask=parts_mask()](all).slice[32, offset=32 * part]())


def parts_mask() -> IndexList[64]:
    """The elements of a float8 chunk in the order of its two vectors of words."""
    var mask = IndexList[64]()
    for i in range(64):
        mask[i] = i % 32 // 8 * 16 + i // 32 * 8 + i % 8
    return mask


@always_inline
def unpack_sums[kv_dtype: DType](acc: Pointer[Float32, _]) -> SIMD[DType.float32, Widened[kv_dtype].length]:
    """A chunk of weighted sums in its natural order, from tiles whose columns `zip_mask` chose."""
    comptime if kv_dtype == DType.bfloat16:
        return rebind[SIMD[DType.float32, Widened[kv_dtype].length]](
            acc.unsafe_load[width=32]().shuffle[mask=natural_mask[32]()](acc.unsafe_load[width=32]())
        )
    else:
        return rebind[SIMD[DType.float32, Widened[kv_dtype].length]](
            acc.unsafe_load[width=64]().shuffle[mask=natural_mask[64]()](acc.unsafe_load[width=64]())
        )


def natural_mask[length: Int]() -> IndexList[length]:
    """Where each element of a chunk ends up among the columns of its tiles."""
    comptime run = length // 4  # elements that share 16 bytes of every word vector
    var mask = IndexList[length]()
    for element in range(length):
        var part = element % run // 8
        mask[element] = part * 32 + element % 8 // 4 * 16 + element // run * 4 + element % 4
    return mask
