"""Attention on any GPU: vector loads, warp shuffles, float32 arithmetic. The fallback, and the reference.

A CTA serves one item of the schedule for one KV head and up to `HEADS` query heads of its group, which share every
load of K and V. Its threads form teams of `LANES` lanes: a team takes one token at a time, each lane 16 bytes of its
head (8 of a float8 head), and keeps a softmax state of its own. At the end the states are merged in shared memory.
"""

from std.math import ceildiv, cos, exp2, sin
from std.memory import unsafe_stack_allocation
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, WARP_SIZE, barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp

from ...cache.gpu_loads import check_alignment, load, load_raw, vector_width, widen
from ...cache.paged_kv_cache import DynamicKVCache
from ..softmax import MINUS_INFINITY
from .combine import enqueue_combine, rescale_factor
from .row_page_table import RowPageTable
from .params import GpuAttentionParams, NOT_A_NUMBER
from .rope import RotaryFrequencies, rotation_angle
from .scheduler import PartialOutputs, Schedule, Workspace, enqueue_schedule, multiprocessors
from .split_kv import INVALID_ROW, NO_ROW, WHOLE_ROW, ScheduleBounds

comptime THREADS = 128


def attend_generic[
    dtype: DType, kv_dtype: DType, //
](
    ctx: DeviceContext,
    params: GpuAttentionParams[dtype],
    k: DynamicKVCache[kv_dtype],
    v: DynamicKVCache[kv_dtype],
    rotary: RotaryFrequencies,
    batch_invariant: Bool,
) raises:
    """Enqueues attention of every row over the pages of its request; the host waits for nothing.

    Shapes were checked. The device alone has lengths, requests and page ids (`README.md`, "What is not refused").
    """
    check_alignment("k_blocks", k)
    check_alignment("v_blocks", v)
    if params.num_rows == 0 or params.num_heads == 0:
        return
    var dim = Int(params.head_dim)
    var group = Int(params.num_heads) // k.num_heads()
    if rotary.rotates():
        # Two kernels a pair of dtypes: half of the lanes idle where head_dim is small, and a lane keeps two parts of q.
        if dim <= 128:
            launch_generic[128, 4, True](ctx, params, k, v, rotary, group, batch_invariant)
        else:
            launch_generic[512, 2, True](ctx, params, k, v, rotary, group, batch_invariant)
        return
    # The kernel for the next larger head_dim, and for the least number of heads that holds the group.
    if dim <= 64:
        launch_generic_for_group[64](ctx, params, k, v, group, batch_invariant)
    elif dim <= 128:
        launch_generic_for_group[128](ctx, params, k, v, group, batch_invariant)
    elif dim <= 256:
        launch_generic_for_group[256](ctx, params, k, v, group, batch_invariant)
    else:
        launch_generic_for_group[512](ctx, params, k, v, group, batch_invariant)


def launch_generic_for_group[
    dtype: DType, kv_dtype: DType, //, DIM: Int
](
    ctx: DeviceContext,
    params: GpuAttentionParams[dtype],
    k: DynamicKVCache[kv_dtype],
    v: DynamicKVCache[kv_dtype],
    group: Int,
    batch_invariant: Bool,
) raises:
    # HEADS * DIM bounds the registers: 64 numbers each for the queries and the sums of a lane.
    comptime most = 4 if DIM > 256 else 8
    var none = RotaryFrequencies(0, 1)
    if group == 1:
        launch_generic[DIM, 1](ctx, params, k, v, none, group, batch_invariant)
    elif group <= 4:
        launch_generic[DIM, 4](ctx, params, k, v, none, group, batch_invariant)
    else:
        launch_generic[DIM, most](ctx, params, k, v, none, group, batch_invariant)


def launch_generic[
    dtype: DType, kv_dtype: DType, //, DIM: Int, HEADS: Int, ROTARY: Bool = False
](
    ctx: DeviceContext,
    params: GpuAttentionParams[dtype],
    k: DynamicKVCache[kv_dtype],
    v: DynamicKVCache[kv_dtype],
    rotary: RotaryFrequencies,
    group: Int,
    batch_invariant: Bool,
) raises:
    var parts = ceildiv(group, HEADS)
    var bounds = ScheduleBounds.of(
        Int(params.num_rows), Int(params.capacity), k.num_heads() * parts, multiprocessors(ctx), batch_invariant
    )
    var workspace = Workspace(ctx, bounds, Int(params.num_heads), Int(params.head_dim))
    var schedule = workspace.schedule()
    var partials = workspace.partials()
    enqueue_schedule(ctx, params, schedule)
    comptime kernel = attend_item_on_any_gpu[dtype, kv_dtype, DIM, HEADS, ROTARY]
    ctx.enqueue_function[kernel](
        params, k, v, schedule, partials, rotary, grid_dim=(bounds.items, k.num_heads(), parts), block_dim=THREADS
    )
    enqueue_combine(ctx, params, schedule, partials)
    _ = workspace^


struct TeamShape[kv_dtype: DType, DIM: Int, HEADS: Int, ROTARY: Bool]:
    """How the threads of a CTA form teams, and what each lane loads."""

    comptime WIDTH = vector_width[Self.kv_dtype]()
    comptime LANES = min(WARP_SIZE, Self.DIM // Self.WIDTH)
    """Lanes of a team: they hold one head of one token."""
    comptime PARTS = Self.DIM // (Self.WIDTH * Self.LANES)
    """Vectors that a lane holds of it."""
    comptime TEAMS = THREADS // Self.LANES
    comptime TOKENS = 4 if Self.HEADS * Self.WIDTH * Self.PARTS <= 32 and not Self.ROTARY else 2
    """Tokens that a team loads at once, to have many loads in flight."""


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)))
def attend_item_on_any_gpu[
    dtype: DType, kv_dtype: DType, DIM: Int, HEADS: Int, ROTARY: Bool
](
    params: GpuAttentionParams[dtype],
    k: DynamicKVCache[kv_dtype],
    v: DynamicKVCache[kv_dtype],
    schedule: Schedule,
    partials: PartialOutputs,
    rotary: RotaryFrequencies,
):
    """One item for KV head `block_idx.y` and heads `[HEADS * block_idx.z, ...)` of its group."""
    comptime Shape = TeamShape[kv_dtype, DIM, HEADS, ROTARY]
    comptime WIDTH = Shape.WIDTH
    comptime LANES = Shape.LANES
    comptime PARTS = Shape.PARTS
    comptime TEAMS = Shape.TEAMS
    comptime TOKENS = Shape.TOKENS
    comptime Vector = SIMD[DType.float32, WIDTH]

    var item = schedule.item(Int(block_idx.x))
    if item.row == NO_ROW:
        return
    var group = params.num_heads // Int32(k.num_heads())
    var kv_head = Int32(block_idx.y)
    var first_of_part = Int32(Int(block_idx.z) * HEADS)
    var heads = min(Int32(HEADS), group - first_of_part)
    var first_head = kv_head * group + first_of_part
    var team = Int32(thread_idx.x // LANES)
    var lane = Int32(thread_idx.x % LANES)

    var q = Array[Vector, HEADS * PARTS](fill=0)  # [HEADS, PARTS]
    var acc = Array[Vector, HEADS * PARTS](fill=0)
    var slope = Array[Float32, HEADS](fill=0)
    var greatest = Array[Float32, HEADS](fill=MINUS_INFINITY)
    var total = Array[Float32, HEADS](fill=NOT_A_NUMBER if item.end == INVALID_ROW else 0)
    comptime for h in range(HEADS):
        if h < Int(heads):
            slope[h] = params.slope(first_head + Int32(h))
            comptime for p in range(PARTS):
                var dim = (Int32(p * LANES) + lane) * Int32(WIDTH)
                if dim < params.head_dim:
                    q[h * PARTS + p] = load[WIDTH](params.q, params.element(item.row, first_head + Int32(h), dim))
    # With rotary keys: the other half of q, and how fast each dimension rotates.
    comptime ROTARY_PARTS = PARTS if ROTARY else 0
    var partner = Array[Vector, HEADS * ROTARY_PARTS](fill=0)  # [HEADS, PARTS]
    var frequency = Array[SIMD[DType.uint64, WIDTH], ROTARY_PARTS](fill=0)
    var position = Int32(0)
    comptime if ROTARY:
        if item.begin < item.end:
            var half = params.head_dim // 2
            position = params.row_lengths[unsafe_offset=Int(item.row)] - 1
            comptime for p in range(PARTS):
                comptime for i in range(WIDTH):
                    var dim = (Int32(p * LANES) + lane) * Int32(WIDTH) + Int32(i)
                    if dim < params.head_dim:
                        var other = dim + half if dim < half else dim - half
                        frequency[p][i] = rotary.frequency(min(dim, other))
                        comptime for h in range(HEADS):
                            if h < Int(heads):
                                var at = params.element(item.row, first_head + Int32(h), other)
                                var x = params.q[unsafe_offset=at].cast[DType.float32]()
                                partner[h * PARTS + p][i] = -x if dim < half else x

    var pages = RowPageTable(item.row, params, k)
    # The same number of steps in every team: lanes of one warp shuffle together.
    for base in range(item.begin, item.end, Int32(TEAMS * TOKENS)):
        # All loads of a step come first.
        var keys = Array[SIMD[kv_dtype, WIDTH], TOKENS * PARTS](fill=0)  # [TOKENS, PARTS]
        var values = Array[SIMD[kv_dtype, WIDTH], TOKENS * PARTS](fill=0)
        var missing = Array[Float32, TOKENS](fill=0)
        comptime for t in range(TOKENS):
            var token = base + Int32(t * TEAMS) + team
            if token < item.end:
                var at = pages.locate(token)
                if at.page < 0:
                    missing[t] = NOT_A_NUMBER
                else:
                    var k_at = k.offset(Int(at.page), Int(at.slot), Int(kv_head))
                    var v_at = v.offset(Int(at.page), Int(at.slot), Int(kv_head))
                    comptime for p in range(PARTS):
                        var dim = (Int32(p * LANES) + lane) * Int32(WIDTH)
                        if dim < params.head_dim:
                            keys[t * PARTS + p] = load_raw[WIDTH](k.blocks.ptr, k_at + Int(dim))
                            values[t * PARTS + p] = load_raw[WIDTH](v.blocks.ptr, v_at + Int(dim))

        var scores = Array[Float32, TOKENS * HEADS](fill=0)  # [TOKENS, HEADS]
        comptime for t in range(TOKENS):
            comptime for p in range(PARTS):
                var key = widen(keys[t * PARTS + p])
                comptime if ROTARY:
                    var angle = rotation_angle(frequency[p], position - (base + Int32(t * TEAMS) + team))
                    var across = key * sin(angle)
                    key *= cos(angle)
                    comptime for h in range(HEADS):
                        comptime for i in range(WIDTH):
                            scores[t * HEADS + h] = partner[h * PARTS + p][i].fma(across[i], scores[t * HEADS + h])
                comptime for h in range(HEADS):
                    comptime for i in range(WIDTH):
                        scores[t * HEADS + h] = q[h * PARTS + p][i].fma(key[i], scores[t * HEADS + h])
        comptime for t in range(TOKENS):
            var token = base + Int32(t * TEAMS) + team
            comptime for h in range(HEADS):
                var dot = sum_of_team[LANES](scores[t * HEADS + h]) + missing[t]
                var score = params.score(dot, slope[h], token)
                scores[t * HEADS + h] = score if token < item.end else MINUS_INFINITY

        comptime for h in range(HEADS):
            var highest = greatest[h]
            comptime for t in range(TOKENS):
                highest = max(highest, scores[t * HEADS + h])
            # Where no score above -inf was seen, weights are relative to 0.
            var reference = highest if highest != MINUS_INFINITY else 0
            var factor = exp2(greatest[h] - reference)
            greatest[h] = highest
            total[h] *= factor
            comptime for p in range(PARTS):
                acc[h * PARTS + p] *= factor
            comptime for t in range(TOKENS):
                var w = exp2(scores[t * HEADS + h] - reference)
                scores[t * HEADS + h] = w
                total[h] += w
        comptime for t in range(TOKENS):
            comptime for p in range(PARTS):
                var value = widen(values[t * PARTS + p])
                comptime for h in range(HEADS):
                    acc[h * PARTS + p] = value.fma(Vector(scores[t * HEADS + h]), acc[h * PARTS + p])

    # The teams' results are merged: [TEAMS, HEADS, DIM] and [TEAMS, HEADS].
    var sums = unsafe_stack_allocation[TEAMS * HEADS * DIM, Float32, address_space=AddressSpace.SHARED, alignment=16]()
    var states = unsafe_stack_allocation[2 * TEAMS * HEADS, Float32, address_space=AddressSpace.SHARED]()
    comptime for h in range(HEADS):
        var state = Int(team) * HEADS + h
        if lane == 0:
            states[unsafe_offset=2 * state] = greatest[h]
            states[unsafe_offset=2 * state + 1] = total[h]
        comptime for p in range(PARTS):
            var dim = (p * LANES + Int(lane)) * WIDTH
            sums.unsafe_store[alignment=16](state * DIM + dim, acc[h * PARTS + p])
    barrier()
    for i in range(Int(thread_idx.x), Int(heads) * DIM, THREADS):
        var h, dim = divmod(i, DIM)
        if dim >= Int(params.head_dim):
            continue
        var head = first_head + Int32(h)
        var common = MINUS_INFINITY
        comptime for t in range(TEAMS):
            common = max(common, states[unsafe_offset=2 * (t * HEADS + h)])
        var whole = Float32(0)
        var sum = Float32(0)
        comptime for t in range(TEAMS):
            var state = t * HEADS + h
            var part_factor = rescale_factor(states[unsafe_offset=2 * state], common)
            whole = part_factor.fma(states[unsafe_offset=2 * state + 1], whole)
            sum = part_factor.fma(sums[unsafe_offset=state * DIM + dim], sum)
        if item.partial == WHOLE_ROW:
            var factor = params.finish(item.row, head, common, whole, writes_lse=dim == 0)
            params.o.unsafe_store(params.element(item.row, head, Int32(dim)), (sum * factor).cast[dtype]())
        else:
            var state = Int(item.partial) * Int(params.num_heads) + Int(head)
            partials.acc.unsafe_store(state * Int(params.head_dim) + dim, sum)
            if dim == 0:
                partials.greatest.unsafe_store(state, common)
                partials.total.unsafe_store(state, whole)


@always_inline
def sum_of_team[lanes: Int](x: Float32) -> Float32:
    """The sum over the lanes of a team, the same bits in each of them."""
    var sum = x
    comptime for i in range(8):
        comptime step = lanes >> (i + 1)
        comptime if step > 0:
            sum += warp.shuffle_xor(sum, UInt32(step))
    return sum
