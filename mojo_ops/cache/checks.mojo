"""Checks of the storage that an op gets, before anything is written.

Every message names the argument, the request and the value.
"""

from std.utils import IndexList

from .pointers import RowPointer
from .strides import PageStrides


@no_inline
def check_same_cache[rank: Int](k_shape: IndexList[rank], v_shape: IndexList[rank], k_at: Int, v_at: Int) raises:
    """K and V have one shape; only arrays that hold both (rank 5, 6) may be, and must be, the same."""
    if k_shape != v_shape:
        raise Error("v_blocks: shape ", v_shape, " differs from k_blocks' ", k_shape)
    comptime if rank >= 5:
        if k_shape[1] != 2:
            raise Error("k_blocks: dimension 1 must be 2 (K and V), not ", k_shape[1])
        if k_at != v_at and k_shape.flattened_length() > 0:
            raise Error("v_blocks: a cache that holds K and V is passed twice, but these are two arrays")


@no_inline
def check_view(what: StaticString, shape: IndexList[4], strides: PageStrides, size: Int) raises:
    """A strided view `[page, slot, head, dim]` lies within its `size` elements."""
    var is_empty = False
    for axis in range(4):
        if shape[axis] < 0:
            raise Error(what, ": shape ", shape, " has a negative dimension")
        is_empty |= shape[axis] == 0
    if is_empty:
        return
    if strides.start < 0 or strides.page < 0 or strides.slot < 0 or strides.head < 0:
        raise Error(what, ": negative strides are not supported")
    # What is left of the storage shrinks axis by axis: a product of sizes could pass 64 bits.
    var left = size - 1 - strides.start
    var steps = IndexList[4](strides.page, strides.slot, strides.head, 1)
    for axis in range(4):
        var last = shape[axis] - 1
        if left < 0 or (steps[axis] > 0 and last > left // steps[axis]):
            raise Error(what, ": the view of shape ", shape, " runs past the storage's ", size, " elements")
        left -= last * steps[axis]


@no_inline
def check_equal(what: StaticString, found: Int, expected: Int) raises:
    if found != expected:
        raise Error(what, " is ", found, ", expected ", expected)


@no_inline
def check_rows(rows: RowPointer, count: Int, available: Int) raises:
    """Rows `[count]` that are taken from a matrix x are some of its `available`."""
    for i in range(count):
        var row = Int(rows[unsafe_offset=i])
        if row < 0 or row >= available:
            raise Error("rows: entry ", i, " is ", row, ", x has ", available, " rows")
