"""Parts of a call on several threads, or on the calling thread alone.

The threads are MAX's. A library that other programs call (`runtime/native.mojo`) is compiled with
`-D PAGED_KV_OPENMP`, and runs on OpenMP's threads, which are those of the program that loaded it.
"""

from std.atomic import Atomic
from std.ffi import external_call
from std.math import ceildiv
from std.sys.defines import is_defined
from std.utils.numerics import FlushDenormals

from max.algorithm import sync_parallelize

comptime ON_OPENMP = is_defined["PAGED_KV_OPENMP"]()
"""Whether parts run on OpenMP's threads instead of MAX's."""

comptime TASK_ELEMENTS = 16384
"""Elements of a task of `for_rows`, at least: fewer take less time than a thread takes to begin."""


@always_inline
def run_tasks[Task: def(Int) -> None, //](task: Task, count: Int, workers: Int):
    """Runs `task(0)` to `task(count - 1)` on up to `workers` threads.

    With one worker they run here, one after the other: a task may then be a part of another task, which must not wait
    for threads. What is no normal number is 0 in all of them, as MAX has it in its own.
    """
    if workers == 1:
        with FlushDenormals():
            for index in range(count):
                task(index)
    else:
        comptime if ON_OPENMP:
            run_on_openmp(task, count, min(count, workers))
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

    run_tasks(part, count, count)


struct SharedTasks[Task: def(Int) -> None]:
    """What the threads of a team share."""

    var task: Pointer[Self.Task, ImmUntrackedOrigin]
    var count: Int
    var taken: Atomic[Int64]
    """Tasks that a thread has begun."""

    def __init__(out self, task: Pointer[Self.Task, ImmUntrackedOrigin], count: Int):
        self.task = task
        self.count = count
        self.taken = Atomic[Int64](0)


def run_on_openmp[Task: def(Int) -> None, //](task: Task, count: Int, workers: Int):
    """Runs all tasks in one parallel region of up to `workers` threads.

    `GOMP_parallel` is GNU's name for it, which LLVM's and Intel's libraries have too.
    """

    def take_tasks(shared: Pointer[SharedTasks[Task], MutUntrackedOrigin]) abi("C"):
        with FlushDenormals():
            var index = Int(shared[].taken.fetch_add(1))
            while index < shared[].count:
                shared[].task[](index)
                index = Int(shared[].taken.fetch_add(1))

    # A function of the module with this parameter would count as one that captures.
    comptime body: def(Pointer[SharedTasks[Task], MutUntrackedOrigin]) thin abi("C") -> None = take_tasks
    var at = Pointer(to=task).unsafe_mut_cast[False]().unsafe_origin_cast[ImmUntrackedOrigin]()
    var shared = SharedTasks[Task](at, count)
    external_call["GOMP_parallel", NoneType](body, Pointer(to=shared), UInt32(workers), UInt32(0))
    _ = shared^
