"""Linear layers of which each row takes one of many: the experts of a mixture, or the heads of attention.

The rows of an expert are gathered, multiplied as one linear layer, and written back. So each weight is read once a
call, whatever the number of its rows, and experts without rows are not read. A row's result is bit by bit what `linear`
gives for it alone.
"""

from max.algorithm import sync_parallelize
from std.math import ceildiv
from std.memory import unsafe_memcpy, unsafe_memset_zero

from ..cache.pointers import RowPointer, untracked
from .dispatch import linear
from .member import LinearMember

comptime COPIED_ROWS = 64
"""Rows that one task copies."""


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
    """Where each expert's rows begin in `order`, and after them where those of no expert do: `[count + 1]`."""
    var order: List[Int]
    """`[rows]`."""
    var is_sorted: Bool
    """Whether the rows are in this order already."""

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
    workers: Int,
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

        sync_parallelize(gather, ceildiv(used, COPIED_ROWS))
    for expert in range(count):
        var begin = grouping.starts[expert]
        var present = grouping.starts[expert + 1] - begin
        if present > 0:
            var member = LinearMember(ys.unsafe_offset(begin * n), w.unsafe_offset(expert * n * k), n)
            linear(
                Array[LinearMember[dtype, weight_dtype], 1](fill=member),
                xs.unsafe_offset(begin * k),
                present,
                k,
                workers,
            )
    if not in_place:

        def scatter(task: Int) {var y, var ys, var order, var used, var n}:
            for at in range(task * COPIED_ROWS, min(used, (task + 1) * COPIED_ROWS)):
                unsafe_memcpy(dest=y.unsafe_offset(order[unsafe_offset=at] * n), src=ys.unsafe_offset(at * n), count=n)

        sync_parallelize(scatter, ceildiv(used, COPIED_ROWS))
    for at in range(used, rows):
        unsafe_memset_zero(y.unsafe_offset(order[unsafe_offset=at] * n), n)
    _ = grouping^
    _ = x_memory^
    _ = y_memory^
