"""The merge of a split block: every order in which its parts finish gives the same bits, those of one softmax."""

from std.math import exp2
from std.random import random_ui64, seed
from std.testing import TestSuite, assert_almost_equal, assert_equal, assert_true

from mojo_ops.attention.cpu.plan import SPLIT_TOKENS, Segment
from mojo_ops.attention.cpu.split_merge import SplitResults, TaskResult
from mojo_ops.attention.softmax import AttentionState

comptime KV_HEADS = 2
comptime STRIDE = 3
comptime QUERIES = 2  # a KV head has room for one more
comptime PADDED = 32


def part_of(first: Int, part: Int, parts: Int, begin: Int) -> Segment:
    """A part of a block whose first part has slot `first`, and begins after `begin` splits."""
    var token = (begin + part) * SPLIT_TOKENS
    var segment = Segment(0, 1, token, token + 1)
    segment.split_result = first + part
    segment.split = part
    segment.num_splits = parts
    return segment


def fill(split_results: SplitResults, index: Int, p: Int, empty: Int):
    """Part p of query i has greatest score g and total t, and values that depend on all of them; some are empty, and so
    are those before part `empty`."""
    for i in range(KV_HEADS * STRIDE):
        var state = AttentionState(Float32((p * 7 + i * 3) % 11) - 5, 1 + Float32((p + i) % 5))
        if (p + i) % 4 == 1 or p < empty:
            state = AttentionState()
        split_results.states_of(index)[unsafe_offset=i] = state
        for d in range(PADDED):
            split_results.acc_of(index)[unsafe_offset=i * PADDED + d] = state.total * Float32(d - p) / 3
        if i % STRIDE >= QUERIES:  # no query's room: it must stay out of it
            split_results.acc_of(index)[unsafe_offset=i * PADDED] = Float32(0) / Float32(0)


def finish(
    split_results: SplitResults, first: Int, part: Int, parts: Int, mut task: TaskResult, begin: Int = 0, empty: Int = 0
) -> Bool:
    """A task computes a part and merges it; the result that it is left with is no longer needed by others."""
    fill(split_results, task.index, begin + part, empty)
    var complete = split_results.merge_finished(part_of(first, part, parts, begin), KV_HEADS, STRIDE, QUERIES, task)
    if not complete:
        for i in range(KV_HEADS * STRIDE):
            split_results.states_of(task.index)[unsafe_offset=i] = AttentionState(1000, 1)
            for d in range(PADDED):
                split_results.acc_of(task.index)[unsafe_offset=i * PADDED + d] = 1000
    return complete


def check(last: Int, first: Int, begin: Int = 0) raises:
    """The parts `[begin, last)` of one block, computed by three tasks in several orders; at first with empty ones before
    them."""
    var expected = List[Float32]()
    for order in range(12):
        var before = 0 if order == 0 else begin
        var parts = last - before
        var split_results = SplitResults(first + parts, first + parts, 3, KV_HEADS * STRIDE, PADDED)
        var tasks = [TaskResult(0), TaskResult(1), TaskResult(2)]
        var left = List[Int]()
        for p in range(parts):
            left.append(p if order == 0 else parts - 1 - p)
        var result = -1
        while len(left) > 0:
            var i = 0 if order < 2 else Int(random_ui64(0, UInt64(len(left) - 1)))
            var part = left.pop(i)
            ref task = tasks[Int(random_ui64(0, 2))]
            assert_equal(finish(split_results, first, part, parts, task, before, begin), len(left) == 0)
            result = task.index

        for head in range(KV_HEADS):
            for m in range(QUERIES):
                var i = head * STRIDE + m
                var state = split_results.states_of(result)[unsafe_offset=i]
                var total: Float64 = 0
                var value: Float64 = 0
                for p in range(begin, last):
                    if (p + i) % 4 != 1:
                        var greatest = Float64((p * 7 + i * 3) % 11) - 5
                        var weight = exp2(greatest - Float64(state.greatest)) * Float64(1 + (p + i) % 5)
                        total += weight
                        value += weight * Float64(5 - p) / 3
                assert_almost_equal(Float64(state.total), total, rtol=1e-6)
                var found = split_results.acc_of(result)[unsafe_offset=i * PADDED + 5]
                assert_almost_equal(Float64(found), value, rtol=1e-6, atol=1e-6)
                var at = (head * QUERIES + m) * 2
                if order == 0:
                    expected.append(state.total)
                    expected.append(found)
                assert_equal(state.total, expected[at])
                assert_equal(found, expected[at + 1])


def test_every_order_and_number_of_parts() raises:
    seed(1)
    for parts in range(2, 12):
        check(parts, 0)
        check(parts, 3)


def test_empty_parts_change_no_bit() raises:
    for begin in range(1, 7):
        check(begin + 1, 2, begin)
        check(11, 0, begin)


def test_many_parts() raises:
    check(32, 1)
    check(33, 0)


def test_blocks_do_not_meet() raises:
    """Two blocks whose parts finish in turn: each is complete with its own last part, and not before."""
    comptime PARTS = 5
    var split_results = SplitResults(2 * PARTS, 2 * PARTS, 2, KV_HEADS * STRIDE, PADDED)
    var tasks = [TaskResult(0), TaskResult(1)]
    for part in range(PARTS):
        for block in range(2):
            var complete = finish(split_results, block * PARTS, part, PARTS, tasks[block])
            assert_equal(complete, part == PARTS - 1)
    for i in range(KV_HEADS * STRIDE):
        if i % STRIDE < QUERIES:
            assert_equal(
                split_results.acc_of(tasks[0].index)[unsafe_offset=i * PADDED + 5],
                split_results.acc_of(tasks[1].index)[unsafe_offset=i * PADDED + 5],
            )


def test_results_are_used_again() raises:
    """One task that computes the parts in order has one unmerged result for each level of the tree, and its own."""
    comptime PARTS = 64
    var split_results = SplitResults(PARTS, PARTS, 1, KV_HEADS * STRIDE, PADDED)
    var task = TaskResult(0)
    for part in range(PARTS):
        _ = finish(split_results, 0, part, PARTS, task)
        assert_true(task.index <= 6)


def test_lines_are_not_shared() raises:
    """The results of two tasks lie in different cache lines: values, states, counters."""
    var split_results = SplitResults(3, 3, 2, 5, PADDED)
    for index in range(4):
        assert_equal(Int(split_results.acc_of(index)) % 64, 0)
        assert_equal(Int(split_results.states_of(index)) % 64, 0)
        assert_true(Int(split_results.states_of(index + 1)) - Int(split_results.states_of(index)) >= 5 * 8)
    for split in range(3):
        assert_equal(Int(split_results.node(split, 0)) % 64, 0)
    assert_equal(Int(split_results.num_used.at()) % 64, 0)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
