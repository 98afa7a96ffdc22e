"""The rest of a step between our ops: functions of each element, and of two, in float32, rounded once."""

from std.math import floor, log1p, rsqrt, tanh
from std.utils.numerics import isnan

from ..isa.convert import LANES, narrow, widen
from ..isa.threads import Workers, for_rows
from .elementwise import GELU_TANH, SIGMOID, activated, for_vectors

comptime TANH: StaticString = "tanh"
comptime FLOOR: StaticString = "floor"
comptime LOG1P: StaticString = "log1p"
comptime RSQRT: StaticString = "rsqrt"
comptime UNARY = (TANH, FLOOR, LOG1P, RSQRT, GELU_TANH, SIGMOID)
"""In the order of their numbers (`runtime/program_ops.py`)."""
comptime ADD: StaticString = "add"
comptime SUB: StaticString = "sub"
comptime MUL: StaticString = "mul"
comptime DIV: StaticString = "div"
comptime MIN: StaticString = "min"
comptime MAX: StaticString = "max"
comptime BINARY = (ADD, SUB, MUL, DIV, MIN, MAX)


@fieldwise_init
struct Operand[dtype: DType](TrivialRegisterPassable):
    """A matrix, one of whose rows or columns may stand for all."""

    var at: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    var row: Int
    """Elements from a row to the next; 0 where all rows are one."""
    var column: Int
    """1, or 0 where all columns are one."""

    @always_inline
    def load[width: Int](self, row: Int, column: Int) -> SIMD[DType.float32, width]:
        var first = self.at.unsafe_offset(row * self.row)
        if self.column == 0:
            return widen[1](first)[0]
        return widen[width](first.unsafe_offset(column))


@no_inline
def unary[
    dtype: DType, //, function: StaticString
](
    y: Pointer[Scalar[dtype], MutUntrackedOrigin],
    x: Pointer[Scalar[dtype], MutUntrackedOrigin],
    count: Int,
    workers: Workers,
):
    """`y = f(x)`."""

    def part[width: Int](at: Int) {var y, var x}:
        var value = widen[width](x.unsafe_offset(at))
        comptime if function == TANH:
            value = isnan(value).select(value, tanh(value))  # the function clamps its argument
        elif function == FLOOR:
            value = floor(value)
        elif function == GELU_TANH or function == SIGMOID:
            value = activated[function](value)
        elif function == RSQRT:
            value = rsqrt(value)
        else:
            value = log1p(value)
        y.unsafe_store(at, narrow[dtype](value))

    for_vectors(part, count, workers)


@no_inline
def binary[
    dtype: DType, //, function: StaticString
](
    y: Pointer[Scalar[dtype], MutUntrackedOrigin],
    x: Operand[dtype],
    z: Operand[dtype],
    rows: Int,
    columns: Int,
    workers: Workers,
):
    """`y = f(x, z)`, `[rows, columns]`."""

    def task(begin: Int, end: Int) {var y, var x, var z, var columns}:
        var whole = columns // LANES * LANES
        for row in range(begin, end):
            for column in range(0, whole, LANES):
                y.unsafe_store(row * columns + column, combined[function, LANES](x, z, row, column))
            for column in range(whole, columns):
                y.unsafe_store(row * columns + column, combined[function, 1](x, z, row, column))

    for_rows(task, rows, columns, workers)


@always_inline
def combined[
    dtype: DType, //, function: StaticString, width: Int
](x: Operand[dtype], z: Operand[dtype], row: Int, column: Int) -> SIMD[dtype, width]:
    var a = x.load[width](row, column)
    var b = z.load[width](row, column)
    comptime if function == ADD:
        return narrow[dtype](a + b)
    elif function == SUB:
        return narrow[dtype](a - b)
    elif function == MUL:
        return narrow[dtype](a * b)
    elif function == DIV:
        return narrow[dtype](a / b)
    elif function == MIN:  # NaN where one of them is
        return narrow[dtype]((b.lt(a) | isnan(b)).select(b, a))
    else:
        return narrow[dtype]((b.gt(a) | isnan(b)).select(b, a))


@no_inline
def mean_of_rows(
    y: Pointer[Float32, MutUntrackedOrigin],
    x: Pointer[Float32, MutUntrackedOrigin],
    rows: Int,
    columns: Int,
    workers: Workers,
):
    """The mean of each row of x."""

    def task(begin: Int, end: Int) {var y, var x, var columns}:
        for row in range(begin, end):
            var at = x.unsafe_offset(row * columns)
            var whole = columns // LANES * LANES
            var sums = SIMD[DType.float32, LANES](0)
            for d in range(0, whole, LANES):
                sums += at.unsafe_load[width=LANES](d)
            var total = sums.reduce_add()
            for d in range(whole, columns):
                total += at[unsafe_offset=d]
            y[unsafe_offset=row] = total / Float32(columns)

    for_rows(task, rows, columns, workers)
