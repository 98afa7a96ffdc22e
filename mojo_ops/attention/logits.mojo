"""From a dot product to a base-2 score: scale, ALiBi, soft cap; and the window of tokens that a row sees."""

from std.math import exp2 as gpu_exp2
from std.math import iota
from std.sys.info import is_gpu
from std.utils.numerics import isfinite

from .softmax import LOG2E, LOG2E_FLOAT64, exp2

comptime HeadPointer = Pointer[Float32, ImmUntrackedOrigin]
"""`[Hq]` float32, one number a query head."""


struct ScoreOptions(TrivialRegisterPassable):
    """What turns a dot product into a score on every device: a variant of the softmax is a field here, off by default.

    ALiBi, which depends on the head and the token, is added after `scale` and before the rest.
    """

    var scale: Float32
    """Multiplies q . k; the product of sm_scale, q_scale and k_scale."""
    var soft_cap: Float32
    """Replaces x by `cap * tanh(x / cap)` where > 0; 0 = off."""

    @always_inline
    def __init__(out self, scale: Float32, *, soft_cap: Float32 = 0):
        self.scale = scale
        self.soft_cap = soft_cap

    def check(self) raises:
        if not isfinite(self.scale):
            raise Error("sm_scale must be finite, not ", self.scale)
        if not isfinite(self.soft_cap) or self.soft_cap < 0:
            raise Error("logits_soft_cap must be finite and at least 0 (0 = off), not ", self.soft_cap)

    @always_inline
    def factor(self) -> Float32:
        """Return the number that makes a dot product a base-2 score, where nothing else is done to it; otherwise 0."""
        var factor = self.scale * LOG2E
        return factor if self.soft_cap <= 0 and isfinite(factor) else 0

    @always_inline
    def base_2(self, scaled: SIMD[DType.float32, _]) -> type_of(scaled):
        """The base-2 scores of scaled dot products, ALiBi included."""
        var x = scaled
        if self.soft_cap > 0:
            x = soft_capped(x, self.soft_cap)
        return x * LOG2E

    def base_2_in_float64(self, scaled: Float64) -> Float64:
        """The same in float64. A soft cap has the precision of float32."""
        var x = scaled
        if self.soft_cap > 0:
            var cap = Float64(self.soft_cap)
            x = cap * Float64(soft_capped(Float32(x / cap), 1))
        return x * LOG2E_FLOAT64


@fieldwise_init
struct Logits(TrivialRegisterPassable):
    """The options of one attention call (the formula is in `README.md`)."""

    var scores: ScoreOptions
    var window_left: Int
    """Keeps the last `window_left + 1` tokens; -1 = all."""
    var alibi_slopes: HeadPointer
    """Adds `slope * token` after the scale and before the cap."""
    var has_alibi: Bool
    var sinks: HeadPointer
    """Natural-log scores that are added to the denominator alone."""
    var has_sinks: Bool

    @always_inline
    def from_head(self, head: Int) -> Self:
        """The same options, whose first query head is `head`."""
        var part = self
        if self.has_alibi:
            part.alibi_slopes = self.alibi_slopes.unsafe_offset(head)
        if self.has_sinks:
            part.sinks = self.sinks.unsafe_offset(head)
        return part

    @no_inline
    def check(self) raises:
        self.scores.check()
        if self.window_left < -1:
            raise Error("window_left must be at least -1 (-1 = off), not ", self.window_left)

    @always_inline
    def first_token(self, length: Int) -> Int:
        """The first token that a row of `length` tokens attends to."""
        return max(0, length - 1 - self.window_left) if self.window_left >= 0 else 0

    @always_inline
    def factor(self) -> Float32:
        """As `ScoreOptions.factor`; 0 where there is ALiBi."""
        return self.scores.factor() if not self.has_alibi else 0

    @always_inline
    def score(self, dot: SIMD[DType.float32, _], head: Int, token: Int) -> type_of(dot):
        """The base-2 scores of one query head for consecutive tokens from `token` on."""
        var slope = type_of(dot)(self.alibi_slopes[unsafe_offset=head]) if self.has_alibi else 0
        return self.score_each(dot, slope, iota[DType.float32, dot.length](Float32(token)))

    @always_inline
    def score_each(self, dot: SIMD[DType.float32, _], slope: type_of(dot), token: type_of(dot)) -> type_of(dot):
        """The base-2 scores of some pairs of a query head and a token; `slope` is the head's."""
        var x = dot * self.scores.scale
        if self.has_alibi:
            x = token.fma(slope, x)
        return self.scores.base_2(x)

    def score_in_float64(self, dot: Float64, head: Int, token: Int) -> Float64:
        """The base-2 score of one token."""
        var x = dot * Float64(self.scores.scale)
        if self.has_alibi:
            x += Float64(self.alibi_slopes[unsafe_offset=head]) * Float64(token)
        return self.scores.base_2_in_float64(x)

    def sink_in_float64(self, head: Int) -> Float64:
        """The base-2 score of a query head's sink."""
        return Float64(self.sinks[unsafe_offset=head]) * LOG2E_FLOAT64


@always_inline
def nan_where_infinite(dot: SIMD[DType.float32, _]) -> type_of(dot):
    """Dot products, NaN for an infinite one: it overflowed, and perhaps in a partial sum of the other sign."""
    return dot + (dot - dot)


comptime SMALL_RATIO: Float32 = 0.625
"""The ratio of a score to its soft cap up to which `soft_capped` is a polynomial."""


@always_inline
def soft_capped(x: SIMD[DType.float32, _], cap: Float32) -> type_of(x):
    """`cap * tanh(x / cap)`, to 3 units in the last place, for every `cap` that is a normal number.

    A GPU takes its own instruction for 2^x: the error of 2^-22 that it has is small beside 1.
    """
    # A reciprocal, which is computed once, and of a quarter of a large cap, because it must be a normal number.
    var part = Float32(0.25) if cap > 1 else Float32(1)
    var ratio = x * part * (1 / (cap * part))
    # tanh(y) = y + y^3 p(y^2) up to `SMALL_RATIO`, with a relative error of at most 4.2e-9.
    var square = ratio * ratio
    var p = square.fma(-5.717045162e-3, 2.065058798e-2)
    p = p.fma(square, -5.374349654e-2).fma(square, 0.1333149076).fma(square, -0.3333328366)
    var small = (x * square).fma(p, x)
    # tanh(y) = 1 - 2 t / (1 + t) with t = exp(-2 y).
    var magnitude = abs(ratio)
    var exponent = magnitude * (-2 * LOG2E)
    var t: type_of(x)
    comptime if is_gpu():
        t = gpu_exp2(exponent)
    else:
        t = exp2(exponent)
    var large = (-2 * t / (1 + t)).fma(cap, cap)
    return magnitude.lt(SMALL_RATIO).select(small, x.lt(0).select(-large, large))
