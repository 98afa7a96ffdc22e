"""Heads of codes, each head with its scale: their formats, their bytes, and the way from float32 and back.

A stored head is its codes and then one float32, the scale that each code is multiplied by. `../cache/README.md` draws it.
"""

from std.builtin.variadics import TypeList
from std.math import round
from std.sys import size_of
from std.utils.numerics import nan

comptime SCALE_BYTES = 4
"""Bytes of the float32 behind the codes of a head."""
comptime STEP = 8
"""Elements that a head_dim is a multiple of."""
comptime BLOCK = 32
"""Elements that are converted at once."""
comptime LEAST_SCALE: Float32 = 1.17549435e-38
"""The least normal float32. A head whose scale would be smaller is stored as zeros."""

comptime FORMATS = TypeList.of[Trait=CodeFormat, Int8Codes, Int4Codes]()
"""All of them, those of `TABLE` in python/paged_kv/kv_formats.py. The kernels take a new one as it is; what computes
some of them by fewer instructions names them (`convert.mojo`, `../attention/cpu/vectors/code_sums.mojo`)."""


trait CodeFormat:
    """A format of codes."""

    comptime MEMORY: DType
    """The type of their memory, by which formats are told apart."""
    comptime NAME: StaticString
    comptime PER_NUMBER: Int
    """Codes in one stored number."""

    @staticmethod
    def scale(most: Float32, least: Float32) -> Float32:
        """The scale of a head whose elements are at most `most`, not below 0, and at least `least`, not above 0."""
        ...

    @staticmethod
    def pack[width: Int](x: SIMD[DType.float32, width]) -> SIMD[Self.MEMORY, width // Self.PER_NUMBER]:
        """Elements over their scale as stored numbers."""
        ...

    @staticmethod
    def unpack[width: Int](numbers: SIMD[Self.MEMORY, width // Self.PER_NUMBER]) -> SIMD[DType.float32, width]:
        """Codes as float32, in their natural order."""
        ...


struct Int8Codes(CodeFormat):
    """A byte each. The scale is the greatest magnitude over 127."""

    comptime MEMORY = DType.int8
    comptime NAME: StaticString = "int8"
    comptime PER_NUMBER = 1
    comptime GREATEST_SCALE: Float32 = 2.6793884e36
    """127 times the next float32 would be infinite."""

    @staticmethod
    @always_inline
    def scale(most: Float32, least: Float32) -> Float32:
        return min(max(most, -least) / 127, Self.GREATEST_SCALE)

    @staticmethod
    @always_inline
    def pack[width: Int](x: SIMD[DType.float32, width]) -> SIMD[Self.MEMORY, width // Self.PER_NUMBER]:
        return rebind[SIMD[Self.MEMORY, width // Self.PER_NUMBER]](round(x).cast[DType.int32]().cast[DType.int8]())

    @staticmethod
    @always_inline
    def unpack[width: Int](numbers: SIMD[Self.MEMORY, width // Self.PER_NUMBER]) -> SIMD[DType.float32, width]:
        return rebind[SIMD[DType.float32, width]](numbers.cast[DType.float32]())


struct Int4Codes(CodeFormat):
    """Two's complement, two a byte: byte `i` holds element `2 i` in its low half and `2 i + 1` in its high half.

    The scale is the element of greatest magnitude over -8 (the negative one of two), so it has a sign, and all 16 codes
    are in use: on real K and V the error is a tenth smaller than with codes from -7 to 7 (docs/quantised-cache.md).
    """

    comptime MEMORY = DType.uint8
    comptime NAME: StaticString = "int4"
    comptime PER_NUMBER = 2

    @staticmethod
    @always_inline
    def scale(most: Float32, least: Float32) -> Float32:
        return (most if most > -least else least) / -8

    @staticmethod
    @always_inline
    def pack[width: Int](x: SIMD[DType.float32, width]) -> SIMD[Self.MEMORY, width // Self.PER_NUMBER]:
        var halves = min(round(x).cast[DType.int32](), 7).deinterleave()
        return rebind[SIMD[Self.MEMORY, width // Self.PER_NUMBER]](
            ((halves[0] & 15) | (halves[1] << 4)).cast[DType.uint8]()
        )

    @staticmethod
    @always_inline
    def unpack[width: Int](numbers: SIMD[Self.MEMORY, width // Self.PER_NUMBER]) -> SIMD[DType.float32, width]:
        var bytes = numbers.cast[DType.int32]()
        var low = (bytes << 28) >> 28
        var high = (bytes << 24) >> 28
        return rebind[SIMD[DType.float32, width]](low.interleave(high).cast[DType.float32]())


def format_of(dtype: DType) -> Int:
    """The index in `FORMATS` of the codes that lie in memory of this type; -1 of a type without any."""
    comptime for i in range(FORMATS.length):
        if dtype == FORMATS[i].MEMORY:
            return i
    return -1


def is_codes(dtype: DType) -> Bool:
    """Return whether attention reads memory of this type as codes and scales."""
    return format_of(dtype) >= 0


@always_inline
def units_of(dtype: DType, elements: Int) -> Int:
    """The stored numbers of `dtype` that some elements of a head take."""
    comptime for i in range(FORMATS.length):
        if dtype == FORMATS[i].MEMORY:
            return elements // FORMATS[i].PER_NUMBER
    return elements


@always_inline
def scale_units(dtype: DType) -> Int:
    """The stored numbers of `dtype` that the scale of a head takes."""
    comptime for i in range(FORMATS.length):
        if dtype == FORMATS[i].MEMORY:
            return SCALE_BYTES // size_of[FORMATS[i].MEMORY]()
    return 0


@always_inline
def head_units(dtype: DType, head_dim: Int) -> Int:
    """The stored numbers of `dtype` that a head takes, its scale included."""
    return units_of(dtype, head_dim) + scale_units(dtype)


@always_inline
def elements_of(dtype: DType, units: Int) -> Int:
    """The elements of a head that takes so many stored numbers of `dtype`, its scale included."""
    comptime for i in range(FORMATS.length):
        if dtype == FORMATS[i].MEMORY:
            return (units - scale_units(dtype)) * FORMATS[i].PER_NUMBER
    return units


def cache_name(dtype: DType) -> String:
    """Return the name of a cache whose memory is of this type."""
    comptime for i in range(FORMATS.length):
        if dtype == FORMATS[i].MEMORY:
            return FORMATS[i].NAME
    return String(dtype)


@always_inline
def scale_of[
    dtype: DType, //, alignment: Int = 1, volatile: Bool = False
](head: Pointer[Scalar[dtype], _], head_dim: Int) -> Float32:
    """The scale of a stored head, whose address is a multiple of `alignment`."""
    comptime assert is_codes(dtype), "only heads of codes have scales"
    var scale = head.unsafe_offset(units_of(dtype, head_dim)).unsafe_bitcast[Float32]()
    return scale.unsafe_load[alignment=alignment, volatile=volatile]()


@always_inline
def load_codes[
    dtype: DType, //, width: Int, alignment: Int = 1
](head: Pointer[Scalar[dtype], _], element: Int) -> SIMD[DType.float32, width]:
    """`width` codes from an even `element` on, as float32 in their natural order."""
    comptime units = units_of(dtype, width)
    return widen_codes[width](head.unsafe_load[width=units, alignment=alignment](units_of(dtype, element)))


@always_inline
def widen_codes[
    dtype: DType, //, width: Int
](stored: SIMD[dtype, units_of(dtype, width)]) -> SIMD[DType.float32, width]:
    """Stored codes as float32 in their natural order."""
    comptime Format = FORMATS[format_of(dtype)]
    return Format.unpack[width](rebind[SIMD[Format.MEMORY, width // Format.PER_NUMBER]](stored))


@fieldwise_init
struct HeadScale(TrivialRegisterPassable):
    """The scale that a head gets, and what its elements are multiplied by to become codes."""

    var scale: Float32
    var inverse: Float32
    """1 over the scale; 0 where the codes are zeros."""


struct HeadRange[width: Int](TrivialRegisterPassable):
    """The range of a head's elements, on which its scale depends: `width` of them side by side."""

    var highest: SIMD[DType.float32, Self.width]
    """At least 0."""
    var lowest: SIMD[DType.float32, Self.width]
    """At most 0."""
    var not_finite: SIMD[DType.float32, Self.width]
    """0, or NaN where an element is not finite."""

    @always_inline
    def __init__(out self):
        self.highest = 0
        self.lowest = 0
        self.not_finite = 0

    @always_inline
    def include(mut self, x: SIMD[DType.float32, Self.width]):
        self.highest = max(self.highest, x)
        self.lowest = min(self.lowest, x)
        self.not_finite = x.fma(SIMD[DType.float32, Self.width](0), self.not_finite)

    @always_inline
    def reduced(self) -> HeadRange[1]:
        """Return the range of all elements together."""
        var all = HeadRange[1]()
        all.highest = self.highest.reduce_max()
        all.lowest = self.lowest.reduce_min()
        all.not_finite = self.not_finite.reduce_add()
        return all

    @always_inline
    def merge(mut self, other: Self):
        self.highest = max(self.highest, other.highest)
        self.lowest = min(self.lowest, other.lowest)
        self.not_finite += other.not_finite


@always_inline
def head_scale[dtype: DType](elements: HeadRange[1]) -> HeadScale:
    """The scale of a head of these elements, as codes in memory of `dtype`.

    A head that holds NaN or infinity has the scale NaN, so that attention makes NaN of it as of any NaN. A head of
    zeros, or of numbers so small that the scale would not be a normal float32, has scale 0 and codes 0.
    """
    comptime assert is_codes(dtype), "only heads of codes have scales"
    var scale = FORMATS[format_of(dtype)].scale(elements.highest, elements.lowest)
    if not (elements.not_finite == 0):
        return HeadScale(nan[DType.float32](), 0)
    if abs(scale) < LEAST_SCALE:
        return HeadScale(0, 0)
    return HeadScale(scale, 1 / scale)


@always_inline
def store_head[
    dtype: DType, source_dtype: DType, //
](head: Pointer[mut=True, Scalar[dtype], _], source: Pointer[Scalar[source_dtype], _], head_dim: Int):
    """Quantises one head: its elements over its scale become codes.

    Args:
        head: Where it is stored.
        source: Its elements.
        head_dim: A multiple of 8.
    """
    var blocks = HeadRange[BLOCK]()
    var rest = HeadRange[STEP]()
    var whole = head_dim // BLOCK * BLOCK
    for d in range(0, whole, BLOCK):
        blocks.include(source.unsafe_load[width=BLOCK](d).cast[DType.float32]())
    for d in range(whole, head_dim, STEP):
        rest.include(source.unsafe_load[width=STEP](d).cast[DType.float32]())
    var elements = blocks.reduced()
    elements.merge(rest.reduced())
    var scale = head_scale[dtype](elements)
    for d in range(0, whole, BLOCK):
        store_codes(head, d, source.unsafe_load[width=BLOCK](d).cast[DType.float32](), scale.inverse)
    for d in range(whole, head_dim, STEP):
        store_codes(head, d, source.unsafe_load[width=STEP](d).cast[DType.float32](), scale.inverse)
    store_scale(head, head_dim, scale.scale)


@always_inline
def store_codes[
    dtype: DType, //, alignment: Int = 1
](head: Pointer[mut=True, Scalar[dtype], _], element: Int, x: SIMD[DType.float32, _], inverse: Float32):
    """Stores the codes of numbers from an even `element` on; zeros where `inverse`, 1 over the scale, is 0."""
    comptime Format = FORMATS[format_of(dtype)]
    var numbers = Format.pack[x.length](x * inverse if inverse != 0 else type_of(x)(0))
    head.unsafe_store[alignment=alignment](units_of(dtype, element), rebind[SIMD[dtype, numbers.length]](numbers))


@always_inline
def store_scale[
    dtype: DType, //, alignment: Int = 1
](head: Pointer[mut=True, Scalar[dtype], _], head_dim: Int, scale: Float32):
    """Behind the codes of a head."""
    head.unsafe_offset(units_of(dtype, head_dim)).unsafe_bitcast[Float32]().unsafe_store[alignment=alignment](0, scale)
