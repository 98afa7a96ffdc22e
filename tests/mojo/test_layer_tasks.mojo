"""Rows of a layer's ops on several threads: each row in exactly one task, whatever the number of threads."""

from std.testing import TestSuite, assert_equal, assert_true

from mojo_ops.layers.elementwise import for_vectors
from mojo_ops.isa.threads import TASK_ELEMENTS, for_rows
from support import untracked_mutable

comptime GUARD = 64
"""Entries past the last row: an index that is not clipped lands in them."""


def visits(rows: Int, row_elements: Int, workers: Int) -> List[Int32]:
    """Return how often each row, and each index past the last one, was in a task."""
    var counts = List[Int32](length=rows + GUARD, fill=0)
    var at = untracked_mutable(counts)

    def task(begin: Int, end: Int) {var at}:
        for row in range(begin, end):
            at[unsafe_offset=row] += 1

    for_rows(task, rows, row_elements, workers)
    return counts^


def test_each_row_is_in_one_task() raises:
    """Also with more threads than rows, and with rows that no number of threads divides."""
    for rows in [0, 1, 2, 3, 5, 7, 16, 37]:
        for workers in [1, 2, 3, 4, 7, 16, 40]:
            for row_elements in [0, 1, TASK_ELEMENTS // 5, TASK_ELEMENTS, 3 * TASK_ELEMENTS]:
                var counts = visits(rows, row_elements, workers)
                for row in range(len(counts)):
                    assert_equal(counts[row], Int32(1 if row < rows else 0))


def tasks_of(rows: Int, row_elements: Int, workers: Int) -> Int:
    """Tasks that have a row."""
    var begins = List[Int32](length=rows + 1, fill=0)
    var at = untracked_mutable(begins)

    def task(begin: Int, end: Int) {var at}:
        if begin < end:
            at[unsafe_offset=begin] += 1

    for_rows(task, rows, row_elements, workers)
    var count = 0
    for begin in begins:
        count += Int(begin)
    return count


def test_no_more_tasks_than_threads_and_none_below_its_least_size() raises:
    for workers in [1, 2, 5, 16]:
        assert_equal(tasks_of(80, TASK_ELEMENTS, workers), workers)
        assert_equal(tasks_of(80, TASK_ELEMENTS // 80, workers), 1)
        assert_true(tasks_of(80, TASK_ELEMENTS // 20, workers) <= 4)
    assert_equal(tasks_of(3, TASK_ELEMENTS, 16), 3)


def test_each_element_is_in_one_vector_or_alone() raises:
    for count in [0, 1, 15, 16, 17, 31, 32, 33, 2 * TASK_ELEMENTS + 5, 3 * TASK_ELEMENTS]:
        for workers in [1, 3, 16]:
            var counts = List[Int32](length=count + GUARD, fill=0)
            var at = untracked_mutable(counts)

            def part[width: Int](first: Int) {var at}:
                for i in range(first, first + width):
                    at[unsafe_offset=i] += 1

            for_vectors(part, count, workers)
            for i in range(len(counts)):
                assert_equal(counts[i], Int32(1 if i < count else 0))


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
