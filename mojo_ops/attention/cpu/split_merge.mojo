"""The results of attention: written where a segment is all of its block, joined where a block was split.

The parts of a block are joined in pairs, the pairs in pairs and so on, each pair by whoever finishes its second half.
Nobody waits, and the tree depends on the number of parts alone, so who joins leaves no trace in the result.
"""

from std.atomic import Atomic

from ...isa.convert import LANES, chunk_of, to_natural_order
from ..logits import Logits
from ..params import AttentionRows
from ..softmax import AttentionState, LOG2E, exp2
from .amx.widen import Bf16Chunk, unpack_sums
from .kv_tile import FloatPointer, HeadLayout, RunningStates
from .plan import Segment


struct SplitResults(Movable):
    """Where the segments of split blocks leave their unfinished results, each in a slot of its own."""

    var memory: List[Float32]
    var states: List[AttentionState]
    """`[split_results, queries]`."""
    var finished_halves: List[Int64]
    """`[split_results]`: how many halves of the pair whose second half starts at this part are finished."""
    var queries: Int
    """Room of a slot: all KV heads of the largest block."""
    var padded: Int

    def __init__(out self, count: Int, queries: Int, padded: Int):
        # Not filled, for no part is read before it was written.
        self.memory = List[Float32](unsafe_uninit_length=count * queries * padded + 16)
        self.states = List[AttentionState](unsafe_uninit_length=count * queries)
        self.finished_halves = List[Int64](length=count, fill=0)
        self.queries = queries
        self.padded = padded

    @always_inline
    def acc_of(self, partial: Int) -> FloatPointer:
        """`[queries, P]`: weighted values; a segment sums them up here, and nothing is copied."""
        var start = self.memory.unsafe_ptr().unsafe_mut_cast[True]().unsafe_origin_cast[MutUntrackedOrigin]()
        return start.unsafe_offset((64 - Int(start) % 64) % 64 // 4 + partial * self.queries * self.padded)

    @always_inline
    def states_of(self, partial: Int) -> Pointer[AttentionState, MutUntrackedOrigin]:
        return (
            self.states.unsafe_ptr()
            .unsafe_mut_cast[True]()
            .unsafe_origin_cast[MutUntrackedOrigin]()
            .unsafe_offset(partial * self.queries)
        )

    def merge_finished(self, segment: Segment, kv_heads: Int, stride: Int, queries: Int) -> Bool:
        """Merges a finished part with what is there; whether the block is complete, in the slot of its first part.

        Args:
            segment: The part, with its states and values in its slot.
            kv_heads: How many KV heads the slot holds.
            stride: The queries of a KV head that the slot has room for.
            queries: How many there are.
        """
        var first = segment.split_result - segment.split
        var part = segment.split
        var span = 1
        while span < segment.num_splits:
            var left = part // (2 * span) * (2 * span)
            var right = left + span
            if right < segment.num_splits:
                var counter = (
                    self.finished_halves.unsafe_ptr()
                    .unsafe_mut_cast[True]()
                    .unsafe_origin_cast[MutUntrackedOrigin]()
                    .unsafe_bitcast[Atomic[Int64]]()
                )
                if counter[unsafe_offset=first + right].fetch_add(1) == 0:
                    return False
                for head in range(kv_heads):
                    for m in range(queries):
                        self.merge_query(first + left, first + right, head * stride + m)
            part = left
            span *= 2
        return True

    @always_inline
    def merge_query(self, left: Int, right: Int, query: Int):
        """Adds part `right` of one query to part `left`."""
        var states = self.states_of(left)
        var state = states[unsafe_offset=query]
        var mine, theirs = state.merge(self.states_of(right)[unsafe_offset=query])
        states[unsafe_offset=query] = state
        var acc = self.acc_of(left).unsafe_offset(query * self.padded)
        var added = self.acc_of(right).unsafe_offset(query * self.padded)
        for d in range(0, self.padded, LANES):
            acc.unsafe_store(d, acc.unsafe_load[width=LANES](d) * mine + added.unsafe_load[width=LANES](d) * theirs)


@always_inline
def write_output[
    dtype: DType, //, kv_dtype: DType, amx: Bool
](acc: FloatPointer, factor: Float32, dim: Int, target: Pointer[Scalar[dtype], MutUntrackedOrigin]):
    """Weighted values times `factor`, in their natural order."""
    comptime length = Bf16Chunk[kv_dtype].length if amx else chunk_of(kv_dtype)
    for d in range(0, dim, length):
        var sums: SIMD[DType.float32, length]
        comptime if amx:
            sums = rebind[SIMD[DType.float32, length]](unpack_sums[kv_dtype](acc.unsafe_offset(d)))
        else:
            sums = rebind[SIMD[DType.float32, length]](
                to_natural_order[kv_dtype](acc.unsafe_load[width=chunk_of(kv_dtype)](d))
            )
        var out = (sums * factor).cast[dtype]()
        comptime for i in range(length // 8):
            if d + 8 * i < dim:
                target.unsafe_store(d + 8 * i, out.slice[8, offset=8 * i]())


@always_inline
def write_result[
    dtype: DType, //, kv_dtype: DType, amx: Bool
](
    rows: AttentionRows[dtype],
    row: Int,
    query: Int,
    logits: Logits,
    dim: Int,
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
    write_output[kv_dtype, amx](acc, factor, dim, rows.o.unsafe_offset((row * rows.num_heads + query) * dim))
    rows.lse[unsafe_offset=row * rows.num_heads + query] = state.lse()


def finish_segment[
    dtype: DType, States: RunningStates, //, kv_dtype: DType, amx: Bool
](
    rows: AttentionRows[dtype],
    segment: Segment,
    logits: Logits,
    heads: HeadLayout,
    stride: Int,
    sums: States,
    var acc: FloatPointer,
    split_results: SplitResults,
):
    """What a segment has summed up: to the output, if its block is complete with it.

    Args:
        rows: The rows of the call.
        segment: What was computed.
        logits: The sinks, if there are any.
        heads: The sizes.
        stride: The queries of a KV head that `sums` and `acc` have room for.
        sums: The states.
        acc: The weighted values; of a part, those of its slot.
        split_results: The slots of split blocks.
    """
    var queries = segment.num_rows * heads.group
    var first_head = segment.head if segment.is_prefill() else 0
    var kv_heads = 1 if segment.is_prefill() else heads.kv_heads
    var first = segment.split_result - segment.split
    if segment.split_result >= 0:
        for head in range(kv_heads):
            for m in range(queries):
                split_results.states_of(segment.split_result)[unsafe_offset=head * stride + m] = sums.state(
                    head * stride + m
                )
        if not split_results.merge_finished(segment, kv_heads, stride, queries):
            return
        acc = split_results.acc_of(first)
    for head in range(kv_heads):
        for m in range(queries):
            var at = head * stride + m
            var state = split_results.states_of(first)[unsafe_offset=at] if segment.split_result >= 0 else sums.state(
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
