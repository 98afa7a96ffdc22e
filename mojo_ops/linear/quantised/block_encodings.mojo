"""GGUF's encodings whose weights are numbers of a few bits each, and two of GPTQ's kind."""

from std.memory import bitcast

from ...isa.convert import FloatVector
from ...isa.int8_dot import DOT_ROWS, SIGNED_AS_UNSIGNED
from .encoding import ALL, Encoding, LOW, SIGNED_OFFSET, byte, half, shifted, signed_byte
from .tile import Raw, Unpacked, Words


@always_inline
def set_nibbles[T: Unpacked, //, step: Int](mut tile: T, quads: Words):
    """Four bytes whose low halves are the elements of `step`, and the high ones those of 16 elements on."""
    tile.set_step[step](quads & LOW)
    tile.set_step[step + 4]((quads >> 4) & LOW)


comptime Values = SIMD[DType.int8, 16]
comptime IQ4_VALUES = Values(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The meaning of 4 bits in IQ4_NL and IQ4_XS: steps that are finer around zero."""
comptime E2M1_VALUES = Values(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice what 4 bits mean in MXFP4: a sign, two bits of exponent, one of mantissa."""


@always_inline
def set_values[T: Unpacked, //, values: Values, step: Int, *, apart: Int = 4](mut tile: T, quads: Words):
    """Set two steps, `apart` from each other, from four bytes, whose low and high halves are places in `values`."""
    comptime table = bitcast[DType.uint8, 16](values) + UInt8(SIGNED_OFFSET)
    var low = table._dynamic_shuffle(bitcast[DType.uint8, 64](quads & LOW))
    var high = table._dynamic_shuffle(bitcast[DType.uint8, 64]((quads >> 4) & LOW))
    tile.set_step[step](bitcast[DType.uint32, DOT_ROWS](low))
    tile.set_step[step + apart](bitcast[DType.uint32, DOT_ROWS](high))


@always_inline
def quads_of_small(raw: Raw, group: Int, i: Int) -> Words:
    """Bytes `4 i` to `4 i + 3` of group `group` of 8 blocks of 18 bytes, a float16 and 16 bytes. Every other block
    begins in the middle of a dword."""
    var first = group // 2 * 9
    return raw[first + 5 + i] if group % 2 else raw.from_middle(first + i)


@always_inline
def scales_of_small(raw: Raw, group: Int) -> FloatVector:
    var first = group // 2 * 9
    return half(raw[first + 4] >> 16 if group % 2 else raw[first])


struct Q4_0(Encoding):
    """A block is d and 16 bytes: element `i` in the low half of byte `i`, `i + 16` in the high one."""

    comptime INDEX = 0
    comptime BLOCK_ELEMENTS = 32
    comptime BYTES = 144
    comptime GROUP = 32
    comptime ROUNDS_BLOCKS = False
    comptime SIGNED = False
    comptime OFFSET = 8
    comptime OFFSET_BY_MINS = True
    comptime HAS_MINS = True

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        comptime for group in range(elements // 32):
            tile.set_scale[group](scales_of_small(raw, group))
            tile.set_min[group](-8)
            comptime for i in range(4):
                set_nibbles[8 * group + i](tile, quads_of_small(raw, group, i))


struct IQ4_NL(Encoding):
    """A block is d and 16 bytes in the order of Q4_0, whose halves are places in `IQ4_VALUES`."""

    comptime INDEX = 2
    comptime BLOCK_ELEMENTS = 32
    comptime BYTES = 144
    comptime GROUP = 32
    comptime ROUNDS_BLOCKS = False
    comptime SIGNED = not SIGNED_AS_UNSIGNED
    comptime OFFSET = SIGNED_OFFSET
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = False

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        comptime for group in range(elements // 32):
            tile.set_scale[group](scales_of_small(raw, group))
            comptime for i in range(4):
                set_values[IQ4_VALUES, 8 * group + i](tile, quads_of_small(raw, group, i))


struct Q8_0(Encoding):
    """A block is d and 32 signed bytes."""

    comptime INDEX = 1
    comptime BLOCK_ELEMENTS = 32
    comptime BYTES = 272
    comptime GROUP = 32
    comptime ROUNDS_BLOCKS = False
    comptime SIGNED = not SIGNED_AS_UNSIGNED
    comptime OFFSET = SIGNED_OFFSET
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = False
    comptime BYTES_AT = 2

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        comptime for pair in range(elements // 64):
            comptime first = 17 * pair
            tile.set_scale[2 * pair](half(raw[first]))
            tile.set_scale[2 * pair + 1](half(raw[first + 8] >> 16))
            comptime for i in range(8):
                var even = raw.from_middle(first + i)
                var odd = raw[first + 9 + i]
                comptime if SIGNED_AS_UNSIGNED:
                    even ^= ALL
                    odd ^= ALL
                tile.set_step[16 * pair + i](even)
                tile.set_step[16 * pair + 8 + i](odd)


@always_inline
def set_scales_and_mins[T: Unpacked, //](raw: Raw, mut tile: T):
    """Reads d, dmin, and 12 bytes with 8 scales and 8 minimums of 6 bits.

    Bytes 0 to 3 hold the first four scales, 4 to 7 the first four minimums; the lower 4 bits of the others are in bytes
    8 to 11, a scale and a minimum each, and the upper 2 at the top of bytes 0 to 7.
    """
    tile.set_factor(half(raw[0]))
    var scales = Array[Words, 2](fill=0)
    scales[0] = raw[1] & 0x3F3F3F3F
    scales[1] = (raw[3] & LOW) | ((raw[1] >> 2) & 0x30303030)
    comptime for group in range(8):
        tile.set_scale[group](byte(scales[group // 4], group % 4))
    var mins = Array[Words, 2](fill=0)
    mins[0] = raw[2] & 0x3F3F3F3F
    mins[1] = ((raw[3] >> 4) & LOW) | ((raw[2] >> 2) & 0x30303030)
    var pairs = Array[Words, 4](fill=0)
    comptime for i in range(4):
        pairs[i] = (mins[i // 2] >> UInt32(8 * (i % 2))) & 0x00FF00FF
    tile.set_min_pairs(pairs, -half(raw[0] >> 16))


struct Q4_K(Encoding):
    """A block is d, dmin, scales and minimums, and 4 times 32 bytes: two groups each, in the low and in the high
    halves.
    """

    comptime INDEX = 3
    comptime BLOCK_ELEMENTS = 256
    comptime BYTES = 144
    comptime GROUP = 32
    comptime ROUNDS_BLOCKS = True
    comptime SIGNED = False
    comptime OFFSET = 0
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = True

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        set_scales_and_mins(raw, tile)
        comptime for pair in range(4):
            comptime for i in range(8):
                var quads = raw[4 + 8 * pair + i]
                tile.set_step[16 * pair + i](quads & LOW)
                tile.set_step[16 * pair + 8 + i]((quads >> 4) & LOW)


struct Q5_K(Encoding):
    """A block is Q4_K's with 32 bytes between: bit `g` of byte `i` is the fifth of element `i` of group `g`."""

    comptime INDEX = 4
    comptime BLOCK_ELEMENTS = 256
    comptime BYTES = 176
    comptime GROUP = 32
    comptime ROUNDS_BLOCKS = True
    comptime SIGNED = False
    comptime OFFSET = 0
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = True

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        set_scales_and_mins(raw, tile)
        comptime for pair in range(4):
            comptime for i in range(8):
                var quads = raw[12 + 8 * pair + i]
                var fifth = (raw[4 + i] >> UInt32(2 * pair)) << 4
                tile.set_step[16 * pair + i]((quads & LOW) | (fifth & 0x10101010))
                tile.set_step[16 * pair + 8 + i](((quads >> 4) & LOW) | ((fifth >> 1) & 0x10101010))


struct Q6_K(Encoding):
    """128 bytes of lower halves, 64 of upper 2 bits, 16 signed scales, d: halves of 128 elements, of four runs of 32.

    Runs 0 and 1 are in the low halves of 64 bytes, 2 and 3 in the high ones; bits `2 r` of 32 bytes belong to run `r`.
    """

    comptime INDEX = 5
    comptime BLOCK_ELEMENTS = 256
    comptime BYTES = 210
    comptime GROUP = 16
    comptime ROUNDS_BLOCKS = True
    comptime SIGNED = False
    comptime OFFSET = 32
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = False

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        tile.set_factor(half(raw.at_byte[208, Self.BYTES]()))
        comptime for four in range(4):
            var scales = raw[48 + four]
            comptime for i in range(4):
                tile.set_scale[4 * four + i](signed_byte(scales, i))
        comptime for run in range(8):
            comptime part = run // 4
            comptime for i in range(8):
                var quads = (raw[16 * part + run % 2 * 8 + i] >> UInt32(run % 4 // 2 * 4)) & LOW
                var upper = shifted[4 - 2 * (run % 4)](raw[32 + 8 * part + i])
                tile.set_step[8 * run + i](quads | (upper & 0x30303030))


struct IQ4_XS(Encoding):
    """A block is d, 8 times the upper 2 bits of a scale, 8 times the lower 4, and 8 times 16 bytes as in IQ4_NL.

    A scale is 32 less than its 6 bits.
    """

    comptime INDEX = 6
    comptime BLOCK_ELEMENTS = 256
    comptime BYTES = 136
    comptime GROUP = 32
    comptime ROUNDS_BLOCKS = True
    comptime SIGNED = not SIGNED_AS_UNSIGNED
    comptime OFFSET = SIGNED_OFFSET
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = False

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        tile.set_factor(half(raw[0]))
        var upper = raw[0] >> 16
        var lower = raw[1]
        comptime for group in range(8):
            var scale = ((lower >> UInt32(4 * group)) & 15) | (((upper >> UInt32(2 * group)) & 3) << 4)
            tile.set_scale[group]((bitcast[DType.int32, DOT_ROWS](scale) - 32).cast[DType.float32]())
            comptime for i in range(4):
                set_values[IQ4_VALUES, 8 * group + i](tile, raw.at_byte[8 + 16 * group + 4 * i, Self.BYTES]())


@always_inline
def half_of_power(words: Words) -> FloatVector:
    """Half of the power of two that the lowest byte of each dword says in E8M0; below float32's normal numbers too.

    255 means NaN, and is refused when a file is loaded.
    """
    var e = words & 255
    return bitcast[DType.float32, DOT_ROWS](e.lt(2).select(Words(0x00200000) << e, (e - 1) << 23))


struct MXFP4(Encoding):
    """A block is a scale of E8M0 and 16 bytes as in Q4_0, of `E2M1_VALUES`."""

    comptime INDEX = 7
    comptime BLOCK_ELEMENTS = 32
    comptime BYTES = 136
    comptime GROUP = 32
    comptime ROUNDS_BLOCKS = False
    comptime SIGNED = not SIGNED_AS_UNSIGNED
    comptime OFFSET = SIGNED_OFFSET
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = False

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        comptime for group in range(elements // 32):
            comptime first = 17 * group
            tile.set_scale[group](half_of_power(raw.at_byte[first, Self.BYTES * elements // 256]()))
            comptime for i in range(4):
                set_values[E2M1_VALUES, 8 * group + i](
                    tile, raw.at_byte[first + 1 + 4 * i, Self.BYTES * elements // 256]()
                )


struct Q4_1(Encoding):
    """A block is d, a minimum, and 16 bytes as in Q4_0."""

    comptime INDEX = 8
    comptime BLOCK_ELEMENTS = 32
    comptime BYTES = 160
    comptime GROUP = 32
    comptime ROUNDS_BLOCKS = False
    comptime SIGNED = False
    comptime OFFSET = 0
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = True
    comptime MINS_IN_STEPS = False

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        comptime for group in range(elements // 32):
            comptime first = 5 * group
            tile.set_scale[group](half(raw[first]))
            tile.set_min[group](half(raw[first] >> 16))
            comptime for i in range(4):
                set_nibbles[8 * group + i](tile, raw[first + 1 + i])


@always_inline
def set_fives[T: Unpacked, //, group: Int, i: Int](mut tile: T, quads: Words, fifths: Words):
    """Set two steps from bytes `4 i` to `4 i + 3` of `group`. Bit `e` of `fifths` is the fifth of element `e`."""
    tile.set_step[8 * group + i]((quads & LOW) | fifths_of[i](fifths))
    tile.set_step[8 * group + i + 4](((quads >> 4) & LOW) | fifths_of[i + 4](fifths))


@always_inline
def fifths_of[quad: Int](fifths: Words) -> Words:
    """Bits `4 quad` to `4 quad + 3`, each as the fifth of a byte."""
    # The sums of a product are bits 7 apart, of which none meet: bit b becomes bit 8 b + 4.
    return (((fifths >> UInt32(4 * quad)) & 15) * 0x02040810) & 0x10101010


struct Q5_0(Encoding):
    """A block is d, 32 fifth bits, and 16 bytes as in Q4_0: d (q - 16)."""

    comptime INDEX = 9
    comptime BLOCK_ELEMENTS = 32
    comptime BYTES = 176
    comptime GROUP = 32
    comptime ROUNDS_BLOCKS = False
    comptime SIGNED = False
    comptime OFFSET = 16
    comptime OFFSET_BY_MINS = True
    comptime HAS_MINS = True

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        comptime for group in range(elements // 32):
            comptime first = 22 * group
            tile.set_scale[group](half(raw.at_byte[first, Self.BYTES * elements // 256]()))
            tile.set_min[group](-16)
            var fifths = raw.at_byte[first + 2, Self.BYTES * elements // 256]()
            comptime for i in range(4):
                set_fives[group, i](tile, raw.at_byte[first + 6 + 4 * i, Self.BYTES * elements // 256](), fifths)


struct Q5_1(Encoding):
    """A block is d, a minimum, 32 fifth bits, and 16 bytes as in Q4_0."""

    comptime INDEX = 10
    comptime BLOCK_ELEMENTS = 32
    comptime BYTES = 192
    comptime GROUP = 32
    comptime ROUNDS_BLOCKS = False
    comptime SIGNED = False
    comptime OFFSET = 0
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = True
    comptime MINS_IN_STEPS = False

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        comptime for group in range(elements // 32):
            comptime first = 6 * group
            tile.set_scale[group](half(raw[first]))
            tile.set_min[group](half(raw[first] >> 16))
            comptime for i in range(4):
                set_fives[group, i](tile, raw[first + 2 + i], raw[first + 1])


struct Q2_K(Encoding):
    """16 bytes of a scale and a minimum of 4 bits, 64 of weights, d, dmin: halves of 128 elements, of four runs of 32.

    Bits `2 r` of a half's 32 bytes belong to run `r`.
    """

    comptime INDEX = 11
    comptime BLOCK_ELEMENTS = 256
    comptime BYTES = 84
    comptime GROUP = 16
    comptime ROUNDS_BLOCKS = True
    comptime SIGNED = False
    comptime OFFSET = 0
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = True

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        var factors = raw.at_byte[80, Self.BYTES]()
        tile.set_factor(half(factors))
        var pairs = Array[Words, 8](fill=0)
        comptime for four in range(4):
            var both = raw[four]
            comptime for i in range(4):
                tile.set_scale[4 * four + i](byte(both & LOW, i))
            comptime for i in range(2):
                pairs[2 * four + i] = (both >> UInt32(4 + 8 * i)) & 0x000F000F
        tile.set_min_pairs(pairs, -half(factors >> 16))
        comptime for run in range(8):
            comptime for i in range(8):
                tile.set_step[8 * run + i]((raw[4 + run // 4 * 8 + i] >> UInt32(2 * (run % 4))) & 0x03030303)


struct Q3_K(Encoding):
    """32 bytes of third bits, 64 of lower 2 bits, 12 of scales, d: runs of 32 elements as in Q2_K.

    Bit `r` of 32 bytes belongs to run `r`. 12 bytes hold 16 scales of 6 bits, minus 32: the lower 4 bits of the first
    eight are in the low halves of bytes 0 to 7, of the others in the high ones; bits `2 j` of bytes 8 to 11 are the
    upper 2 of scales `4 j` to `4 j + 3`.
    """

    comptime INDEX = 12
    comptime BLOCK_ELEMENTS = 256
    comptime BYTES = 110
    comptime GROUP = 16
    comptime ROUNDS_BLOCKS = True
    comptime SIGNED = False
    comptime OFFSET = 32
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = False

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        tile.set_factor(half(raw.at_byte[108, Self.BYTES]()) / 8)
        comptime for four in range(4):
            var lower = (raw.at_byte[96 + 4 * (four % 2), Self.BYTES]() >> UInt32(four // 2 * 4)) & LOW
            var upper = shifted[4 - 2 * four](raw.at_byte[104, Self.BYTES]()) & 0x30303030
            comptime for i in range(4):
                tile.set_scale[4 * four + i](byte(lower | upper, i) - 32)
        # Weights are 8 times what they are, so the offset is Q6_K's 32 instead of 4.
        comptime for run in range(8):
            comptime for i in range(8):
                var lower = shifted[3 - 2 * (run % 4)](raw[8 + run // 4 * 8 + i]) & 0x18181818
                var upper = shifted[5 - run](raw[i]) & 0x20202020
                tile.set_step[8 * run + i](lower | upper)


struct INT4(Encoding):
    """A block is d, a zero of one byte, a byte of no meaning, and 16 bytes as in Q4_0: d (q - zero)."""

    comptime INDEX = 13
    comptime BLOCK_ELEMENTS = 32
    comptime BYTES = 160
    comptime GROUP = 32
    comptime ROUNDS_BLOCKS = False
    comptime SIGNED = False
    comptime OFFSET = 0
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = True

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        comptime for group in range(elements // 32):
            comptime first = 5 * group
            tile.set_scale[group](half(raw[first]))
            tile.set_min[group](-byte(raw[first], 2))
            comptime for i in range(4):
                set_nibbles[8 * group + i](tile, raw[first + 1 + i])


struct INT8(Encoding):
    """A block is d, a signed zero of one byte, a byte of no meaning, and 32 signed bytes: d (q - zero)."""

    comptime INDEX = 14
    comptime BLOCK_ELEMENTS = 32
    comptime BYTES = 288
    comptime GROUP = 32
    comptime ROUNDS_BLOCKS = False
    comptime SIGNED = not SIGNED_AS_UNSIGNED
    comptime OFFSET = SIGNED_OFFSET
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = True

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        comptime for group in range(elements // 32):
            comptime first = 9 * group
            tile.set_scale[group](half(raw[first]))
            tile.set_min[group](-signed_byte(raw[first], 2))
            comptime for i in range(8):
                var quads = raw[first + 1 + i]
                comptime if SIGNED_AS_UNSIGNED:
                    quads ^= ALL
                tile.set_step[8 * group + i](quads)


@always_inline
def set_ones[T: Unpacked, //](mut tile: T, factors: FloatVector):
    """Set the factor of a block whose groups have no scales."""
    tile.set_factor(factors)
    comptime for group in range(8):
        tile.set_scale[group](1)


comptime Trits = SIMD[DType.uint8, 4 * DOT_ROWS]


@always_inline
def trits(bytes: Trits) -> Words:
    """The leading digit in base 3 of each byte, which is a fraction of 256."""
    return bitcast[DType.uint32, DOT_ROWS](bytes.ge(86).cast[DType.uint8]() + bytes.ge(171).cast[DType.uint8]())


struct TQ1_0(Encoding):
    """48 bytes of five digits in base 3, 4 of four, d: d (q - 1).

    Digit `n` of the first 32 bytes are elements `32 n` on, of the next 16 elements `160 + 16 n` on, of the last 4
    `240 + 4 n` on. A byte times 3 loses its leading digit.
    """

    comptime INDEX = 15
    comptime BLOCK_ELEMENTS = 256
    comptime BYTES = 54
    comptime GROUP = 32
    comptime ROUNDS_BLOCKS = True
    comptime SIGNED = False
    comptime OFFSET = 1
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = False

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        set_ones(tile, half(raw.at_byte[52, Self.BYTES]()))
        var bytes = Array[Trits, 13](fill=0)
        comptime for i in range(13):
            bytes[i] = bitcast[DType.uint8, 4 * DOT_ROWS](raw.at_byte[4 * i, Self.BYTES]())
        comptime for run in range(5):
            comptime for i in range(8):
                tile.set_step[8 * run + i](trits(bytes[i]))
                bytes[i] += bytes[i] + bytes[i]
        comptime for run in range(5):
            comptime for i in range(4):
                tile.set_step[40 + 4 * run + i](trits(bytes[8 + i]))
                bytes[8 + i] += bytes[8 + i] + bytes[8 + i]
        comptime for run in range(4):
            tile.set_step[60 + run](trits(bytes[12]))
            bytes[12] += bytes[12] + bytes[12]


struct TQ2_0(Encoding):
    """64 bytes as the weights of Q2_K, d: d (q - 1)."""

    comptime INDEX = 16
    comptime BLOCK_ELEMENTS = 256
    comptime BYTES = 66
    comptime GROUP = 32
    comptime ROUNDS_BLOCKS = True
    comptime SIGNED = False
    comptime OFFSET = 1
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = False

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        set_ones(tile, half(raw.at_byte[64, Self.BYTES]()))
        comptime for run in range(8):
            comptime for i in range(8):
                tile.set_step[8 * run + i]((raw[run // 4 * 8 + i] >> UInt32(2 * (run % 4))) & 0x03030303)


@always_inline
def unsigned_e4m3(words: Words, i: Int) -> FloatVector:
    """The float8 of four bits of exponent and three of mantissa in byte `i` of each dword, without its sign.

    127 means NaN, and is refused when a file is loaded.
    """
    var code = (words >> UInt32(8 * i)) & 0x7F
    var normal = bitcast[DType.float32, DOT_ROWS]((code << 20) + 0x3C000000)
    return code.lt(8).select(code.cast[DType.float32]() / 512, normal)


struct NVFP4(Encoding):
    """A block of 64 is a float32 number, four scales of E4M3, and four times 8 bytes of `E2M1_VALUES`: element `i` of
    16 in the low half of byte `i`, `i + 8` in the high one.
    """

    comptime INDEX = 24
    comptime BLOCK_ELEMENTS = 64
    comptime BYTES = 160
    comptime GROUP = 16
    comptime ROUNDS_BLOCKS = False
    comptime SIGNED = not SIGNED_AS_UNSIGNED
    comptime OFFSET = SIGNED_OFFSET
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = False

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        comptime for block in range(4):
            comptime first = 10 * block
            var whole = bitcast[DType.float32, DOT_ROWS](raw[first])
            comptime for i in range(4):
                comptime group = 4 * block + i
                tile.set_scale[group](whole * unsigned_e4m3(raw[first + 1], i) / 2)
                comptime for quad in range(2):
                    set_values[E2M1_VALUES, 4 * group + quad, apart=2](tile, raw[first + 2 + 2 * i + quad])


struct Q1_0(Encoding):
    """A block of 128 is d and 16 bytes: d where bit `i % 8` of byte `i // 8` is set, else -d."""

    comptime INDEX = 25
    comptime BLOCK_ELEMENTS = 128
    comptime BYTES = 36
    comptime GROUP = 32
    comptime ROUNDS_BLOCKS = False
    comptime SIGNED = False
    comptime OFFSET = 1
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = False

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        comptime for group in range(8):
            comptime first = 18 * (group // 4)
            tile.set_scale[group](half(raw.at_byte[first, Self.BYTES]()))
            var bits = raw.at_byte[first + 2 + 4 * (group % 4), Self.BYTES]()
            comptime for i in range(8):
                # The sums of a product are bits 7 apart, of which none meet: bit b becomes bit 8 b + 1, a weight of 2.
                tile.set_step[8 * group + i]((((bits >> UInt32(4 * i)) & 15) * 0x00408102) & 0x02020202)
