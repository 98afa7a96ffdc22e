"""Cosines and sines of the rotary embedding, and its angles on a GPU, against float64; all on the CPU."""

from std.ffi import external_call
from std.math import cos, log, pi, sin
from std.testing import TestSuite, assert_almost_equal, assert_equal, assert_true

from mojo_ops.attention.gpu.rope import RotaryFrequencies, rotation_angle
from mojo_ops.attention.rope import cos_and_sin

comptime BOUND: Float64 = 1.2e-7


def check(quarter_turns: SIMD[DType.float64, 8]) raises:
    var found = cos_and_sin(quarter_turns)
    for i in range(8):
        # The library reduces radians exactly, but radians of many turns are rounded: whole turns are taken off before.
        var turns = quarter_turns[i] / 4
        var angle = (turns - external_call["rint", Float64](turns)) * (2 * pi)
        var cos_error = abs(found[0][i].cast[DType.float64]() - external_call["cos", Float64](angle))
        var sin_error = abs(found[1][i].cast[DType.float64]() - external_call["sin", Float64](angle))
        assert_true(max(cos_error, sin_error) < BOUND, String(quarter_turns[i], ": ", cos_error, ", ", sin_error))


def test_every_quarter() raises:
    for i in range(-4000, 4000, 8):
        var x = SIMD[DType.float64, 8](0)
        for lane in range(8):
            x[lane] = Float64(i + lane) / 777
        check(x)
        check(x * 1e9)


def test_quarter_turns_are_exact() raises:
    for i in range(-9, 9):
        var found = cos_and_sin(SIMD[DType.float64, 1](i))
        assert_equal(found[0][0], Float32(1 - i % 4 if i % 2 == 0 else 0))
        assert_equal(found[1][0], Float32(2 - i % 4 if i % 2 != 0 else 0))


def test_an_angle_without_a_fraction_counts_as_none() raises:
    for x in [Float64(1e30), Float64(-1e30), Float64(2) ** 50]:
        var found = cos_and_sin(SIMD[DType.float64, 1](x))
        assert_equal(found[0][0], 1)
        assert_equal(found[1][0], 0)


def check_angles(head_dim: Int, theta: Float64, scale: Float64) raises:
    """The angles of rotary keys on a GPU, at distances that no test of a kernel can reach."""
    var frequencies = RotaryFrequencies.of(head_dim, Float32(theta), Float32(scale))
    for i in range(head_dim // 2):
        var frequency = external_call["exp", Float64](-2 * Float64(i) / Float64(head_dim) * log(theta)) / scale
        for tokens in [0, 1, 7, 4097, 131_071, 1_048_576]:
            var expected = frequency * Float64(tokens)
            var found = rotation_angle[width=1](frequencies.frequency(Int32(i)), Int32(tokens)).cast[DType.float64]()
            assert_almost_equal(cos(found), cos(expected), atol=3e-7, rtol=0)
            assert_almost_equal(sin(found), sin(expected), atol=3e-7, rtol=0)


def test_angles_on_a_gpu_are_those_of_float64() raises:
    check_angles(8, 10000, 1)
    check_angles(128, 500000, 8)
    check_angles(136, 10000, 0.125)
    check_angles(512, 2, 1)


def test_no_theta_is_off_on_a_gpu() raises:
    assert_equal(RotaryFrequencies.of(64, 0, 1).rotates(), False)
    assert_equal(RotaryFrequencies.of(64, 10000, 1).rotates(), True)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
