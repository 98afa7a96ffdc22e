"""Attention over pages at the speed of memory: who computes what, on which thread.

Vectors (`segment_vectors.mojo`) or AMX (`segment_amx.mojo`, `blocks_amx.mojo`) do the arithmetic; each block of rows has
its own choice.
"""

from max.algorithm import sync_parallelize
from std.atomic import Atomic
from std.math import ceildiv

from ...cache.paged_kv_cache import PagedKVCache
from ...isa.amx import HAS_AMX, amx_permitted, tile_release
from ...isa.convert import chunk_of, is_float8
from ..logits import Logits
from ..params import AttentionRows
from .amx.layout import AmxBuffers
from .amx.prefill import attend_prefill_amx
from .amx.prefill_workspace import PrefillWorkspace, PREFILL_MAX_QUERIES, PREFILL_MIN_QUERIES, padded_queries
from .amx.segment import attend_segment_amx
from .amx.widen import Bf16Chunk
from .kv_tile import HeadLayout, SegmentWorkspace
from .plan import BlockSizes, MAX_BLOCK_ROWS, SegmentQueue, Segment, plan_segments
from .split_merge import SplitResults, finish_segment
from .vectors.segment import attend_segment_vectors


def max_vector_queries(kv_dtype: DType) -> Int:
    """Up to so many queries, vectors hide behind the memory more completely than AMX does."""
    return 2 if is_float8(kv_dtype) else 4


def amx_serves(dtype: DType, kv_dtype: DType) -> Bool:
    """Whether AMX computes attention of these types without losing bits, and the target has it."""
    return HAS_AMX and dtype == DType.bfloat16 and (kv_dtype == DType.bfloat16 or is_float8(kv_dtype))


@fieldwise_init
struct CpuKernelChoice[dtype: DType, kv_dtype: DType](ImplicitlyCopyable):
    """Who computes a block of rows: it depends on the block alone."""

    comptime may_use_amx = amx_serves(Self.dtype, Self.kv_dtype)
    comptime chunk = max(chunk_of(Self.kv_dtype), Bf16Chunk[Self.kv_dtype].length if Self.may_use_amx else 0)
    """What head_dim is rounded up to."""
    var permitted: Bool
    """Whether this process may use AMX."""

    def __init__(out self):
        self.permitted = False
        comptime if Self.may_use_amx:
            self.permitted = amx_permitted()

    @always_inline
    def uses_amx(self, queries: Int) -> Bool:
        """Whether AMX computes a block of that many queries a KV head."""
        return self.permitted and queries > max_vector_queries(Self.kv_dtype)

    @always_inline
    def query_stride(self, queries: Int) -> Int:
        """The queries of a KV head that it keeps."""
        return AmxBuffers.query_stride(queries) if self.uses_amx(queries) else queries

    def sizes(self, heads: HeadLayout) -> BlockSizes:
        """How large blocks are, and from which size on their heads go one by one (`blocks_amx.mojo`)."""
        if not self.permitted:
            return BlockSizes.without_prefill()
        return BlockSizes(
            max(MAX_BLOCK_ROWS, PREFILL_MAX_QUERIES // heads.group),
            ceildiv(PREFILL_MIN_QUERIES, heads.group),
            heads.kv_heads,
        )


def attend_on_cpu[
    dtype: DType
](rows: AttentionRows[dtype], k: PagedKVCache, v: type_of(k), logits: Logits, workers: Int):
    """Attention of every row, as `attend_rows` defines it, without rotary embedding."""
    comptime kv_dtype = k.dtype
    var choice = CpuKernelChoice[dtype, kv_dtype]()
    var heads = HeadLayout.of(rows, k, v, CpuKernelChoice[dtype, kv_dtype].chunk)
    var plan = plan_segments(rows.row_batch, rows.row_lengths, rows.num_rows, logits, choice.sizes(heads))
    var stride_most = AmxBuffers.query_stride(plan.max_rows * heads.group)
    var room = heads.kv_heads * stride_most
    var wide = plan.max_prefill_rows * heads.group
    var split_results = SplitResults(plan.split_results, max(room, padded_queries(wide)), heads.padded_dim)
    var num_taken = Atomic[Int64](0)
    var queue = SegmentQueue(
        plan.segments.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin](),
        len(plan.segments),
        Pointer(to=num_taken).unsafe_origin_cast[MutUntrackedOrigin](),
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
        var queue,
        var stride_most,
        var room,
        var wide,
        ref split_results,
    }:
        var workspace = SegmentWorkspace(
            heads,
            stride_most,
            AmxBuffers.num_floats(room, heads.padded_dim) if choice.may_use_amx else 0,
        )
        var own = workspace.acc
        var prefill_workspace = PrefillWorkspace(wide, heads.padded_dim)
        var segment = queue.take()
        while segment.num_rows > 0:
            var queries = segment.num_rows * heads.group
            var stride = choice.query_stride(queries)
            var following = Segment.none()
            if segment.is_prefill():
                comptime if amx_serves(dtype, kv_dtype):
                    prefill_workspace.acc = prefill_workspace.own if segment.split_result < 0 else split_results.acc_of(
                        segment.split_result
                    )
                    attend_prefill_amx(rows, segment, k, v, logits, heads, prefill_workspace)
                    finish_segment[kv_dtype, True](
                        rows, segment, logits, heads, stride, prefill_workspace, prefill_workspace.acc, split_results
                    )
                    following = queue.take()
            else:
                workspace.acc = own if segment.split_result < 0 else split_results.acc_of(segment.split_result)
                if choice.uses_amx(queries):
                    comptime if amx_serves(dtype, kv_dtype):
                        following = attend_segment_amx(rows, segment, k, v, logits, heads, queue, workspace)
                        finish_segment[kv_dtype, True](
                            rows, segment, logits, heads, stride, workspace, workspace.acc, split_results
                        )
                else:
                    following = attend_segment_vectors(rows, segment, k, v, logits, heads, queue, workspace)
                    finish_segment[kv_dtype, False](
                        rows, segment, logits, heads, stride, workspace, workspace.acc, split_results
                    )
            segment = following
        comptime if amx_serves(dtype, kv_dtype):
            tile_release()

    sync_parallelize(task, max(1, min(queue.count, workers)))
    _ = split_results^
    _ = plan^
    _ = num_taken^
