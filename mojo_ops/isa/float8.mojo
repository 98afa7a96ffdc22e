"""Exact conversion of float8 to bfloat16 by table look-up, 64 bytes at a time."""

from std.memory import bitcast
from std.sys import llvm_intrinsic
from std.sys.info import CompilationTarget
from std.utils import IndexList

from .held import held

comptime Bf16Words = SIMD[DType.uint16, 32]
comptime ByteVector = SIMD[DType.uint8, 64]

comptime HAS_BYTE_LOOKUP = CompilationTarget.is_x86() and CompilationTarget._has_feature["avx512vbmi"]()
"""Whether the CPU target looks up 64 bytes with one instruction (AVX-512 VBMI)."""


struct Float8Tables[dtype: DType](TrivialRegisterPassable):
    """The constants of `float8_words`; zeros for types and CPU targets that do not look up."""

    var low: ByteVector
    """Of magnitudes 0 to 63: the lower 8 bits of their bfloat16."""
    var next_low: ByteVector
    """Of magnitudes 64 to 127."""
    var high: ByteVector
    """The upper 8 bits, of magnitudes 0 to 63."""
    var next_high: ByteVector
    """Of magnitudes 64 to 127."""
    var sign: ByteVector
    """The sign bit of each byte."""

    @always_inline
    def __init__(out self):
        comptime is_used = HAS_BYTE_LOOKUP and (Self.dtype == DType.float8_e4m3fn or Self.dtype == DType.float8_e5m2)
        comptime low = float8_table(Self.dtype, 0, 0) if is_used else ByteVector(0)
        comptime next_low = float8_table(Self.dtype, 64, 0) if is_used else ByteVector(0)
        comptime high = float8_table(Self.dtype, 0, 8) if is_used else ByteVector(0)
        comptime next_high = float8_table(Self.dtype, 64, 8) if is_used else ByteVector(0)
        self.low = low
        self.next_low = next_low
        self.high = high
        self.next_high = next_high
        self.sign = ByteVector(0x80)

    @always_inline
    def held(self) -> Self:
        """The same constants for a loop that looks up (`held.mojo`)."""
        var out = self
        out.low = held(self.low)
        out.next_low = held(self.next_low)
        out.high = held(self.high)
        out.next_high = held(self.next_high)
        out.sign = held(self.sign)
        return out


@always_inline
def float8_words[dtype: DType](bytes: ByteVector, tables: Float8Tables[dtype]) -> Tuple[Bf16Words, Bf16Words]:
    """The bfloat16 bits of 64 numbers, in the order of `float8_word_order`."""
    var low = look_up(tables.low, bytes, tables.next_low)
    var high = look_up(tables.high, bytes, tables.next_high) | (bytes & tables.sign)
    return (
        bitcast[DType.uint16, 32](low.shuffle[mask=zip_mask[64](0)](high)),
        bitcast[DType.uint16, 32](low.shuffle[mask=zip_mask[64](8)](high)),
    )


@always_inline
def look_up(first: ByteVector, index: ByteVector, second: ByteVector) -> ByteVector:
    """Byte `index % 128` of the 128 bytes of both tables, for each byte of `index`."""
    return llvm_intrinsic["llvm.x86.avx512.vpermi2var.qi.512", ByteVector](first, index, second)


def zip_mask[length: Int](start: Int) -> IndexList[length]:
    """A shuffle that interleaves half of each 16 bytes of two vectors, from element `start` of the 16 bytes on."""
    comptime run = length // 4
    var mask = IndexList[length]()
    for i in range(length):
        mask[i] = i // run * run + start + i % run // 2 + i % 2 * length
    return mask


def float8_table(dtype: DType, start: Int, shift: Int) -> ByteVector:
    """A table for 64 magnitudes of a float8 type, from `start` on: 8 bits of their bfloat16, from bit `shift` on."""
    var table = ByteVector(0)
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
                # Subnormal: shift the leading one to the implicit bit.
                exponent = 1
                while fraction < (1 << mantissa_bits):
                    fraction *= 2
                    exponent -= 1
                fraction -= 1 << mantissa_bits
            bits = ((exponent - bias + 127) << 7) | (fraction << (7 - mantissa_bits))
        table[i] = UInt8((bits >> shift) & 0xFF)
    return table


def float8_word_order() -> IndexList[64]:
    """The elements of a float8 chunk in the order of its two vectors of words."""
    var mask = IndexList[64]()
    for i in range(64):
        mask[i] = i % 32 // 8 * 16 + i // 32 * 8 + i % 8
    return mask
