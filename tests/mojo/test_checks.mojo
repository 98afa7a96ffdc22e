"""The contract of the ops: what is refused, and in which words."""

from std.testing import TestSuite, assert_raises
from std.utils import IndexList

from mojo_ops.attention.checks import check_heads, check_rows
from mojo_ops.attention.logits import Logits
from mojo_ops.attention.row_masks import NoMasks
from mojo_ops.cache.checks import check_equal, check_same_cache, check_view
from mojo_ops.cache.page_table import PageTable
from mojo_ops.cache.strides import PageStrides
from mojo_ops.transfer.checks import check_append, check_gather, check_offsets
from support import untracked

comptime BATCH = 2
comptime MAX_PAGES = 3
comptime NUM_PAGES = 7
comptime PAGE_SIZE = 5


struct Table:
    """`[BATCH, MAX_PAGES]`, the last page slot of request 1 unused: its id is no page."""

    var entries: List[UInt32]

    def __init__(out self):
        self.entries = [5, 0, 6, 2, 4, 99]

    def view(self, page_size: Int = PAGE_SIZE) -> PageTable:
        return PageTable(untracked(self.entries), BATCH, MAX_PAGES, NUM_PAGES, page_size)

    def append(self, batch_indices: List[Int32], positions: List[Int32], page_size: Int = PAGE_SIZE) raises:
        check_append(self.view(page_size), untracked(batch_indices), untracked(positions), len(batch_indices))

    def rows(self, row_batch: List[Int32], row_lengths: List[Int32], window_left: Int = -1) raises:
        var none = List[Float32]()
        var logits = Logits(
            scale=1,
            soft_cap=0,
            window_left=window_left,
            alibi_slopes=untracked(none),
            has_alibi=False,
            sinks=untracked(none),
            has_sinks=False,
        )
        check_rows(self.view(), untracked(row_batch), untracked(row_lengths), len(row_batch), NoMasks(), logits)
        _ = none^

    def gather(self, indptr: List[Int32], num_rows: Int) raises:
        check_gather(self.view(), untracked(indptr), num_rows)


def test_append_takes_what_is_right() raises:
    var table = Table()
    table.append([], [])
    table.append([0, 1, 0, 1], [0, 0, 14, 9])
    # A row of padding is not looked at.
    table.append([-1, -1, 0], [99, -5, 3])
    _ = table^


def test_append_takes_a_full_cache() raises:
    var table = Table()
    var batch_indices = List[Int32]()
    var positions = List[Int32]()
    for position in range(15):
        batch_indices.append(0)
        positions.append(Int32(14 - position))
    for position in range(10):
        batch_indices.append(1)
        positions.append(Int32(position))
    table.append(batch_indices, positions)
    _ = table^


def test_append_refuses_a_request() raises:
    var table = Table()
    with assert_raises(contains="batch_indices: row 1 names request 2 of 2"):
        table.append([0, 2], [0, 0])
    with assert_raises(contains="batch_indices: row 0 names request -2 of 2"):
        table.append([-2], [0])
    _ = table^


def test_append_refuses_a_position() raises:
    var table = Table()
    with assert_raises(contains="positions: row 1 (request 0) has position -1"):
        table.append([1, 0], [0, -1])
    with assert_raises(contains="row 0 (request 0) has position 15, past the 3 pages of 5 in lookup_table"):
        table.append([0], [15])
    _ = table^


def test_append_refuses_a_page() raises:
    var table = Table()
    with assert_raises(contains="request 1, page slot 2 holds page id 99, outside the pool's [0, 7)"):
        table.append([1], [10])
    with assert_raises(contains="page_size must be at least 1, the cache has 0"):
        table.append([], [], page_size=0)
    _ = table^


def test_append_refuses_a_shared_slot() raises:
    var table = Table()
    with assert_raises(
        contains="row 2 (request 1, position 4) writes slot 4 of page 2, which an earlier row already writes"
    ):
        table.append([1, 1, 1], [4, 3, 4])
    # Two requests whose tables share a page.
    table.entries[4] = 0
    with assert_raises(contains="row 1 (request 1, position 7) writes slot 2 of page 0"):
        table.append([0, 1], [7, 7])
    table.append([0, 1], [7, 8])
    _ = table^


def test_rows_take_what_is_right() raises:
    var table = Table()
    table.rows([], [])
    table.rows([0, 1, 1, -1, 0], [15, 10, 0, 3, 1])
    _ = table^


def test_rows_refuse_a_request() raises:
    var table = Table()
    with assert_raises(contains="row_batch: row 1 names request 2 of 2"):
        table.rows([0, 2], [1, 1])
    with assert_raises(contains="row_batch: row 0 names request -2 of 2"):
        table.rows([-2], [1])
    _ = table^


def test_rows_refuse_a_length() raises:
    var table = Table()
    with assert_raises(contains="row_lengths: row 0 (request 1) has length -1"):
        table.rows([1], [-1])
    with assert_raises(contains="request 0 has 16 tokens, which need 4 pages of 5, but lookup_table has 3 columns"):
        table.rows([0, 0], [1, 16])
    _ = table^


def test_rows_refuse_a_page() raises:
    var table = Table()
    with assert_raises(contains="lookup_table: request 1, page slot 2 holds page id 99"):
        table.rows([0, 1], [15, 11])
    _ = table^


def test_rows_look_only_at_pages_in_the_window() raises:
    var table = Table()
    table.entries[0] = 99
    table.rows([0], [15], window_left=9)
    with assert_raises(contains="request 0, page slot 0 holds page id 99"):
        table.rows([0], [15], window_left=10)
    with assert_raises(contains="request 0, page slot 0"):
        table.rows([0, 0], [15, 9], window_left=9)
    _ = table^


def test_gather() raises:
    var table = Table()
    table.gather([0, 15, 25], 25)
    table.gather([0, 0, 0], 0)
    with assert_raises(contains="indptr must start at 0, not 1"):
        table.gather([1, 2, 3], 3)
    with assert_raises(contains="indptr decreases at request 1: -2 tokens"):
        table.gather([0, 4, 2], 2)
    with assert_raises(contains="request 0 has 16 tokens, which need 4 pages"):
        table.gather([0, 16, 16], 16)
    with assert_raises(contains="request 1, page slot 2 holds page id 99"):
        table.gather([0, 0, 11], 11)
    with assert_raises(contains="indptr: its last entry is 25, expected 24"):
        table.gather([0, 15, 25], 24)
    _ = table^


def check_offset_list(row_offsets: List[UInt32], num_rows: Int) raises:
    check_offsets(untracked(row_offsets), len(row_offsets) - 1, num_rows)


def test_offsets() raises:
    check_offset_list([0, 2, 2, 5], 5)
    check_offset_list([0, 2], 8)
    check_offset_list([0], 0)
    with assert_raises(contains="row_offsets must start at 0, not 3"):
        check_offset_list([3, 4], 4)
    with assert_raises(contains="row_offsets decreases at request 1"):
        check_offset_list([0, 4, 3], 4)
    with assert_raises(contains="row_offsets ends at 5, past the 4 rows"):
        check_offset_list([0, 5], 4)


def test_view() raises:
    comptime shape = IndexList[4](PAGE_SIZE, 4, 3, 8)
    comptime strides = PageStrides(start=2, page=96, slot=24, head=8)
    check_view("k_blocks", shape, strides, 2 + PAGE_SIZE * 96)
    check_view("k_blocks", IndexList[4](0, 4, 3, 8), strides, 0)
    with assert_raises(contains="v_blocks: the view of shape (5, 4, 3, 8) runs past the storage's 481 elements"):
        check_view("v_blocks", shape, strides, 2 + PAGE_SIZE * 96 - 1)
    with assert_raises(contains="k_blocks: shape (5, 4, -3, 8) has a negative dimension"):
        check_view("k_blocks", IndexList[4](5, 4, -3, 8), strides, 1000)
    for negative in [
        PageStrides(-1, 96, 24, 8),
        PageStrides(0, -96, 24, 8),
        PageStrides(0, 96, -24, 8),
        PageStrides(0, 96, 24, -8),
    ]:
        with assert_raises(contains="k_blocks: negative strides are not supported"):
            check_view("k_blocks", shape, negative, 1000)


def test_view_whose_sizes_overflow_together() raises:
    """The product of these sizes is 2^64 times something: 0 in 64 bits."""
    var strides = PageStrides(0, 1 << 34, 24, 8)
    with assert_raises(contains="runs past the storage's 1000 elements"):
        check_view("k_blocks", IndexList[4](1 << 32, 1 << 32, 3, 8), strides, 1000)
    with assert_raises(contains="runs past the storage's 0 elements"):
        check_view("k_blocks", IndexList[4](1, 1, 1, 8), PageStrides(0, 0, 0, 0), 0)


def test_same_cache() raises:
    comptime both = IndexList[5](NUM_PAGES, 2, PAGE_SIZE, 3, 8)
    comptime alone = IndexList[4](NUM_PAGES, PAGE_SIZE, 3, 8)
    check_same_cache(both, both, 64, 64)
    check_same_cache(alone, alone, 64, 128)
    with assert_raises(contains="v_blocks: shape (7, 5, 3, 16) differs from k_blocks' (7, 5, 3, 8)"):
        check_same_cache(alone, IndexList[4](NUM_PAGES, PAGE_SIZE, 3, 16), 64, 128)
    with assert_raises(contains="k_blocks: dimension 1 must be 2 (K and V), not 3"):
        check_same_cache(IndexList[5](7, 3, 5, 3, 8), IndexList[5](7, 3, 5, 3, 8), 64, 64)
    with assert_raises(contains="a cache that holds K and V is passed twice, but these are two arrays"):
        check_same_cache(both, both, 64, 128)


def test_heads() raises:
    check_heads(q_heads=8, kv_heads=2, q_dim=64, kv_dim=64)
    check_heads(q_heads=5, kv_heads=1, q_dim=8, kv_dim=8)
    with assert_raises(contains="q: its 7 heads are no multiple of the cache's 2 KV heads"):
        check_heads(q_heads=7, kv_heads=2, q_dim=64, kv_dim=64)
    with assert_raises(contains="q: its 7 heads are no multiple of the cache's 0 KV heads"):
        check_heads(q_heads=7, kv_heads=0, q_dim=64, kv_dim=64)
    with assert_raises(contains="q: its head_dim is 64, expected 128"):
        check_heads(q_heads=8, kv_heads=2, q_dim=64, kv_dim=128)
    for dim in [0, 4, 12, 520]:
        with assert_raises(contains=String("head_dim must be a multiple of 8 from 8 to 512, not ", dim)):
            check_heads(q_heads=8, kv_heads=2, q_dim=dim, kv_dim=dim)


def test_equal() raises:
    check_equal("v: its length", 3, 3)
    with assert_raises(contains="v: its length is 2, expected 3"):
        check_equal("v: its length", 2, 3)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
