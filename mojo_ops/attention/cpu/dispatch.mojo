"""Attention over pages on the CPU, decode and prefill: cuts a call into segments and runs them on all threads.

Each block of rows is computed in vectors (`vectors/segment.mojo`, `vectors/prefill.mojo`) or on matrix tiles
(`amx/segment.mojo`, `amx/prefill.mojo`).
"""

from ...cache.paged_kv_cache import PagedKVCache
from ...cache.pointers import untracked
from ...isa.line_counter import LineCounter
from ...isa.amx import tile_release
from ...isa.threads import Workers, run_tasks
from ..logits import Logits
from ..params import AttentionRows
from .amx.layout import AmxBuffers
from .amx.prefill import attend_prefill_amx
from .amx.prefill_workspace import PrefillWorkspace
from .amx.segment import attend_segment_amx
from .kernel_choice import CpuKernelChoice, amx_serves
from .plan import BlockSizes, Segment, SegmentQueue, plan_segments
from .prefill.queries import padded_queries
from .rotary_keys import KeyRotation, RotaryTables
from .split_merge import SplitResults, TaskResult, finish_segment
from .vectors.prefill import attend_prefill_vectors, prefetch_ranges
from .vectors.prefill_workspace import VectorPrefillWorkspace
from .vectors.segment import attend_segment_vectors
from .workspace import HeadLayout, SegmentWorkspace


def attend_on_cpu[
    dtype: DType, //, *, latent: Bool = False, rotates: Bool = False
](
    rows: AttentionRows[dtype, ...],
    k: PagedKVCache,
    v: type_of(k),
    logits: Logits,
    workers: Workers,
    *,
    deterministic: Bool = False,
):
    """Computes o `[R, Hq, Dv]` and lse `[R, Hq]` of every row of a call on up to `workers` threads.

    The formula is in `../README.md`. The rows were checked (`check_rows`). The result does not depend on `workers`.
    That of a row depends on no other row where all are computed in vectors.

    Parameters:
        dtype: The dtype of the queries.
        latent: True if a key is a token's V and then its K, so that V is read once. All blocks are then prefill blocks:
            only these take another head_dim of V than of K.
        rotates: True if queries and keys are rotated as they are read (`rotary_keys.mojo`).

    Args:
        rows: The rows of the call.
        k: The keys.
        v: The values.
        logits: The options of the call.
        workers: Threads, at most.
        deterministic: True if all rows are computed in vectors, though there are matrix tiles.
    """
    comptime kv_dtype = k.dtype
    var choice = CpuKernelChoice[dtype, kv_dtype]()
    choice.permitted &= not deterministic
    var heads = HeadLayout.of[latent=latent](rows, k, v, CpuKernelChoice[dtype, kv_dtype].chunk)
    comptime if latent:
        # Matrix tiles cannot scale the sums over `ckv` before those over `kpe` are added.
        choice.permitted &= rows.latent_scale == 1
    comptime has_masks = rows.Masks.has_masks
    var sizes = choice.sizes[latent=latent](heads, prefill_only=has_masks or latent)
    var plan = plan_segments(rows.row_batch, rows.row_lengths, rows.num_rows, rows.masks, logits, sizes)
    var max_stride = AmxBuffers.query_stride(plan.max_rows * heads.group)
    var max_queries = heads.kv_heads * max_stride
    var max_prefill_queries = plan.max_prefill_rows * heads.group
    var tasks = plan.num_tasks(heads.group, heads.kv_heads, heads.padded_dim, workers.count)
    plan.cut_heads(heads.kv_heads, tasks)
    tasks = min(tasks, len(plan.segments))
    var split_results = SplitResults(
        plan.num_split_results,
        plan.max_results(),
        tasks,
        max(max_queries, padded_queries(max_prefill_queries)),
        heads.padded_value,
    )
    var rotary_tables = RotaryTables[kv_dtype](heads.head_dim, rows.rope_theta if rotates else 0, rows.rope_scale)
    var max_rotated = max(plan.max_rows * rows.num_heads, max_prefill_queries)
    # All threads write it, so its cache line holds nothing else.
    var num_taken = LineCounter()
    var segments = SegmentQueue(
        untracked(plan.segments.unsafe_ptr()),
        len(plan.segments),
        num_taken.at(),
        Segment.none(),
    )

    def task(
        index: Int,
    ) {
        var rows,
        var k,
        var v,
        var logits,
        var heads,
        var choice,
        var segments,
        var max_stride,
        var max_queries,
        var max_prefill_queries,
        var max_rotated,
        ref rotary_tables,
        ref split_results,
    }:
        var rotation = KeyRotation(rotary_tables, heads, max_rotated, choice.permitted)
        var amx_heads = rotation.heads_of[DType.bfloat16](heads) if rotates else heads
        var workspace = SegmentWorkspace(
            heads,
            max_stride,
            AmxBuffers.num_floats(max_queries, amx_heads.padded_dim) if choice.may_use_amx else 0,
            query_floats=amx_heads.padded_dim // 2 if choice.may_use_amx else 0,
        )
        var own = workspace.acc
        var result = TaskResult(index)
        var prefill_amx = PrefillWorkspace(max_prefill_queries if choice.permitted else 0, amx_heads)
        var prefill_vectors = VectorPrefillWorkspace(
            0 if choice.permitted else max_prefill_queries, heads, prefetch_ranges(heads)
        )
        var queue = segments
        var segment = queue.take()
        while segment.num_rows > 0:
            var queries = segment.num_rows * heads.group
            var stride = choice.query_stride(queries)
            var following = Segment.none()
            if segment.prefill:
                var states = prefill_amx.queries if choice.permitted else prefill_vectors.queries
                states.acc = states.own_acc if segment.split_result < 0 else split_results.acc_of(result.index)
                if choice.permitted:
                    comptime if amx_serves(dtype, kv_dtype):
                        prefill_amx.queries = states
                        comptime if rotates:
                            var rotated = rotation.rotate_queries[DType.bfloat16, kv_dtype](rows, segment, heads)
                            attend_prefill_amx[latent, True](
                                rotated, segment, k, v, logits, heads, prefill_amx, rotation
                            )
                        else:
                            attend_prefill_amx[latent, False](rows, segment, k, v, logits, heads, prefill_amx, rotation)
                        finish_segment[True, latent](
                            rows, segment, k, v, logits, heads, stride, states, states.acc, split_results, result
                        )
                else:
                    prefill_vectors.queries = states
                    comptime if rotates:
                        var rotated = rotation.rotate_queries[DType.float32, kv_dtype](rows, segment, heads)
                        attend_prefill_vectors[latent, True](
                            rotated, segment, k, v, logits, heads, prefill_vectors, rotation
                        )
                    else:
                        attend_prefill_vectors[latent, False](
                            rows, segment, k, v, logits, heads, prefill_vectors, rotation
                        )
                    finish_segment[False, latent](
                        rows, segment, k, v, logits, heads, stride, states, states.acc, split_results, result
                    )
                following = queue.take()
            elif not has_masks:
                # The segment's KV heads as if the call had no others. The next segment's K, whose first tokens are
                # prefetched here, may be of other heads: then it is read without.
                var first = segment.head
                var part = heads.part(segment.heads_of(heads.kv_heads))
                var part_rows = rows.from_head(first * heads.group, heads.head_dim, heads.value_dim)
                var part_logits = logits.from_head(first * heads.group)
                var part_k = k.from_head(first)
                var part_v = v.from_head(first)
                workspace.acc = own if segment.split_result < 0 else split_results.acc_of(result.index)
                if choice.uses_amx(queries):
                    comptime if amx_serves(dtype, kv_dtype):
                        comptime if rotates:
                            var rotated = rotation.rotate_queries[DType.bfloat16, kv_dtype](part_rows, segment, part)
                            following = attend_segment_amx[True](
                                rotated, segment, part_k, part_v, part_logits, part, queue, workspace, rotation
                            )
                        else:
                            following = attend_segment_amx[False](
                                part_rows, segment, part_k, part_v, part_logits, part, queue, workspace, rotation
                            )
                        finish_segment[True, latent](
                            part_rows,
                            segment,
                            part_k,
                            part_v,
                            part_logits,
                            part,
                            stride,
                            workspace,
                            workspace.acc,
                            split_results,
                            result,
                        )
                else:
                    comptime if rotates:
                        var rotated = rotation.rotate_queries[DType.float32, kv_dtype](part_rows, segment, part)
                        following = attend_segment_vectors[True](
                            rotated, segment, part_k, part_v, part_logits, part, queue, workspace, rotation
                        )
                    else:
                        following = attend_segment_vectors[False](
                            part_rows, segment, part_k, part_v, part_logits, part, queue, workspace, rotation
                        )
                    finish_segment[False, latent](
                        part_rows,
                        segment,
                        part_k,
                        part_v,
                        part_logits,
                        part,
                        stride,
                        workspace,
                        workspace.acc,
                        split_results,
                        result,
                    )
            segment = following
        comptime if amx_serves(dtype, kv_dtype):
            tile_release()

    run_tasks(task, tasks, workers.at_most(tasks))
    _ = split_results^
    _ = rotary_tables^
    _ = plan^
    _ = num_taken^
