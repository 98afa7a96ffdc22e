"""Rotary embedding inside attention, of q and of keys that are stored without rotation (FlashInfer's ROPE_LLAMA)."""

from std.ffi import external_call
from std.math import cos, log, pi, round, sin


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
                # The library's own exp is off by 4e-13, which is 4e-7 radians after a million tokens.
                var power = external_call["exp", Float64](exponent * log(Float64(theta)))
                self.frequencies.append(power / Float64(scale))

    @always_inline
    def rotate[dtype: DType, //](self, head: Pointer[mut=True, Scalar[dtype], _], position: Int):
        """Rotates `head` `[D]`, float32 or float64, in place."""
        var half = len(self.frequencies)
        var frequencies = self.frequencies.unsafe_ptr()
        # D is a multiple of 8, so each half is read four elements at a time.
        for i in range(0, half, 4):
            var cycles = frequencies.unsafe_load[width=4](i) * (Float64(position) / (2 * pi))
            var angle = ((cycles - round(cycles)) * (2 * pi)).cast[DType.float32]()
            var a = head.unsafe_load[width=4](i)
            var b = head.unsafe_load[width=4](half + i)
            var c = cos(angle).cast[dtype]()
            var s = sin(angle).cast[dtype]()
            head.unsafe_store(i, a * c - b * s)
            head.unsafe_store(half + i, b * c + a * s)
