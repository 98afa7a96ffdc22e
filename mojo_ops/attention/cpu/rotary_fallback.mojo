"""The slow fallback for keys that are stored without their rotation, and rotated whenever they are read (ROPE_LLAMA).

A portable loop over one row and one KV head at a time, several times slower than `dispatch.mojo`, which computes all
other calls. Every key is rotated once for each row that reads it.
"""

from max.algorithm import sync_parallelize
from std.math import iota

from ...cache.paged_kv_cache import PagedKVCache
from ...isa.convert import narrow
from ..logits import Logits, nan_where_infinite
from ..params import AttentionRows
from ..row_sight import ALL_BITS
from ..rope import RotaryEmbedding
from ..softmax import AttentionState, LOG2E, MINUS_INFINITY, exp2
from .float64_rows import recompute_not_finite

comptime DIM_STEP = 8
"""Elements of head_dim that are computed at once: head_dim is a multiple of 8."""
comptime FALLBACK_TILE_TOKENS = 32
"""Tokens whose scores are computed before their weights."""


struct FallbackWorkspace:
    """Float32 working memory of one task: the query heads that share a KV head."""

    var q: List[Float32]
    """`[group, D]`."""
    var acc: List[Float32]
    """`[group, D]`: weighted values, relative to `state.greatest`."""
    var token: List[Float32]
    """`[D]`: one token's K or V."""
    var weights: List[Float32]
    """`[group, FALLBACK_TILE_TOKENS]`: scores, then weights."""
    var state: List[AttentionState]
    """`[group]`."""
    var rotary: RotaryEmbedding

    def __init__(out self, group: Int, head_dim: Int, var rotary: RotaryEmbedding):
        self.q = List[Float32](length=group * head_dim, fill=0)
        self.acc = List[Float32](length=group * head_dim, fill=0)
        self.token = List[Float32](length=head_dim, fill=0)
        self.weights = List[Float32](length=group * FALLBACK_TILE_TOKENS, fill=0)
        self.state = List[AttentionState](length=group, fill=AttentionState())
        self.rotary = rotary^


def attend_rotary_fallback[
    dtype: DType
](rows: AttentionRows[dtype, ...], k: PagedKVCache, v: type_of(k), logits: Logits, workers: Int):
    """Computes o `[R, Hq, D]` and lse `[R, Hq]` of every row with rotated q and keys (`../README.md`).

    The rows were checked (`check_rows`). A task computes whole pairs of a row and a KV head, so the result does not
    depend on `workers`.
    """
    var kv_heads = k.num_heads()
    var items = rows.num_rows * kv_heads
    var tasks = min(items, max(1, workers) * 4)

    def task(index: Int) {var rows, var k, var v, var logits, var kv_heads, var items, var tasks}:
        var rotary = RotaryEmbedding(k.head_dim(), rows.rope_theta, rows.rope_scale)
        var workspace = FallbackWorkspace(rows.num_heads // kv_heads, k.head_dim(), rotary^)
        for item in range(index, items, tasks):
            var row, head = divmod(item, kv_heads)
            attend_row_fallback(rows, row, k, v, head, logits, workspace)

    sync_parallelize(task, tasks)


def attend_row_fallback[
    dtype: DType
](
    rows: AttentionRows[dtype, ...],
    row: Int,
    k: PagedKVCache,
    v: type_of(k),
    kv_head: Int,
    logits: Logits,
    mut workspace: FallbackWorkspace,
):
    """Computes one row and one KV head. Every load of K and V serves all query heads of the group."""
    var dim = k.head_dim()
    var group = rows.num_heads // k.num_heads()
    var request = Int(rows.row_batch[unsafe_offset=row])
    var length = rows.length(row)
    var token_offset = rows.sight.offset(request) if request >= 0 else 0
    var sees_tokens = rows.sees_any(row, logits)
    var first_head = row * rows.num_heads + kv_head * group
    var q = workspace.q.unsafe_ptr()
    var acc = workspace.acc.unsafe_ptr()
    var token = workspace.token.unsafe_ptr()
    var weights = workspace.weights.unsafe_ptr()

    for i in range(0, group * dim, DIM_STEP):
        var source = rows.q.unsafe_offset(first_head * dim + i)
        q.unsafe_store(i, source.unsafe_load[width=DIM_STEP]().cast[DType.float32]())
        acc.unsafe_store(i, SIMD[DType.float32, DIM_STEP](0))
    for g in range(group):
        workspace.state[g] = AttentionState()
        workspace.rotary.rotate(q.unsafe_offset(g * dim), rows.position(row) if sees_tokens else 0)

    var start = rows.first_token(row, logits) if sees_tokens else length
    while start < length:
        # A tile is a run of slots of one page.
        var count = min(FALLBACK_TILE_TOKENS, length - start, k.slots() - start % k.slots())
        var source = k.block_paged_ptr[1](request, start, kv_head)
        for i in range(count):
            widen_head(source.unsafe_offset(i * k.row_pitch()), token, dim)
            workspace.rotary.rotate(token, token_offset + start + i)
            for g in range(group):
                weights[unsafe_offset=g * FALLBACK_TILE_TOKENS + i] = dot(q.unsafe_offset(g * dim), token, dim)

        # A row that is computed alone weights no token which it does not see.
        var seen_bits = rows.seen_bits(row, start, logits) if rows.Sight.has_masks else ALL_BITS
        for g in range(group):
            ref state = workspace.state[g]
            var tile = weights.unsafe_offset(g * FALLBACK_TILE_TOKENS)
            var greatest = MINUS_INFINITY
            for i in range(0, FALLBACK_TILE_TOKENS, DIM_STEP):
                var lane = iota[DType.int32, DIM_STEP](Int32(i))
                var dots = nan_where_infinite(tile.unsafe_load[width=DIM_STEP](i))
                var scores = logits.score(dots, kv_head * group + g, token_offset + start + i)
                scores = lane.lt(Int32(count)).select(scores, MINUS_INFINITY)
                comptime if rows.Sight.has_masks:
                    var seen = (
                        SIMD[DType.uint32, DIM_STEP](seen_bits >> UInt32(i)) >> iota[DType.uint32, DIM_STEP](0) & 1
                    ).eq(1)
                    scores = seen.select(scores, MINUS_INFINITY)
                tile.unsafe_store(i, scores)
                greatest = max(greatest, scores.reduce_max())
            var factor = state.raise_to(greatest)
            if factor != 1:
                scale(acc.unsafe_offset(g * dim), factor, dim)
            var total = SIMD[DType.float32, DIM_STEP](0)
            for i in range(0, FALLBACK_TILE_TOKENS, DIM_STEP):
                # All scores are -inf until a token is seen.
                var w = exp2(tile.unsafe_load[width=DIM_STEP](i) - state.greatest)
                comptime if rows.Sight.has_masks:
                    w = w if state.greatest != MINUS_INFINITY else 0
                tile.unsafe_store(i, w)
                total += w
            state.add(total.reduce_add())

        source = v.block_paged_ptr[1](request, start, kv_head)
        for i in range(count):
            if seen_bits >> UInt32(i) & 1 == 0:
                continue
            widen_head(source.unsafe_offset(i * v.row_pitch()), token, dim)
            for g in range(group):
                accumulate(acc.unsafe_offset(g * dim), weights[unsafe_offset=g * FALLBACK_TILE_TOKENS + i], token, dim)
        start += count

    var zeros = SIMD[DType.float32, DIM_STEP](0)  # NaN where a result is infinite or NaN
    for g in range(group):
        ref state = workspace.state[g]
        if logits.has_sinks and sees_tokens:
            var sink = logits.sinks[unsafe_offset=kv_head * group + g] * LOG2E
            scale(acc.unsafe_offset(g * dim), state.raise_to(sink), dim)
            state.add(exp2(sink - state.greatest))
        var target = rows.o.unsafe_offset((first_head + g) * dim)
        for i in range(0, dim, DIM_STEP):
            var sums = acc.unsafe_load[width=DIM_STEP](g * dim + i)
            var out = sums * state.normaliser() * rows.v_scale
            zeros = out.fma(SIMD[DType.float32, DIM_STEP](0), zeros)
            target.unsafe_store(i, narrow[rows.o_dtype](out))
        rows.lse[unsafe_offset=first_head + g] = state.lse()
        zeros += state.lse() * 0
    if sees_tokens and not zeros.eq(0).reduce_and():
        recompute_not_finite(rows, row, 1, kv_head, k, v, logits, workspace.rotary)


comptime MutableFloats = Pointer[mut=True, Float32, _]


@always_inline
def widen_head[dtype: DType, //](source: Pointer[mut=True, Scalar[dtype], _], target: MutableFloats, count: Int):
    """Converts `count` stored elements to float32."""
    for i in range(0, count, DIM_STEP):
        target.unsafe_store(i, source.unsafe_load[width=DIM_STEP](i).cast[DType.float32]())


@always_inline
def dot(a: MutableFloats, b: MutableFloats, count: Int) -> Float32:
    var total = SIMD[DType.float32, DIM_STEP](0)
    for i in range(0, count, DIM_STEP):
        total = a.unsafe_load[width=DIM_STEP](i).fma(b.unsafe_load[width=DIM_STEP](i), total)
    return total.reduce_add()


@always_inline
def accumulate(target: MutableFloats, weight: Float32, x: MutableFloats, count: Int):
    """`target += weight * x`."""
    for i in range(0, count, DIM_STEP):
        var sum = x.unsafe_load[width=DIM_STEP](i).fma(
            SIMD[DType.float32, DIM_STEP](weight), target.unsafe_load[width=DIM_STEP](i)
        )
        target.unsafe_store(i, sum)


@always_inline
def scale(target: MutableFloats, factor: Float32, count: Int):
    for i in range(0, count, DIM_STEP):
        target.unsafe_store(i, target.unsafe_load[width=DIM_STEP](i) * factor)
