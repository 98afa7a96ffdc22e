"""The results of attention: written where a segment is all of its block, joined where a block was split.

The parts of a block are joined in pairs, the pairs in pairs and so on, each pair by whoever finishes its second half.
Nobody waits, and the tree depends on the number of parts alone, so who joins leaves no trace in the result.
"""

from std.atomic import Atomic

from ...isa.convert import HALF, chunk_of, unpack
from ..logits import Logits
from ..params import AttentionRows
from ..softmax import AttentionState, LOG2E, exp2
from .amx.widen import Widened, unpack_sums
from .kv_tile import Floats, Heads, Summed
from .plan import Segment


struct Partials(Movable):
    """Where the segments of split blocks leave their unfinished results, each in a slot of its own."""

    var memory: List[Float32]
    var states: List[AttentionState]
    """`[partials, queries]`."""
    var arrived: List[Int64]
    """`[partials]`: how many halves of the pair whose second half starts at this part are finished."""
    var queries: Int
    """Room of a slot: all KV heads of the largest block."""
    var padded: Int

    def __init__(out self, count: Int, queries: Int, padded: Int):
        # Not filled, for no part is read before it was written.
        self.memory = List[Float32](unsafe_uninit_length=count * queries * padded + 16)
        self.states = List[AttentionState](unsafe_uninit_length=count * queries)
        self.arrived = List[Int64](length=count, fill=0)
        self.queries = queries
        self.padded = padded

    @always_inline
    def acc_of(self, partial: Int) -> Floats:
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

    def join(self, segment: Segment, kv_heads: Int, stride: Int, queries: Int) -> Bool:
        """Merges a finished part with what is there; whether the block is complete, in the slot of its first part.

        Args:
            segment: The part, with its states and values in its slot.
            kv_heads: How many KV heads the slot holds.
            stride: The queries of a KV head that the slot has room for.
            queries: How many there are.
        """
        var first = segment.partial - segment.part
        var part = segment.part
        var span = 1
        while span < segment.parts:
            var left = part // (2 * span) * (2 * span)
            var right = left + span
            if right < segment.parts:
                var counter = (
                    self.arrived.unsafe_ptr()
                    .unsafe_mut_cast[True]()
                    .unsafe_origin_cast[MutUntrackedOrigin]()
                    .unsafe_bitcast[Atomic[Int64]]()
                )
                if counter[unsafe_offset=first + right].fetch_add(1) == 0:
                    return False
                for head in range(kv_heads):
                    for m in range(queries):
                        self.merge(first + left, first + right, head * stride + m)
            part = left
            span *= 2
        return True

    @always_inline
    def merge(self, left: Int, right: Int, query: Int):
        """Adds part `right` of one query to part `left`."""
        var states = self.states_of(left)
        var state = states[unsafe_offset=query]
        var mine, theirs = state.merge(self.states_of(right)[unsafe_offset=query])
        states[unsafe_offset=query] = state
        var acc = self.acc_of(left).unsafe_offset(query * self.padded)
        var added = self.acc_of(right).unsafe_offset(query * self.padded)
        for d in range(0, self.padded, HALF):
            acc.unsafe_store(d, acc.unsafe_load[width=HALF](d) * mine + added.unsafe_load[width=HALF](d) * theirs)


@always_inline
def write_values[
    dtype: DType, //, kv_dtype: DType, amx: Bool
](acc: Floats, factor: Float32, dim: Int, target: Pointer[Scalar[dtype], MutUntrackedOrigin]):
    """Weighted values times `factor`, in their natural order."""
    comptime length = Widened[kv_dtype].length if amx else chunk_of(kv_dtype)
    for d in range(0, dim, length):
        var sums: SIMD[DType.float32, length]
        comptime if amx:
            sums = rebind[SIMD[DType.float32, length]](unpack_sums[kv_dtype](acc.unsafe_offset(d)))
        else:
            sums = rebind[SIMD[DType.float32, length]](unpack[kv_dtype](acc.unsafe_load[width=chunk_of(kv_dtype)](d)))
        var out = (sums * factor).cast[dtype]()
        comptime for i in range(length // 8):
            if d + 8 * i < dim:
                target.unsafe_store(d + 8 * i, out.slice[8, offset=8 * i]())


@always_inline
def finish[
    dtype: DType, //, kv_dtype: DType, amx: Bool
](rows: AttentionRows[dtype], row: Int, query: Int, logits: Logits, dim: Int, var state: AttentionState, acc: Floats,):
    """Writes o and lse of query head `query` of one row."""
    var factor: Float32 = 1
    var sees_tokens = rows.row_batch[unsafe_offset=row] >= 0 and rows.row_lengths[unsafe_offset=row] > 0
    if logits.has_sinks and sees_tokens:
        var sink = logits.sinks[unsafe_offset=query] * LOG2E
        factor = state.raise_to(sink)
        state.add(exp2(sink - state.greatest))
    factor *= state.normaliser() * rows.v_scale
    write_values[kv_dtype, amx](acc, factor, dim, rows.o.unsafe_offset((row * rows.num_heads + query) * dim))
    rows.lse[unsafe_offset=row * rows.num_heads + query] = state.lse()


def deliver[
    dtype: DType, Sums: Summed, //, kv_dtype: DType, amx: Bool
](
    rows: AttentionRows[dtype],
    segment: Segment,
    logits: Logits,
    heads: Heads,
    stride: Int,
    sums: Sums,
    var acc: Floats,
    partials: Partials,
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
        partials: The slots of split blocks.
    """
    var queries = segment.num_rows * heads.group
    var first_head = segment.head if segment.is_wide() else 0
    var kv_heads = 1 if segment.is_wide() else heads.kv_heads
    var first = segment.partial - segment.part
    if segment.partial >= 0:
        for head in range(kv_heads):
            for m in range(queries):
                partials.states_of(segment.partial)[unsafe_offset=head * stride + m] = sums.state(head * stride + m)
        if not partials.join(segment, kv_heads, stride, queries):
            return
        acc = partials.acc_of(first)
    for head in range(kv_heads):
        for m in range(queries):
            var at = head * stride + m
            var state = partials.states_of(first)[unsafe_offset=at] if segment.partial >= 0 else sums.state(at)
            var row, g = divmod(m, heads.group)
            finish[kv_dtype, amx](
                rows,
                segment.row + row,
                (first_head + head) * heads.group + g,
                logits,
                heads.dim,
                state,
                acc.unsafe_offset(at * heads.padded),
            )
