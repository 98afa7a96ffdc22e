"""Cosines and sines of the rotary embedding on the CPU, against the C library in float64."""

from std.ffi import external_call
from std.math import pi
from std.testing import TestSuite, assert_equal, assert_true

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


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
