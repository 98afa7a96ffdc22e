"""Prints the plan of calls of attention, a line a segment: `call tokens rows head block split num_splits`.

The arguments are calls, each as `requests:tokens:new_tokens,...` with the rows of a prefill block and the KV heads of
one, 0 where there is no prefill, behind a slash: `1:32768:1,31:128:1/0/0`.
"""

from std.math import ceildiv
from std.sys import argv

from mojo_ops.attention.cpu.plan import BlockSizes, MAX_BLOCK_ROWS, plan_segments
from mojo_ops.attention.logits import Logits
from support import untracked


def main() raises:
    for call in range(1, len(argv())):
        var parts = String(argv()[call]).split("/")
        var row_batch = List[Int32]()
        var row_lengths = List[Int32]()
        var request = 0
        for group in parts[0].split(","):
            var numbers = group.split(":")
            for _ in range(Int(numbers[0])):
                for row in range(Int(numbers[2])):
                    row_batch.append(Int32(request))
                    row_lengths.append(Int32(Int(numbers[1]) - Int(numbers[2]) + 1 + row))
                request += 1
        var rows = Int(parts[1])
        var sizes = BlockSizes.without_prefill()
        if rows > 0:
            sizes = BlockSizes(max(MAX_BLOCK_ROWS, rows), ceildiv(rows, 4), Int(parts[2]))
        var none = List[Float32]()
        var logits = Logits(1, 0, -1, untracked(none), False, untracked(none), False)
        var plan = plan_segments(untracked(row_batch), untracked(row_lengths), len(row_batch), logits, sizes)
        _ = none^
        for s in plan.segments:
            var first = s.split_result - s.split if s.split_result >= 0 else -1
            print(call - 1, s.end - s.begin, s.num_rows, s.head, first, s.split, s.num_splits)
