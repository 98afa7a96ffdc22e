"""Attention over pages on the CPU, decode and prefill: cuts a call into segments and runs them on all threads.

Each block of rows is computed in vectors (`vectors/segment.mojo`, `vectors/prefill.mojo`) or on matrix tiles
(`amx/segment.mojo`, `amx/prefill.mojo`).
"""

from ...cache.paged_kv_cache import DynamicKVCache
from ...cache.pointers import untracked
from ...isa.amx import tile_release
from ...isa.line_counter import LineCounter
from ...isa.memory import FloatPointer
from ...isa.threads import Workers, run_tasks
from ..logits import Logits
from ..params import AttentionRows
from ..row_masks import RowMasks
from .amx.layout import AmxBuffers
from .amx.prefill import attend_prefill_amx
from .amx.prefill_workspace import PrefillWorkspace
from .amx.segment import attend_segment_amx
from .cpu_call import CpuCall
from .plan import Segment, SegmentPlan, SegmentQueue, plan_segments
from .prefill.queries import PrefillQueries, padded_queries
from .rotary_keys import KeyRotation, RotaryTables
from .split_merge import SplitResults, TaskResult, finish_segment
from .vectors.prefill import attend_prefill_vectors, prefetch_ranges
from .vectors.prefill_workspace import VectorPrefillWorkspace
from .vectors.segment import attend_segment_vectors
from .workspace import HeadLayout, SegmentWorkspace


struct PrefillTask(Movable):
    """The prefill segments of one task, each one KV head of a block: on matrix tiles where the call may use them, else
    in vectors."""

    var amx: PrefillWorkspace
    var vectors: VectorPrefillWorkspace

    def __init__(out self, call: CpuCall, queries: Int, amx_heads: HeadLayout):
        """For segments of up to `queries` queries, whose heads are `amx_heads` on matrix tiles."""
        self.amx = PrefillWorkspace(queries if call.choice.permitted else 0, amx_heads)
        self.vectors = VectorPrefillWorkspace(
            0 if call.choice.permitted else queries, call.heads, prefetch_ranges(call.heads)
        )

    @always_inline
    def run(
        mut self,
        call: CpuCall,
        segment: Segment,
        mut rotation: KeyRotation,
        split_results: SplitResults,
        mut result: TaskResult,
    ):
        """Computes a segment, and writes o and lse where its block is complete."""
        if call.choice.permitted:
            comptime if call.Choice.may_use_amx:
                ref states = self.amx.queries
                states.acc = split_results.acc_for(segment, result, states.own_acc)
                var queries = call.queries[DType.bfloat16](segment, rotation)
                attend_prefill_amx[call.latent, call.rotates](
                    queries, segment, call.k, call.v, call.logits, call.heads, self.amx, rotation
                )
                finish_segment[amx=True](call, segment, states, states.acc, split_results, result)
        else:
            ref states = self.vectors.queries
            states.acc = split_results.acc_for(segment, result, states.own_acc)
            var queries = call.queries[DType.float32](segment, rotation)
            attend_prefill_vectors[call.latent, call.rotates](
                queries, segment, call.k, call.v, call.logits, call.heads, self.vectors, rotation
            )
            finish_segment[amx=False](call, segment, states, states.acc, split_results, result)


struct DecodeTask(Movable):
    """The other segments of one task, each some or all KV heads of a block: on matrix tiles or in vectors, as
    `CpuKernelChoice.uses_amx` says."""

    var workspace: SegmentWorkspace
    var own_acc: FloatPointer
    """The memory for the weighted values of a block that is not split."""

    def __init__(out self, call: CpuCall, stride: Int, amx_heads: HeadLayout):
        """For segments of up to `stride` queries a KV head, whose heads are `amx_heads` on matrix tiles."""
        comptime amx = call.Choice.may_use_amx
        self.workspace = SegmentWorkspace(
            call.heads,
            stride,
            AmxBuffers.num_floats(call.heads.kv_heads * stride, amx_heads.padded_dim) if amx else 0,
            query_floats=amx_heads.padded_dim // 2 if amx else 0,
        )
        self.own_acc = self.workspace.acc

    @always_inline
    def run(
        mut self,
        call: CpuCall,
        segment: Segment,
        mut queue: SegmentQueue,
        mut rotation: KeyRotation,
        split_results: SplitResults,
        mut result: TaskResult,
    ) -> Segment:
        """Computes a segment, and writes o and lse where its block is complete. Returns the next segment.

        The next segment's K, whose first tokens are prefetched here, may be of other heads: then it is read without.
        """
        ref workspace = self.workspace
        var part = call.part(segment)
        var following = Segment.none()
        workspace.acc = split_results.acc_for(segment, result, self.own_acc)
        if call.choice.uses_amx(segment.num_rows * call.heads.group):
            comptime if call.Choice.may_use_amx:
                var queries = part.queries[DType.bfloat16](segment, rotation)
                following = attend_segment_amx[call.rotates](
                    queries, segment, part.k, part.v, part.logits, part.heads, queue, workspace, rotation
                )
                finish_segment[amx=True](part, segment, workspace, workspace.acc, split_results, result)
        else:
            var queries = part.queries[DType.float32](segment, rotation)
            following = attend_segment_vectors[call.rotates](
                queries, segment, part.k, part.v, part.logits, part.heads, queue, workspace, rotation
            )
            finish_segment[amx=False](part, segment, workspace, workspace.acc, split_results, result)
        return following


def attend_on_cpu[
    dtype: DType, o_dtype: DType, Masks: RowMasks, kv_dtype: DType, //, *, latent: Bool = False, rotates: Bool = False
](
    rows: AttentionRows[dtype, o_dtype, Masks],
    k: DynamicKVCache[kv_dtype],
    v: DynamicKVCache[kv_dtype],
    logits: Logits,
    workers: Workers,
    *,
    deterministic: Bool = False,
):
    """Computes o `[R, Hq, Dv]` and lse `[R, Hq]` of every row of a call on up to `workers` threads.

    The formula is in `../README.md`. The rows were checked (`check_rows`). The result does not depend on `workers`.
    That of a row depends on no other row where all are computed in vectors.

    Parameters:
        dtype: The dtype of q.
        o_dtype: The dtype of o.
        Masks: What rows see of their tokens beside their lengths.
        kv_dtype: The dtype of the cache.
        latent: As in `CpuCall`.
        rotates: As in `CpuCall`.

    Args:
        rows: The rows of the call.
        k: The keys.
        v: The values.
        logits: The options of the call.
        workers: Threads, at most.
        deterministic: True if all rows are computed in vectors, though there are matrix tiles.
    """
    comptime Call = CpuCall[dtype, o_dtype, Masks, kv_dtype, latent, rotates]
    var choice = Call.Choice()
    # Matrix tiles cannot scale the sums over `ckv` before those over `kpe` are added.
    choice.permitted &= not deterministic and (not latent or rows.latent_scale == 1)
    var heads = HeadLayout.of[latent=latent](rows, k, v, Call.Choice.chunk)
    var sizes = choice.sizes[latent=latent](heads, prefill_only=Call.prefill_only)
    var plan = plan_segments(rows.row_batch, rows.row_lengths, rows.num_rows, rows.masks, logits, sizes)
    var tasks = plan.num_tasks(heads.group, heads.kv_heads, heads.padded_dim, workers.count)
    plan.cut_heads(heads.kv_heads, tasks)
    tasks = min(tasks, len(plan.segments))

    var call = Call(rows, k, v, logits, heads, choice)
    var max_stride = AmxBuffers.query_stride(plan.max_rows * heads.group)
    var max_prefill_queries = plan.max_prefill_rows * heads.group
    var max_rotated = max(plan.max_rows * rows.num_heads, max_prefill_queries)
    var rotary_tables = RotaryTables[kv_dtype](heads.head_dim, rows.rope_theta if rotates else 0, rows.rope_scale)
    var split_results = SplitResults(
        plan.num_split_results,
        plan.max_results(),
        tasks,
        max(heads.kv_heads * max_stride, padded_queries(max_prefill_queries)),
        heads.padded_value,
    )
    # All threads write it, so its cache line holds nothing else.
    var num_taken = LineCounter()
    var segments = SegmentQueue(
        untracked(plan.segments.unsafe_ptr()), len(plan.segments), num_taken.at(), Segment.none()
    )

    def task(
        index: Int,
    ) {
        var call,
        var segments,
        var max_stride,
        var max_prefill_queries,
        var max_rotated,
        ref rotary_tables,
        ref split_results,
    }:
        var rotation = KeyRotation(rotary_tables, call.heads, max_rotated, call.choice.permitted)
        var amx_heads = rotation.heads_of[DType.bfloat16](call.heads) if rotates else call.heads
        var decode = DecodeTask(call, max_stride, amx_heads)
        var prefill = PrefillTask(call, max_prefill_queries, amx_heads)
        var result = TaskResult(index)
        var queue = segments
        var segment = queue.take()
        while segment.num_rows > 0:
            if Call.prefill_only or segment.prefill:
                prefill.run(call, segment, rotation, split_results, result)
                segment = queue.take()
            else:
                comptime if not Call.prefill_only:
                    segment = decode.run(call, segment, queue, rotation, split_results, result)
        comptime if Call.Choice.may_use_amx:
            tile_release()

    run_tasks(task, tasks, workers.at_most(tasks))
    _ = split_results^
    _ = rotary_tables^
    _ = plan^
    _ = num_taken^
