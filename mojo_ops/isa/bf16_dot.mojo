"""Dot products of pairs of bfloat16 with float32 sums, one instruction for 32 products (AVX-512 BF16)."""

from std.memory import bitcast
from std.sys import CompilationTarget, llvm_intrinsic

from .cpu_tuning import CPU_TUNING

comptime BF16_DOT_LANES = 16
"""Float32 sums of a vector."""
comptime BF16_DOT_ELEMENTS = 2 * BF16_DOT_LANES
"""Elements (bfloat16) of an operand."""
comptime HAS_BF16_DOT = CompilationTarget.is_x86() and CompilationTarget._has_feature["avx512bf16"]()
"""True if the CPU target has the instruction."""
comptime USES_BF16_DOT = HAS_BF16_DOT and CPU_TUNING.fast_bf16_dot
"""True if kernels use it: Intel's CPUs with AMX run it at a fraction of the rate of a float32 FMA."""


@always_inline
def bf16_dot(
    sums: SIMD[DType.float32, BF16_DOT_LANES],
    a: SIMD[DType.bfloat16, BF16_DOT_ELEMENTS],
    b: SIMD[DType.bfloat16, BF16_DOT_ELEMENTS],
) -> SIMD[DType.float32, BF16_DOT_LANES]:
    """`sums[i] + a[2 i + 1] b[2 i + 1] + a[2 i] b[2 i]`, each product added by a float32 FMA; denormals are zero."""
    return llvm_intrinsic["llvm.x86.avx512bf16.dpbf16ps.512", SIMD[DType.float32, BF16_DOT_LANES]](sums, a, b)
