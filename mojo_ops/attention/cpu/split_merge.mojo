"""The end of a segment: a whole block is written to o and lse, the splits of a block are merged first.

Splits are merged in pairs, the results in pairs again and so on. The thread that finishes the later half of a pair
merges it, so no thread waits. The tree of merges depends on the number of splits alone, so the result does not depend
on which thread merges what.
"""

from std.atomic import Atomic

from ...cache.pointers import untracked
from ...isa.convert import LANES, chunk_of, narrow, to_natural_order
from ...isa.memory import FloatPointer, align_to_line
from ..logits import Logits
from ..params import AttentionRows
from ..softmax import AttentionState, LOG2E, exp2
from .amx.widen import Bf16Chunk, unpack_sums
from .plan import Segment
from .workspace import HeadLayout, RunningStates


struct SplitResults(Movable):
    """The states and weighted values of the splits of all blocks, one result for each split."""

    var memory: List[Float32]
    var states: List[AttentionState]
    """`[count, queries]`."""
    var finished_halves: List[Int64]
    """`[count]`: the finished halves of the pair whose second half begins with this split."""
    var queries: Int
    """Queries that a result has memory for: all KV heads of the largest block."""
    var padded_dim: Int

    def __init__(out self, count: Int, queries: Int, padded_dim: Int):
        # Not filled: every result is written before it is read.
        self.memory = List[Float32](unsafe_uninit_length=count * queries * padded_dim + 16)
        self.states = List[AttentionState](unsafe_uninit_length=count * queries)
        self.finished_halves = List[Int64](length=count, fill=0)
        self.queries = queries
        self.padded_dim = padded_dim

    @always_inline
    def acc_of(self, index: Int) -> FloatPointer:
        """`[queries, P]`: the weighted values of result `index`. A segment accumulates them here, without a copy."""
        return align_to_line(untracked(self.memory.unsafe_ptr())).unsafe_offset(index * self.queries * self.padded_dim)

    @always_inline
    def states_of(self, index: Int) -> Pointer[AttentionState, MutUntrackedOrigin]:
        """`[queries]`: the states of result `index`."""
        return untracked(self.states.unsafe_ptr()).unsafe_offset(index * self.queries)

    def merge_finished(self, segment: Segment, kv_heads: Int, stride: Int, queries: Int) -> Bool:
        """Merges a finished split with the finished splits beside it.

        Args:
            segment: The split, whose states and values are in its result.
            kv_heads: The KV heads of a result.
            stride: The queries of a KV head that a result has memory for.
            queries: The queries of a KV head.

        Returns:
            Whether the block is complete. Its result is then that of its first split.
        """
        var first = segment.split_result - segment.split
        var split = segment.split
        var width = 1
        while width < segment.num_splits:
            var left = split // (2 * width) * (2 * width)
            var right = left + width
            if right < segment.num_splits:
                var counter = untracked(self.finished_halves.unsafe_ptr()).unsafe_bitcast[Atomic[Int64]]()
                if counter[unsafe_offset=first + right].fetch_add(1) == 0:
                    return False
                for head in range(kv_heads):
                    for m in range(queries):
                        self.merge_query(first + left, first + right, head * stride + m)
            split = left
            width *= 2
        return True

    @always_inline
    def merge_query(self, left: Int, right: Int, query: Int):
        """Merges one query's result `right` into result `left`."""
        var states = self.states_of(left)
        var state = states[unsafe_offset=query]
        var mine, theirs = state.merge(self.states_of(right)[unsafe_offset=query])
        states[unsafe_offset=query] = state
        var acc = self.acc_of(left).unsafe_offset(query * self.padded_dim)
        var added = self.acc_of(right).unsafe_offset(query * self.padded_dim)
        for d in range(0, self.padded_dim, LANES):
            acc.unsafe_store(d, acc.unsafe_load[width=LANES](d) * mine + added.unsafe_load[width=LANES](d) * theirs)


@always_inline
def write_output[
    dtype: DType, //, kv_dtype: DType, amx: Bool
](acc: FloatPointer, factor: Float32, head_dim: Int, target: Pointer[Scalar[dtype], MutUntrackedOrigin]):
    """Writes weighted values times `factor` to `target` `[D]`, in their natural order."""
    comptime length = Bf16Chunk[kv_dtype].length if amx else chunk_of(kv_dtype)
    for d in range(0, head_dim, length):
        var sums: SIMD[DType.float32, length]
        comptime if amx:
            sums = rebind[SIMD[DType.float32, length]](unpack_sums[kv_dtype](acc.unsafe_offset(d)))
        else:
            sums = rebind[SIMD[DType.float32, length]](
                to_natural_order[kv_dtype](acc.unsafe_load[width=chunk_of(kv_dtype)](d))
            )
        var out = narrow[dtype](sums * factor)
        comptime for i in range(length // 8):
            if d + 8 * i < head_dim:
                target.unsafe_store(d + 8 * i, out.slice[8, offset=8 * i]())


@always_inline
def write_result[
    dtype: DType, //, kv_dtype: DType, amx: Bool
](
    rows: AttentionRows[dtype],
    row: Int,
    query: Int,
    logits: Logits,
    head_dim: Int,
    var state: AttentionState,
    acc: FloatPointer,
):
    """Writes o and lse of query head `query` of one row."""
    var factor: Float32 = 1
    var sees_tokens = rows.row_batch[unsafe_offset=row] >= 0 and rows.row_lengths[unsafe_offset=row] > 0
    if logits.has_sinks and sees_tokens:
        var sink = logits.sinks[unsafe_offset=query] * LOG2E
        factor = state.raise_to(sink)
        state.add(exp2(sink - state.greatest))
    factor *= state.normaliser() * rows.v_scale
    write_output[kv_dtype, amx](acc, factor, head_dim, rows.o.unsafe_offset((row * rows.num_heads + query) * head_dim))
    rows.lse[unsafe_offset=row * rows.num_heads + query] = state.lse()


def finish_segment[
    dtype: DType, StatesType: RunningStates, //, kv_dtype: DType, amx: Bool
](
    rows: AttentionRows[dtype],
    segment: Segment,
    logits: Logits,
    heads: HeadLayout,
    stride: Int,
    states: StatesType,
    var acc: FloatPointer,
    split_results: SplitResults,
):
    """Merges a computed segment with the other splits of its block, and writes o and lse where the block is complete.

    Args:
        rows: The rows of the call.
        segment: The computed segment.
        logits: The options of the call, for their sinks.
        heads: The head sizes.
        stride: The queries of a KV head that `states` and `acc` have memory for.
        states: The softmax states of the segment.
        acc: The weighted values; those of a split are in its split result.
        split_results: The results of all splits of the call.
    """
    var queries = segment.num_rows * heads.group
    var first_head = segment.head if segment.is_prefill() else 0
    var kv_heads = 1 if segment.is_prefill() else heads.kv_heads
    var first = segment.split_result - segment.split
    if segment.split_result >= 0:
        for head in range(kv_heads):
            for m in range(queries):
                split_results.states_of(segment.split_result)[unsafe_offset=head * stride + m] = states.state(
                    head * stride + m
                )
        if not split_results.merge_finished(segment, kv_heads, stride, queries):
            return
        acc = split_results.acc_of(first)
    for head in range(kv_heads):
        for m in range(queries):
            var at = head * stride + m
            var state = split_results.states_of(first)[unsafe_offset=at] if segment.split_result >= 0 else states.state(
                at
            )
            var row, g = divmod(m, heads.group)
            write_result[kv_dtype, amx](
                rows,
                segment.row + row,
                (first_head + head) * heads.group + g,
                logits,
                heads.head_dim,
                state,
                acc.unsafe_offset(at * heads.padded_dim),
            )
