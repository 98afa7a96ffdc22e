"""One split item of the Hopper kernel, on the CPU: its tiles are copied, read and multiplied as the hardware would.

The copy engine and wgmma are modelled below from the PTX manual; everything else is the kernel's own arithmetic.
Values are small integers, so that sums are exact.
"""

from std.math import isnan
from std.memory import bitcast
from std.random import random_si64, seed
from std.sys import size_of
from std.testing import TestSuite, assert_equal, assert_true
from std.utils import IndexList
from std.utils.numerics import nan

from mojo_ops.attention.gpu.hopper.pipeline import Ring
from mojo_ops.attention.gpu.hopper.producer import find_box
from mojo_ops.attention.gpu.hopper.shared_memory import SharedMemoryMap
from mojo_ops.attention.gpu.hopper.tiles import CopyBox, ItemTiles, MIN_BOX_BITS, WGMMA_TILE_TOKENS
from mojo_ops.attention.gpu.hopper.wgmma import (
    CHUNK_BYTES,
    CONSUMER_THREADS,
    CORE_MATRIX_BYTES,
    MatrixOperand,
    SWIZZLE_PERIOD_BYTES,
    SWIZZLE_ROW_BYTES,
    WGMMA_K,
    fragment_column,
    fragment_row,
)
from mojo_ops.cache.paged_kv_cache import DynamicKVCache
from mojo_ops.cache.strides import PageStrides
from mojo_ops.cache.tensor_map import PageBoxes
from support import page_table_of, untracked, untracked_mutable

comptime BASE = 3 * 1024
"""Where the block's shared memory starts: not at 0, so that a forgotten base shows."""


# The hardware


def swizzled_by_hardware(address: Int) -> Int:
    """128-byte swizzle: bits 4 to 6 of an address are XORed with bits 7 to 9."""
    var chunk = (address // 16) % 8
    var line = (address // 128) % 8
    return address - chunk * 16 + (chunk ^ line) * 16


def operand_address(descriptor: Int64, other: Int, reduced: Int, reduced_adjacent: Bool) -> Int:
    """Where a wgmma finds an element of a 16-bit operand, from the canonical layouts of the manual."""
    var bits = UInt64(descriptor)
    var start = Int((bits & 0x3FFF) << 4)
    var leading = Int(((bits >> 16) & 0x3FFF) << 4)
    var stride = Int(((bits >> 32) & 0x3FFF) << 4)
    var mode = Int(bits >> 62)
    if mode == 1:
        if reduced_adjacent:
            return swizzled_by_hardware(start + (other // 8) * stride + (other % 8) * 128 + reduced * 2)
        var at = start + (other // 64) * leading + (reduced // 8) * stride
        return swizzled_by_hardware(at + (reduced % 8) * 128 + (other % 64) * 2)
    if reduced_adjacent:
        return start + (other // 8) * stride + (reduced // 8) * leading + (other % 8) * 16 + (reduced % 8) * 2
    return start + (other // 8) * stride + (reduced // 8) * leading + (reduced % 8) * 16 + (other % 8) * 2


comptime STORED_NAN: UInt8 = 255


struct Block[kv_dtype: DType, head_dim: Int, heads: Int](Movable):
    """A block's shared memory, and what the hardware does to it. 16-bit numbers are bfloat16, 8-bit ones x + 100."""

    comptime Map = SharedMemoryMap[Self.kv_dtype, Self.head_dim, Self.heads]
    var memory: List[UInt8]

    def __init__(out self):
        # bfloat16 NaN, and the 8-bit one.
        self.memory = List[UInt8](length=Self.Map.BYTES, fill=STORED_NAN)

    def read(self, offset: Int) -> Float32:
        var bits = UInt16(self.memory[offset]) | UInt16(self.memory[offset + 1]) << 8
        return bitcast[DType.bfloat16](bits).cast[DType.float32]()

    def write(mut self, offset: Int, value: Float32):
        var bits = bitcast[DType.uint16](value.cast[DType.bfloat16]())
        self.memory[offset] = UInt8(bits & 255)
        self.memory[offset + 1] = UInt8(bits >> 8)

    def copy_box(mut self, offset: Int, values: List[Float32]):
        """A box of rows of 64 16-bit elements, or of `head_dim` 8-bit ones, arrives at `offset`."""
        for i in range(len(values)):
            comptime if Self.Map.WIDENED:
                self.memory[offset + i] = STORED_NAN if isnan(values[i]) else UInt8(Int(values[i]) + 100)
            else:
                self.write(swizzled_by_hardware(BASE + offset + i * 2) - BASE, values[i])

    def widen(mut self, stage: Int, to: Int):
        """As `widen_tile`, one number at a time."""
        for token in range(WGMMA_TILE_TOKENS):
            for dim in range(Self.head_dim):
                var stored = self.memory[stage * Self.Map.STAGE_BYTES + token * Self.head_dim + dim]
                var value = nan[DType.float32]() if stored == STORED_NAN else Float32(Int(stored) - 100)
                self.write(to + Self.Map.widened_offset(token, dim // 8) + (dim % 8) * 2, value)

    def multiply(
        self,
        mut result: List[Float32],
        a: MatrixOperand,
        b: MatrixOperand,
        a_reduced_adjacent: Bool,
        b_reduced_adjacent: Bool,
    ):
        """The `result [64, heads] += a [64, 16] b [heads, 16]^T`."""
        var a_bits = a.descriptor(BASE)
        var b_bits = b.descriptor(BASE)
        for k in range(WGMMA_K):
            for row in range(64):
                var x = self.read(operand_address(a_bits, row, k, a_reduced_adjacent) - BASE)
                for column in range(Self.heads):
                    var y = self.read(operand_address(b_bits, column, k, b_reduced_adjacent) - BASE)
                    result[row * Self.heads + column] += x * y


def fetch_box(pool: List[BFloat16], boxes: PageBoxes, first: IndexList[5]) -> List[Float32]:
    """What the copy engine fetches at the coordinates `first`, outermost first: innermost elements adjacent."""
    var found = List[Float32]()
    for i in range(boxes.box.flattened_length()):
        var rest = i
        var at = 0
        var inside = True
        for axis in reversed(range(5)):
            var index = first[axis] + rest % boxes.box[axis]
            rest //= boxes.box[axis]
            inside = inside and index >= 0 and index < boxes.shape[axis]
            at += index * boxes.strides[axis]
        found.append(pool[at].cast[DType.float32]() if inside else 0)
    return found^


# One split item


def attend_like_the_kernel[
    head_dim: Int, heads: Int, kv_dtype: DType = DType.bfloat16
](page_size: Int, begin: Int, end: Int, hnd: Bool = False) raises:
    """K Q^T and V^T P^T of the tokens `[begin, end)`, P any function of the scores, against plain loops."""
    comptime Map = SharedMemoryMap[kv_dtype, head_dim, heads]
    comptime kv_heads = 3
    comptime kv_head = 1
    comptime requests = 2
    comptime request = 1
    var max_pages = (end + page_size - 1) // page_size
    var pages = requests * max_pages + 1

    # A shuffled table; the pool is NaN but for the request's own tokens of this head.
    var order = List[Int]()
    for page in range(pages):
        order.append(page)
    for i in range(pages - 1, 0, -1):
        order.swap_elements(i, Int(random_si64(0, Int64(i))))
    var table = List[UInt32]()
    for i in range(requests * max_pages):
        table.append(UInt32(order[i]))
    var page = page_size * kv_heads * head_dim
    var strides = PageStrides(0, page, kv_heads * head_dim, head_dim)
    if hnd:
        strides = PageStrides(0, page, head_dim, page_size * head_dim)
    var k = List[BFloat16](length=pages * strides.page, fill=nan[DType.bfloat16]())
    var v = k.copy()
    var shape = IndexList[4](pages, page_size, kv_heads, head_dim)
    var cache = DynamicKVCache[DType.bfloat16](
        untracked_mutable(k), shape, strides, untracked(table), requests, max_pages
    )
    for token in range(begin, end):
        for dim in range(head_dim):
            var at = cache.locate(request, token)
            var element = cache.offset(at[0], at[1], kv_head, dim)
            k[element] = BFloat16(Int(random_si64(-3, 3)))
            v[element] = BFloat16(Int(random_si64(-3, 3)))
    var q = List[Float32]()  # [heads, head_dim]
    for _ in range(heads * head_dim):
        q.append(Float32(Int(random_si64(-3, 3))))

    var lookup = page_table_of(untracked(table).unsafe_offset(request * max_pages), pages, page_size)
    var block = Block[kv_dtype, head_dim, heads]()
    for head in range(heads):
        for dim in range(head_dim):
            block.write(Map.query_offset(head, dim // 8) + (dim % 8) * 2, q[head * head_dim + dim])
    var sums = List[Float32](length=head_dim * heads, fill=0)
    var box = CopyBox.of_page(page_size)
    assert_true(box.bits >= MIN_BOX_BITS, "a box of 8 slots or more")
    var boxes = PageBoxes.of(0, shape, strides, Int(box.slots()), size_of[kv_dtype]())
    var tiles = ItemTiles.of(Int32(begin), Int32(end), box)
    var seen = 0
    for tile in range(tiles.count):
        var valid = tiles.valid_rows(tile)
        var k_stage = Ring[Map.STAGES].stage_of(2 * tile)[1]
        var v_stage = Ring[Map.STAGES].stage_of(2 * tile + 1)[1]
        for lane in range(valid.boxes(box)):
            var source = find_box(tiles, tile, lookup, box, lane)
            # As `copy_box` has it.
            var first = IndexList[5](Int(source.page), Int(source.slot) // 8, kv_head * boxes.head_step, 0, 0)
            var offset = Map.box_offset(Int(lane << box.bits))
            assert_equal(offset % (CORE_MATRIX_BYTES if Map.WIDENED else SWIZZLE_PERIOD_BYTES), 0)
            block.copy_box(k_stage * Map.STAGE_BYTES + offset, fetch_box(k, boxes, first))
            block.copy_box(v_stage * Map.STAGE_BYTES + offset, fetch_box(v, boxes, first))

        var buffer = Int(tile) % Map.BUFFERS
        var k_tile = k_stage * Map.STAGE_BYTES
        var v_tile = v_stage * Map.STAGE_BYTES
        comptime if Map.WIDENED:
            block.widen(k_stage, Map.WIDENED_KEYS)
            block.widen(v_stage, Map.WIDENED_VALUES)
            k_tile = Map.WIDENED_KEYS
            v_tile = Map.WIDENED_VALUES
        var dots = List[Float32](length=WGMMA_TILE_TOKENS * heads, fill=0)
        for step in range(head_dim // WGMMA_K):
            block.multiply(dots, Map.key_operand(k_tile, step), Map.query_operand(step), True, True)
        # Every thread turns its scores into weights.
        for thread in range(CONSUMER_THREADS):
            for i in range(heads // 2):
                var row = fragment_row(thread, i)
                var column = fragment_column(thread, i)
                var weight = Float32(0)
                if Int32(row) >= valid.begin and Int32(row) < valid.end:
                    var dot = Float32(0)
                    var at = cache.locate(request, Int(tiles.token(tile)) + row)
                    for dim in range(head_dim):
                        var key = k[cache.offset(at[0], at[1], kv_head, dim)].cast[DType.float32]()
                        dot += key * q[column * head_dim + dim]
                    assert_equal(dots[row * heads + column], dot)
                    weight = weight_of(dot)
                    seen += 1
                block.write(Map.weight_offset(row, column, buffer), weight)
        for i in range(Map.ATOMS * WGMMA_TILE_TOKENS * (SWIZZLE_ROW_BYTES // CHUNK_BYTES)):
            var row = Map.row_of_chunk(i)
            if Int32(row) < valid.begin or Int32(row) >= valid.end:
                for e in range(CHUNK_BYTES // 2):
                    block.write(v_tile + i * CHUNK_BYTES + e * 2, 0)
        for atom in range(Map.ATOMS):
            var part = List[Float32](length=64 * heads, fill=0)
            for step in range(WGMMA_TILE_TOKENS // WGMMA_K):
                var weights = Map.weight_operand(step, buffer)
                block.multiply(part, Map.value_operand(v_tile, atom, step), weights, False, False)
            for thread in range(CONSUMER_THREADS):
                for i in range(heads // 2):
                    var row = fragment_row(thread, i)
                    var column = fragment_column(thread, i)
                    sums[(atom * 64 + row) * heads + column] += part[row * heads + column]

    assert_equal(seen, (end - begin) * heads)
    for head in range(heads):
        for dim in range(head_dim):
            var expected = Float32(0)
            for token in range(begin, end):
                var at = cache.locate(request, token)
                var dot = Float32(0)
                for d in range(head_dim):
                    dot += k[cache.offset(at[0], at[1], kv_head, d)].cast[DType.float32]() * q[head * head_dim + d]
                expected += weight_of(dot) * v[cache.offset(at[0], at[1], kv_head, dim)].cast[DType.float32]()
            assert_equal(sums[dim * heads + head], expected)
    _ = table^


def weight_of(dot: Float32) -> Float32:
    return Float32(Int(dot) % 5)


def test_tiles_through_shared_memory() raises:
    seed(1)
    # Page sizes: a box of 8 (8, 24), 16 (16, 48), 32 (96) and 64 slots (64, 256); tails and windows at all offsets.
    attend_like_the_kernel[64, 8](page_size=16, begin=0, end=150)
    attend_like_the_kernel[64, 8](page_size=24, begin=29, end=131)
    attend_like_the_kernel[128, 8](page_size=8, begin=3, end=68)
    attend_like_the_kernel[128, 16](page_size=48, begin=47, end=130)


def test_large_pages_through_shared_memory() raises:
    seed(2)
    attend_like_the_kernel[64, 16](page_size=64, begin=63, end=130)
    attend_like_the_kernel[64, 8](page_size=96, begin=1, end=65)
    attend_like_the_kernel[128, 8](page_size=256, begin=100, end=290)
    attend_like_the_kernel[256, 8](page_size=16, begin=10, end=75)


def test_heads_outside_of_slots() raises:
    seed(6)
    attend_like_the_kernel[128, 8](page_size=8, begin=3, end=68, hnd=True)
    attend_like_the_kernel[64, 8](page_size=48, begin=40, end=100, hnd=True)
    attend_like_the_kernel[128, 8, DType.float8_e4m3fn](page_size=16, begin=5, end=70, hnd=True)


def test_float8_through_shared_memory() raises:
    seed(5)
    attend_like_the_kernel[64, 8, DType.float8_e4m3fn](page_size=24, begin=29, end=131)
    attend_like_the_kernel[128, 8, DType.float8_e4m3fn](page_size=16, begin=0, end=150)
    attend_like_the_kernel[256, 16, DType.float8_e5m2](page_size=64, begin=63, end=130)


def test_one_token() raises:
    seed(3)
    for begin in [0, 7, 8, 15, 16, 63, 64]:
        attend_like_the_kernel[64, 8](page_size=16, begin=begin, end=begin + 1)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
