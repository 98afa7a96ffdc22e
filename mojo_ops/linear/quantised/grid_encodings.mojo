"""GGUF's encodings whose weights are entries of a grid: 8 or 4 of them are one index (`grids.mojo`).

Their signs or shifts lie beside. A place in a grid and a sign make a code of 4 bits, and a shuffle its value.
"""

from std.memory import bitcast

from ...isa.convert import FloatVector
from ...isa.int8_dot import DOT_ROWS
from .encoding import Encoding, LOW, half
from .grids import IQ1_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID, looked_up
from .tile import Raw, Unpacked, Words

comptime Values = SIMD[DType.int8, 16]
"""The meaning of a code: a place in the grid, and the sign as its upper bit."""
comptime IQ2_VALUES = Values(8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0)
comptime IQ3_XXS_VALUES = Values(4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
comptime IQ3_S_VALUES = Values(1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
comptime IQ1_VALUES = Values(-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0)
"""8 times what they are: -1, 0 or 1, shifted by 1/8 or, with the upper bit, by -1/8."""


@always_inline
def set_codes[T: Unpacked, //, E: Encoding, values: Values, step: Int](mut tile: T, codes: Words):
    """Elements of two steps: codes of the first are in the low halves of bytes, of the second in the high ones."""
    comptime table = bitcast[DType.uint8, 16](values + Int8(E.OFFSET))
    var low = table._dynamic_shuffle(bitcast[DType.uint8, 64](codes & LOW))
    var high = table._dynamic_shuffle(bitcast[DType.uint8, 64]((codes >> 4) & LOW))
    tile.set_step[step](bitcast[DType.uint32, DOT_ROWS](low))
    tile.set_step[step + 1](bitcast[DType.uint32, DOT_ROWS](high))


@always_inline
def sign_codes(signs: Words) -> Words:
    """The signs of 8 values, bits 0 to 7, as the upper bits of their codes."""
    # Copies of four bits lie 7 apart, so none meet: bit b becomes bit 8 b + 3, and bit 4 + b bit 8 b + 7.
    return (((signs & 0x0F) * 0x01020408) & 0x08080808) | (((signs & 0xF0) * 0x01020408) & 0x80808080)


@always_inline
def parities(signs: Words) -> Words:
    """Bit 0: whether an odd number of bits 0 to 6 is set. Wherever seven bits begin, that bit is theirs."""
    var pairs = signs ^ (signs >> 1)
    return pairs ^ (pairs >> 2) ^ (pairs >> 4) ^ (signs >> 6)


@always_inline
def seven_sign_codes[first: Int](signs: Words, eighths: Words) -> Words:
    """The upper bits of 8 codes from seven signs, bit `first` on, and an eighth, that bit of their `parities`: it makes
    the number of negative ones even."""
    var seven = signs >> UInt32(first)
    var lower = (seven & 0x0F) * 0x01020408
    var upper = (seven & 0x70) * 0x01020408
    return (lower & 0x08080808) | (upper & 0x80808080) | ((eighths << UInt32(31 - first)) & 0x80000000)


@always_inline
def odd(words: Words) -> FloatVector:
    """2 s + 1."""
    return bitcast[DType.int32, DOT_ROWS](words * 2 + 1).cast[DType.float32]()


struct IQ2_XXS(Encoding):
    """A block is d, and for each 32 elements 4 bytes of indices, 28 signs, a scale of 4 bits: d/8 (2 s + 1)."""

    comptime INDEX = 19
    comptime BLOCK_ELEMENTS = 256
    comptime BYTES = 66
    comptime GROUP = 32
    comptime ROUNDS_BLOCKS = True
    comptime SIGNED = False
    comptime OFFSET = 64
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = False
    comptime FUSED = False

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        tile.set_factor(half(raw[0]) / 8)
        comptime for group in range(8):
            var indices = raw.at_byte[2 + 8 * group, Self.BYTES]()
            var signs = raw.at_byte[6 + 8 * group, Self.BYTES]()
            tile.set_scale[group](odd(signs >> 28))
            var eighths = parities(signs)
            comptime for i in range(4):
                var entry = looked_up[IQ2_XXS_GRID]((indices >> UInt32(8 * i)) & 255)
                var codes = entry | seven_sign_codes[7 * i](signs, eighths)
                set_codes[Self, IQ2_VALUES, 8 * group + 2 * i](tile, codes)


struct IQ2_XS(Encoding):
    """A block is d, 32 times an index of 9 bits and 7 signs, 16 scales of 4 bits: d/8 (2 s + 1)."""

    comptime INDEX = 20
    comptime BLOCK_ELEMENTS = 256
    comptime BYTES = 74
    comptime GROUP = 16
    comptime ROUNDS_BLOCKS = True
    comptime SIGNED = False
    comptime OFFSET = 64
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = False
    comptime FUSED = False

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        tile.set_factor(half(raw[0]) / 8)
        comptime for group in range(16):
            var scales = raw.at_byte[66 + group // 8 * 4, Self.BYTES]()
            tile.set_scale[group](odd((scales >> UInt32(4 * (group % 8))) & 15))
            var both = raw.at_byte[2 + 4 * group, Self.BYTES]()
            var eighths = parities(both)
            comptime for i in range(2):
                var entry = looked_up[IQ2_XS_GRID]((both >> UInt32(16 * i)) & 511)
                var codes = entry | seven_sign_codes[16 * i + 9](both, eighths)
                set_codes[Self, IQ2_VALUES, 4 * group + 2 * i](tile, codes)


struct IQ2_S(Encoding):
    """A block is d, 32 lower bytes of indices, 32 of signs, 64 upper bits, 16 scales of 4 bits: d/8 (2 s + 1)."""

    comptime INDEX = 21
    comptime BLOCK_ELEMENTS = 256
    comptime BYTES = 82
    comptime GROUP = 16
    comptime ROUNDS_BLOCKS = True
    comptime SIGNED = False
    comptime OFFSET = 64
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = False
    comptime FUSED = False

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        tile.set_factor(half(raw[0]) / 8)
        comptime for group in range(16):
            var scales = raw.at_byte[74 + group // 8 * 4, Self.BYTES]()
            tile.set_scale[group](odd((scales >> UInt32(4 * (group % 8))) & 15))
        comptime for four in range(8):
            var lower = raw.at_byte[2 + 4 * four, Self.BYTES]()
            var signs = raw.at_byte[34 + 4 * four, Self.BYTES]()
            var upper = raw.at_byte[66 + four // 4 * 4, Self.BYTES]() >> UInt32(8 * (four % 4))
            comptime for i in range(4):
                var index = ((lower >> UInt32(8 * i)) & 255) | (((upper >> UInt32(2 * i)) & 3) << 8)
                var codes = looked_up[IQ2_S_GRID](index) | sign_codes(signs >> UInt32(8 * i))
                set_codes[Self, IQ2_VALUES, 8 * four + 2 * i](tile, codes)


struct IQ3_XXS(Encoding):
    """A block is d, 64 indices, and for each 32 elements 4 times 7 signs and a scale of 4 bits: d/4 (2 s + 1)."""

    comptime INDEX = 22
    comptime BLOCK_ELEMENTS = 256
    comptime BYTES = 98
    comptime GROUP = 32
    comptime ROUNDS_BLOCKS = True
    comptime SIGNED = False
    comptime OFFSET = 64
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = False
    comptime FUSED = False

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        tile.set_factor(half(raw[0]) / 4)
        comptime for group in range(8):
            var signs = raw.at_byte[66 + 4 * group, Self.BYTES]()
            tile.set_scale[group](odd(signs >> 28))
            var eighths = parities(signs)
            comptime for i in range(4):
                var both = raw.at_byte[2 + 8 * group + i // 2 * 4, Self.BYTES]() >> UInt32(16 * (i % 2))
                var entry = looked_up[IQ3_XXS_GRID](both & 255) | (looked_up[IQ3_XXS_GRID]((both >> 8) & 255) << 4)
                var codes = entry | seven_sign_codes[7 * i](signs, eighths)
                set_codes[Self, IQ3_XXS_VALUES, 8 * group + 2 * i](tile, codes)


struct IQ3_S(Encoding):
    """A block is d, 64 lower bytes of indices, 64 upper bits, 32 bytes of signs, 8 scales of 4 bits: d (2 s + 1)."""

    comptime INDEX = 23
    comptime BLOCK_ELEMENTS = 256
    comptime BYTES = 110
    comptime GROUP = 32
    comptime ROUNDS_BLOCKS = True
    comptime SIGNED = False
    comptime OFFSET = 16
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = False
    comptime FUSED = False

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        tile.set_factor(half(raw[0]))
        var scales = raw.at_byte[106, Self.BYTES]()
        comptime for group in range(8):
            tile.set_scale[group](odd((scales >> UInt32(4 * group)) & 15))
            var upper = raw.at_byte[66 + group // 4 * 4, Self.BYTES]() >> UInt32(8 * (group % 4))
            var signs = raw.at_byte[74 + 4 * group, Self.BYTES]()
            comptime for i in range(4):
                var both = raw.at_byte[2 + 8 * group + i // 2 * 4, Self.BYTES]() >> UInt32(16 * (i % 2))
                var first = (both & 255) | (((upper >> UInt32(2 * i)) & 1) << 8)
                var second = ((both >> 8) & 255) | (((upper >> UInt32(2 * i + 1)) & 1) << 8)
                var entry = looked_up[IQ3_S_GRID](first) | (looked_up[IQ3_S_GRID](second) << 4)
                set_codes[Self, IQ3_S_VALUES, 8 * group + 2 * i](tile, entry | sign_codes(signs >> UInt32(8 * i)))


@always_inline
def shift_codes(shifts: Words) -> Words:
    """Bit 0 as the upper bits of 8 codes."""
    return (shifts & 1) * 0x88888888


struct IQ1_S(Encoding):
    """A block is d, 32 lower bytes of indices, and for each 32 elements 12 upper bits, a scale of 3 bits, a shift.

    d (2 s + 1) (entry + 1/8), or - 1/8.
    """

    comptime INDEX = 17
    comptime BLOCK_ELEMENTS = 256
    comptime BYTES = 50
    comptime GROUP = 32
    comptime ROUNDS_BLOCKS = True
    comptime SIGNED = False
    comptime OFFSET = 16
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = False
    comptime FUSED = False

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        tile.set_factor(half(raw[0]) / 8)
        comptime for group in range(8):
            var lower = raw.at_byte[2 + 4 * group, Self.BYTES]()
            var upper = raw.at_byte[34 + 2 * group, Self.BYTES]()
            tile.set_scale[group](odd((upper >> 12) & 7))
            var shifts = shift_codes(upper >> 15)
            comptime for i in range(4):
                var index = ((lower >> UInt32(8 * i)) & 255) | (((upper >> UInt32(3 * i)) & 7) << 8)
                set_codes[Self, IQ1_VALUES, 8 * group + 2 * i](tile, looked_up[IQ1_GRID](index) | shifts)


struct IQ1_M(Encoding):
    """32 lower bytes of indices, 32 times 3 upper bits and a shift, four times 4 scales of 3 bits and a quarter of d.

    As IQ1_S, with a shift of 8 elements.
    """

    comptime INDEX = 18
    comptime BLOCK_ELEMENTS = 256
    comptime BYTES = 56
    comptime GROUP = 16
    comptime ROUNDS_BLOCKS = True
    comptime SIGNED = False
    comptime OFFSET = 16
    comptime OFFSET_BY_MINS = False
    comptime HAS_MINS = False
    comptime FUSED = False

    @staticmethod
    @always_inline
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        var first = raw.at_byte[48, Self.BYTES]()
        var second = raw.at_byte[52, Self.BYTES]()
        var d = ((first >> 12) & 15) | ((first >> 24) & 0xF0) | ((second >> 4) & 0xF00) | ((second >> 16) & 0xF000)
        tile.set_factor(half(d) / 8)
        comptime for group in range(16):
            var scales = first if group < 8 else second
            tile.set_scale[group](odd((scales >> UInt32(group % 8 // 4 * 16 + group % 4 * 3)) & 7))
        comptime for four in range(8):
            var lower = raw[four]
            var upper = raw.at_byte[32 + 2 * four, Self.BYTES]()
            comptime for i in range(4):
                var own = upper >> UInt32(4 * i)
                var codes = looked_up[IQ1_GRID](((lower >> UInt32(8 * i)) & 255) | ((own & 7) << 8))
                set_codes[Self, IQ1_VALUES, 8 * four + 2 * i](tile, codes | shift_codes(own >> 3))
