"""Attention over latent vectors (MLA) on any GPU, as `generic.mojo`: one vector of a token is key and value of all
heads.

A key is the latent vector and a rotary part beside it; the value is the latent vector, which is loaded once for both.
"""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import ceildiv
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.host import DeviceContext

from ...cache.gpu_loads import check_alignment, load, load_raw, widen
from ...cache.paged_kv_cache import DynamicKVCache
from ..softmax import MINUS_INFINITY
from .combine import enqueue_combine
from .params import GpuAttentionParams, NOT_A_NUMBER
from .row_page_table import RowPageTable
from .scheduler import PartialOutputs, Schedule, Workspace, enqueue_schedule, multiprocessors
from .split_kv import INVALID_ROW, NO_ROW, ScheduleBounds
from .teams import THREADS, TeamState, sum_of_team

comptime LATENT_DIM = 512
"""The widest latent vector, and the widest rotary part."""


@fieldwise_init
struct RotaryQuery[dtype: DType](DevicePassable, TrivialRegisterPassable):
    """The part of a query that meets the rotary part of keys, as kernels take it; both are rotated already."""

    comptime device_type: AnyType = Self

    var q: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[R, Hq, Dpe]`, in device memory."""
    var dim: Int32
    """Dpe; 0 where keys have no rotary part, which is then not read."""
    var latent_scale: Float32
    """Multiplies the product with the latent vector, before both are scaled."""

    def _to_device_type(self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return String("RotaryQuery[", Self.dtype, "]")

    @staticmethod
    def get_device_type_name() -> String:
        return Self.get_type_name()


def attend_latent[
    dtype: DType, o_dtype: DType, kv_dtype: DType, //
](
    ctx: DeviceContext,
    params: GpuAttentionParams[dtype, o_dtype],
    rotary: RotaryQuery[dtype],
    latent: DynamicKVCache[kv_dtype],
    rotary_keys: DynamicKVCache[kv_dtype],
    batch_invariant: Bool,
) raises:
    """Enqueues attention of every row over the latent vectors of its request; the host waits for nothing.

    Shapes were checked; `params` has the latent part of the queries. Both caches have one head and one page table.
    """
    check_alignment("ckv", latent)
    if rotary.dim > 0:
        check_alignment("kpe", rotary_keys)
    if params.num_rows == 0 or params.num_heads == 0:
        return
    # Registers hold the query: a wide rotary part leaves room for fewer heads.
    if rotary.dim <= 128:
        launch_latent[128, 4](ctx, params, rotary, latent, rotary_keys, batch_invariant)
    else:
        launch_latent[LATENT_DIM, 2](ctx, params, rotary, latent, rotary_keys, batch_invariant)


def launch_latent[
    dtype: DType, o_dtype: DType, kv_dtype: DType, //, ROTARY_DIM: Int, HEADS: Int
](
    ctx: DeviceContext,
    params: GpuAttentionParams[dtype, o_dtype],
    rotary: RotaryQuery[dtype],
    latent: DynamicKVCache[kv_dtype],
    rotary_keys: DynamicKVCache[kv_dtype],
    batch_invariant: Bool,
) raises:
    var parts = ceildiv(Int(params.num_heads), HEADS)
    var bounds = ScheduleBounds.of(
        Int(params.num_rows), Int(params.capacity), parts, multiprocessors(ctx), batch_invariant
    )
    var workspace = Workspace(ctx, bounds, Int(params.num_heads), Int(params.head_dim))
    var schedule = workspace.schedule()
    var partials = workspace.partials()
    enqueue_schedule(ctx, params, schedule)
    comptime kernel = attend_latent_item[dtype, o_dtype, kv_dtype, ROTARY_DIM, HEADS]
    ctx.enqueue_function[kernel](
        params, rotary, latent, rotary_keys, schedule, partials, grid_dim=(bounds.items, parts), block_dim=THREADS
    )
    enqueue_combine(ctx, params, schedule, partials)
    _ = workspace^


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)))
def attend_latent_item[
    dtype: DType, o_dtype: DType, kv_dtype: DType, ROTARY_DIM: Int, HEADS: Int
](
    params: GpuAttentionParams[dtype, o_dtype],
    rotary: RotaryQuery[dtype],
    latent: DynamicKVCache[kv_dtype],
    rotary_keys: DynamicKVCache[kv_dtype],
    schedule: Schedule,
    partials: PartialOutputs,
):
    """One item for query heads `[HEADS * block_idx.y, ...)`; rotary parts have up to `ROTARY_DIM` elements."""
    comptime State = TeamState[kv_dtype, LATENT_DIM, HEADS, 2]
    comptime Shape = State.Shape
    comptime WIDTH = Shape.WIDTH
    comptime LANES = Shape.LANES
    comptime PARTS = Shape.PARTS
    comptime TEAMS = Shape.TEAMS
    comptime TOKENS = Shape.TOKENS
    comptime Vector = State.Vector
    comptime ROTARY_PARTS = ceildiv(ROTARY_DIM, WIDTH * LANES)

    var item = schedule.item(Int(block_idx.x))
    if item.row == NO_ROW:
        return
    var first_head = Int32(Int(block_idx.y) * HEADS)
    var heads = min(Int32(HEADS), params.num_heads - first_head)
    var team = Int32(thread_idx.x // LANES)
    var lane = Int32(thread_idx.x % LANES)

    var q = Array[Vector, HEADS * PARTS](fill=0)  # [HEADS, PARTS]
    var q_rotary = Array[Vector, HEADS * ROTARY_PARTS](fill=0)  # [HEADS, ROTARY_PARTS]
    var state = State(NOT_A_NUMBER if item.end == INVALID_ROW else 0)
    comptime for h in range(HEADS):
        if h < Int(heads):
            comptime for p in range(PARTS):
                var dim = (Int32(p * LANES) + lane) * Int32(WIDTH)
                if dim < params.head_dim:
                    var at = params.element(item.row, first_head + Int32(h), dim)
                    q[h * PARTS + p] = load[WIDTH](params.q, at) * rotary.latent_scale
            comptime for p in range(ROTARY_PARTS):
                var dim = (Int32(p * LANES) + lane) * Int32(WIDTH)
                if dim < rotary.dim:
                    var row_and_head = Int(item.row) * Int(params.num_heads) + Int(first_head) + h
                    q_rotary[h * ROTARY_PARTS + p] = load[WIDTH](rotary.q, row_and_head * Int(rotary.dim) + Int(dim))

    var pages = RowPageTable(item.row, params, latent)
    # The same number of steps in every team: lanes of one warp shuffle together.
    for base in range(item.begin, item.end, Int32(TEAMS * TOKENS)):
        # All loads of a step come first.
        var vectors = Array[SIMD[kv_dtype, WIDTH], TOKENS * PARTS](fill=0)  # [TOKENS, PARTS]
        var keys = Array[SIMD[kv_dtype, WIDTH], TOKENS * ROTARY_PARTS](fill=0)  # [TOKENS, ROTARY_PARTS]
        var missing = Array[Float32, TOKENS](fill=0)
        comptime for t in range(TOKENS):
            var token = base + Int32(t * TEAMS) + team
            if token < item.end:
                var at = pages.locate(token)
                if at.page < 0:
                    missing[t] = NOT_A_NUMBER
                else:
                    var latent_at = latent.offset(Int(at.page), Int(at.slot), 0)
                    comptime for p in range(PARTS):
                        var dim = (Int32(p * LANES) + lane) * Int32(WIDTH)
                        if dim < params.head_dim:
                            vectors[t * PARTS + p] = load_raw[WIDTH](latent.blocks.ptr, latent_at + Int(dim))
                    var key_at = rotary_keys.offset(Int(at.page), Int(at.slot), 0)
                    comptime for p in range(ROTARY_PARTS):
                        var dim = (Int32(p * LANES) + lane) * Int32(WIDTH)
                        if dim < rotary.dim:
                            keys[t * ROTARY_PARTS + p] = load_raw[WIDTH](rotary_keys.blocks.ptr, key_at + Int(dim))

        var scores = State.Scores(fill=0)  # [TOKENS, HEADS]
        comptime for t in range(TOKENS):
            comptime for p in range(ROTARY_PARTS):
                var key = widen(keys[t * ROTARY_PARTS + p])
                comptime for h in range(HEADS):
                    comptime for i in range(WIDTH):
                        scores[t * HEADS + h] = q_rotary[h * ROTARY_PARTS + p][i].fma(key[i], scores[t * HEADS + h])
            comptime for p in range(PARTS):
                var vector = widen(vectors[t * PARTS + p])
                comptime for h in range(HEADS):
                    comptime for i in range(WIDTH):
                        scores[t * HEADS + h] = q[h * PARTS + p][i].fma(vector[i], scores[t * HEADS + h])
        comptime for t in range(TOKENS):
            var token = base + Int32(t * TEAMS) + team
            comptime for h in range(HEADS):
                var dot = sum_of_team[LANES](scores[t * HEADS + h]) + missing[t]
                scores[t * HEADS + h] = params.score(dot, 0, token) if token < item.end else MINUS_INFINITY

        state.weigh(scores)
        comptime for t in range(TOKENS):
            comptime for p in range(PARTS):
                state.add[t, p](scores, widen(vectors[t * PARTS + p]))
    state.finish(params, item, partials, team, lane, first_head, heads)
