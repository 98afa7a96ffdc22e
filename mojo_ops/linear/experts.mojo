"""Linear layers of which each row takes one of many: the experts of a mixture, or the heads of attention.

The rows of an expert are gathered, multiplied as one linear layer, and written back. So each weight is read once a
call, whatever the number of its rows, and experts without rows are not read. A row's result is bit by bit what `linear`
gives for it alone.
"""

from std.math import ceildiv
from std.memory import unsafe_memcpy, unsafe_memset_zero
from std.sys import size_of

from ..cache.pointers import RowPointer, untracked
from ..isa.line_counter import LineCounter
from .dispatch import linear
from .member import LinearMember
from ..isa.threads import Workers, run_tasks

comptime COPIED_ROWS = 64
"""Rows that one task copies."""
comptime EXPERTS_OF_A_THREAD = 3
"""Experts with rows for each thread, from which on a thread takes a whole one: fewer would leave threads idle."""
comptime SMALL_BYTES = 2**18
"""Bytes of a weight that is too small to be shared by threads: waiting for them would take as long."""


def check_experts(experts: RowPointer, rows: Int, m: Int, count: Int) raises:
    """Every row names one of `count` experts or -1, and each of the `m` rows of x serves as many of them."""
    if rows != 0 if m == 0 else rows % m != 0:
        raise Error("experts: its length ", rows, " is no multiple of the ", m, " rows of x")
    for row in range(rows):
        var expert = Int(experts[unsafe_offset=row])
        if expert < -1 or expert >= count:
            raise Error("experts: row ", row, " names expert ", expert, " of ", count)


struct Grouping(Movable):
    """The rows of a call, sorted by expert; rows of one expert stay in their order."""

    var starts: List[Int]
    """The first row of each expert in `order`, and after them where those of no expert do: `[count + 1]`."""
    var order: List[Int]
    """`[rows]`."""
    var is_sorted: Bool
    """True if the rows are in this order already."""

    def __init__(out self, experts: RowPointer, rows: Int, count: Int):
        self.starts = List[Int](length=count + 1, fill=0)
        self.order = List[Int](length=rows, fill=0)
        self.is_sorted = True
        for row in range(rows):
            var expert = Int(experts[unsafe_offset=row])
            if expert >= 0:
                self.starts[expert + 1] += 1
        for expert in range(count):
            self.starts[expert + 1] += self.starts[expert]
        var free = self.starts.copy()
        for row in range(rows):
            var expert = Int(experts[unsafe_offset=row])
            var to = count if expert < 0 else expert
            self.order[free[to]] = row
            self.is_sorted = self.is_sorted and free[to] == row
            free[to] += 1


def linear_experts[
    dtype: DType, weight_dtype: DType, //
](
    y: Pointer[Scalar[dtype], MutUntrackedOrigin],
    x: Pointer[Scalar[dtype], MutUntrackedOrigin],
    w: Pointer[Scalar[weight_dtype], MutUntrackedOrigin],
    experts: RowPointer,
    rows: Int,
    m: Int,
    count: Int,
    n: Int,
    k: Int,
    workers: Workers,
):
    """Computes `y[r] = x[r // (rows / m)] w[experts[r]]^T`; 0 where the expert is -1.

    Args:
        y: `[rows, n]`.
        x: `[m, k]`.
        w: `[count, n, k]`.
        experts: `[rows]`, checked.
        rows: Rows of y.
        m: Rows of x, a divisor of `rows`.
        count: Experts.
        n: Columns of y.
        k: Columns of x.
        workers: Threads; the result does not depend on them.
    """
    if rows == 0:
        return
    var grouping = Grouping(experts, rows, count)
    var used = grouping.starts[count]
    var order = untracked(grouping.order.unsafe_ptr())
    var share = rows // m
    # Where x is read or y written in the order of the experts, no copy is needed.
    var in_place = grouping.is_sorted
    var x_memory = List[Scalar[dtype]](capacity=0 if in_place and share == 1 else used * k)
    var y_memory = List[Scalar[dtype]](capacity=0 if in_place else used * n)
    var xs = x if in_place and share == 1 else untracked(x_memory.unsafe_ptr())
    var ys = y if in_place else untracked(y_memory.unsafe_ptr())

    if not (in_place and share == 1):

        def gather(task: Int) {var x, var xs, var order, var used, var share, var k}:
            for at in range(task * COPIED_ROWS, min(used, (task + 1) * COPIED_ROWS)):
                unsafe_memcpy(
                    dest=xs.unsafe_offset(at * k), src=x.unsafe_offset(order[unsafe_offset=at] // share * k), count=k
                )

        copy_tasks(gather, used, workers)
    ExpertLinear[dtype, weight_dtype](ys, xs, w, untracked(grouping.starts.unsafe_ptr()), count, n, k).run(workers)
    if not in_place:

        def scatter(task: Int) {var y, var ys, var order, var used, var n}:
            for at in range(task * COPIED_ROWS, min(used, (task + 1) * COPIED_ROWS)):
                unsafe_memcpy(
                    dest=y.unsafe_offset(order[unsafe_offset=at] * n),
                    src=ys.unsafe_offset(at * n),
                    count=n,
                )

        copy_tasks(scatter, used, workers)
    for at in range(used, rows):
        unsafe_memset_zero(y.unsafe_offset(order[unsafe_offset=at] * n), n)
    _ = grouping^
    _ = x_memory^
    _ = y_memory^


@always_inline
def copy_tasks[Task: def(Int) -> None, //](task: Task, used: Int, workers: Workers):
    """Runs a task for each `COPIED_ROWS` rows."""
    var count = ceildiv(used, COPIED_ROWS)
    run_tasks(task, count, workers.at_most(count))


@fieldwise_init
struct ExpertLinear[dtype: DType, weight_dtype: DType](TrivialRegisterPassable):
    """The operands of a call, with rows sorted by expert."""

    var y: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[rows, n]`."""
    var x: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[rows, k]`."""
    var w: Pointer[Scalar[Self.weight_dtype], MutUntrackedOrigin]
    """`[count, n, k]`."""
    var starts: Pointer[Int, MutUntrackedOrigin]
    """The first row of each expert, and where the last one's end: `[count + 1]`."""
    var count: Int
    var n: Int
    var k: Int

    def run(self, workers: Workers):
        """Computes y. The next idle thread takes the next expert where there are enough of them or they are small; else
        all threads work on one expert after the other.
        """
        var present = 0
        for expert in range(self.count):
            present += Int(self.starts[unsafe_offset=expert + 1] > self.starts[unsafe_offset=expert])
        var small = self.n * self.k * size_of[Self.weight_dtype]() <= SMALL_BYTES
        if workers.count == 1 or (present < EXPERTS_OF_A_THREAD * workers.count and not small):
            for expert in range(self.count):
                self.multiply(expert, workers)
            return
        var counter = LineCounter()
        var taken = counter.at()

        def task(index: Int) {var self, var taken}:
            var expert = Int(taken[].fetch_add(1))
            while expert < self.count:
                self.multiply(expert, 1)
                expert = Int(taken[].fetch_add(1))

        run_tasks(task, max(1, min(present, workers.count)), workers)
        _ = counter^

    def multiply(self, expert: Int, workers: Workers):
        """Multiplies the rows of one expert on so many threads."""
        var begin = self.starts[unsafe_offset=expert]
        var rows = self.starts[unsafe_offset=expert + 1] - begin
        if rows > 0:
            var y = self.y.unsafe_offset(begin * self.n)
            var member = LinearMember(y, self.w.unsafe_offset(expert * self.n * self.k), self.n)
            var members = List[LinearMember[Self.dtype, Self.weight_dtype]](length=1, fill=member)
            linear(
                untracked(members.unsafe_ptr()),
                1,
                self.x.unsafe_offset(begin * self.k),
                rows,
                self.k,
                workers,
            )
            _ = members^
