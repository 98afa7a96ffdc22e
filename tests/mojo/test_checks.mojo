"""Views whose sizes pass 64 bits together: no array of an op test has them, so the checks are called themselves."""

from std.testing import TestSuite, assert_raises
from std.utils import IndexList

from mojo_ops.cache.checks import check_view
from mojo_ops.cache.strides import PageStrides


def test_view_whose_sizes_overflow_together() raises:
    """The product of these sizes is 2^64 times something: 0 in 64 bits."""
    var strides = PageStrides(0, 1 << 34, 24, 8)
    with assert_raises(contains="runs past the storage's 1000 elements"):
        check_view("k_blocks", IndexList[4](1 << 32, 1 << 32, 3, 8), strides, 1000)
    with assert_raises(contains="runs past the storage's 0 elements"):
        check_view("k_blocks", IndexList[4](1, 1, 1, 8), PageStrides(0, 0, 0, 0), 0)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
