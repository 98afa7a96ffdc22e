"""The soft cap of a score, against Float64 over all ratios and caps."""

from std.ffi import external_call
from std.testing import TestSuite, assert_equal, assert_true
from std.utils.numerics import inf, isnan, nan, nextafter

from mojo_ops.attention.logits import soft_capped

comptime INFINITY = inf[DType.float32]()
comptime STEPS = 200_000
comptime WIDTH = 16


def exact(x: Float32, cap: Float32) -> Float64:
    return Float64(cap) * external_call["tanh", Float64](Float64(x) / Float64(cap))


def error(found: Float32, x: Float32, cap: Float32) -> Float64:
    """In units of the last place of the exact result, of normal numbers."""
    var expected = exact(x, cap)
    var rounded = abs(Float32(expected))
    var unit = nextafter(rounded, INFINITY) - rounded if rounded < 3e38 else rounded - nextafter(rounded, Float32(0))
    return abs(Float64(found) - expected) / max(Float64(unit), 1.4e-45)


def worst[width: Int](cap: Float32, lowest: Float32, highest: Float32, factor: Float32) -> Float64:
    """The greatest error over ratios of both signs from `lowest` on, each `factor` times the one before."""
    var most = Float64(0)
    var ratio = lowest
    while ratio < highest:
        var x = SIMD[DType.float32, width](0)
        for i in range(width):
            x[i] = ratio * cap * (Float32(1) if i % 2 == 0 else Float32(-1))
            ratio *= factor
        var found = soft_capped(x, cap)
        for i in range(width):
            if abs(x[i]) < 3e38:
                most = max(most, error(found[i], x[i], cap))
    return most


def test_ratios_of_ordinary_caps() raises:
    for cap in [Float32(0.5), 1, 7.3, 30, 50, 100]:
        assert_true(worst[16](cap, 1e-4, 30, 1.00001) < 3)
        assert_true(worst[8](cap, 1e-4, 30, 1.00003) < 3)
        assert_true(worst[1](cap, 1e-4, 30, 1.001) < 3)


def test_scores_far_below_the_cap() raises:
    """They are returned as they are, whatever their ratio to the cap."""
    for cap in [Float32(1), 50, 1e10, 1e35, 3.4e38]:
        for x in [Float32(1e-30), 1e-10, 1e-4, 0.5]:
            if x < 1e-4 * cap:
                assert_equal(soft_capped(x, cap), x)
                assert_equal(soft_capped(-x, cap), -x)


def test_caps_at_the_ends_of_float32() raises:
    for cap in [Float32(1.1754944e-38), 1e-35, 1e35, 1.7e38, 3.4e38]:
        assert_true(worst[16](cap, 0.01, 30, 1.001) < 3)


def test_what_is_not_finite() raises:
    for cap in [Float32(1.1754944e-38), 50, 3.4e38]:
        assert_equal(soft_capped(INFINITY, cap), cap)
        assert_equal(soft_capped(-INFINITY, cap), -cap)
        assert_equal(soft_capped(Float32(3.4e38), cap), Float32(exact(3.4e38, cap)))
        assert_true(isnan(soft_capped(nan[DType.float32](), cap)))
        assert_equal(soft_capped(Float32(0), cap), 0)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
