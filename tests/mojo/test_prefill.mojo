"""Attention on the CPU: neither threads, nor other rows, nor other requests change a bit of a row, and what no row
sees is not multiplied.
"""

from std.testing import TestSuite, assert_equal, assert_true
from std.utils import IndexList
from std.utils.numerics import nan

from mojo_ops.attention.cpu.dispatch import attend_on_cpu
from mojo_ops.attention.cpu.prefill.queries import PREFILL_MAX_QUERIES, QUERY_COLUMNS
from mojo_ops.attention.cpu.prefill.step import STEP_TOKENS
from mojo_ops.attention.cpu.vectors.prefill import num_score_blocks
from mojo_ops.attention.cpu.vectors.prefill_workspace import TILES_AT_ONCE, score_tokens
from mojo_ops.attention.logits import Logits, ScoreOptions
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


def attend[
    dtype: DType, kv_dtype: DType
](
    lengths: List[Int],
    new_tokens: List[Int],
    workers: Int,
    sm_scale: Float32 = 0.125,
    window_left: Int = -1,
    deterministic: Bool = False,
) -> Results:
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
    for row in range(rows):
        for i in range(HEADS * DIM):
            var seed = (Int(row_batch[row]) * 5000 + Int(row_lengths[row])) * HEADS * DIM + i + 77
            q[row * HEADS * DIM + i] = some_number(seed).cast[dtype]()
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
        Logits(ScoreOptions(sm_scale), window_left, untracked(nothing), False, untracked(nothing), False),
        workers,
        deterministic=deterministic,
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


def check_rows[dtype: DType, kv_dtype: DType](window_left: Int = -1) raises:
    """The rows of a prompt of 1,400 tokens, alone, in parts of it, and beside other requests."""
    comptime tokens = 1400
    comptime sm_scale: Float32 = 1.9  # scores of up to some hundred: maxima are raised now and then
    var prompt = attend[dtype, kv_dtype]([tokens], [tokens], 2, sm_scale, window_left, True)
    for length, new_tokens in [
        (1, 1),
        (5, 5),
        (128, 1),
        (129, 3),
        (250, 13),
        (256, 1),
        (257, 1),
        (513, 8),
        (700, 64),
        (tokens, 1),
        (tokens, 7),
        (tokens, 300),
    ]:
        for others in range(2):
            var lengths: List[Int] = [length]
            var parts: List[Int] = [new_tokens]
            if others == 1:
                lengths += [3000, 40]
                parts += [1, 20]
            var part = attend[dtype, kv_dtype](lengths, parts, 1 + others, sm_scale, window_left, True)
            for row in range(new_tokens):
                var at = length - new_tokens + row
                for head in range(HEADS):
                    assert_equal(part.lse[row * HEADS + head], prompt.lse[at * HEADS + head], String("lse of row ", at))
                for i in range(HEADS * DIM):
                    assert_equal(part.o[row * HEADS * DIM + i], prompt.o[at * HEADS * DIM + i], String("o of row ", at))


def test_other_rows_change_no_bit() raises:
    check_rows[DType.bfloat16, DType.bfloat16]()
    check_rows[DType.float32, DType.float32]()
    check_rows[DType.float32, DType.bfloat16]()
    check_rows[DType.bfloat16, DType.float8_e4m3fn]()
    for window_left in [0, 100, 511, 700]:
        check_rows[DType.float32, DType.bfloat16](window_left)


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
