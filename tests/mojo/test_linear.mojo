"""The linear layer's promise on bits: neither threads nor the other rows of x change a bit of a row.

That a row is right: tests/ops/test_linear_op.py.
"""

from std.testing import TestSuite, assert_equal

from mojo_ops.linear.dispatch import linear
from mojo_ops.linear.member import LinearMember
from mojo_ops.linear.vectors import linear_vectors
from support import untracked_mutable

comptime ROWS = 141
"""More than are packed at once, and one panel beyond that."""


def numbers[dtype: DType](count: Int) -> List[Scalar[dtype]]:
    """Numbers whose sums depend on the order of addition."""
    var found = List[Scalar[dtype]](length=count, fill=0)
    for i in range(count):
        found[i] = (Float32(i * 7919 % 1009 - 504) / 97).cast[dtype]()
    return found^


def check[dtype: DType, weight_dtype: DType, vectors: Bool](n: Int, k: Int) raises:
    """All counts of threads and of rows against all rows on one thread."""
    var x = numbers[dtype](ROWS * k)
    var w = numbers[weight_dtype](n * k)
    var all = List[Scalar[dtype]](length=ROWS * n, fill=0)

    def multiply(mut y: List[Scalar[dtype]], first: Int, m: Int, workers: Int) {mut x, mut w, var n, var k}:
        var rows = untracked_mutable(x).unsafe_offset(first * k)
        comptime if vectors:
            linear_vectors(untracked_mutable(y), rows, untracked_mutable(w), m, n, k, workers)
        else:
            var member = LinearMember(untracked_mutable(y), untracked_mutable(w), n)
            var members = List[type_of(member)](length=1, fill=member)
            linear(untracked_mutable(members), 1, rows, m, k, workers)
            _ = members^

    multiply(all, 0, ROWS, 1)
    for m in [1, 2, 3, 4, 5, 8, 9, 17, 64, 100, ROWS]:
        for workers in [1, 2, 5, 11]:
            var first = ROWS - m
            var y = List[Scalar[dtype]](length=m * n, fill=0)
            multiply(y, first, m, workers)
            for i in range(m * n):
                assert_equal(y[i], all[first * n + i])
    _ = x^
    _ = w^


def test_bits_of_vectors() raises:
    for k in [1, 63, 700, 1035]:
        check[DType.bfloat16, DType.bfloat16, True](77, k)
        check[DType.float32, DType.bfloat16, True](50, k)
        check[DType.float16, DType.float16, True](131, k)
        check[DType.float32, DType.float32, True](7, k)


def test_bits_of_the_fastest_form() raises:
    for k in [1, 63, 1035]:
        check[DType.bfloat16, DType.bfloat16, False](77, k)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
