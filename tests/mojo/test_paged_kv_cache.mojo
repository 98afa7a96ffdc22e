"""PagedKVCache: every method agrees with every other, and with where the array's axes say an element lies."""

from std.builtin.device_passable import DevicePassable
from std.testing import TestSuite, assert_equal, assert_false, assert_raises, assert_true
from std.utils import IndexList
from layout import UNKNOWN_VALUE

from mojo_ops.cache.checks import check_view
from mojo_ops.cache.paged_kv_cache import DynamicKVCache, PagedKVCache
from mojo_ops.cache.pointers import TablePointer
from mojo_ops.cache.static_params import KVCacheStaticParams, UNKNOWN_STATIC_PARAMS
from mojo_ops.cache.strides import PageStrides
from support import Storage, untracked, untracked_mutable

comptime PAGES = 7
comptime LAYERS = 3
comptime HEADS = 3
comptime DIM = 8
comptime BATCH = 2
comptime MAX_PAGES = 3

comptime Known = KVCacheStaticParams(HEADS, DIM)
comptime AnyCache = DynamicKVCache[DType.float32]


def shuffled_table() -> List[UInt32]:
    """`[BATCH, MAX_PAGES]`: every page but number 3, in no order."""
    return [5, 0, 6, 2, 4, 1]


def numbered(size: Int) -> List[Float32]:
    """Every element holds its own index, which float32 has exactly."""
    var storage = List[Float32](length=size, fill=0)
    for i in range(size):
        storage[i] = Float32(i)
    return storage^


def views(page_size: Int) -> List[Storage]:
    """K and V of every layer in every layout."""
    var views = List[Storage]()
    for hnd in [False, True]:
        views.append(Storage(hnd, 4, PAGES, LAYERS, page_size, HEADS, DIM, False, 0))
        for is_value in [False, True]:
            views.append(Storage(hnd, 5, PAGES, LAYERS, page_size, HEADS, DIM, is_value, 0))
            for layer in range(LAYERS):
                views.append(Storage(hnd, 6, PAGES, LAYERS, page_size, HEADS, DIM, is_value, layer))
    return views^


def check_addresses[kv_params: KVCacheStaticParams, page_size: Int](slots: Int) raises:
    """Every token, head and dim of every view, for pages of `slots` slots."""
    comptime Cache = PagedKVCache[DType.float32, kv_params, page_size]
    var table = shuffled_table()
    for view in views(slots):
        var storage = numbered(view.size())
        var base = untracked_mutable(storage)
        var cache = Cache(base, view.shape(), view.strides(), untracked(table), BATCH, MAX_PAGES)
        assert_equal(cache.num_pages(), PAGES)
        assert_equal(cache.slots(), slots)
        assert_equal(cache.num_heads(), HEADS)
        assert_equal(cache.head_dim(), DIM)
        var start = view.cell(0, 0, 0, 0)
        for request in range(BATCH):
            for token in range(MAX_PAGES * slots):
                var page = Int(table[request * MAX_PAGES + token // slots])
                var slot = token % slots
                for head in range(HEADS):
                    var first = view.cell(page, slot, head, 0)
                    var pointer = cache.block_paged_ptr[1](request, token, head)
                    assert_equal(Int(pointer) - Int(base), first * 4, "block_paged_ptr")
                    assert_equal(cache.offset(page, slot, head), first - start, "offset")
                    var row = cache.row_idx(UInt32(request), UInt32(token))
                    var in_matrix = row * cache.row_pitch() + cache.col_idx(UInt32(head))
                    assert_equal(in_matrix, first - start, "row_idx and col_idx")
                    var x, y, z, w = cache.tma_coords(request, token, head, 4)
                    var at = cache.strides()
                    assert_equal(IndexList[4](w, z, y, x), IndexList[4](page, slot, head, 4), "tma_coords")
                    assert_equal(w * at.page + z * at.slot + y * at.head + x, first + 4 - start, "strides")
                    for dim in range(DIM):
                        var expected = view.cell(page, slot, head, dim)
                        assert_equal(Int(cache.load[1](request, head, token, dim)), expected, "load")
                        assert_equal(cache.offset(page, slot, head, dim), expected - start, "offset of a dim")
                    var wide = cache.load[4](request, head, token, 4)
                    for lane in range(4):
                        assert_equal(Int(wide[lane]), view.cell(page, slot, head, 4 + lane), "wide load")
        _ = storage^
    _ = table^


def test_addresses_with_everything_known() raises:
    comptime for page_size in [1, 5, 16, 128]:
        check_addresses[Known, page_size](page_size)


def test_addresses_with_nothing_known() raises:
    for page_size in [1, 5, 16, 128]:
        check_addresses[UNKNOWN_STATIC_PARAMS, UNKNOWN_VALUE](page_size)


def test_addresses_with_some_things_known() raises:
    check_addresses[KVCacheStaticParams(HEADS, UNKNOWN_VALUE), 5](5)
    check_addresses[KVCacheStaticParams(UNKNOWN_VALUE, DIM), UNKNOWN_VALUE](5)


def test_store_changes_nothing_else() raises:
    var table = shuffled_table()
    for view in views(page_size=2):
        var storage = numbered(view.size())
        var expected = numbered(view.size())
        var cache = PagedKVCache[DType.float32, Known, 2](
            untracked_mutable(storage), view.shape(), view.strides(), untracked(table), BATCH, MAX_PAGES
        )
        var value = SIMD[DType.float32, 4](-1, -2, -3, -4)
        cache.store(1, 2, 3, 4, value)
        for lane in range(4):
            expected[view.cell(page=4, slot=1, head=2, dim=4 + lane)] = value[lane]
        assert_equal(cache.load[4](1, 2, 3, 4), value)
        assert_equal(storage, expected)
    _ = table^


def test_strides_given_freely() raises:
    """A view that no layout describes: padded rows inside a larger allocation."""
    comptime strides = PageStrides(start=10, page=400, slot=40, head=12)
    var storage = numbered(3000)
    var table = shuffled_table()
    var numbers: List[Int64] = [10, 400, 40, 12]
    assert_true(PageStrides.read(untracked(numbers)) == strides)
    var cache = AnyCache(
        untracked_mutable(storage), IndexList[4](PAGES, 5, HEADS, DIM), strides, untracked(table), BATCH, MAX_PAGES
    )
    assert_equal(Int(cache.load[1](1, 2, 13, 7)), 10 + 1 * 400 + 3 * 40 + 2 * 12 + 7)
    _ = storage^
    _ = table^
    _ = numbers^


def far[
    kv_params: KVCacheStaticParams, page_size: Int
](view: Storage, page: Int, token: Int, head: Int) raises -> Tuple[Int, Int]:
    """Element and row of a token's head in an array too large to exist: no element of it is touched."""
    var table: List[UInt32] = [0, UInt32(page)]
    var one = List[BFloat16](length=1, fill=0)
    var base = untracked_mutable(one)
    var cache = PagedKVCache[DType.bfloat16, kv_params, page_size](
        base, view.shape(), view.strides(), untracked(table), 1, 2
    )
    var element = (Int(cache.block_paged_ptr[1](0, token, head, 3)) - Int(base)) // 2
    var row = cache.row_idx(0, UInt32(token))
    assert_equal(element, view.cell(page, token % 16, head, 3))
    var in_matrix = row * cache.row_pitch() + cache.col_idx(UInt32(head)) + 3
    assert_equal(element, view.cell(0, 0, 0, 0) + in_matrix)
    _ = one^
    _ = table^
    return (element, row)


def test_a_pool_past_2_to_the_31_elements() raises:
    for hnd in [False, True]:
        for rank in [4, 5, 6]:
            var view = Storage(hnd, rank, 1 << 18, LAYERS, 16, 8, 128, rank > 4, LAYERS - 1)
            var element, _ = far[KVCacheStaticParams(8, 128), 16](view, (1 << 18) - 1, 16 + 13, 7)
            assert_true(element > 1 << 31)
            assert_equal(far[UNKNOWN_STATIC_PARAMS, UNKNOWN_VALUE](view, (1 << 18) - 1, 16 + 13, 7)[0], element)


def test_a_pool_past_2_to_the_32_rows() raises:
    """In HND a row is one slot of one head."""
    var view = Storage(True, 5, 1 << 26, 1, 16, 8, 128, True, 0)
    var page = (1 << 26) - 1
    var _, row = far[UNKNOWN_STATIC_PARAMS, UNKNOWN_VALUE](view, page, 16 + 13, 7)
    assert_true(row > 1 << 32)
    assert_equal(row, page * 2 * 8 * 16 + 13)


def test_a_page_id_past_2_to_the_31() raises:
    """The table is unsigned."""
    var view = Storage(False, 4, 3_000_000_001, 1, 16, 8, 128, False, 0)
    var _, row = far[UNKNOWN_STATIC_PARAMS, UNKNOWN_VALUE](view, 3_000_000_000, 16 + 13, 7)
    assert_equal(row, 3_000_000_000 * 16 + 13)


def test_view_whose_sizes_overflow_together() raises:
    """The product of these sizes is 2^64 times something, 0 in 64 bits: no array of an op test has them."""
    var strides = PageStrides(0, 1 << 34, 24, 8)
    with assert_raises(contains="runs past the storage's 1000 elements"):
        check_view("k_blocks", IndexList[4](1 << 32, 1 << 32, 3, 8), strides, 1000)
    with assert_raises(contains="runs past the storage's 0 elements"):
        check_view("k_blocks", IndexList[4](1, 1, 1, 8), PageStrides(0, 0, 0, 0), 0)


def test_lengths() raises:
    var table = shuffled_table()
    var lengths: List[UInt32] = [9, 4]
    var storage = numbered(PAGES * 5 * HEADS * DIM)
    var view = Storage(False, 4, PAGES, 1, 5, HEADS, DIM, False, 0)
    var cache = AnyCache(
        untracked_mutable(storage),
        view.shape(),
        view.strides(),
        untracked(table),
        BATCH,
        MAX_PAGES,
        cache_lengths=Optional[TablePointer](untracked(lengths)),
        max_seq_length=3,
        max_cache_length=9,
    )
    assert_equal(cache.cache_length(0), 9)
    assert_equal(cache.cache_length(1), 4)
    assert_equal(Int(cache.cache_lengths_nd().dim[0]()), BATCH)
    assert_equal(cache.cache_lengths_nd().ptr[unsafe_offset=1], 4)
    assert_false(cache.empty_cache())
    assert_equal(cache.max_prompt_length(), 3)
    assert_equal(cache.max_context_length(), 9)

    var empty = AnyCache(cache.blocks, cache.cache_lengths, cache.lookup_table, 3, 0)
    assert_true(empty.empty_cache())
    assert_equal(Int(empty.load[1](1, 0, 4, 0)), view.cell(2, 4, 0, 0), "the constructor from tensors")
    var without = AnyCache(untracked_mutable(storage), view.shape(), view.strides(), untracked(table), BATCH, MAX_PAGES)
    assert_equal(Int(without.cache_lengths_nd().dim[0]()), 0)
    _ = storage^
    _ = table^
    _ = lengths^


def test_constants_and_names() raises:
    comptime Cache = PagedKVCache[DType.bfloat16, KVCacheStaticParams(8, 128), 16]
    assert_equal(Cache.dtype, DType.bfloat16)
    assert_true(Cache.kv_params == KVCacheStaticParams(8, 128, False))
    assert_equal(Cache.page_size_, 16)
    assert_equal(Cache.max_tile_size(), 16)
    assert_equal(AnyCache.max_tile_size(), UNKNOWN_VALUE)
    comptime assert Cache.blocks_shape[0].value() == UNKNOWN_VALUE and Cache.blocks_shape[1].value() == 16
    comptime assert Cache.blocks_shape[2].value() == 8 and Cache.blocks_shape[3].value() == 128
    comptime assert Cache.blocks_layout.rank() == 4 and Cache.blocks_layout.stride[3].value() == 1
    comptime name = "PagedKVCache[bfloat16, KVCacheStaticParams(num_heads=8, head_size=128, is_mla=False), 16]"
    assert_equal(Cache.get_type_name(), name)
    assert_equal(Cache.get_device_type_name(), name)
    assert_equal(Cache.device_type.get_type_name(), name)


def pass_on[T: TrivialRegisterPassable & DevicePassable](value: T) -> T:
    return value


def test_a_view_is_passed_by_value() raises:
    """Copies of a view, in registers or in a closure, see the same memory."""
    var view = Storage(True, 5, PAGES, 1, 5, HEADS, DIM, True, 0)
    var storage = numbered(view.size())
    var table = shuffled_table()
    var cache = AnyCache(untracked_mutable(storage), view.shape(), view.strides(), untracked(table), BATCH, MAX_PAGES)
    var copy = pass_on(cache)

    def write(token: Int) {var copy}:
        copy.store(1, 0, token, 0, Float32(-token))

    for token in range(1, 4):
        write(token)
        assert_equal(cache.load[1](1, 0, token, 0), Float32(-token))
        assert_equal(storage[view.cell(2, token, 0, 0)], Float32(-token))
    _ = storage^
    _ = table^


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
