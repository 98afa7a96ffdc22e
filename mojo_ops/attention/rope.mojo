"""Rotary embedding inside attention, of q and of keys that are stored without rotation (FlashInfer's ROPE_LLAMA)."""

from std.math import cos, exp, log, pi, round, sin


struct RotaryEmbedding(Movable):
    """Rotates one head: dimensions `i` and `i + D / 2` by the angle `position * theta^(-2 i / D) / scale`.

    Angles are float64 until whole rotations are subtracted: in float32 the angle of token 30,000 is off by 2e-3.
    """

    var frequencies: List[Float64]
    """`[D / 2]` in radians a token; empty = off."""

    def __init__(out self, head_dim: Int, theta: Float32, scale: Float32):
        """The frequencies for heads of `head_dim` elements. With `theta` 0 the rotation is off."""
        self.frequencies = List[Float64]()
        if theta != 0:
            for i in range(head_dim // 2):
                var exponent = -2 * Float64(i) / Float64(head_dim)
                self.frequencies.append(exp(exponent * log(Float64(theta))) / Float64(scale))

    @always_inline
    def rotate(self, head: Pointer[mut=True, Float32, _], position: Int):
        """Rotates `head` `[D]` in place."""
        var half = len(self.frequencies)
        var frequencies = self.frequencies.unsafe_ptr()
        # D is a multiple of 8, so each half is read four elements at a time.
        for i in range(0, half, 4):
            var cycles = frequencies.unsafe_load[width=4](i) * (Float64(position) / (2 * pi))
            var angle = ((cycles - round(cycles)) * (2 * pi)).cast[DType.float32]()
            var a = head.unsafe_load[width=4](i)
            var b = head.unsafe_load[width=4](half + i)
            head.unsafe_store(i, a * cos(angle) - b * sin(angle))
            head.unsafe_store(half + i, b * cos(angle) + a * sin(angle))
