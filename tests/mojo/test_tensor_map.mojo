"""The tensor map of a paged cache: its boxes, and what it refuses."""

from std.testing import TestSuite, assert_equal, assert_raises
from std.utils import IndexList
from layout import UNKNOWN_VALUE
from max.gpu.host.nvidia.tma import TensorMapSwizzle

from mojo_ops.cache.strides import PageStrides
from mojo_ops.cache.tensor_map import PageTensorMap, atom_size, box_slots, check_tensor_map

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


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
