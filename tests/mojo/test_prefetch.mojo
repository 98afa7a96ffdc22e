"""Prefetching: every line of a tile once, evenly, in as many calls as `start` was told.

The calls on matrix tiles are counted where the CPU target has them.
"""

from std.collections import Set
from std.math import ceildiv
from std.sys import size_of
from std.testing import TestSuite, assert_equal, assert_true
from std.utils import IndexList

from mojo_ops.attention.cpu.amx.layout import AmxBuffers, prefetch_calls_amx
from mojo_ops.attention.cpu.amx.scores import KeyProducts, score_tile_amx
from mojo_ops.attention.cpu.amx.weighted_sums import ValueProducts, sum_tile_amx
from mojo_ops.attention.cpu.bf16_chunk import Bf16Chunk
from mojo_ops.attention.cpu.kv_tile import KVTile
from mojo_ops.attention.cpu.prefetch import EARLY_V_TOKENS, KV_TILE_TOKENS, Prefetcher, STREAMS
from mojo_ops.attention.cpu.prefill.queries import PREFILL_MAX_QUERIES, QUERY_COLUMNS
from mojo_ops.attention.cpu.prefill.step import STEP_TOKENS
from mojo_ops.attention.cpu.rotary_keys import KeyRotation, RotaryTables
from mojo_ops.attention.cpu.vectors.code_sums import rounds_weights
from mojo_ops.attention.cpu.vectors.prefill import num_score_blocks
from mojo_ops.attention.cpu.vectors.prefill_workspace import TILES_AT_ONCE, score_tokens
from mojo_ops.attention.cpu.vectors.products import score_prefetch_calls, score_tile, sum_prefetch_calls, sum_tile
from mojo_ops.attention.cpu.vectors.queries import packed_query_dtype
from mojo_ops.attention.cpu.workspace import HeadLayout, SegmentWorkspace, TILE_BUFFERS
from mojo_ops.cache.paged_kv_cache import KVCacheStaticParams, PagedKVCache, UNKNOWN_VALUE
from mojo_ops.cache.strides import PageStrides, page_shape
from mojo_ops.isa.amx import HAS_AMX, amx_permitted, tile_release
from mojo_ops.isa.codes import head_units, is_codes
from mojo_ops.isa.convert import ChunkConstants, chunk_of
from mojo_ops.isa.memory import CACHE_LINE_BYTES
from support import untracked, untracked_mutable

comptime KV_HEADS = 3


def check_lines[
    dtype: DType, *, side_by_side: Bool = True
](heads: Int, dim: Int, head_stride: Int, token_stride: Int, calls: Int) raises:
    """After all calls each line of the tile was prefetched once, and evenly."""
    var storage = List[Scalar[dtype]](length=1, fill=0)
    var base = storage.unsafe_ptr()
    var tokens = List[Int](length=KV_TILE_TOKENS, fill=0)
    for i in range(KV_TILE_TOKENS):
        tokens[i] = (KV_TILE_TOKENS - 1 - i) * token_stride
    var together = heads if head_stride == dim else 1
    var rows = heads // together
    var range_bytes = together * dim * size_of[dtype]()
    var addresses = List[Int](length=KV_TILE_TOKENS * rows, fill=0)
    var prefetcher = Prefetcher[to_l1=True, side_by_side=side_by_side](untracked_mutable(addresses), range_bytes)
    for row in range(rows):
        # In two pieces, as units are.
        prefetcher.add_ranges(base, untracked_mutable(tokens), 0, STREAMS, row * head_stride)
        prefetcher.add_ranges(base, untracked_mutable(tokens), STREAMS, KV_TILE_TOKENS, row * head_stride)
    prefetcher.start(calls)
    var total = ceildiv(range_bytes, CACHE_LINE_BYTES) * KV_TILE_TOKENS * rows
    assert_true(calls >= total // STREAMS)  # then a call prefetches one line of each stream at most
    var lines = Set[Int]()
    var bursts = 0
    for call in range(calls):
        var before = (Int(prefetcher.addresses), prefetcher.line_offset)
        var burst = [prefetcher.address(s) for s in range(STREAMS)]
        prefetcher.run()
        if (Int(prefetcher.addresses), prefetcher.line_offset) != before:
            bursts += 1
            for s in range(STREAMS):
                var line = burst[s] - Int(base)
                assert_true(line not in lines)
                lines.add(line)
                # Each is of the next row, or all are of one.
                var row = (Int(before[0]) - Int(addresses.unsafe_ptr())) // size_of[Int]()
                row += 0 if prefetcher.one_by_one() else s
                assert_true(addresses[row] <= burst[s] < addresses[row] + range_bytes)
        assert_true(abs(bursts * STREAMS * calls - (call + 1) * total) <= STREAMS * calls)
    assert_equal(len(lines), total)
    # The lines of a row are counted from its first byte: a token's of all heads in NHD, else one head's of a token.
    for token in range(KV_TILE_TOKENS):
        for row in range(rows):
            for byte in range(0, range_bytes, CACHE_LINE_BYTES):
                assert_true((tokens[token] + row * head_stride) * size_of[dtype]() + byte in lines)
    _ = storage^
    _ = tokens^
    _ = addresses^


def test_every_line_once() raises:
    for calls in [256, 300, 1000]:
        check_lines[DType.bfloat16](8, 128, 128, 8 * 128, calls)  # NHD: heads are adjacent
        check_lines[DType.bfloat16, side_by_side=False](8, 128, 128, 8 * 128, calls)
        check_lines[DType.bfloat16, side_by_side=False](3, 96, 96, 3 * 96, calls)  # no multiple of 8 lines
        check_lines[DType.bfloat16](8, 128, KV_TILE_TOKENS * 128, 128, calls)  # HND
        check_lines[DType.float32](3, 80, 80, 240, calls)
        check_lines[DType.float8_e4m3fn](1, 64, 64, 64, calls)
        check_lines[DType.float8_e4m3fn](4, 64, KV_TILE_TOKENS * 64, 64, calls)


def test_no_row_is_no_work() raises:
    var addresses = List[Int](length=STREAMS, fill=0)
    var prefetcher = Prefetcher[to_l1=True](untracked_mutable(addresses), 256)
    prefetcher.start(7)
    for _ in range(7):
        prefetcher.run()
    assert_equal(prefetcher.line_offset, 0)
    assert_equal(Int(prefetcher.addresses), Int(addresses.unsafe_ptr()), "rows that were passed")
    _ = addresses^


def test_rows_of_all_heads_have_room() raises:
    """The matrix tiles list where heads are apart: the K of a tile, and the first V after it, a head a row."""
    for kv_heads in [1, 3, 4, 9]:
        var heads = HeadLayout(kv_heads, kv_heads, 1, 64, 64, KV_TILE_TOKENS * 64, KV_TILE_TOKENS * 64, 64, 64, 64)
        var workspace = SegmentWorkspace(heads, 1, 0)
        var storage = List[Float32](length=1, fill=0)
        var prefetcher = Prefetcher[to_l1=False](workspace.offset_buffer(TILE_BUFFERS), 256)
        for end in [KV_TILE_TOKENS, EARLY_V_TOKENS]:
            for _ in range(kv_heads):
                prefetcher.add_ranges(storage.unsafe_ptr(), workspace.offset_buffer(0), 0, end, 0)
        var room = Int(workspace.offsets.unsafe_ptr()) + size_of[Int]() * len(workspace.offsets)
        assert_true(Int(prefetcher.addresses.unsafe_offset(prefetcher.count)) <= room, String(kv_heads))
        _ = storage^
        _ = workspace^


def check_calls[dtype: DType](dim: Int, queries: Int) raises:
    """The choice call `run` as often as they say: a rate of 1 counts."""
    comptime Cache = PagedKVCache[dtype, KVCacheStaticParams(UNKNOWN_VALUE, UNKNOWN_VALUE), UNKNOWN_VALUE]
    comptime integers = rounds_weights(DType.bfloat16, dtype)
    var units = head_units(dtype, dim)
    var shape = IndexList[5](2, 2, 16, KV_HEADS, units)
    var storage = List[Scalar[dtype]](length=2 * 2 * 16 * KV_HEADS * units, fill=0)
    var table: List[UInt32] = [1, 0]
    var k = Cache(
        untracked_mutable(storage),
        page_shape["NHD"](shape),
        PageStrides.of["NHD"](shape, False),
        untracked(table),
        1,
        2,
    )
    comptime chunk = max(chunk_of(dtype), Bf16Chunk[dtype].length)
    var padded = ceildiv(dim, chunk) * chunk
    var heads = HeadLayout(KV_HEADS, KV_HEADS, queries, dim, padded, units, units, dim, padded, units)
    var room = KV_HEADS * AmxBuffers.query_stride(queries)
    var workspace = SegmentWorkspace(heads, AmxBuffers.query_stride(queries), AmxBuffers.num_floats(room, padded))
    var tile = KVTile(k, k, 0, 0, KV_TILE_TOKENS, workspace.offset_buffer(0))

    var prefetcher = Prefetcher[to_l1=True](workspace.offset_buffer(TILE_BUFFERS), 0)
    prefetcher.rate = 1
    var constants = ChunkConstants[dtype]()
    comptime query_dtype = packed_query_dtype(DType.bfloat16, dtype)
    for unit in range(0, KV_TILE_TOKENS, STREAMS):
        for head in range(KV_HEADS):
            score_tile[query_dtype](
                k.blocks.ptr.unsafe_offset(head * heads.k_stride),
                constants,
                tile.k,
                heads,
                head,
                head,
                unit,
                unit + STREAMS,
                queries,
                workspace,
                prefetcher,
            )
    assert_equal(prefetcher.due, KV_HEADS * score_prefetch_calls[dtype](heads, queries), "scores in vectors")
    comptime if not is_codes(dtype):
        var tables = RotaryTables[dtype](dim, 10000, 1)
        var rotation = KeyRotation(tables, heads, 0, False)
        rotation.place_keys[DType.float32](STREAMS)
        rotation.select_tile(0, tile)
        prefetcher.due = 0
        for unit in range(0, KV_TILE_TOKENS, STREAMS):
            for head in range(KV_HEADS):
                rotation.rotate_keys[DType.float32](
                    k, constants, tile, 0, heads, head, unit, unit + STREAMS, prefetcher
                )
        assert_equal(prefetcher.due, KV_HEADS * KV_TILE_TOKENS, "rotated keys")
        _ = tables^
    prefetcher.due = 0
    for unit in range(0, KV_TILE_TOKENS, STREAMS):
        for head in range(KV_HEADS):
            sum_tile[integers](
                k, constants, tile, heads, head, head, unit, unit + STREAMS, queries, workspace, prefetcher
            )
    assert_equal(prefetcher.due, KV_HEADS * sum_prefetch_calls[dtype, integers](heads, queries), "sums in vectors")

    comptime if HAS_AMX and (dtype == DType.bfloat16 or dtype == DType.float8_e4m3fn):
        if amx_permitted():
            var buffers = AmxBuffers(queries, padded, workspace)
            buffers.configure()
            prefetcher.due = 0
            var scores = KeyProducts[Bf16Chunk[dtype].length](buffers)
            for head in range(KV_HEADS):
                var keys = k.blocks.ptr.unsafe_offset(head * heads.k_stride)
                score_tile_amx(keys, tile.k, heads, head, buffers, workspace, prefetcher, scores)
            assert_equal(prefetcher.due, KV_HEADS * prefetch_calls_amx[dtype](heads), "scores on matrix tiles")
            prefetcher.due = 0
            var sums = ValueProducts[Bf16Chunk[dtype].length](heads, buffers, workspace)
            for head in range(KV_HEADS):
                sum_tile_amx(k, tile, heads, head, buffers, workspace, prefetcher, sums)
            assert_equal(prefetcher.due, KV_HEADS * prefetch_calls_amx[dtype](heads), "sums on matrix tiles")
            tile_release()
    _ = storage^
    _ = table^
    _ = workspace^


def test_calls_are_as_announced() raises:
    for dim in [64, 80, 96, 112, 128, 192, 256]:
        for queries in [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17]:
            check_calls[DType.bfloat16](dim, queries)
            check_calls[DType.float8_e4m3fn](dim, queries)
            check_calls[DType.float32](dim, queries)
            check_calls[DType.int8](dim, queries)
            check_calls[DType.uint8](dim, queries)


def test_no_more_calls_than_planned_for_prefill_blocks() raises:
    """Of every number of queries, with all tokens of a step seen."""
    for queries in range(1, PREFILL_MAX_QUERIES + 1):
        var calls = 0
        var m = 0
        comptime for tiles in [TILES_AT_ONCE, 1]:
            while m + (tiles - 1) * QUERY_COLUMNS < queries:
                calls += (STEP_TOKENS + score_tokens(tiles) - 1) // score_tokens(tiles)
                m += tiles * QUERY_COLUMNS
        assert_true(calls <= num_score_blocks(queries), String(queries))


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
