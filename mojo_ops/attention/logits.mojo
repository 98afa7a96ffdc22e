"""From a dot product to a base-2 score: scale, ALiBi, soft cap; and the window of tokens that a row sees."""

from std.math import iota, tanh
from std.utils.numerics import isfinite

from .softmax import LOG2E

comptime HeadPointer = Pointer[Float32, ImmUntrackedOrigin]
"""`[Hq]` float32, one number a query head."""


@fieldwise_init
struct Logits(TrivialRegisterPassable):
    """The options of one attention call (the formula is in `README.md`)."""

    var scale: Float32
    """Multiplies q . k; the product of sm_scale, q_scale and k_scale."""
    var soft_cap: Float32
    """Replaces x by `cap * tanh(x / cap)` where > 0; 0 = off."""
    var window_left: Int
    """Keeps the last `window_left + 1` tokens; -1 = all."""
    var alibi_slopes: HeadPointer
    """Adds `slope * token` after the scale and before the cap."""
    var has_alibi: Bool
    var sinks: HeadPointer
    """Natural-log scores that are added to the denominator alone."""
    var has_sinks: Bool

    def check(self) raises:
        if not isfinite(self.scale):
            raise Error("sm_scale must be finite, not ", self.scale)
        if not isfinite(self.soft_cap) or self.soft_cap < 0:
            raise Error("logits_soft_cap must be finite and at least 0 (0 = off), not ", self.soft_cap)
        if self.window_left < -1:
            raise Error("window_left must be at least -1 (-1 = off), not ", self.window_left)

    @always_inline
    def first_token(self, length: Int) -> Int:
        """The first token that a row of `length` tokens attends to."""
        return max(0, length - 1 - self.window_left) if self.window_left >= 0 else 0

    @always_inline
    def score(self, dot: SIMD[DType.float32, _], head: Int, token: Int) -> type_of(dot):
        """The base-2 scores of one query head for consecutive tokens from `token` on."""
        var slope = type_of(dot)(self.alibi_slopes[unsafe_offset=head]) if self.has_alibi else 0
        return self.score_each(dot, slope, iota[DType.float32, dot.length](Float32(token)))

    @always_inline
    def score_each(self, dot: SIMD[DType.float32, _], slope: type_of(dot), token: type_of(dot)) -> type_of(dot):
        """The base-2 scores of some pairs of a query head and a token; `slope` is the head's."""
        var x = dot * self.scale
        if self.has_alibi:
            x = token.fma(slope, x)
        if self.soft_cap > 0:
            x = self.soft_cap * tanh(x / self.soft_cap)
        return x * LOG2E
