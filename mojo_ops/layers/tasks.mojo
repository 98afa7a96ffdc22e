"""Rows of a call on several threads."""

from std.math import ceildiv

from max.algorithm import sync_parallelize

comptime TASK_ELEMENTS = 16384
"""Elements of a task, at least: fewer take less time than a thread takes to begin."""


@always_inline
def for_rows[Task: def(Int, Int) -> None, //](task: Task, rows: Int, row_elements: Int, workers: Int):
    """Runs `task(begin, end)` for ranges that make up all rows, on up to `workers` threads."""
    var count = max(1, min(min(workers, rows), rows * row_elements // TASK_ELEMENTS))
    if count == 1:
        task(0, rows)
        return
    var each = ceildiv(rows, count)

    def part(index: Int) {ref task, var each, var rows}:
        task(min(rows, index * each), min(rows, (index + 1) * each))

    sync_parallelize(part, count)
