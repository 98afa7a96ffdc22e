"""Prefetching: every line of a tile once, evenly, and as many calls as were announced.

The calls on matrix tiles are counted where the target that this is compiled for has them.
"""

from std.collections import Set
from std.math import ceildiv
from std.sys import size_of
from std.testing import TestSuite, assert_equal, assert_true
from std.utils import IndexList

from mojo_ops.attention.cpu.amx.layout import Engine, calls_amx
from mojo_ops.attention.cpu.amx.scores import Scores, score_tile_amx
from mojo_ops.attention.cpu.amx.weighted_sums import Sums, sum_tile_amx
from mojo_ops.attention.cpu.amx.widen import Widened
from mojo_ops.attention.cpu.kv_tile import Heads, PLACES, Scratch, Tile
from mojo_ops.attention.cpu.prefetch import Ahead, EARLY, LINE, STREAMS, TILE
from mojo_ops.attention.cpu.vectors.products import score_calls, score_tile, sum_calls, sum_tile
from mojo_ops.cache.paged_kv_cache import KVCacheStaticParams, PagedKVCache, UNKNOWN_VALUE
from mojo_ops.cache.strides import PageStrides, page_shape
from mojo_ops.isa.amx import HAS_AMX, amx_permitted, tile_release
from mojo_ops.isa.convert import chunk_of
from support import untracked, untracked_mutable

comptime KV_HEADS = 3


def check_lines[dtype: DType](heads: Int, dim: Int, head_stride: Int, token_stride: Int, calls: Int) raises:
    """After all calls each line of the tile was asked for once, and evenly."""
    var storage = List[Scalar[dtype]](length=1, fill=0)
    var base = storage.unsafe_ptr()
    var tokens = List[Int](length=TILE, fill=0)
    for i in range(TILE):
        tokens[i] = (TILE - 1 - i) * token_stride
    var together = heads if head_stride == dim else 1
    var rows = heads // together
    var row_bytes = together * dim * size_of[dtype]()
    var places = List[Int](length=TILE * rows, fill=0)
    var ahead = Ahead[near=True](untracked_mutable(places), row_bytes)
    for row in range(rows):
        # In two pieces, as units are.
        ahead.add(base, untracked_mutable(tokens), 0, STREAMS, row * head_stride)
        ahead.add(base, untracked_mutable(tokens), STREAMS, TILE, row * head_stride)
    ahead.start(calls)
    var total = ceildiv(row_bytes, LINE) * TILE * rows
    assert_true(calls >= total // STREAMS)  # then a call asks for one line of each stream at most
    var lines = Set[Int]()
    var bursts = 0
    for call in range(calls):
        var before = (Int(ahead.rows), ahead.line)
        var burst = [ahead.address(s) for s in range(STREAMS)]
        ahead.run()
        if (Int(ahead.rows), ahead.line) != before:
            bursts += 1
            for s in range(STREAMS):
                var line = burst[s] - Int(base)
                assert_true(line not in lines)
                lines.add(line)
                # Each is of the next row.
                var row = (Int(before[0]) - Int(places.unsafe_ptr())) // size_of[Int]() + s
                assert_true(places[row] <= burst[s] < places[row] + row_bytes)
        assert_true(abs(bursts * STREAMS * calls - (call + 1) * total) <= STREAMS * calls)
    assert_equal(len(lines), total)
    # The lines of a row are counted from its first byte: a token's of all heads in NHD, else one head's of a token.
    for token in range(TILE):
        for row in range(rows):
            for byte in range(0, row_bytes, LINE):
                assert_true((tokens[token] + row * head_stride) * size_of[dtype]() + byte in lines)
    _ = storage^
    _ = tokens^
    _ = places^


def test_every_line_once() raises:
    for calls in [256, 300, 1000]:
        check_lines[DType.bfloat16](8, 128, 128, 8 * 128, calls)  # NHD: heads are neighbours
        check_lines[DType.bfloat16](8, 128, TILE * 128, 128, calls)  # HND
        check_lines[DType.float32](3, 80, 80, 240, calls)
        check_lines[DType.float8_e4m3fn](1, 64, 64, 64, calls)
        check_lines[DType.float8_e4m3fn](4, 64, TILE * 64, 64, calls)


def test_no_row_is_no_work() raises:
    var places = List[Int](length=STREAMS, fill=0)
    var ahead = Ahead[near=True](untracked_mutable(places), 256)
    ahead.start(7)
    for _ in range(7):
        ahead.run()
    assert_equal(ahead.line, 0)
    assert_equal(Int(ahead.rows), Int(places.unsafe_ptr()), "rows that were passed")
    _ = places^


def test_rows_of_all_heads_have_room() raises:
    """What the matrix tiles list where heads are apart: the K of a tile, and the first V after it, a head a row."""
    for kv_heads in [1, 3, 4, 9]:
        var heads = Heads(kv_heads, 1, 64, 64, TILE * 64, TILE * 64)
        var scratch = Scratch(heads, 1, 0)
        var storage = List[Float32](length=1, fill=0)
        var ahead = Ahead[near=False](scratch.place(PLACES), 256)
        for end in [TILE, EARLY]:
            for _ in range(kv_heads):
                ahead.add(storage.unsafe_ptr(), scratch.place(0), 0, end, 0)
        var room = Int(scratch.places.unsafe_ptr()) + size_of[Int]() * len(scratch.places)
        assert_true(Int(ahead.rows.unsafe_offset(ahead.count)) <= room, String(kv_heads))
        _ = storage^
        _ = scratch^


def check_calls[dtype: DType](dim: Int, queries: Int) raises:
    """The engines call `run` as often as they say: a rate of 1 counts."""
    comptime Cache = PagedKVCache[dtype, KVCacheStaticParams(UNKNOWN_VALUE, UNKNOWN_VALUE), UNKNOWN_VALUE]
    var shape = IndexList[5](2, 2, 16, KV_HEADS, dim)
    var storage = List[Scalar[dtype]](length=2 * 2 * 16 * KV_HEADS * dim, fill=0)
    var table: List[UInt32] = [1, 0]
    var k = Cache(
        untracked_mutable(storage),
        page_shape["NHD"](shape),
        PageStrides.of["NHD"](shape, False),
        untracked(table),
        1,
        2,
    )
    comptime chunk = max(chunk_of(dtype), Widened[dtype].length)
    var padded = ceildiv(dim, chunk) * chunk
    var heads = Heads(KV_HEADS, queries, dim, padded, dim, dim)
    var room = KV_HEADS * Engine.stride_of(queries)
    var scratch = Scratch(heads, Engine.stride_of(queries), Engine.spare(room, padded))
    var tile = Tile(k, k, 0, 0, TILE, scratch.place(0))

    var ahead = Ahead[near=True](scratch.place(PLACES), 0)
    ahead.rate = 1
    for unit in range(0, TILE, STREAMS):
        for head in range(KV_HEADS):
            score_tile(k, tile, heads, head, head, unit, unit + STREAMS, queries, scratch, ahead)
    assert_equal(ahead.due, KV_HEADS * score_calls[dtype](heads, queries), "scores in vectors")
    ahead.due = 0
    for unit in range(0, TILE, STREAMS):
        for head in range(KV_HEADS):
            sum_tile(k, tile, heads, head, head, unit, unit + STREAMS, queries, scratch, ahead)
    assert_equal(ahead.due, KV_HEADS * sum_calls[dtype](heads, queries), "sums in vectors")

    comptime if HAS_AMX and (dtype == DType.bfloat16 or dtype == DType.float8_e4m3fn):
        if amx_permitted():
            var engine = Engine(queries, padded, scratch)
            engine.configure()
            ahead.due = 0
            var scores = Scores[Widened[dtype].length](engine)
            for head in range(KV_HEADS):
                score_tile_amx(k, tile, heads, head, engine, scratch, ahead, scores)
            assert_equal(ahead.due, KV_HEADS * calls_amx[dtype](heads), "scores on matrix tiles")
            ahead.due = 0
            var sums = Sums[Widened[dtype].length](heads, engine, scratch)
            for head in range(KV_HEADS):
                sum_tile_amx(k, tile, heads, head, engine, scratch, ahead, sums)
            assert_equal(ahead.due, KV_HEADS * calls_amx[dtype](heads), "sums on matrix tiles")
            tile_release()
    _ = storage^
    _ = table^
    _ = scratch^


def test_calls_are_as_announced() raises:
    for dim in [64, 80, 96, 112, 128, 192, 256]:
        for queries in [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17]:
            check_calls[DType.bfloat16](dim, queries)
            check_calls[DType.float8_e4m3fn](dim, queries)
            check_calls[DType.float32](dim, queries)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
