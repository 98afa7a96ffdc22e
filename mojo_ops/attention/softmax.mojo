"""The running state of a softmax whose scores arrive in parts.

Scores are in base 2: a natural-log score `x` becomes `x * LOG2E`. So weights are computed by `exp2`, and the lse is in
base 2, FlashInfer's convention.
"""

from std.math import log2
from std.memory import bitcast
from std.sys.info import CompilationTarget
from std.sys.intrinsics import llvm_intrinsic
from std.utils.numerics import neg_inf

comptime LOG2E: Float32 = 1.4426950408889634
comptime LOG2E_FLOAT64: Float64 = 1.4426950408889634
comptime MINUS_INFINITY = neg_inf[DType.float32]()


comptime HAS_SCALEF = CompilationTarget.is_x86() and CompilationTarget._has_feature["avx512dq"]()
"""True if the CPU target has an instruction for the fraction, and one that scales by a power of two (AVX-512 DQ)."""


@always_inline
def exp2(x: SIMD[DType.float32, _]) -> type_of(x):
    """The 2^x for x <= 0, to 2 units in the last place; 0 below -125, NaN for NaN.

    The library's float32 `exp2` is off by up to 1.4e-5, more than the whole error that attention may have.
    """
    comptime if HAS_SCALEF and x.length % 16 == 0:
        var result = type_of(x)(0)
        comptime for i in range(0, x.length, 16):
            result = result.insert[offset=i](exp2_by_scaling(x.slice[16, offset=i]()))
        return result
    else:
        comptime to_integer: Float32 = 12582912  # 1.5 * 2^23: a sum with it keeps the nearest integer in the low bits
        var rounded = x + to_integer
        var f = x - (rounded - to_integer)
        # Interpolates 2^f on [-1/2, 1/2] at the Chebyshev nodes: relative error below 3e-9.
        var p = f.fma(1.546144469e-4, 1.340042818e-3)
        p = p.fma(f, 9.618056679e-3).fma(f, 5.550327227e-2).fma(f, 0.2402265092).fma(f, 0.6931472067).fma(f, 1)
        var power = bitcast[DType.int32, x.length](rounded) << 23
        var result = bitcast[DType.float32, x.length](bitcast[DType.int32, x.length](p) + power)
        # Not `max`: that would turn a NaN into a number.
        return x.lt(-125).select(type_of(x)(0), x.eq(x).select(result, x))


@always_inline
def exp2_by_scaling(x: SIMD[DType.float32, 16]) -> SIMD[DType.float32, 16]:
    """`exp2` where `HAS_SCALEF`; for x > 0 too, where it is inf from 128 on."""
    comptime Vector = SIMD[DType.float32, 16]
    comptime to_floor: Int32 = 9
    var f = llvm_intrinsic["llvm.x86.avx512.mask.reduce.ps.512", Vector, has_side_effect=False](
        x, to_floor, Vector(0), UInt16(0xFFFF), Int32(4)
    )
    # Fits 2^f on [0, 1] with a relative error of at most 2.1e-9. NaN stays NaN, and of -inf f is 0.
    var p = f.fma(2.1613015269e-4, 1.2467820197e-3)
    p = p.fma(f, 9.6754543483e-3).fma(f, 5.5485278368e-2).fma(f, 0.24022930861).fma(f, 0.69314706326).fma(f, 1)
    # 2^floor(x) times p.
    var result = llvm_intrinsic["llvm.x86.avx512.mask.scalef.ps.512", Vector, has_side_effect=False](
        p, x, Vector(0), UInt16(0xFFFF), Int32(4)
    )
    return x.lt(-125).select(Vector(0), result)


struct AttentionState(TrivialRegisterPassable):
    """The greatest score so far and the sum of `2^(score - greatest)`.

    The caller keeps the sum of weighted values. Every method says by what factor that sum must be rescaled.
    """

    var greatest: Float32
    """-inf while no score was seen."""
    var total: Float32
    """The sum of the weights, relative to `greatest`."""

    def __init__(out self):
        """The empty state: its output is 0 and its lse -inf."""
        self.greatest = MINUS_INFINITY
        self.total = 0

    def __init__(out self, greatest: Float32, total: Float32):
        self.greatest = greatest
        self.total = total

    @staticmethod
    def of_lse(lse: Float32) -> Self:
        """The state of a part whose values are already normalised."""
        return Self(lse, Float32(0) if lse == MINUS_INFINITY else Float32(1))

    @always_inline
    def raise_to(mut self, score: Float32) -> Float32:
        """Raises the maximum to `score` if that is greater; returns the factor for the values so far."""
        if score <= self.greatest:
            return 1
        var factor = exp2(self.greatest - score)
        self.greatest = score
        self.total *= factor
        return factor

    @always_inline
    def add(mut self, weight: Float32):
        """Adds the sum of the weights of a part, relative to `greatest`."""
        self.total += weight

    @always_inline
    def merge(mut self, other: Self) -> Tuple[Float32, Float32]:
        """Merges another part; returns the factors for this part's and the other's values."""
        if other.total == 0:
            return (Float32(1), Float32(0))
        var mine = self.raise_to(other.greatest)
        var theirs = exp2(other.greatest - self.greatest)
        self.total += other.total * theirs
        return (mine, theirs)

    @always_inline
    def normaliser(self) -> Float32:
        """Return what the weighted values are multiplied by to become the output; 0 for the empty state."""
        return 1 / self.total if self.total != 0 else 0

    @always_inline
    def lse(self) -> Float32:
        """The log2 of the sum of `2^score`; -inf for the empty state."""
        # Not `greatest`: beside a NaN, that may be -inf.
        return self.greatest + log2(self.total) if self.total != 0 else MINUS_INFINITY
