"""The memory map of the Hopper kernel and its boxes; fragments, swizzles and stages run on the model of tests/gpu."""

from std.random import random_si64, seed
from std.testing import TestSuite, assert_equal, assert_true

from mojo_ops.attention.gpu.hopper.shared_memory import SharedMemoryMap
from mojo_ops.attention.gpu.hopper.tiles import CopyBox, ItemTiles, WGMMA_TILE_TOKENS
from mojo_ops.attention.gpu.hopper.wgmma import CHUNK_BYTES


def check_map[dtype: DType, head_dim: Int, heads: Int]() raises:
    """Each part ends where the next one begins, and no two buffers meet."""
    comptime Map = SharedMemoryMap[dtype, head_dim, heads]
    Map.check()
    comptime buffers = Map.BUFFERS
    assert_true(Map.WIDENED_KEYS + (2 * WGMMA_TILE_TOKENS * head_dim * 2 if Map.WIDENED else 0) <= Map.QUERY)
    assert_equal(Map.query_offset(heads - 1, head_dim // 8 - 1) + CHUNK_BYTES, Map.WEIGHTS)
    assert_equal(Map.weight_offset(WGMMA_TILE_TOKENS - 1, heads - 1, buffers - 1) + 2, Map.EXCHANGE)
    assert_equal(Map.exchange_offset(3, heads - 1) + 4, Map.FACTORS)
    assert_equal(Map.factor_offset(heads - 1, 1) + 4 if Map.WIDENED else Map.FACTORS, Map.STATUS)
    assert_equal(Map.factor_offset(0, 1) - Map.factor_offset(heads - 1, 0), 4)
    assert_equal(Map.BYTES - Map.FULL, 2 * 8 * (Map.STAGES + (2 if Map.WIDENED else 0)), "the barriers")


def test_map() raises:
    check_map[DType.bfloat16, 64, 8]()
    check_map[DType.bfloat16, 64, 16]()
    check_map[DType.bfloat16, 128, 8]()
    check_map[DType.float16, 128, 16]()
    check_map[DType.bfloat16, 256, 8]()
    check_map[DType.float16, 256, 16]()
    check_map[DType.float8_e4m3fn, 64, 16]()
    check_map[DType.float8_e4m3fn, 128, 8]()
    check_map[DType.float8_e5m2, 256, 16]()


def test_boxes() raises:
    """Boxes hold all tokens of an item once, each within one page, and none that holds no token."""
    seed(4)
    assert_equal(CopyBox.of_page(16).slots(), 16)
    assert_equal(CopyBox.of_page(24).slots(), 8)
    assert_equal(CopyBox.of_page(256).slots(), WGMMA_TILE_TOKENS)
    assert_equal(CopyBox.of_page(12).slots(), 4)
    assert_equal(CopyBox.of_page(1).slots(), 1)
    for page_size in [8, 16, 24, 40, 48, 64, 72, 96, 128, 160, 192, 256]:
        var box = CopyBox.of_page(page_size)
        for _ in range(40):
            var begin = Int(random_si64(0, 700))
            var end = begin + Int(random_si64(1, 500))
            var tiles = ItemTiles.of(Int32(begin), Int32(end), box)
            var token = begin
            for tile in range(tiles.count):
                var valid = tiles.valid_rows(tile)
                assert_true(valid.begin < valid.end)
                assert_equal(valid.all(), valid.end - valid.begin == WGMMA_TILE_TOKENS)
                assert_equal(Int(tiles.token(tile) + valid.begin), token)
                token = Int(tiles.token(tile) + valid.end)
                for i in range(valid.boxes(box)):
                    var first = Int(tiles.token(tile) + (i << box.bits))
                    var last = first + Int(box.slots()) - 1
                    assert_true(first >= 0)
                    assert_equal(first // page_size, last // page_size)
                    assert_true(last >= begin and first < end)
            assert_equal(token, end)
    assert_equal(ItemTiles.of(5, 5, CopyBox(4)).count, 0)
    assert_equal(ItemTiles.of(0, -1, CopyBox(4)).count, 0)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
