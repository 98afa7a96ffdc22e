"""The parts of attention on matrix tiles that run on every CPU: buffers, packed queries, transposes, element orders."""

from std.testing import TestSuite, assert_equal, assert_true

from mojo_ops.attention.cpu.amx.layout import AmxBuffers, pack_queries_amx, transpose_score_tile
from mojo_ops.attention.cpu.amx.weighted_sums import natural_mask
from mojo_ops.attention.cpu.plan import Segment
from mojo_ops.attention.cpu.prefetch import KV_TILE_TOKENS
from mojo_ops.attention.cpu.workspace import HeadLayout, SegmentWorkspace
from mojo_ops.attention.params import AttentionRows
from mojo_ops.attention.row_masks import NoMasks
from mojo_ops.isa.convert import LANES
from mojo_ops.isa.bf16_lookup import word_order, zip_mask
from support import untracked, untracked_mutable

comptime MARK: Float32 = 12345


def check_packing[kv_dtype: DType](num_rows: Int, group: Int, kv_heads: Int, dim: Int, padded: Int) raises:
    """Every query is where the matrix tiles load it, and nothing is written past the two regions that packing owns."""
    var q = List[BFloat16](length=num_rows * group * kv_heads * dim, fill=0)
    for i in range(len(q)):
        q[i] = BFloat16(Float32(i % 251 + 1))
    var nothing = List[Float32](length=1, fill=0)
    var rows_of = List[Int32](length=num_rows, fill=0)
    var numbers = untracked(rows_of)
    var at = untracked_mutable(q)
    var rows = AttentionRows[DType.bfloat16](
        at, at, untracked_mutable(nothing), numbers, numbers, num_rows, group * kv_heads, 1, 0, 1, NoMasks(), at, 1
    )
    var queries = num_rows * group
    var room = AmxBuffers.query_stride(queries) * kv_heads
    var amx_floats = AmxBuffers.num_floats(room, padded)
    var heads = HeadLayout(kv_heads, kv_heads, group, dim, padded, dim, dim, dim, padded, dim)
    var workspace = SegmentWorkspace(heads, AmxBuffers.query_stride(queries), amx_floats)
    var buffers = AmxBuffers(queries, padded, workspace)
    for i in range(room * KV_TILE_TOKENS):
        workspace.weights[unsafe_offset=i] = MARK
    for i in range(room * padded):
        workspace.acc[unsafe_offset=i] = MARK
    for i in range(amx_floats):
        workspace.amx_floats[unsafe_offset=i] = MARK
    pack_queries_amx[kv_dtype](rows, Segment(0, num_rows, 0, 0), heads, buffers, workspace)

    for i in range(room * KV_TILE_TOKENS):
        assert_equal(workspace.weights[unsafe_offset=i], MARK)
    for i in range(amx_floats):
        assert_equal(workspace.amx_floats[unsafe_offset=i], MARK)
    for i in range(room * padded):
        assert_equal(workspace.acc[unsafe_offset=i], 0)
    # The scores come last in `amx_floats`, and have to end where it does.
    assert_equal(
        Int(buffers.scores.unsafe_offset(room * KV_TILE_TOKENS)),
        Int(workspace.amx_floats.unsafe_offset(amx_floats)),
        "the scores' end",
    )
    assert_true(
        Int(workspace.greatest.unsafe_offset(room)) <= Int(workspace.memory.unsafe_ptr()) + 4 * len(workspace.memory)
    )

    # Where each element of a float8 chunk goes (`word_order`); the others keep their order.
    var positions = List[Int](length=64, fill=0)
    var stored = materialize[word_order(DType.float8_e4m3fn)]()
    for i in range(64):
        positions[stored[i]] = i
    var words = workspace.q.unsafe_bitcast[BFloat16]()
    var n = buffers.columns
    for head in range(kv_heads):
        for m in range(buffers.stride):
            var block, column = divmod(m, n)
            for d in range(padded):
                var position = d
                comptime if kv_dtype != DType.bfloat16:
                    position = d // 64 * 64 + positions[d % 64]
                var tile = (head * buffers.stride + block * n) * padded + position // 32 * 32 * n
                var found = words[unsafe_offset=tile + position % 32 // 2 * 2 * n + 2 * column + position % 2]
                var expected = BFloat16(0)
                if m < queries and d < dim:
                    var row, g = divmod(m, group)
                    expected = q[((row * kv_heads + head) * group + g) * dim + d]
                assert_equal(found, expected)
    _ = q^
    _ = nothing^
    _ = rows_of^
    _ = workspace^


def test_packing_fills_its_own_memory_alone() raises:
    for kv_heads in [1, 3]:
        for group in [1, 3, 6, 16]:
            for num_rows in [1, 5, 8]:
                check_packing[DType.bfloat16](num_rows, group, kv_heads, 80, 96)
                check_packing[DType.float8_e4m3fn](num_rows, group, kv_heads, 72, 128)


def test_room_never_falls_as_queries_grow() raises:
    for queries in range(1, 200):
        assert_true(queries <= AmxBuffers.query_stride(queries) <= AmxBuffers.query_stride(queries + 1))


def check_transpose[count: Int]() raises:
    var source = List[Float32](length=16 * count, fill=0)
    var target = List[Float32](length=16 * KV_TILE_TOKENS, fill=-1)
    for i in range(16 * count):
        source[i] = Float32(i)
    transpose_score_tile[count](untracked_mutable(source), untracked_mutable(target))
    for column in range(count):
        for token in range(16):
            assert_equal(target[column * KV_TILE_TOKENS + token], Float32(token * count + column))
    _ = source^
    _ = target^


def test_transpose() raises:
    check_transpose[1]()
    check_transpose[2]()
    check_transpose[4]()
    check_transpose[8]()
    check_transpose[16]()


def check_order[length: Int]() raises:
    """Two tokens' elements that are zipped, then widened to words, are pairs in columns in natural order again."""
    comptime natural = natural_mask[length]()
    comptime zips = (zip_mask[length](0), zip_mask[length](length // 8))
    for element in range(length):
        # Two vectors of 32 words, or four where each half of the zipped elements becomes two.
        var vector, column = divmod(natural[element], LANES)
        for token in range(2):
            var stored = 2 * column + token
            comptime if length == 64:
                comptime parts = word_order(DType.float8_e4m3fn)
                stored = parts[vector % 2 * 32 + stored]
            var upper = vector if length == 32 else vector // 2
            assert_equal((zips[1] if upper == 1 else zips[0])[stored], token * length + element)


def test_sums_come_back_in_order() raises:
    check_order[32]()
    check_order[64]()


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
