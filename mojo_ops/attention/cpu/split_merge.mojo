"""The end of a segment: a whole block is written to o and lse, the splits of a block are merged first.

Splits are merged in pairs, the results in pairs again and so on. The thread that finishes the later half of a pair
merges it, so no thread waits. Pairs are counted from token 0, so a row's result depends on its own tokens alone: neither
on the thread that merges what, nor on splits of its block in which it sees nothing.

A thread accumulates each split in a result of its own, which is in its cache. It leaves the result to the thread that
merges it, and goes on in the memory of a result that it has merged before: few results are in use at a time, and they
stay in the cache (32 requests of 1024 tokens in 128 splits took 1.15 times the time of whole blocks where each split
had memory of its own; Zen 5, 2026-11-22).
"""

from std.atomic import Atomic
from std.math import align_up

from ...cache.pointers import untracked
from ...isa.convert import LANES, chunk_of, narrow, to_natural_order
from ...isa.line_counter import LineCounter
from ...isa.memory import CACHE_LINE_BYTES, FloatPointer, align_to_line
from ..logits import Logits
from ..params import AttentionRows
from ..rope import RotaryEmbedding
from ..softmax import AttentionState, LOG2E, MINUS_INFINITY, exp2
from .amx.weighted_sums import unpack_sums
from .bf16_chunk import Bf16Chunk
from .cpu_call import CpuCall
from .float64_rows import recompute_not_finite
from .plan import Segment
from .workspace import RunningStates

comptime LINE_WORDS = CACHE_LINE_BYTES // 8
"""Int64 numbers of a cache line. What threads write at the same time lies in different lines."""


struct TaskResult(Movable):
    """The result that a task accumulates its next split in, and merged results whose memory it may use again."""

    var index: Int
    var free: List[Int]

    def __init__(out self, task: Int):
        """Each task of a call begins with the result of its own index."""
        self.index = task
        self.free = List[Int]()


struct SplitResults(Movable):
    """The states and weighted values of the splits of all blocks that are not merged yet."""

    var memory: List[Float32]
    var states: List[AttentionState]
    """`[results, states_stride]`."""
    var nodes: List[Int64]
    """`[splits, LINE_WORDS]`: of the part of a block that begins with this split, the finished halves of the pair whose
    second half it is, and the index of its result."""
    var num_used: LineCounter
    """The number of results that are or have been in use."""
    var queries: Int
    """Queries that a result has memory for: all KV heads of the largest block."""
    var states_stride: Int
    """`queries`, rounded up to whole lines."""
    var padded_value: Int

    def __init__(out self, splits: Int, results: Int, tasks: Int, queries: Int, padded_value: Int):
        """Memory for `splits` splits of all blocks, `results` of which wait at a time. Each of `tasks` tasks begins with
        a result."""
        var count = results + tasks if splits > 0 else 0
        self.queries = queries
        self.states_stride = align_up(queries, LINE_WORDS)
        self.padded_value = padded_value
        # Not filled: every result is written before it is read.
        self.memory = List[Float32](unsafe_uninit_length=count * queries * padded_value + 16)
        self.states = List[AttentionState](unsafe_uninit_length=count * self.states_stride + LINE_WORDS)
        self.nodes = List[Int64](length=(splits + 1) * LINE_WORDS, fill=0)
        self.num_used = LineCounter()
        _ = self.num_used.at()[].fetch_add(Int64(tasks))

    @always_inline
    def acc_of(self, index: Int) -> FloatPointer:
        """`[queries, Pv]`: the weighted values of result `index`. A split accumulates them here, without a copy."""
        return align_to_line(untracked(self.memory.unsafe_ptr())).unsafe_offset(
            index * self.queries * self.padded_value
        )

    @always_inline
    def acc_for(self, segment: Segment, result: TaskResult, own: FloatPointer) -> FloatPointer:
        """The memory for the weighted values of a segment: a task's own for a whole block, `result` for a split."""
        return own if segment.split_result < 0 else self.acc_of(result.index)

    @always_inline
    def states_of(self, index: Int) -> Pointer[AttentionState, MutUntrackedOrigin]:
        """`[queries]`: the states of result `index`."""
        var floats = align_to_line(untracked(self.states.unsafe_ptr()).unsafe_bitcast[Float32]())
        return floats.unsafe_bitcast[AttentionState]().unsafe_offset(index * self.states_stride)

    @always_inline
    def node(self, split: Int, word: Int) -> Pointer[Int64, MutUntrackedOrigin]:
        """A number of the node of `split`, counted over all blocks."""
        return align_to_line(untracked(self.nodes.unsafe_ptr())).unsafe_offset(split * LINE_WORDS + word)

    def merge_finished(
        self, segment: Segment, kv_heads: Int, stride: Int, queries: Int, mut result: TaskResult
    ) -> Bool:
        """Merges a finished split with the finished splits beside it.

        Args:
            segment: The split.
            kv_heads: The KV heads of a result.
            stride: The queries of a KV head that a result has memory for.
            queries: The queries of a KV head.
            result: The result that holds the split's states and values.

        Returns:
            Whether the block is complete, in `result`. Else the result is left to another thread, and `result` is one
            that can be written.
        """
        # Splits are counted from token 0; the block has `[first, last)`, and `result` those of `[split, split + width)`.
        var first = segment.first_split()
        var last = first + segment.num_splits
        var zero = segment.split_result - segment.split - first
        var split = first + segment.split
        var width = 1
        while split > first or split + width < last:
            var left = split // (2 * width) * (2 * width)
            var right = left + width
            if first < right < last:
                self.node(zero + max(split, first), 1)[] = Int64(result.index)
                var halves = self.node(zero + right, 0).unsafe_bitcast[Atomic[Int64]]()
                if halves[].fetch_add(1) == 0:
                    result.index = result.free.pop() if len(result.free) > 0 else Int(self.num_used.at()[].fetch_add(1))
                    return False
                var other = Int(self.node(zero + max(left + right - split, first), 1)[])
                for head in range(kv_heads):
                    for m in range(queries):
                        if split == left:
                            self.merge_query[True](result.index, other, head * stride + m)
                        else:
                            self.merge_query[False](result.index, other, head * stride + m)
                result.free.append(other)
            split = left
            width *= 2
        return True

    @always_inline
    def merge_query[other_is_right: Bool](self, mine: Int, other: Int, query: Int):
        """Merges one query's result `other` into result `mine`: the same bits whichever is the left one."""
        var states = self.states_of(mine)
        var acc = self.acc_of(mine).unsafe_offset(query * self.padded_value)
        var added = self.acc_of(other).unsafe_offset(query * self.padded_value)
        var state: AttentionState
        var factors: Tuple[Float32, Float32]
        comptime if other_is_right:
            state = states[unsafe_offset=query]
            factors = state.merge(self.states_of(other)[unsafe_offset=query])
        else:
            state = self.states_of(other)[unsafe_offset=query]
            factors = state.merge(states[unsafe_offset=query])
        states[unsafe_offset=query] = state
        for d in range(0, self.padded_value, LANES):
            var left = acc.unsafe_load[width=LANES](d)
            var right = added.unsafe_load[width=LANES](d)
            comptime if not other_is_right:
                swap(left, right)
            acc.unsafe_store(d, left.fma(factors[0], right * factors[1]))


@always_inline
def write_output[
    dtype: DType, //, kv_dtype: DType, amx: Bool
](
    acc: FloatPointer,
    factor: Float32,
    v_scale: Float32,
    value_dim: Int,
    target: Pointer[Scalar[dtype], MutUntrackedOrigin],
) -> Bool:
    """Writes weighted values times `factor` and `v_scale` to `target` `[Dv]`, in their natural order.

    Returns whether all of them are finite before they are rounded.
    """
    comptime length = Bf16Chunk[kv_dtype].length if amx else chunk_of(kv_dtype)
    var zeros = SIMD[DType.float32, length](0)  # NaN where an element is infinite or NaN
    for d in range(0, value_dim, length):
        var sums: SIMD[DType.float32, length]
        comptime if amx:
            sums = rebind[SIMD[DType.float32, length]](unpack_sums[kv_dtype](acc.unsafe_offset(d)))
        else:
            sums = rebind[SIMD[DType.float32, length]](
                to_natural_order[kv_dtype](acc.unsafe_load[width=chunk_of(kv_dtype)](d))
            )
        # One factor after the other: their product may be no normal number though the result is.
        sums = sums * factor * v_scale
        zeros = sums.fma(SIMD[DType.float32, length](0), zeros)
        var out = narrow[dtype](sums)
        comptime for i in range(length // 8):
            if d + 8 * i < value_dim:
                target.unsafe_store(d + 8 * i, out.slice[8, offset=8 * i]())
    return zeros.eq(0).reduce_and()


@always_inline
def write_result[
    dtype: DType, //, kv_dtype: DType, amx: Bool
](
    rows: AttentionRows[dtype, ...],
    row: Int,
    query: Int,
    logits: Logits,
    value_dim: Int,
    var state: AttentionState,
    acc: FloatPointer,
) -> Bool:
    """Writes o and lse of query head `query` of one row; returns whether they are finite, or the row sees no token."""
    var factor: Float32 = 1
    var target = rows.o.unsafe_offset((row * rows.num_heads + query) * value_dim)
    # Masks are read where the sum of the weights does not tell: of scores that are all -inf.
    var sees_tokens = rows.Masks.has_masks and state.total != 0 or rows.sees_any(row, logits)
    if not sees_tokens:
        for d in range(0, value_dim, 8):
            target.unsafe_store(d, SIMD[rows.o_dtype, 8](0))
        rows.lse[unsafe_offset=row * rows.num_heads + query] = MINUS_INFINITY
        return True
    if logits.has_sinks:
        var sink = logits.sinks[unsafe_offset=query] * LOG2E
        factor = state.raise_to(sink)
        state.add(exp2(sink - state.greatest))
    factor *= state.normaliser()
    var is_finite = write_output[kv_dtype, amx](acc, factor, rows.v_scale, value_dim, target)
    var lse = state.lse()
    rows.lse[unsafe_offset=row * rows.num_heads + query] = lse
    return is_finite and lse - lse == 0


def finish_segment[
    StatesType: RunningStates, //, *, amx: Bool
](
    call: CpuCall,
    segment: Segment,
    states: StatesType,
    acc: FloatPointer,
    split_results: SplitResults,
    mut result: TaskResult,
):
    """Merges a computed segment with the other splits of its block, and writes o and lse where the block is complete.

    Args:
        call: The call, of the segment's KV heads alone where it is not prefill.
        segment: The computed segment.
        states: The softmax states of the segment.
        acc: The weighted values; those of a split are in `result`.
        split_results: The results of all splits of the call.
        result: The task's own; afterwards one that can be written.
    """
    ref heads = call.heads
    var queries = segment.num_rows * heads.group
    # The queries of a KV head that `states` and `acc` have memory for.
    var stride = call.choice.query_stride(queries)
    var first_head = segment.head if segment.prefill else 0
    var kv_heads = 1 if segment.prefill else heads.kv_heads
    if segment.split_result >= 0:
        for head in range(kv_heads):
            for m in range(queries):
                split_results.states_of(result.index)[unsafe_offset=head * stride + m] = states.state(head * stride + m)
        if not split_results.merge_finished(segment, kv_heads, stride, queries, result):
            return
    for head in range(kv_heads):
        var is_finite = True
        for m in range(queries):
            var at = head * stride + m
            var state = states.state(at)
            if segment.split_result >= 0:
                state = split_results.states_of(result.index)[unsafe_offset=at]
            var row, g = divmod(m, heads.group)
            is_finite &= write_result[call.kv_dtype, amx](
                call.rows,
                segment.row + row,
                (first_head + head) * heads.group + g,
                call.logits,
                heads.value_dim,
                state,
                acc.unsafe_offset(at * heads.padded_value),
            )
        if not is_finite:
            ref rows = call.rows
            var rotary = RotaryEmbedding(heads.head_dim, rows.rope_theta, rows.rope_scale)
            recompute_not_finite[call.latent](
                rows, segment.row, segment.num_rows, first_head + head, call.k, call.v, call.logits, rotary
            )
