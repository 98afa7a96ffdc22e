"""The tensor map of a paged cache: its boxes, and what it refuses."""

from std.testing import TestSuite, assert_equal, assert_raises, assert_true
from std.utils import IndexList
from layout import UNKNOWN_VALUE
from max.gpu.host.nvidia.tma import TensorMapSwizzle

from mojo_ops.cache.strides import PageStrides
from mojo_ops.cache.tensor_map import PageBoxes, PageTensorMap, atom_size, box_slots, check_tensor_map

comptime PAGES = 7
comptime HEADS = 3
comptime DIM = 8


def test_boxes_of_a_tensor_map() raises:
    comptime swizzle = TensorMapSwizzle.SWIZZLE_128B
    assert_equal(atom_size[DType.bfloat16, swizzle](), 64)
    assert_equal(atom_size[DType.float8_e4m3fn, swizzle](), 128)
    assert_equal(atom_size[DType.float16, TensorMapSwizzle.SWIZZLE_NONE](), 8)
    assert_equal(box_slots(page_size=16, tile_m=64), 16)
    assert_equal(box_slots(page_size=128, tile_m=64), 64)
    assert_equal(box_slots(UNKNOWN_VALUE, tile_m=64), 64)
    comptime Box = PageTensorMap[DType.bfloat16, box_slots(16, 64), 128, swizzle, True]
    comptime assert Box.tile_shape.element_types[1].static_value == 16
    comptime assert Box.tile_shape.element_types[3].static_value == 128
    comptime assert Box.desc_shape.element_types[3].static_value == 64


def test_what_a_tensor_map_refuses() raises:
    comptime shape = IndexList[4](PAGES, 5, HEADS, DIM)
    comptime strides = PageStrides(start=0, page=120, slot=24, head=8)
    check_tensor_map(1 << 40, shape, strides, element_bytes=2)
    with assert_raises(contains="address 1099511627784 is no multiple of 16 bytes"):
        check_tensor_map((1 << 40) + 8, shape, strides, element_bytes=2)
    with assert_raises(contains="the page stride of 120 bytes is no multiple of 16 bytes"):
        check_tensor_map(1 << 40, shape, strides, element_bytes=1)
    with assert_raises(contains="the slot stride of 40 bytes"):
        check_tensor_map(1 << 40, shape, PageStrides(0, 120, 20, 8), element_bytes=2)
    with assert_raises(contains="the head stride of 8 bytes"):
        check_tensor_map(1 << 40, shape, PageStrides(0, 120, 24, 4), element_bytes=2)
    with assert_raises(contains="no page, slot, head or dim"):
        check_tensor_map(1 << 40, IndexList[4](0, 5, HEADS, DIM), strides, element_bytes=2)


def check_boxes[shape: IndexList[5], strides: IndexList[5], box: IndexList[5]](found: PageBoxes, head_step: Int) raises:
    assert_equal(found.shape, shape)
    assert_equal(found.strides, strides)
    assert_equal(found.box, box)
    assert_equal(found.head_step, head_step)
    # The bytes of a box's row are the swizzle's, or a whole float8 head; one side has at most 256 elements.
    for axis in range(5):
        assert_true(found.box[axis] <= min(256, found.shape[axis]))


def test_boxes_of_whole_heads() raises:
    """Pages of 48 slots, 3 heads of 128, pages twice as far apart as they are long (K and V in one array)."""
    comptime view = IndexList[4](PAGES, 48, HEADS, 128)
    comptime page = 2 * 48 * HEADS * 128
    # Slots outside of heads: the atoms of all heads are adjacent.
    check_boxes[
        IndexList[5](PAGES, 6, 6, 8, 64), IndexList[5](page, 8 * 384, 64, 384, 1), IndexList[5](1, 2, 2, 8, 64)
    ](PageBoxes.of(0, view, PageStrides(0, page, 384, 128), slots=16, element_bytes=2), 2)
    # Heads outside of slots: from one head to the next there are 96 atoms.
    check_boxes[
        IndexList[5](PAGES, 6, 194, 8, 64), IndexList[5](page, 8 * 128, 64, 128, 1), IndexList[5](1, 1, 2, 8, 64)
    ](PageBoxes.of(0, view, PageStrides(0, page, 128, 48 * 128), slots=8, element_bytes=2), 96)
    # Float8: a row is a head.
    check_boxes[
        IndexList[5](PAGES, 6, 3, 8, 128), IndexList[5](page, 8 * 384, 128, 384, 1), IndexList[5](1, 2, 1, 8, 128)
    ](PageBoxes.of(0, view, PageStrides(0, page, 384, 128), slots=16, element_bytes=1), 1)


def test_what_boxes_of_whole_heads_refuse() raises:
    comptime view = IndexList[4](PAGES, 48, HEADS, 128)
    with assert_raises(contains="the head stride of 136 elements is no multiple of 64"):
        _ = PageBoxes.of(0, view, PageStrides(0, 48 * 408, 408, 136), slots=16, element_bytes=2)
    # One head: there is no next.
    _ = PageBoxes.of(0, IndexList[4](PAGES, 48, 1, 128), PageStrides(0, 48 * 136, 136, 136), slots=16, element_bytes=2)
    for slots in [4, 12, 32]:
        with assert_raises(contains="do not fill pages of 48"):
            _ = PageBoxes.of(0, view, PageStrides(0, 48 * 384, 384, 128), slots=slots, element_bytes=2)
    with assert_raises(contains="over 256 on a side"):
        _ = PageBoxes.of(0, IndexList[4](1, 8, 1, 512), PageStrides(0, 8 * 512, 512, 512), slots=8, element_bytes=1)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
