"""Exact bfloat16 of stored float8, int8 and int4 elements by table look-up, 64 elements at a time."""

from std.memory import bitcast
from std.sys import llvm_intrinsic
from std.sys.info import CompilationTarget
from std.utils import IndexList

from .held import held

comptime Bf16Words = SIMD[DType.uint16, 32]
comptime ByteVector = SIMD[DType.uint8, 64]

comptime HAS_BYTE_LOOKUP = CompilationTarget.is_x86() and CompilationTarget._has_feature["avx512vbmi"]()
"""True if the CPU target looks up 64 bytes with one instruction (AVX-512 VBMI)."""
comptime HAS_WORD_LOOKUP = CompilationTarget.is_x86() and CompilationTarget._has_feature["avx512bw"]()
"""True if it looks up 32 words with one instruction (AVX-512 BW)."""


def is_looked_up(dtype: DType) -> Bool:
    """Return whether the CPU target makes bfloat16 of this type by look-up: float8, int8, pairs of int4 (uint8)."""
    if dtype == DType.uint8:
        return HAS_WORD_LOOKUP
    return HAS_BYTE_LOOKUP and (dtype == DType.float8_e4m3fn or dtype == DType.float8_e5m2 or dtype == DType.int8)


struct LookupTables[dtype: DType](TrivialRegisterPassable):
    """The constants of `bf16_words` and `int4_words`; zeros for types and CPU targets that do not look up."""

    var low: ByteVector
    """The table of magnitudes 0 to 63: the lower 8 bits of their bfloat16."""
    var next_low: ByteVector
    """The table of magnitudes 64 to 127."""
    var high: ByteVector
    """The upper 8 bits, of magnitudes 0 to 63."""
    var next_high: ByteVector
    """The table of magnitudes 64 to 127."""
    var sign: ByteVector
    """The sign bit of each byte."""
    var int4: Bf16Words
    """The bfloat16 of each int4 code, by its bits, twice."""

    @always_inline
    def __init__(out self):
        comptime is_used = is_looked_up(Self.dtype) and Self.dtype != DType.uint8
        comptime low = lookup_table_of(Self.dtype, 0, 0) if is_used else ByteVector(0)
        comptime next_low = lookup_table_of(Self.dtype, 64, 0) if is_used else ByteVector(0)
        comptime high = lookup_table_of(Self.dtype, 0, 8) if is_used else ByteVector(0)
        comptime next_high = lookup_table_of(Self.dtype, 64, 8) if is_used else ByteVector(0)
        self.low = low
        self.next_low = next_low
        self.high = high
        self.next_high = next_high
        self.sign = ByteVector(0x80)
        comptime int4 = int4_table()
        self.int4 = int4

    @always_inline
    def held(self) -> Self:
        """The same constants for a loop that looks up (`held.mojo`)."""
        var out = self
        out.low = held(self.low)
        out.next_low = held(self.next_low)
        out.high = held(self.high)
        out.next_high = held(self.next_high)
        out.sign = held(self.sign)
        out.int4 = held(self.int4)
        return out


@always_inline
def bf16_words[dtype: DType](bytes: ByteVector, tables: LookupTables[dtype]) -> Tuple[Bf16Words, Bf16Words]:
    """The bfloat16 bits of 64 numbers of float8 or int8, in the order of `word_order`.

    Of int8, 0 and -128 share an entry. Its lower 8 bits are 0 for both, its upper 8 those of 128, of which a mask makes
    zeros where the byte is 0: one instruction more, as long as `held` keeps LLVM from moving the mask behind the sign.
    """
    var magnitudes = bytes
    comptime if dtype == DType.int8:
        magnitudes = abs(bitcast[DType.int8, 64](bytes)).cast[DType.uint8]()
    var low = look_up(tables.low, magnitudes, tables.next_low)
    var high = look_up(tables.high, magnitudes, tables.next_high)
    comptime if dtype == DType.int8:
        high = held(bytes.ne(0).select(high, ByteVector(0)))
    high |= bytes & tables.sign
    return (
        bitcast[DType.uint16, 32](low.shuffle[mask=zip_mask[64](0)](high)),
        bitcast[DType.uint16, 32](low.shuffle[mask=zip_mask[64](8)](high)),
    )


@always_inline
def int4_words(pairs: Bf16Words, tables: LookupTables[DType.uint8]) -> Tuple[Bf16Words, Bf16Words]:
    """The bfloat16 bits of 64 int4 codes, of which each word of `pairs` holds two in its lower byte: even, then odd
    ones.
    """
    return (look_up_words(tables.int4, pairs), look_up_words(tables.int4, pairs >> 4))


@always_inline
def look_up_words(table: Bf16Words, index: Bf16Words) -> Bf16Words:
    """Word `index % 32` of the table, for each word of `index`."""
    comptime if HAS_WORD_LOOKUP:
        return llvm_intrinsic["llvm.x86.avx512.permvar.hi.512", Bf16Words](table, index)
    else:
        return Bf16Words(0)


@always_inline
def look_up(first: ByteVector, index: ByteVector, second: ByteVector) -> ByteVector:
    """Byte `index % 128` of the 128 bytes of both tables, for each byte of `index`."""
    return llvm_intrinsic["llvm.x86.avx512.vpermi2var.qi.512", ByteVector](first, index, second)


@always_inline
def permute(bytes: ByteVector, index: ByteVector) -> ByteVector:
    """Byte `index % 64` of `bytes`, for each byte of `index`."""
    return llvm_intrinsic["llvm.x86.avx512.permvar.qi.512", ByteVector](bytes, index)


def zip_mask[length: Int](start: Int) -> IndexList[length]:
    """A shuffle that interleaves half of each 16 bytes of two vectors, from element `start` of the 16 bytes on."""
    comptime run = length // 4
    var mask = IndexList[length]()
    for i in range(length):
        mask[i] = i // run * run + start + i % run // 2 + i % 2 * length
    return mask


def lookup_table_of(dtype: DType, start: Int, shift: Int) -> ByteVector:
    """A table for 64 magnitudes of float8 or int8, from `start` on: 8 bits of their bfloat16, from bit `shift` on.

    Entry 0 of int8 is 128.
    """
    var table = ByteVector(0)
    if dtype == DType.int8:
        for i in range(64):
            var magnitude = 128 if start + i == 0 else start + i
            table[i] = UInt8((bf16_bits(magnitude) >> shift) & 0xFF)
        return table
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


def int4_table() -> Bf16Words:
    """The bfloat16 bits of the int4 codes 0 to 7 and -8 to -1, twice."""
    var table = Bf16Words(0)
    for i in range(32):
        var code = i % 16
        table[i] = UInt16(bf16_bits(code) if code < 8 else bf16_bits(16 - code) | 0x8000)
    return table


def bf16_bits(number: Int) -> Int:
    """The bits of an integer from 0 to 255 in bfloat16, which has all of them exactly."""
    if number == 0:
        return 0
    var exponent = 0
    while number >> exponent > 1:
        exponent += 1
    return (exponent + 127) << 7 | (number << (7 - exponent)) & 0x7F


def word_order(dtype: DType) -> IndexList[64]:
    """The elements of a chunk of 64 in the order of its two vectors of words."""
    var mask = IndexList[64]()
    for i in range(64):
        if dtype == DType.uint8:
            mask[i] = i % 32 * 2 + i // 32
        else:
            mask[i] = i % 32 // 8 * 16 + i // 32 * 8 + i % 8
    return mask
