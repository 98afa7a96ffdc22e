"""Dot products of four int8 elements with int32 sums, by the best instruction of the CPU target.

16 sums at once, one for each row of weights. `SIGNED_AS_UNSIGNED` says how weights that are signed are to be stored.
"""

from std.memory import bitcast
from std.sys import CompilationTarget, llvm_intrinsic

comptime DOT_ROWS = 16
"""Int32 sums of a vector, on every target."""
comptime IntVector = SIMD[DType.int32, DOT_ROWS]
comptime ByteVector = SIMD[DType.uint8, 4 * DOT_ROWS]
"""Four elements of each of 16 rows."""

comptime IS_X86 = CompilationTarget.is_x86()
comptime HAS_AVX512 = IS_X86 and CompilationTarget._has_feature["avx512bw"]()
comptime HAS_AVX2 = IS_X86 and CompilationTarget._has_feature["avx2"]()
comptime HAS_VNNI_512 = HAS_AVX512 and CompilationTarget._has_feature["avx512vnni"]()
comptime HAS_VNNI_256 = HAS_AVX2 and not HAS_AVX512 and CompilationTarget._has_feature["avxvnni"]()

comptime SIGNED_AS_UNSIGNED = HAS_VNNI_512 or HAS_VNNI_256
"""True if signed weights are stored plus 128. The other families multiply signed ones."""


@always_inline
def int8_dot[signed: Bool](sums: IntVector, w: ByteVector, x: Int32) -> IntVector:
    """`sums[r]` plus the products of `w[4 r]` to `w[4 r + 3]` by the four int8 elements of `x`.

    Parameters:
        signed: Whether w is int8. Else it is uint8, and at most 127 unless `SIGNED_AS_UNSIGNED`.

    Args:
        sums: The sums of 16 rows.
        w: `[16 rows, 4]`.
        x: Four elements from -127 to 127, the first in the lowest byte.
    """
    comptime if HAS_AVX2:
        return int8_dot[signed](sums, w, bitcast[DType.int8, 64](IntVector(x)))
    else:
        return sums + multiply_wide[signed](w, x)


@always_inline
def int8_dot[signed: Bool](sums: IntVector, w: ByteVector, x: SIMD[DType.int8, 64]) -> IntVector:
    """`sums[i]` plus the products of `w[4 i]` to `w[4 i + 3]` by those of `x`, elements from -127 to 127: with AVX2."""
    comptime if HAS_VNNI_512:
        comptime assert not signed, "signed weights are stored plus 128"
        return llvm_intrinsic["llvm.x86.avx512.vpdpbusd.512", IntVector](sums, w, bitcast[DType.uint8, 64](x))
    elif HAS_VNNI_256:
        comptime assert not signed, "signed weights are stored plus 128"
        comptime Half = SIMD[DType.int32, 8]
        var xs = bitcast[DType.uint8, 64](x)
        var low = llvm_intrinsic["llvm.x86.avx512.vpdpbusd.256", Half](sums.slice[8](), w.slice[32](), xs.slice[32]())
        var high = llvm_intrinsic["llvm.x86.avx512.vpdpbusd.256", Half](
            sums.slice[8, offset=8](), w.slice[32, offset=32](), xs.slice[32, offset=32]()
        )
        return low.join(high)
    elif HAS_AVX512:
        return sums + rebind[IntVector](multiply_add[signed, 64](w, x))
    else:
        var low = multiply_add[signed, 32](w.slice[32](), x.slice[32]())
        var high = multiply_add[signed, 32](w.slice[32, offset=32](), x.slice[32, offset=32]())
        return sums + rebind[IntVector](low.join(high))


@always_inline
def multiply_add[
    signed: Bool, bytes: Int
](w: SIMD[DType.uint8, bytes], x: SIMD[DType.int8, bytes]) -> SIMD[DType.int32, bytes // 4]:
    """The sums of four products by `vpmaddubsw` and `vpmaddwd`. Two products of 128 by 127 fit 16 bits."""
    comptime Words = SIMD[DType.int16, bytes // 2]
    comptime Sums = SIMD[DType.int32, bytes // 4]
    var xs = x
    var ws = w
    comptime if signed:
        comptime if bytes == 32:
            xs = llvm_intrinsic["llvm.x86.avx2.psign.b", SIMD[DType.int8, bytes]](x, w)
        else:
            xs = bitcast[DType.int8, bytes](w).lt(0).select(-x, x)
        ws = bitcast[DType.uint8, bytes](abs(bitcast[DType.int8, bytes](w)))
    var pairs: Words
    var sums: Sums
    comptime if bytes == 64:
        pairs = llvm_intrinsic["llvm.x86.avx512.pmaddubs.w.512", Words](ws, xs)
        sums = llvm_intrinsic["llvm.x86.avx512.pmaddw.d.512", Sums](pairs, Words(1))
    else:
        pairs = llvm_intrinsic["llvm.x86.avx2.pmadd.ub.sw", Words](ws, xs)
        sums = llvm_intrinsic["llvm.x86.avx2.pmadd.wd", Sums](pairs, Words(1))
    return sums


@always_inline
def multiply_wide[signed: Bool](w: ByteVector, x: Int32) -> IntVector:
    """The sums of four products by multiplications of int32."""
    var quads = bitcast[DType.int32, DOT_ROWS](w)
    var sums = IntVector(0)
    comptime for i in range(4):
        var element = (x << Int32(24 - 8 * i)) >> 24
        comptime if signed:
            sums += ((quads << Int32(24 - 8 * i)) >> 24) * element
        else:
            sums += ((quads >> Int32(8 * i)) & 255) * element
    return sums


@always_inline
def int16_pair_dot(sums: IntVector, w: SIMD[DType.uint32, DOT_ROWS], x: Int32) -> IntVector:
    """`sums[r]` plus the products of the two int16 in `w[r]` by those in `x`."""
    var xs = IntVector(x)
    comptime if HAS_VNNI_512:
        comptime Pairs = SIMD[DType.int16, 2 * DOT_ROWS]
        return llvm_intrinsic["llvm.x86.avx512.vpdpwssd.512", IntVector](
            sums, bitcast[DType.int16, 2 * DOT_ROWS](w), bitcast[DType.int16, 2 * DOT_ROWS](xs)
        )
    elif HAS_AVX512:
        return sums + llvm_intrinsic["llvm.x86.avx512.pmaddw.d.512", IntVector](
            bitcast[DType.int16, 2 * DOT_ROWS](w), bitcast[DType.int16, 2 * DOT_ROWS](xs)
        )
    elif HAS_AVX2:
        comptime Half = SIMD[DType.int32, DOT_ROWS // 2]
        var half_xs = bitcast[DType.int16, DOT_ROWS](Half(x))
        var low = llvm_intrinsic["llvm.x86.avx2.pmadd.wd", Half](
            bitcast[DType.int16, DOT_ROWS](w.slice[DOT_ROWS // 2]()), half_xs
        )
        var high = llvm_intrinsic["llvm.x86.avx2.pmadd.wd", Half](
            bitcast[DType.int16, DOT_ROWS](w.slice[DOT_ROWS // 2, offset=DOT_ROWS // 2]()), half_xs
        )
        return sums + low.join(high)
    else:
        var pairs = bitcast[DType.int32, DOT_ROWS](w)
        return sums + ((pairs << 16) >> 16) * ((xs << 16) >> 16) + (pairs >> 16) * (xs >> 16)
