"""Rotary keys on a GPU: keys lie un-rotated in the cache, and no lane needs another's part of one.

A rotation of both sides keeps their product: q rotated by its position, times a key rotated by the key's, is q rotated
by their distance, times the key as it is stored. So a key's element `d` is multiplied by
`cos(angle) * q[d] + sin(angle) * partner[d]`, where `partner` is `-q[d + D / 2]` in the first half of a head and
`q[d - D / 2]` in the second.
"""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.ffi import external_call
from std.math import floor, log, pi

comptime FULL_ROTATION = Float64(2) ** 64
"""2 pi in the units of a frequency."""


@fieldwise_init
struct RotaryFrequencies(DevicePassable, TrivialRegisterPassable):
    """The frequencies of rotary keys, as kernels take them: `first * ratio^i` rotations a token for dimension `i`."""

    comptime device_type: AnyType = Self

    var first: Float64
    """0 = keys lie in the cache as they are used."""
    var ratio: Float64

    @staticmethod
    def of(head_dim: Int, theta: Float32, scale: Float32) -> Self:
        """Dimension `i` rotates by `theta^(-2 i / D) / scale` radians a token, as in `Rotary`; `theta` 0 is off."""
        if theta == 0:
            return Self(0, 1)
        # The library's own exp is off by 4e-13, which is 4e-7 rotations after a million tokens.
        var ratio = external_call["exp", Float64](-2 / Float64(head_dim) * log(Float64(theta)))
        return Self(1 / (2 * pi * Float64(scale)), ratio)

    def _to_device_type(self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "RotaryFrequencies"

    @staticmethod
    def get_device_type_name() -> String:
        return Self.get_type_name()

    @always_inline
    def rotates(self) -> Bool:
        return self.first != 0

    @always_inline
    def frequency(self, i: Int32) -> UInt64:
        """Return the frequency of dimension `i` of a half: in 2^-64 of a rotation a token, whole rotations left out."""
        var rotations = self.first
        var power = self.ratio
        var left = i
        while left > 0:
            if left & 1 != 0:
                rotations *= power
            power *= power
            left >>= 1
        return ((rotations - floor(rotations)) * FULL_ROTATION).cast[DType.uint64]()


@always_inline
def rotation_angle[
    width: Int, //, signed: Bool = False
](frequency: SIMD[DType.uint64, width], tokens: Int32) -> SIMD[DType.float32, width]:
    """Radians in [-pi, pi] for a distance of `tokens`, off by 3e-7 at most: whole rotations overflow 64 bits.

    Parameters:
        width: Dimensions.
        signed: Whether a key may stand behind the query.
    """
    var distance = UInt64(Int64(tokens)) if signed else UInt64(UInt32(tokens))
    var rotations = (frequency * distance) >> 32
    return rotations.cast[DType.uint32]().cast[DType.int32]().cast[DType.float32]() * Float32(2 * pi / 2**32)
