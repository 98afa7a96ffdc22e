"""Parts of a call on several threads, or on the calling thread alone.

A call is told its threads by `Workers`. In a graph they are MAX's. A library of kernels (`../library.mojo`) is compiled
with `-D PAGED_KV_LIBRARY` and has no threads of its own: its caller passes a function that runs a team of threads.
"""

from std.atomic import Atomic
from std.math import ceildiv
from std.sys import inlined_assembly
from std.sys.defines import is_defined
from std.utils.numerics import FlushDenormals

from max.algorithm import sync_parallelize
from max.runtime.asyncrt import parallelism_level

comptime IN_LIBRARY = is_defined["PAGED_KV_LIBRARY"]()
"""True if MAX's threads are out of reach, and only the team of `Workers` is there."""

comptime Body = def(Int) thin abi("C") -> None
"""The work of each thread of a team: a C function of the address of what they share."""
comptime Team = def(Int, Int, UInt32, UInt32, Int) thin abi("C") -> None
"""`team(body, shared, threads, 0, state)` runs `body(shared)` on each of up to so many threads, this one included, and
waits for them: the signature of OpenMP's `GOMP_parallel`, which takes no state and so does not see it."""

comptime TASK_ELEMENTS = 16384
"""Elements of a task of `for_rows`, at least: fewer take less time than a thread takes to begin."""


struct Workers(TrivialRegisterPassable):
    """The threads of a call."""

    var count: Int
    """Threads at most."""
    var team: Int
    """The address of a `Team`, or 0 for MAX's threads."""
    var state: Int
    """The address of the team's own state."""

    @implicit
    def __init__(out self, count: Int):
        """MAX's threads; or the calling one alone."""
        self = Self(count, 0, 0)

    def __init__(out self, count: Int, team: Int, state: Int):
        """Threads that the function at an address brings."""
        self.count = max(1, count)
        self.team = team
        self.state = state

    @always_inline
    def at_most(self, count: Int) -> Self:
        """No more of them than `count`."""
        return Self(min(self.count, count), self.team, self.state)


@always_inline
def run_tasks[Task: def(Int) -> None, //](task: Task, count: Int, workers: Workers):
    """Runs `task(0)` to `task(count - 1)` on up to `workers` threads.

    With one worker they run here, one after the other: a task may then be a part of another task, which must not wait
    for threads. What is no normal number is 0 in all of them, as MAX has it in its own.
    """
    if workers.count == 1:
        with FlushDenormals():
            for index in range(count):
                task(index)
        return
    comptime if IN_LIBRARY:
        run_on_team(task, count, workers.at_most(count))
    else:
        sync_parallelize(task, count)


@always_inline
def for_rows[Task: def(Int, Int) -> None, //](task: Task, rows: Int, row_elements: Int, workers: Workers):
    """Runs `task(begin, end)` for ranges that make up all rows, on up to `workers` threads."""
    var count = max(1, min(min(workers.count, rows), rows * row_elements // TASK_ELEMENTS))
    var each = ceildiv(rows, count)

    def part(index: Int) {ref task, var each, var rows}:
        task(min(rows, index * each), min(rows, (index + 1) * each))

    run_tasks(part, count, workers.at_most(count))


struct SharedTasks[Task: def(Int) -> None]:
    """Tasks that the threads of a team share."""

    var task: Pointer[Self.Task, ImmUntrackedOrigin]
    var count: Int
    var taken: Atomic[Int64]
    """Tasks that a thread has begun."""

    def __init__(out self, task: Pointer[Self.Task, ImmUntrackedOrigin], count: Int):
        self.task = task
        self.count = count
        self.taken = Atomic[Int64](0)


def run_on_team[Task: def(Int) -> None, //](task: Task, count: Int, workers: Workers):
    """Runs all tasks on a team of up to `workers` threads: the next idle thread takes the next task."""

    def take_tasks(shared: Pointer[SharedTasks[Task], MutUntrackedOrigin]) abi("C"):
        with FlushDenormals():
            var index = Int(shared[].taken.fetch_add(1))
            while index < shared[].count:
                shared[].task[](index)
                index = Int(shared[].taken.fetch_add(1))

    # A function of the module with this parameter would count as one that captures.
    comptime Shared = Pointer[SharedTasks[Task], MutUntrackedOrigin]
    comptime body: def(Shared) thin abi("C") -> None = take_tasks
    var at = Pointer(to=task).unsafe_mut_cast[False]().unsafe_origin_cast[ImmUntrackedOrigin]()
    var shared = SharedTasks[Task](at, count)
    keep_in_memory(at)
    keep_in_memory(Pointer(to=shared))
    var function = body
    var team = workers.team
    Pointer(to=team).unsafe_bitcast[Team]()[](
        Pointer(to=function).unsafe_bitcast[Int]()[],
        Int(Pointer(to=shared)),
        UInt32(workers.count),
        UInt32(0),
        workers.state,
    )
    keep_in_memory(Pointer(to=shared))
    keep_in_memory(at)
    _ = shared^


@always_inline
def keep_in_memory(at: Pointer[_, _]):
    """Has everything stored that lies at an address, which other threads read.

    The compiler does not see that they do, and leaves out such stores (on x86-64's baseline, what a task captures).
    """
    inlined_assembly["", NoneType, constraints="r,~{memory}", has_side_effect=True](at)


def team_of_max(body: Int, shared: Int, threads: UInt32, flags: UInt32, state: Int) abi("C"):
    """A `Team` of MAX's threads."""

    def part(index: Int) {var body, var shared}:
        var function = body
        Pointer(to=function).unsafe_bitcast[Body]()[](shared)

    sync_parallelize(part, Int(threads))


def workers_of_max() -> Workers:
    """MAX's threads, for a library that a graph calls."""
    var team: Team = team_of_max
    return Workers(parallelism_level(None), Pointer(to=team).unsafe_bitcast[Int]()[], 0)
