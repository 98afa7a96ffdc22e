"""Results do not depend on the number of threads, though many cut segments by their KV heads.

Nor on the other rows: `assert_blocks_change_no_bit` of tests/support/attending.py, with every comparison of an op test.
"""

from std.math import sin
from std.testing import TestSuite, assert_equal, assert_true
from std.utils import IndexList

from mojo_ops.attention.cpu.dispatch import attend_on_cpu
from mojo_ops.attention.cpu.plan import BlockSizes, MAX_BLOCK_ROWS, SPLIT_TOKENS, plan_segments
from mojo_ops.attention.cpu.vectors.segment import TileOrder
from mojo_ops.attention.cpu.workspace import HeadLayout
from mojo_ops.attention.logits import Logits, ScoreOptions
from mojo_ops.attention.params import AttentionRows
from mojo_ops.attention.row_masks import NoMasks
from mojo_ops.cache.paged_kv_cache import DynamicKVCache
from mojo_ops.cache.strides import PageStrides
from mojo_ops.isa.codes import head_units, is_codes
from support import untracked, untracked_mutable

comptime KV_HEADS = 8
comptime GROUP = 4
comptime DIM = 72
comptime SLOTS = 16
comptime PAGES = 100


@fieldwise_init
struct Step(Copyable):
    """Lengths of requests and the rows of each, which are its last tokens."""

    var lengths: List[Int]
    var new_tokens: List[Int]


def bits_of[dtype: DType, kv_dtype: DType, rotates: Bool](step: Step, threads: Int, hnd: Bool) -> List[UInt32]:
    """The bits of o and lse, with ALiBi and sinks."""
    comptime units = head_units(kv_dtype, DIM)
    var memory = List[Scalar[kv_dtype]](length=PAGES * SLOTS * KV_HEADS * units, fill=0)
    for i in range(len(memory)):
        comptime if is_codes(kv_dtype):
            memory[i] = Scalar[kv_dtype](Int(127 * sin(Float64(i))))
            if i % units == units - 1:  # the scale of a head, a float32 of about 1
                memory[i] = 0x3F
        else:
            memory[i] = sin(Float32(i)).cast[kv_dtype]()
    var table = List[UInt32]()
    var row_batch = List[Int32]()
    var row_lengths = List[Int32]()
    for request in range(len(step.lengths)):
        for i in range(PAGES):
            table.append(UInt32(i * (7 + 4 * request) % PAGES))
        for row in range(step.new_tokens[request]):
            row_batch.append(Int32(request))
            row_lengths.append(Int32(step.lengths[request] - step.new_tokens[request] + row + 1))
    var num_rows = len(row_batch)
    var q = List[Scalar[dtype]](length=num_rows * KV_HEADS * GROUP * DIM, fill=0)
    for i in range(len(q)):
        q[i] = sin(Float32(3 * i)).cast[dtype]()
    var o = q.copy()
    var lse = List[Float32](length=num_rows * KV_HEADS * GROUP, fill=0)
    var slopes = List[Float32](length=KV_HEADS * GROUP, fill=0)
    for i in range(len(slopes)):
        slopes[i] = Float32(i) / 1000
    var sinks = slopes.copy()
    var strides = PageStrides(0, SLOTS * KV_HEADS * units, KV_HEADS * units, units)
    if hnd:
        strides = PageStrides(0, SLOTS * KV_HEADS * units, units, SLOTS * units)
    var cache = DynamicKVCache[kv_dtype](
        untracked_mutable(memory),
        IndexList[4](PAGES, SLOTS, KV_HEADS, DIM),
        strides,
        untracked(table),
        len(step.lengths),
        PAGES,
    )
    var queries = untracked_mutable(q)
    var rows = AttentionRows[dtype](
        queries,
        untracked_mutable(o),
        untracked_mutable(lse),
        untracked(row_batch),
        untracked(row_lengths),
        num_rows,
        KV_HEADS * GROUP,
        1,
        Float32(1e4) * Float32(Int(rotates)),
        1,
        NoMasks(),
        queries,
        1,
    )
    var logits = Logits(ScoreOptions(0.3), -1, untracked(slopes), True, untracked(sinks), True)
    attend_on_cpu[rotates=rotates](rows, cache, cache, logits, threads)
    var bits = List[UInt32]()
    for i in range(len(o)):
        bits.append(o[i].cast[DType.float32]().to_bits[DType.uint32]())
    for i in range(len(lse)):
        bits.append(lse[i].to_bits[DType.uint32]())
    _ = (memory^, table^, row_batch^, row_lengths^, q^, o^, lse^, slopes^, sinks^)
    return bits^


def check[dtype: DType, kv_dtype: DType, rotates: Bool = False](step: Step, many: List[Int]) raises:
    for hnd in [False, True]:
        var expected = bits_of[dtype, kv_dtype, rotates](step, 1, hnd)
        assert_true(expected[0] != expected[DIM])
        for threads in many:
            assert_equal(bits_of[dtype, kv_dtype, rotates](step, threads, hnd), expected)


def decode() -> Step:
    return Step([900, 521], [1, 2])


def test_bfloat16() raises:
    check[DType.bfloat16, DType.bfloat16](decode(), [2, 7, 64, 160])


def test_float32_rotated() raises:
    check[DType.float32, DType.float32, True](decode(), [2, 7, 64, 160])


def test_weights_over_codes_are_rounded_alike() raises:
    check[DType.bfloat16, DType.int8](decode(), [2, 7, 64, 160])


def test_decode_beside_prefill_blocks_of_both_kinds_and_blocks_that_are_split() raises:
    var step = Step([40, 300, 1500, 70], [1, 137, 12, 7])
    check[DType.bfloat16, DType.bfloat16](step, [2, 5])
    check[DType.float32, DType.float32](step, [2, 5])


def test_a_part_of_the_heads_has_the_units_of_all() raises:
    """Weights over codes are rounded a unit at a time."""
    for dim in [64, 128, 256, 512, 1024, 2048]:
        var heads = HeadLayout(8, 8, GROUP, dim, dim, dim, dim, dim, dim, dim)
        for queries in [1, 8, 20]:
            assert_equal(TileOrder(heads.part(2), queries, 1).unit, TileOrder(heads, queries, 1).unit)


def test_heads_are_cut_for_many_threads() raises:
    """Until the longest segment is no more than half of the mean of a thread, and no part is smaller than a head."""
    var row_batch: List[Int32] = [0, 1]
    var row_lengths: List[Int32] = [16384, 16384]
    var none = List[Float32]()
    var logits = Logits(ScoreOptions(1), -1, untracked(none), False, untracked(none), False)
    var short: List[Int32] = [200]
    var alone = plan_segments(
        untracked(row_batch),
        untracked(short),
        1,
        NoMasks(),
        logits,
        BlockSizes(MAX_BLOCK_ROWS, Int.MAX, 8, SPLIT_TOKENS),
    )
    alone.cut_heads(8, 64)
    assert_equal(len(alone.segments), 1)
    for threads, heads in [(1, 8), (32, 8), (48, 4), (100, 2), (200, 1), (2000, 1)]:
        var plan = plan_segments(
            untracked(row_batch),
            untracked(row_lengths),
            2,
            NoMasks(),
            logits,
            BlockSizes(MAX_BLOCK_ROWS, Int.MAX, 8, SPLIT_TOKENS),
        )
        var results = plan.num_split_results
        plan.cut_heads(8, threads)
        assert_equal(plan.segments[0].heads_of(8), heads)
        assert_equal(plan.num_split_results, results * 8 // heads)
        var seen = List[Bool](length=plan.num_split_results, fill=False)
        for segment in plan.segments:
            assert_true(not seen[segment.split_result])
            seen[segment.split_result] = True
    _ = (row_batch^, row_lengths^, short^, none^)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
