"""Prints how calls are cut into tasks, for the simulated clock of tests/support/schedule.py.

The arguments are calls:

    attention/REQUESTS/ROWS/KV_HEADS/THREADS: a line a segment, `call tokens rows heads block split splits num_splits`.
        REQUESTS are `count:tokens:new_tokens,...`; ROWS are those of a prefill block.
    linear/N/WORKERS: a line a section of rows of w, `call rows`.
    append/ROWS/KV_HEADS/HEAD_DIM: a line a task, `call rows`, of bfloat16 K and V.
"""

from std.math import ceildiv
from std.sys import argv
from std.utils import IndexList

from mojo_ops.attention.cpu.plan import BlockSizes, MAX_BLOCK_ROWS, SPLIT_TOKENS, plan_segments
from mojo_ops.attention.logits import Logits, ScoreOptions
from mojo_ops.attention.row_masks import NoMasks
from mojo_ops.cache.paged_kv_cache import DynamicKVCache
from mojo_ops.cache.strides import PageStrides
from mojo_ops.linear.bf16_dot import section_rows
from mojo_ops.transfer.slot_layout import rows_per_task
from support import untracked, untracked_mutable


def attention(call: Int, requests: String, rows: Int, kv_heads: Int, threads: Int) raises:
    var row_batch = List[Int32]()
    var row_lengths = List[Int32]()
    var request = 0
    for group in requests.split(","):
        var numbers = group.split(":")
        for _ in range(Int(numbers[0])):
            for row in range(Int(numbers[2])):
                row_batch.append(Int32(request))
                row_lengths.append(Int32(Int(numbers[1]) - Int(numbers[2]) + 1 + row))
            request += 1
    var sizes = BlockSizes(max(MAX_BLOCK_ROWS, rows), ceildiv(rows, 4), kv_heads, SPLIT_TOKENS)
    var none = List[Float32]()
    var logits = Logits(ScoreOptions(1), -1, untracked(none), False, untracked(none), False)
    var plan = plan_segments(untracked(row_batch), untracked(row_lengths), len(row_batch), NoMasks(), logits, sizes)
    _ = (none^, row_batch^, row_lengths^)
    plan.cut_heads(kv_heads, threads)
    for s in plan.segments:
        var block = s.split_result - s.split if s.split_result >= 0 else -1
        print(call, s.end - s.begin, s.num_rows, s.heads_of(kv_heads), block, s.split, s.splits(), s.num_splits)


def print_tasks(call: Int, total: Int, size: Int):
    for begin in range(0, total, size):
        print(call, min(size, total - begin))


def append(call: Int, rows: Int, heads: Int, dim: Int):
    var nothing = List[BFloat16](length=1, fill=0)
    var table = List[UInt32](length=1, fill=0)
    var cache = DynamicKVCache[DType.bfloat16](
        untracked_mutable(nothing), IndexList[4](1, 16, heads, dim), PageStrides(0, 0, 0, dim), untracked(table), 1, 1
    )
    for _ in range(2):  # K and V
        print_tasks(call, rows, rows_per_task[DType.bfloat16](cache))
    _ = (nothing^, table^)


def main() raises:
    for i in range(1, len(argv())):
        var parts = String(argv()[i]).split("/")
        if parts[0] == "attention":
            attention(i - 1, String(parts[1]), Int(parts[2]), Int(parts[3]), Int(parts[4]))
        elif parts[0] == "linear":
            print_tasks(i - 1, Int(parts[1]), section_rows(Int(parts[1]), Int(parts[2])))
        else:
            append(i - 1, Int(parts[1]), Int(parts[2]), Int(parts[3]))
