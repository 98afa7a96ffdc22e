"""What happens to a raw dot product before the softmax, and which tokens take part."""

from std.math import tanh
from std.utils.numerics import isfinite

from .softmax import LOG2E


@fieldwise_init
struct Logits(TrivialRegisterPassable):
    """Scale, soft cap and window of one attention call (the formula is in `README.md`)."""

    var scale: Float32
    """Multiplies q . k; the product of sm_scale and any q and k scales."""
    var soft_cap: Float32
    """`cap * tanh(x / cap)` where > 0; 0 = off."""
    var window_left: Int
    """Keeps the last `window_left + 1` tokens; -1 = all."""

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
    def score(self, dot: SIMD[DType.float32, _]) -> type_of(dot):
        """The base-2 scores of raw dot products."""
        var x = dot * self.scale
        if self.soft_cap > 0:
            x = self.soft_cap * tanh(x / self.soft_cap)
        return x * LOG2E
