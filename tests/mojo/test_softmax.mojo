"""AttentionState and exp2, against Float64."""

from std.ffi import external_call
from std.math import log2
from std.memory import bitcast
from std.testing import TestSuite, assert_almost_equal, assert_equal, assert_true
from std.utils.numerics import inf, isnan, nan

from mojo_ops.attention.softmax import AttentionState, MINUS_INFINITY, exp2

comptime NAN = nan[DType.float32]()
comptime INFINITY = inf[DType.float32]()


def exp2_64(x: Float64) -> Float64:
    return external_call["exp2", Float64](x)


def scores() -> List[Float32]:
    """Base-2 scores of 40 tokens, far apart and close together."""
    var scores = List[Float32]()
    for i in range(40):
        scores.append(Float32((i * 37) % 41) * 0.75 - Float32(i % 7) * 3.5 - 4)
    return scores^


struct Part(Copyable):
    """Scores `[begin, end)` and their values 1, 2, 3 ...: a state and its weighted sum."""

    var state: AttentionState
    var sum: Float32

    def __init__(out self, scores: List[Float32], begin: Int, end: Int):
        self.state = AttentionState()
        self.sum = 0
        for i in range(begin, end):
            self.sum *= self.state.raise_to(scores[i])
            var weight = exp2(scores[i] - self.state.greatest)
            self.state.add(weight)
            self.sum += weight * Float32(i + 1)

    def merge(mut self, other: Self):
        var mine, theirs = self.state.merge(other.state)
        self.sum = self.sum * mine + other.sum * theirs

    def check(self, scores: List[Float32], begin: Int, end: Int) raises:
        """Compares with a softmax over `[begin, end)` in Float64."""
        var total = Float64(0)
        var sum = Float64(0)
        for i in range(begin, end):
            var weight = exp2_64(Float64(scores[i]))
            total += weight
            sum += weight * Float64(i + 1)
        assert_almost_equal(Float64(self.state.lse()), log2(total), atol=1e-6, rtol=1e-6)
        var output = Float64(self.sum * self.state.normaliser())
        assert_almost_equal(output, sum / total, atol=0, rtol=1e-6)


def check_empty(state: AttentionState) raises:
    assert_equal(state.lse(), MINUS_INFINITY)
    assert_equal(state.normaliser(), 0)
    assert_equal(state.total, 0)


def test_exp2_accuracy() raises:
    """A relative error of 2^-23, two units in the last place at most, from 0 down to the end of its range."""
    var worst = Float64(0)
    for i in range(125 * 1024 + 1):
        var x = -Float32(i) / 1024
        var expected = exp2_64(Float64(x))
        worst = max(worst, abs(Float64(exp2(x)) / expected - 1))
        worst = max(worst, abs(Float64(exp2(SIMD[DType.float32, 16](x))[i % 16]) / expected - 1))
    assert_true(worst <= 1.0 / (1 << 23), String("off by ", worst))


def test_exp2_is_exact_at_integers() raises:
    var expected = Float32(1)
    for i in range(126):
        assert_equal(exp2(Float32(-i)), expected)
        assert_equal(exp2(SIMD[DType.float32, 32](Float32(-i))), SIMD[DType.float32, 32](expected))
        expected *= 0.5


def test_exp2_of_what_is_no_score() raises:
    assert_equal(exp2(MINUS_INFINITY), 0)
    assert_equal(exp2(Float32(-125.01)), 0)
    assert_equal(exp2(Float32(-3e38)), 0)
    assert_true(isnan(exp2(NAN)))
    # A NaN may carry any bits; arithmetic on them must not make it a number.
    for payload in [Int32(0x7FC00001), Int32(-1), Int32(0x7F800001)]:
        assert_true(isnan(exp2(bitcast[DType.float32, 1](payload))))
        assert_true(isnan(exp2(SIMD[DType.float32, 16](bitcast[DType.float32, 1](payload)))).reduce_and())


def check_vector[length: Int]() raises:
    """Every lane for itself: values at the ends of the range, and what is no score, wherever they are."""
    var values: List[Float32] = [0, -1, -2.5, MINUS_INFINITY, NAN, -126, -0.125, -20, -125, -125.01, -3e38, -1e-10]
    for shift in range(length):
        var x = SIMD[DType.float32, length](0)
        for lane in range(length):
            x[lane] = values[(lane + shift) % len(values)]
        var found = exp2(x)
        for lane in range(length):
            var one = exp2(x[lane])
            assert_equal(isnan(found[lane]), isnan(one))
            if not isnan(one):
                assert_almost_equal(found[lane], one, atol=0, rtol=2.0 / (1 << 23))


def test_exp2_of_a_vector() raises:
    check_vector[8]()
    check_vector[16]()
    check_vector[32]()


def test_empty_state() raises:
    check_empty(AttentionState())
    check_empty(AttentionState.of_lse(MINUS_INFINITY))
    var state = AttentionState()
    assert_equal(state.raise_to(MINUS_INFINITY), 1)
    check_empty(state)


def test_merge_of_parts_is_the_whole() raises:
    """Any cut, either order, empties among the parts."""
    var all = scores()
    for cut in range(41):
        var left = Part(all, 0, cut)
        left.merge(Part(all, cut, 40))
        left.check(all, 0, 40)
        var right = Part(all, cut, 40)
        right.merge(Part(all, 0, cut))
        right.check(all, 0, 40)


def test_merge_of_normalised_parts() raises:
    """A merge of outputs that are already divided by their sums: only the lse is known of them."""
    var all = scores()
    for cut in [0, 1, 20, 40]:
        var merged = Part(all, 0, 0)
        for begin, end in [(0, cut), (cut, 40)]:
            var part = Part(all, begin, end)
            part.sum *= part.state.normaliser()
            part.state = AttentionState.of_lse(part.state.lse())
            merged.merge(part)
        merged.check(all, 0, 40)


def test_scores_far_apart() raises:
    """The lesser part vanishes; nothing overflows."""
    var all: List[Float32] = [3e38, -3e38, 1000, -1000]
    for begin in range(4):
        var merged = Part(all, begin, begin + 1)
        for other in range(4):
            if other != begin:
                merged.merge(Part(all, other, other + 1))
        assert_equal(merged.state.lse(), 3e38)
        assert_equal(merged.sum * merged.state.normaliser(), 1)


def test_nan_stays() raises:
    """A NaN score shows in the result, whatever comes before, after, or from the other side of a merge."""
    var before: List[Float32] = [NAN, 1]
    var after: List[Float32] = [1, NAN]
    for all in [before^, after^]:
        assert_true(isnan(Part(all, 0, 2).state.lse()))
        assert_true(isnan(Part(all, 0, 2).state.normaliser()))
        var merged = Part(all, 0, 1)
        merged.merge(Part(all, 1, 2))
        assert_true(isnan(merged.state.lse()))
        assert_true(isnan(merged.sum * merged.state.normaliser()))


def test_nan_stays_where_the_greatest_score_lost_it() raises:
    """Beside masked scores a vector's maximum may be -inf, though a weight is NaN."""
    var state = AttentionState(MINUS_INFINITY, NAN)
    assert_true(isnan(state.lse()))
    assert_true(isnan(state.normaliser()))
    var merged = AttentionState(1, 1)
    var mine, theirs = merged.merge(state)
    assert_equal(mine, 1)
    assert_equal(theirs, 0)
    assert_true(isnan(merged.lse()))
    _ = state.merge(AttentionState(1, 1))
    assert_true(isnan(state.lse()))


def test_an_infinite_score_gives_nan() raises:
    var all: List[Float32] = [1, INFINITY]
    assert_true(isnan(Part(all, 0, 2).state.lse()))


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
