"""Parts of a call on several threads, or on the calling thread alone."""

from std.math import ceildiv

from max.algorithm import sync_parallelize

comptime TASK_ELEMENTS = 16384
"""Elements of a task of `for_rows`, at least: fewer take less time than a thread takes to begin."""


@always_inline
def run_tasks[Task: def(Int) -> None, //](task: Task, count: Int, workers: Int):
    """Runs `task(0)` to `task(count - 1)`.

    With one worker they run here, one after the other: a task may then be a part of another task, which must not wait
    for threads.
    """
    if workers == 1:
        for index in range(count):
            task(index)
    else:
        sync_parallelize(task, count)


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
