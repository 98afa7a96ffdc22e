"""Prefill on the CPU: the number of threads changes no bit, and what no row sees is not multiplied."""

from std.testing import TestSuite, assert_equal, assert_true
from std.utils import IndexList
from std.utils.numerics import nan

from mojo_ops.attention.cpu.dispatch import attend_on_cpu
from mojo_ops.attention.cpu.prefill.queries import PREFILL_MAX_QUERIES, QUERY_COLUMNS
from mojo_ops.attention.cpu.prefill.step import STEP_TOKENS
from mojo_ops.attention.cpu.vectors.prefill import num_score_blocks
from mojo_ops.attention.cpu.vectors.prefill_workspace import TILES_AT_ONCE, score_tokens
from mojo_ops.attention.logits import Logits
from mojo_ops.attention.params import AttentionRows
from mojo_ops.attention.row_masks import NoMasks
from mojo_ops.cache.paged_kv_cache import DynamicKVCache
from mojo_ops.cache.strides import PageStrides
from support import untracked, untracked_mutable

comptime HEADS = 8
comptime KV_HEADS = 2
comptime DIM = 64
comptime SLOTS = 16


def some_number(seed: Int) -> Float32:
    """A number in [-1, 1), another one for each seed."""
    return Float32(Int(UInt32(seed) * 2654435761 >> 8) % 2000) / 1000 - 1


struct Results(Movable):
    """The bits of o and lse."""

    var o: List[Float32]
    var lse: List[Float32]

    def __init__(out self, var o: List[Float32], var lse: List[Float32]):
        self.o = o^
        self.lse = lse^


def attend[dtype: DType, kv_dtype: DType](lengths: List[Int], new_tokens: List[Int], workers: Int) -> Results:
    """The last `new_tokens[b]` tokens of each request attend, over shuffled pages whose other slots are NaN."""
    var columns = 0
    for length in lengths:
        columns = max(columns, length // SLOTS + 1)
    var pages = columns * len(lengths)
    var size = pages * SLOTS * KV_HEADS * DIM
    var keys = List[Scalar[kv_dtype]](length=size, fill=nan[DType.float32]().cast[kv_dtype]())
    var values = List[Scalar[kv_dtype]](length=size, fill=nan[DType.float32]().cast[kv_dtype]())
    var table = List[UInt32](length=pages, fill=0)
    var row_batch = List[Int32]()
    var row_lengths = List[Int32]()
    for b in range(len(lengths)):
        for column in range(columns):
            # Ids in another order: the pages of all requests alternate, the last ones first.
            table[b * columns + column] = UInt32((columns - 1 - column) * len(lengths) + b)
        for token in range(lengths[b]):
            var page = Int(table[b * columns + token // SLOTS])
            for i in range(KV_HEADS * DIM):
                var at = (page * SLOTS + token % SLOTS) * KV_HEADS * DIM + i
                keys[at] = some_number((b * 5000 + token) * 1000 + i).cast[kv_dtype]()
                values[at] = some_number((b * 5000 + token) * 1000 + 500 + i).cast[kv_dtype]()
        for row in range(new_tokens[b]):
            row_batch.append(Int32(b))
            row_lengths.append(Int32(lengths[b] - new_tokens[b] + row + 1))
    var rows = len(row_batch)
    var q = List[Scalar[dtype]](length=rows * HEADS * DIM, fill=0)
    for i in range(len(q)):
        q[i] = some_number(i + 77).cast[dtype]()
    var o = List[Scalar[dtype]](length=rows * HEADS * DIM, fill=nan[dtype]())
    var lse = List[Float32](length=rows * HEADS, fill=nan[DType.float32]())
    var nothing = List[Float32](length=1, fill=0)
    comptime Cache = DynamicKVCache[kv_dtype]
    var shape = IndexList[4](pages, SLOTS, KV_HEADS, DIM)
    var strides = PageStrides(0, SLOTS * KV_HEADS * DIM, KV_HEADS * DIM, DIM)
    attend_on_cpu(
        AttentionRows[dtype](
            untracked_mutable(q),
            untracked_mutable(o),
            untracked_mutable(lse),
            untracked(row_batch),
            untracked(row_lengths),
            rows,
            HEADS,
            v_scale=1,
            rope_theta=0,
            rope_scale=1,
            masks=NoMasks(),
            q_latent=untracked_mutable(q),
            latent_scale=1,
        ),
        Cache(untracked_mutable(keys), shape, strides, untracked(table), len(lengths), columns),
        Cache(untracked_mutable(values), shape, strides, untracked(table), len(lengths), columns),
        Logits(0.125, 0, -1, untracked(nothing), False, untracked(nothing), False),
        workers,
    )
    var results = List[Float32]()
    for x in o:
        results.append(x.cast[DType.float32]())
    _ = (keys^, values^, table^, row_batch^, row_lengths^, q^, o^, nothing^)
    return Results(results^, lse^)


def check_threads[dtype: DType, kv_dtype: DType]() raises:
    # Decode, blocks of both kinds, and blocks that are split.
    var lengths: List[Int] = [40, 300, 1500, 70]
    var new_tokens: List[Int] = [1, 137, 12, 7]
    var alone = attend[dtype, kv_dtype](lengths, new_tokens, 1)
    for i in range(len(alone.o)):
        assert_true(alone.o[i] == alone.o[i], "o holds a NaN")
    for workers in [2, 5]:
        var together = attend[dtype, kv_dtype](lengths, new_tokens, workers)
        for i in range(len(alone.o)):
            assert_equal(together.o[i], alone.o[i])
        for i in range(len(alone.lse)):
            assert_equal(together.lse[i], alone.lse[i])


def test_threads_change_no_bit() raises:
    check_threads[DType.bfloat16, DType.bfloat16]()
    check_threads[DType.float32, DType.float32]()


def test_no_more_prefetches_than_planned() raises:
    """Check every number of queries, with all tokens of a step seen."""
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
