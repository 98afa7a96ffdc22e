"""The merge of a split block: every order in which its parts finish gives the same bits, those of one softmax."""

from std.math import exp2
from std.random import random_ui64, seed
from std.testing import TestSuite, assert_almost_equal, assert_equal

from mojo_ops.attention.cpu.plan import Segment
from mojo_ops.attention.cpu.split_merge import SplitResults
from mojo_ops.attention.softmax import AttentionState

comptime KV_HEADS = 2
comptime STRIDE = 3
comptime QUERIES = 2  # a KV head has room for one more
comptime PADDED = 32


def part_of(first: Int, part: Int, parts: Int) -> Segment:
    """A part of a block whose first part has slot `first`."""
    var segment = Segment(0, 1, 0, 1)
    segment.split_result = first + part
    segment.split = part
    segment.num_splits = parts
    return segment


def fill(split_results: SplitResults, first: Int, parts: Int):
    """Part p of query i has greatest score g and total t, and values that depend on all of them; some are empty."""
    for p in range(parts):
        for i in range(KV_HEADS * STRIDE):
            var state = AttentionState(Float32((p * 7 + i * 3) % 11) - 5, 1 + Float32((p + i) % 5))
            if (p + i) % 4 == 1:
                state = AttentionState()
            split_results.states_of(first + p)[unsafe_offset=i] = state
            for d in range(PADDED):
                split_results.acc_of(first + p)[unsafe_offset=i * PADDED + d] = state.total * Float32(d - p) / 3
            if i % STRIDE >= QUERIES:  # no query's room: it must stay out of it
                split_results.acc_of(first + p)[unsafe_offset=i * PADDED] = Float32(0) / Float32(0)


def check(parts: Int, first: Int) raises:
    var expected = List[Float32]()
    for order in range(12):
        var split_results = SplitResults(first + parts + 1, KV_HEADS * STRIDE, PADDED)
        fill(split_results, first, parts)
        # What belongs to other blocks stays as it is.
        if first > 0:
            split_results.states_of(first - 1)[unsafe_offset=0] = AttentionState(1000, 1)
        split_results.states_of(first + parts)[unsafe_offset=0] = AttentionState(2000, 1)

        var left = List[Int]()
        for p in range(parts):
            left.append(p if order == 0 else parts - 1 - p)
        while len(left) > 0:
            var i = 0 if order < 2 else Int(random_ui64(0, UInt64(len(left) - 1)))
            var part = left.pop(i)
            var complete = split_results.merge_finished(part_of(first, part, parts), KV_HEADS, STRIDE, QUERIES)
            assert_equal(complete, len(left) == 0)

        for head in range(KV_HEADS):
            for m in range(QUERIES):
                var i = head * STRIDE + m
                var state = split_results.states_of(first)[unsafe_offset=i]
                var total: Float64 = 0
                var value: Float64 = 0
                for p in range(parts):
                    if (p + i) % 4 != 1:
                        var greatest = Float64((p * 7 + i * 3) % 11) - 5
                        var weight = exp2(greatest - Float64(state.greatest)) * Float64(1 + (p + i) % 5)
                        total += weight
                        value += weight * Float64(5 - p) / 3
                assert_almost_equal(Float64(state.total), total, rtol=1e-6)
                var found = split_results.acc_of(first)[unsafe_offset=i * PADDED + 5]
                assert_almost_equal(Float64(found), value, rtol=1e-6, atol=1e-6)
                var at = (head * QUERIES + m) * 2
                if order == 0:
                    expected.append(state.total)
                    expected.append(found)
                assert_equal(state.total, expected[at])
                assert_equal(found, expected[at + 1])
        if first > 0:
            assert_equal(split_results.states_of(first - 1)[unsafe_offset=0].greatest, 1000)
        assert_equal(split_results.states_of(first + parts)[unsafe_offset=0].greatest, 2000)


def test_every_order_and_number_of_parts() raises:
    seed(1)
    for parts in range(2, 12):
        check(parts, 0)
        check(parts, 3)


def test_many_parts() raises:
    check(32, 1)
    check(33, 0)


def test_blocks_do_not_meet() raises:
    """Two blocks whose parts finish in turn: each is complete with its own last part, and not before."""
    comptime PARTS = 5
    var split_results = SplitResults(2 * PARTS, KV_HEADS * STRIDE, PADDED)
    fill(split_results, 0, PARTS)
    fill(split_results, PARTS, PARTS)
    for part in range(PARTS):
        for first in [0, PARTS]:
            var complete = split_results.merge_finished(part_of(first, part, PARTS), KV_HEADS, STRIDE, QUERIES)
            assert_equal(complete, part == PARTS - 1)
    for i in range(KV_HEADS * STRIDE):
        if i % STRIDE < QUERIES:
            assert_equal(
                split_results.acc_of(0)[unsafe_offset=i * PADDED + 5],
                split_results.acc_of(PARTS)[unsafe_offset=i * PADDED + 5],
            )


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
