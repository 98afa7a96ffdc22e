"""Tasks of a call on several threads, or on the calling thread alone."""

from max.algorithm import sync_parallelize


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
