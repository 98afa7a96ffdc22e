"""An encoding of weights: what a block holds, and how 16 rows of blocks become a tile.

`raw` is transposed, so all code of encodings works on one dword, one scale or four elements of 16 rows at once.
"""

from std.memory import bitcast

from ...isa.convert import FloatVector
from ...isa.int8_dot import DOT_ROWS, SIGNED_AS_UNSIGNED
from .tile import Raw, Unpacked, Words

comptime SIGNED_OFFSET = 128 if SIGNED_AS_UNSIGNED else 0
"""The offset that is added to signed weights when they are stored."""
comptime LOW = Words(0x0F0F0F0F)
comptime ALL = Words(0x80808080)


trait Encoding:
    """The storage of 256 elements of a row in a file."""

    comptime INDEX: Int
    """Its number in a graph."""
    comptime BLOCK_ELEMENTS: Int
    comptime BYTES: Int
    """Bytes of 256 elements: of one block, or of 8."""
    comptime GROUP: Int
    """Elements that share a scale."""
    comptime ROUNDS_BLOCKS: Bool
    """True if x is rounded to Q8_K, 256 elements a scale; else to Q8_0, 32 a scale."""
    comptime SIGNED: Bool
    """True if weights are signed in a tile."""
    comptime OFFSET: Int
    """The number by which a tile's weights are larger than meant."""
    comptime OFFSET_BY_MINS: Bool
    """True if a tile's minimums take the offset away. Else the int32 sum begins so that it does."""
    comptime HAS_MINS: Bool
    """True if groups have minimums."""
    comptime FUSED: Bool = True
    """True if few rows of x are multiplied as blocks are unpacked. Else a tile is made for them too: where unpacking
    takes longer than the tile's stores, code is compiled once for all numbers of rows."""
    comptime BYTES_AT: Int = -1
    """The place of the bytes in a block of a float16 scale and 32 signed bytes; -1: other blocks."""
    comptime MINS_IN_STEPS: Bool = True
    """True if a group's minimum of `set_min` is in steps of its scale."""

    @staticmethod
    def unpack[T: Unpacked, //, elements: Int](raw: Raw, mut tile: T):
        """Unpacks what `raw` holds: 256 elements of each row, or `PART_ELEMENTS` where a block has 32."""
        ...


@always_inline
def half(words: Words) -> FloatVector:
    """The float16 in the lower half of each dword."""
    return bitcast[DType.float16, DOT_ROWS](words.cast[DType.uint16]()).cast[DType.float32]()


@always_inline
def byte(words: Words, i: Int) -> FloatVector:
    """The unsigned byte `i` of each dword."""
    return ((words >> UInt32(8 * i)) & 255).cast[DType.float32]()


@always_inline
def signed_byte(words: Words, i: Int) -> FloatVector:
    """The signed byte `i` of each dword."""
    return (bitcast[DType.int32, DOT_ROWS](words << UInt32(24 - 8 * i)) >> 24).cast[DType.float32]()


@always_inline
def shifted[by: Int](words: Words) -> Words:
    """The dwords, shifted to the left by so many bits, or to the right by as many as are missing from 0."""
    comptime if by < 0:
        return words >> UInt32(-by)
    else:
        return words << UInt32(by)
