"""The angles of rotary keys on a GPU: on the CPU, against float64, at distances that no test of a kernel can reach."""

from std.ffi import external_call
from std.math import cos, log, sin
from std.testing import TestSuite, assert_almost_equal, assert_equal

from mojo_ops.attention.gpu.rope import RotaryFrequencies, rotation_angle


def check(head_dim: Int, theta: Float64, scale: Float64) raises:
    var frequencies = RotaryFrequencies.of(head_dim, Float32(theta), Float32(scale))
    for i in range(head_dim // 2):
        var frequency = external_call["exp", Float64](-2 * Float64(i) / Float64(head_dim) * log(theta)) / scale
        for tokens in [0, 1, 7, 4097, 131_071, 1_048_576]:
            var expected = frequency * Float64(tokens)
            var found = rotation_angle[width=1](frequencies.frequency(Int32(i)), Int32(tokens)).cast[DType.float64]()
            assert_almost_equal(cos(found), cos(expected), atol=3e-7, rtol=0)
            assert_almost_equal(sin(found), sin(expected), atol=3e-7, rtol=0)


def test_angles_are_those_of_float64() raises:
    check(8, 10000, 1)
    check(128, 500000, 8)
    check(136, 10000, 0.125)
    check(512, 2, 1)


def test_no_theta_is_off() raises:
    assert_equal(RotaryFrequencies.of(64, 0, 1).rotates(), False)
    assert_equal(RotaryFrequencies.of(64, 10000, 1).rotates(), True)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
