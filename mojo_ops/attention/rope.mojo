"""Rotary embedding inside attention, of q and of keys that are stored without rotation (FlashInfer's ROPE_LLAMA)."""

from std.ffi import external_call
from std.math import log, pi
from std.memory import bitcast

comptime ROUNDS_TO_INTEGER: Float64 = 6755399441055744.0
"""1.5 * 2^52: a smaller number plus this is a float64 whose last bit is worth 1."""
comptime MAX_QUARTER_TURNS: Float64 = 1125899906842624.0
"""2^50. A larger angle has no fraction of a quarter turn in float64, and counts as 0."""


struct RotaryEmbedding(Movable):
    """Rotates one head: dimensions `i` and `i + D / 2` by the angle `position * theta^(-2 i / D) / scale`."""

    var turns: List[Float64]
    """`[D / 2]` in quarter turns a token; empty = off."""

    def __init__(out self, head_dim: Int, theta: Float32, scale: Float32):
        """The angles for heads of `head_dim` elements. With `theta` 0 the rotation is off."""
        self.turns = List[Float64]()
        if theta != 0:
            for i in range(head_dim // 2):
                var exponent = -2 * Float64(i) / Float64(head_dim)
                # The library's own exp is off by 4e-13, which is 4e-7 radians after a million tokens.
                var power = external_call["exp", Float64](exponent * log(Float64(theta)))
                self.turns.append(power / Float64(scale) * (2 / pi))

    @always_inline
    def rotate[dtype: DType, //](self, head: Pointer[mut=True, Scalar[dtype], _], position: Int):
        """Rotates `head` `[D]`, float32 or float64, in place."""
        var half = len(self.turns)
        var turns = self.turns.unsafe_ptr()
        # D is a multiple of 8, so each half is read four elements at a time.
        for i in range(0, half, 4):
            var cos_sin = cos_and_sin(turns.unsafe_load[width=4](i) * Float64(position))
            var a = head.unsafe_load[width=4](i)
            var b = head.unsafe_load[width=4](half + i)
            var c = cos_sin[0].cast[dtype]()
            var s = cos_sin[1].cast[dtype]()
            head.unsafe_store(i, a * c - b * s)
            head.unsafe_store(half + i, b * c + a * s)


@always_inline
def cos_and_sin(
    quarter_turns: SIMD[DType.float64, _],
) -> Tuple[SIMD[DType.float32, quarter_turns.length], SIMD[DType.float32, quarter_turns.length]]:
    """The cosine and the sine of angles in quarter turns, each off by at most 1.2e-7.

    Angles are float64 until whole quarter turns are subtracted: in float32 the angle of token 30,000 is off by 2e-3.
    """
    var turns = abs(quarter_turns).lt(MAX_QUARTER_TURNS).select(quarter_turns, 0)
    var shifted = turns + ROUNDS_TO_INTEGER
    var quarters = bitcast[DType.int64, quarter_turns.length](shifted).cast[DType.int32]()
    # From -pi / 4 to pi / 4, where Taylor's polynomials are off by 2e-9.
    var x = ((turns - (shifted - ROUNDS_TO_INTEGER)) * (pi / 2)).cast[DType.float32]()
    var square = x * x
    var p = square.fma(Float32(1.0 / 362880), Float32(-1.0 / 5040))
    p = p.fma(square, Float32(1.0 / 120)).fma(square, Float32(-1.0 / 6))
    var sine = (x * square).fma(p, x)
    p = square.fma(Float32(-1.0 / 3628800), Float32(1.0 / 40320))
    p = p.fma(square, Float32(-1.0 / 720)).fma(square, Float32(1.0 / 24)).fma(square, Float32(-0.5))
    var cosine = square.fma(p, 1)
    var is_odd = (quarters & 1).eq(1)
    var c = is_odd.select(sine, cosine)
    var s = is_odd.select(cosine, sine)
    return (((quarters + 1) & 2).eq(2).select(-c, c), (quarters & 2).eq(2).select(-s, s))
