"""The tiles of a walk over a segment: each of its tokens once, and each where it lies."""

from std.collections import Set
from std.testing import TestSuite, assert_equal, assert_true
from std.utils import IndexList

from mojo_ops.attention.cpu.kv_tile import SPAN_TILES
from mojo_ops.attention.cpu.plan import Segment
from mojo_ops.attention.cpu.prefetch import KV_TILE_TOKENS, SPAN_TOKENS, STREAMS
from mojo_ops.attention.cpu.segment_walk import SegmentStep
from mojo_ops.attention.cpu.workspace import HeadLayout, SegmentWorkspace
from mojo_ops.cache.paged_kv_cache import KVCacheStaticParams, PagedKVCache, UNKNOWN_VALUE
from mojo_ops.cache.strides import PageStrides, page_shape
from mojo_ops.isa.cpu_tuning import CPU_TUNING
from support import untracked, untracked_mutable

comptime TOKENS = 3 * SPAN_TOKENS
comptime DIM = 8
comptime HEADS = 2
comptime Cache = PagedKVCache[DType.float32, KVCacheStaticParams(UNKNOWN_VALUE, UNKNOWN_VALUE), UNKNOWN_VALUE]


def check[layout: StaticString](page_size: Int, begin: Int, end: Int, tiles: Int) raises:
    comptime hnd = layout == "HND"
    var pages = (TOKENS + page_size - 1) // page_size
    var shape = IndexList[5](pages, 2, HEADS if hnd else page_size, page_size if hnd else HEADS, DIM)
    var storage = List[Float32](length=pages * 2 * page_size * HEADS * DIM, fill=0)
    var table = List[UInt32]()
    for i in range(pages):
        table.append(UInt32((i * 7 + 3) % pages) if pages % 7 != 0 else UInt32(pages - 1 - i))
    var k = Cache(
        untracked_mutable(storage),
        page_shape[layout](shape),
        PageStrides.of[layout](shape, False),
        untracked(table),
        1,
        pages,
    )
    var v = Cache(
        untracked_mutable(storage),
        page_shape[layout](shape),
        PageStrides.of[layout](shape, True),
        untracked(table),
        1,
        pages,
    )
    var heads = HeadLayout(HEADS, HEADS, 1, DIM, 32, k.strides().head, v.strides().head, DIM, 32, DIM)
    var workspace = SegmentWorkspace(heads, 1, 0)
    var segment = Segment(0, 1, begin, end)
    var seen = Set[Int]()
    var at = begin
    var buffer = 0
    while at < end:
        var step = SegmentStep(k, v, 0, segment, at, tiles, workspace, buffer)
        buffer = SPAN_TILES - buffer
        assert_true(step.has_tokens())
        assert_true(step.count == 1 or step.count == tiles)
        for i in range(step.count):
            var tile = step.tiles[unsafe_offset=i]
            var tokens = tile.tokens()
            for entry in range(KV_TILE_TOKENS):
                var first_entry = max(0, begin - tile.first)
                var token = Int(tokens[max(first_entry, min(entry, tile.count - 1))])
                var page = k.page(0, token // page_size)
                assert_equal(tile.k[unsafe_offset=entry], k.offset(page, token % page_size, 0))
                assert_equal(tile.v[unsafe_offset=entry], v.offset(page, token % page_size, 0))
                if first_entry <= entry < tile.count:
                    assert_true(begin <= token < end)
                    assert_true(tile.first <= token < tile.end())
                    assert_true(token not in seen)
                    seen.add(token)
            if page_size > CPU_TUNING.interleaved_slots:
                assert_true(not tile.interleaved, "longer pages are read in order")
            if tile.interleaved:
                # Streams go up: each run's next token, not its first again.
                for entry in range(STREAMS, KV_TILE_TOKENS):
                    assert_equal(tokens[entry], tokens[entry - STREAMS] + 1)
        at = step.end
    assert_equal(at, end)
    assert_equal(len(seen), end - begin)
    assert_true(not SegmentStep(k, v, 0, segment, end, tiles, workspace, buffer).has_tokens())
    _ = storage^
    _ = table^
    _ = workspace^


def test_every_token_once() raises:
    for page_size in [1, 5, 16, 64, 100, 512]:
        for begin, end in [
            (0, TOKENS),
            (0, 1),
            (3, 40),
            (SPAN_TOKENS, 2 * SPAN_TOKENS),
            (SPAN_TOKENS - 1, 2 * SPAN_TOKENS + 1),
            (70, TOKENS - 16),
        ]:
            for tiles in [1, SPAN_TILES]:
                check["NHD"](page_size, begin, end, tiles)
                check["HND"](page_size, begin, end, tiles)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
