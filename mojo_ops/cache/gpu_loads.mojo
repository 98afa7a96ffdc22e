"""Loads of a cache's elements by GPU kernels: vector loads, and float32 of what was stored."""

from std.memory import bitcast
from std.sys import size_of
from std.utils.numerics import nan

from ..isa.codes import is_codes, units_of, widen_codes
from .paged_kv_cache import DynamicKVCache

comptime CODE_BYTES = 4
"""Bytes of a load of codes: a head of codes is a multiple of it with its scale, and of nothing more."""


def vector_width[kv_dtype: DType]() -> Int:
    """Elements that a lane takes at once: 16 bytes, 8 of float8 and int8, 4 of int4; head_dim is a multiple of it."""
    return 4 if size_of[kv_dtype]() == 4 else 8


def check_alignment[kv_dtype: DType, //](what: StaticString, cache: DynamicKVCache[kv_dtype]) raises:
    """Refuses storage that vector loads cannot read: every head must begin at a multiple of one load."""
    comptime bytes = load_alignment[kv_dtype](vector_width[kv_dtype]())
    var strides = cache.strides()
    for elements in [strides.page, strides.slot, strides.head]:
        if elements * size_of[kv_dtype]() % bytes != 0:
            raise Error(what, ": a stride of ", elements, " elements is no multiple of ", bytes, " bytes")
    if Int(cache.blocks.ptr) % bytes != 0:
        raise Error(what, ": its address ", Int(cache.blocks.ptr), " is no multiple of ", bytes, " bytes")


def load_alignment[dtype: DType](width: Int) -> Int:
    """The bytes that a load of `width` stored numbers is aligned to."""
    return CODE_BYTES if is_codes(dtype) else width * size_of[dtype]()


@always_inline
def load_raw[dtype: DType, //, width: Int](source: Pointer[Scalar[dtype], _], offset: Int) -> SIMD[dtype, width]:
    """One load of up to 16 bytes, of codes 4 bytes each; `check_alignment` refuses storage where it is not aligned."""
    return source.unsafe_load[width=width, alignment=load_alignment[dtype](width)](offset)


@always_inline
def load[dtype: DType, //, width: Int](source: Pointer[Scalar[dtype], _], offset: Int) -> SIMD[DType.float32, width]:
    """Float32 of the elements of q, which lie at multiples of 8."""
    return load_raw[width](source, offset).cast[DType.float32]()


@always_inline
def widen[dtype: DType, width: Int, //](stored: SIMD[dtype, width]) -> SIMD[DType.float32, width]:
    """Float32 of stored elements; float8 by way of float16, since not every GPU converts it."""
    comptime if dtype == DType.float8_e5m2:
        return bitcast[DType.float16, width](bitcast[DType.uint8, width](stored).cast[DType.uint16]() << 8).cast[
            DType.float32
        ]()
    elif dtype == DType.float8_e4m3fn:
        # seeeemmm -> s0eeeemmm0000000: the exponent bias is 7 there and 15 here.
        var bits = bitcast[DType.uint8, width](stored).cast[DType.uint16]()
        var half = bitcast[DType.float16, width](((bits & 0x80) << 8) | ((bits & 0x7F) << 7))
        var value = half.cast[DType.float32]() * 256
        return (bits & 0x7F).eq(0x7F).select(type_of(value)(nan[DType.float32]()), value)
    else:
        return stored.cast[DType.float32]()


@always_inline
def widen_stored[
    dtype: DType, //, width: Int
](stored: SIMD[dtype, units_of(dtype, width)]) -> SIMD[DType.float32, width]:
    """Float32 of `width` stored elements, of codes without their scale."""
    comptime if is_codes(dtype):
        return widen_codes[width](stored)
    else:
        return widen(rebind[SIMD[dtype, width]](stored))
