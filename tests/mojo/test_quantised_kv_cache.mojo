"""QuantisedKVCache: a head that is stored comes back as its codes times its scale, and no other byte changes."""

from std.testing import TestSuite, assert_equal, assert_raises
from std.utils import IndexList
from std.utils.numerics import isnan, nan

from mojo_ops.cache.gpu_loads import check_alignment
from mojo_ops.cache.paged_kv_cache import DynamicKVCache, PagedKVCache
from mojo_ops.cache.quantised_kv_cache import QuantisedKVCache
from mojo_ops.cache.static_params import UNKNOWN_STATIC_PARAMS
from mojo_ops.cache.strides import PageStrides
from mojo_ops.isa.codes import head_units
from mojo_ops.transfer.slot_layout import BYTES_PER_TASK, rows_per_task
from layout import UNKNOWN_VALUE
from support import untracked, untracked_mutable

comptime PAGES = 3
comptime SLOTS = 2
comptime HEADS = 2
comptime DIM = 40
comptime UNTOUCHED = 77


def check_round_trip[dtype: DType](greatest: Int) raises:
    """Stores one head of `greatest` times the scale and smaller ones, in page 2, slot 1, head 1 of an NHD cache."""
    comptime Stored = PagedKVCache[dtype, UNKNOWN_STATIC_PARAMS, UNKNOWN_VALUE]
    var head = head_units(dtype, DIM)
    var table: List[UInt32] = [1, 2]
    var bytes = List[Scalar[dtype]](length=PAGES * SLOTS * HEADS * head, fill=UNTOUCHED)
    var strides = PageStrides(0, SLOTS * HEADS * head, HEADS * head, head)
    var shape = IndexList[4](PAGES, SLOTS, HEADS, DIM)
    var cache = QuantisedKVCache(Stored(untracked_mutable(bytes), shape, strides, untracked(table), 1, 2))
    var numbers = List[Float32](length=DIM, fill=0)
    for d in range(DIM):
        numbers[d] = 0.5 * Float32(d % 7 - 3)
    numbers[5] = 0.5 * Float32(greatest)
    cache.store(0, 1, 3, untracked(numbers))
    assert_equal(abs(cache.scale(0, 1, 3)), 0.5)
    for d in range(0, DIM, 8):
        var loaded = cache.load[8](0, 1, 3, d)
        for i in range(8):
            assert_equal(loaded[i], numbers[d + i])
    var start = ((2 * SLOTS + 1) * HEADS + 1) * head
    for i in range(len(bytes)):
        if i < start or i >= start + head:
            assert_equal(bytes[i], UNTOUCHED)
    numbers[39] = nan[DType.float32]()
    cache.store(0, 1, 3, untracked(numbers))
    assert_equal(isnan(cache.load[2](0, 1, 3, 0)).reduce_and(), True)
    # A thread's share of an append goes by the bytes of the rows, not of the codes.
    assert_equal(rows_per_task[DType.float32](cache.stored), BYTES_PER_TASK // (HEADS * DIM * 4))
    _ = (bytes^, table^, numbers^)


def test_int8() raises:
    check_round_trip[DType.int8](127)
    check_round_trip[DType.int8](-127)


def test_int4() raises:
    check_round_trip[DType.uint8](-8)
    check_round_trip[DType.uint8](8)


def check_alignment_of[dtype: DType]() raises:
    """Heads of a contiguous cache begin at multiples of 4 bytes, wherever in a cache line that is; others may not."""
    var head = head_units(dtype, DIM)
    var table: List[UInt32] = [0]
    var bytes = List[Scalar[dtype]](length=SLOTS * HEADS * head + 64, fill=0)
    var start = -Int(bytes.unsafe_ptr()) % 4
    for shift, stride in [(0, head), (4, head), (0, head + 4), (1, head), (2, head), (0, head + 1), (0, head + 2)]:
        var strides = PageStrides(start + shift, SLOTS * HEADS * head, HEADS * head, stride)
        var shape = IndexList[4](1, SLOTS, HEADS, DIM)
        var cache = DynamicKVCache[dtype](untracked_mutable(bytes), shape, strides, untracked(table), 1, 1)
        if shift % 4 == 0 and stride % 4 == 0:
            check_alignment("k_blocks", cache)
        else:
            with assert_raises(contains="no multiple of 4 bytes"):
                check_alignment("k_blocks", cache)
    _ = (bytes^, table^)


def test_alignment_on_a_gpu() raises:
    check_alignment_of[DType.int8]()
    check_alignment_of[DType.uint8]()


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
