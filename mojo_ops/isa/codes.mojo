"""Heads of int8 and int4 codes, each head with its scale: their bytes, and the way from float32 and back.

A stored head is its codes and then one float32, the scale that each code is multiplied by. In memory of int8 a code is a
byte. In memory of uint8 it is half a byte: byte `i` holds element `2 i` in its low half and `2 i + 1` in its high half,
both two's complement. `../cache/README.md` draws it.
"""

from std.math import round
from std.utils.numerics import nan

comptime SCALE_BYTES = 4
"""Bytes of the float32 behind the codes of a head."""
comptime STEP = 8
"""Elements that a head_dim is a multiple of."""
comptime BLOCK = 32
"""Elements that are converted at once."""
comptime LEAST_SCALE: Float32 = 1.17549435e-38
"""The least normal float32. A head whose scale would be smaller is stored as zeros."""
comptime GREATEST_SCALE: Float32 = 2.6793884e36
"""The greatest scale of int8: 127 times the next float32 would be infinite."""


def is_codes(dtype: DType) -> Bool:
    """Return whether attention reads memory of this type as codes and scales: int8, or uint8 for pairs of int4."""
    return dtype == DType.int8 or dtype == DType.uint8


@always_inline
def units_of(dtype: DType, elements: Int) -> Int:
    """The stored numbers of `dtype` that some elements of a head take."""
    return elements // 2 if dtype == DType.uint8 else elements


@always_inline
def head_units(dtype: DType, head_dim: Int) -> Int:
    """The stored numbers of `dtype` that a head takes, its scale included."""
    return units_of(dtype, head_dim) + (SCALE_BYTES if is_codes(dtype) else 0)


@always_inline
def elements_of(dtype: DType, units: Int) -> Int:
    """The elements of a head that takes so many stored numbers of `dtype`, its scale included."""
    return (units - SCALE_BYTES) * (2 if dtype == DType.uint8 else 1) if is_codes(dtype) else units


def cache_name(dtype: DType) -> String:
    """Return the name of a cache whose memory is of this type."""
    return "int4" if dtype == DType.uint8 else String(dtype)


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
    comptime if dtype == DType.int8:
        return rebind[SIMD[DType.float32, width]](stored.cast[DType.float32]())
    else:
        comptime assert dtype == DType.uint8, "codes lie in memory of int8 or uint8"
        var bytes = stored.cast[DType.int32]()
        var low = (bytes << 28) >> 28
        var high = (bytes << 24) >> 28
        return rebind[SIMD[DType.float32, width]](low.interleave(high).cast[DType.float32]())


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

    That of int8 is the greatest magnitude over 127. That of int4 is the element of greatest magnitude over -8 (the
    negative one of two), so it has a sign, and all 16 codes are in use: on real K and V the error is a tenth smaller
    than with codes from -7 to 7 (docs/quantised-cache.md).

    A head that holds NaN or infinity has the scale NaN, so that attention makes NaN of it as of any NaN. A head of
    zeros, or of numbers so small that the scale would not be a normal float32, has scale 0 and codes 0.
    """
    comptime assert is_codes(dtype), "codes lie in memory of int8 or uint8"
    var most = elements.highest
    var least = elements.lowest
    var scale: Float32
    comptime if dtype == DType.int8:
        scale = min(max(most, -least) / 127, GREATEST_SCALE)
    else:
        scale = (most if most > -least else least) / -8
    if not (elements.not_finite == 0):
        return HeadScale(nan[DType.float32](), 0)
    if abs(scale) < LEAST_SCALE:
        return HeadScale(0, 0)
    return HeadScale(scale, 1 / scale)


@always_inline
def store_head[
    dtype: DType, source_dtype: DType, //
](head: Pointer[mut=True, Scalar[dtype], _], source: Pointer[Scalar[source_dtype], _], head_dim: Int):
    """Quantises one head: a code is the nearest integer to its element over the scale (`head_scale`).

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
    var codes = round(x * inverse).cast[DType.int32]() if inverse != 0 else SIMD[DType.int32, x.length](0)
    comptime if dtype == DType.int8:
        head.unsafe_store[alignment=alignment](element, codes.cast[dtype]())
    else:
        var halves = min(codes, 7).deinterleave()
        head.unsafe_store[alignment=alignment](element // 2, ((halves[0] & 15) | (halves[1] << 4)).cast[dtype]())


@always_inline
def store_scale[
    dtype: DType, //, alignment: Int = 1
](head: Pointer[mut=True, Scalar[dtype], _], head_dim: Int, scale: Float32):
    """Behind the codes of a head."""
    head.unsafe_offset(units_of(dtype, head_dim)).unsafe_bitcast[Float32]().unsafe_store[alignment=alignment](0, scale)
