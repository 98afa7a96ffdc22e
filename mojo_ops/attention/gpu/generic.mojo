"""Attention on any GPU: vector loads, warp shuffles, float32 arithmetic. The fallback, and the measure of the others.

A CTA serves one item of the schedule for one KV head and up to `HEADS` query heads of its group, which share every
load of K and V. Its threads form teams of `LANES` lanes: a team takes one token at a time, each lane 16 bytes of its
head (8 of a float8 head), and keeps a softmax state of its own. The teams' states meet in shared memory at the end.
"""

from std.math import ceildiv, cos, exp2, sin
from std.memory import unsafe_stack_allocation
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, WARP_SIZE, barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp

from ...cache.gpu_loads import DeviceCache, check_alignment, load, load_raw, vector_width, widen
from ..softmax import MINUS_INFINITY
from .combine import enqueue_combine, weight
from .row_page_table import Pages
from .params import DecodeRows, NOT_A_NUMBER
from .rope import Turns, angle
from .scheduler import Partials, WorkList, Workspace, enqueue_schedule, multiprocessors
from .split_kv import INVALID, NO_ROW, WHOLE, WorkBounds

comptime THREADS = 128


def attend_plain[
    dtype: DType, kv_dtype: DType, //
](
    ctx: DeviceContext,
    rows: DecodeRows[dtype],
    k: DeviceCache[kv_dtype],
    v: DeviceCache[kv_dtype],
    turns: Turns,
    batch_invariant: Bool,
) raises:
    """Enqueues attention of every row over the pages of its request; the host waits for nothing.

    Shapes were checked. Lengths, requests and page ids are the device's business (`README.md`).
    """
    check_alignment("k_blocks", k)
    check_alignment("v_blocks", v)
    if rows.num_rows == 0 or rows.num_heads == 0:
        return
    var dim = Int(rows.head_dim)
    var group = Int(rows.num_heads) // k.num_heads()
    if turns.is_on():
        # Two kernels a pair of dtypes: half of the lanes idle where head_dim is small, and what a lane keeps of q is twice.
        if dim <= 128:
            launch[128, 4, True](ctx, rows, k, v, turns, group, batch_invariant)
        else:
            launch[512, 2, True](ctx, rows, k, v, turns, group, batch_invariant)
        return
    # The kernel for the next larger head_dim, and for the least number of heads that holds the group.
    if dim <= 64:
        launch_for_group[64](ctx, rows, k, v, group, batch_invariant)
    elif dim <= 128:
        launch_for_group[128](ctx, rows, k, v, group, batch_invariant)
    elif dim <= 256:
        launch_for_group[256](ctx, rows, k, v, group, batch_invariant)
    else:
        launch_for_group[512](ctx, rows, k, v, group, batch_invariant)


def launch_for_group[
    dtype: DType, kv_dtype: DType, //, DIM: Int
](
    ctx: DeviceContext,
    rows: DecodeRows[dtype],
    k: DeviceCache[kv_dtype],
    v: DeviceCache[kv_dtype],
    group: Int,
    batch_invariant: Bool,
) raises:
    # HEADS * DIM bounds the registers: 64 numbers each for the queries and the sums of a lane.
    comptime most = 4 if DIM > 256 else 8
    var none = Turns(0, 1)
    if group == 1:
        launch[DIM, 1](ctx, rows, k, v, none, group, batch_invariant)
    elif group <= 4:
        launch[DIM, 4](ctx, rows, k, v, none, group, batch_invariant)
    else:
        launch[DIM, most](ctx, rows, k, v, none, group, batch_invariant)


def launch[
    dtype: DType, kv_dtype: DType, //, DIM: Int, HEADS: Int, ROTARY: Bool = False
](
    ctx: DeviceContext,
    rows: DecodeRows[dtype],
    k: DeviceCache[kv_dtype],
    v: DeviceCache[kv_dtype],
    turns: Turns,
    group: Int,
    batch_invariant: Bool,
) raises:
    var parts = ceildiv(group, HEADS)
    var bounds = WorkBounds.of(
        Int(rows.num_rows), Int(rows.capacity), k.num_heads() * parts, multiprocessors(ctx), batch_invariant
    )
    var workspace = Workspace(ctx, bounds, Int(rows.num_heads), Int(rows.head_dim))
    var work = workspace.work()
    var partials = workspace.partials()
    enqueue_schedule(ctx, rows, work)
    comptime kernel = attend_items[dtype, kv_dtype, DIM, HEADS, ROTARY]
    ctx.enqueue_function[kernel](
        rows, k, v, work, partials, turns, grid_dim=(bounds.items, k.num_heads(), parts), block_dim=THREADS
    )
    enqueue_combine(ctx, rows, work, partials)
    _ = workspace^


struct Team[kv_dtype: DType, DIM: Int, HEADS: Int, ROTARY: Bool]:
    """The numbers that shape the kernel."""

    comptime WIDTH = vector_width[Self.kv_dtype]()
    comptime LANES = min(WARP_SIZE, Self.DIM // Self.WIDTH)
    """Lanes of a team: they hold one head of one token."""
    comptime PARTS = Self.DIM // (Self.WIDTH * Self.LANES)
    """Vectors that a lane holds of it."""
    comptime TEAMS = THREADS // Self.LANES
    comptime TOKENS = 4 if Self.HEADS * Self.WIDTH * Self.PARTS <= 32 and not Self.ROTARY else 2
    """Tokens that a team loads at once, to have many loads in flight."""


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)))
def attend_items[
    dtype: DType, kv_dtype: DType, DIM: Int, HEADS: Int, ROTARY: Bool
](
    rows: DecodeRows[dtype],
    k: DeviceCache[kv_dtype],
    v: DeviceCache[kv_dtype],
    work: WorkList,
    partials: Partials,
    turns: Turns,
):
    """One item for KV head `block_idx.y` and heads `[HEADS * block_idx.z, ...)` of its group."""
    comptime Shape = Team[kv_dtype, DIM, HEADS, ROTARY]
    comptime WIDTH = Shape.WIDTH
    comptime LANES = Shape.LANES
    comptime PARTS = Shape.PARTS
    comptime TEAMS = Shape.TEAMS
    comptime TOKENS = Shape.TOKENS
    comptime Vector = SIMD[DType.float32, WIDTH]

    var item = work.item(Int(block_idx.x))
    if item.row == NO_ROW:
        return
    var group = rows.num_heads // Int32(k.num_heads())
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
    var total = Array[Float32, HEADS](fill=NOT_A_NUMBER if item.end == INVALID else 0)
    comptime for h in range(HEADS):
        if h < Int(heads):
            slope[h] = rows.slope(first_head + Int32(h))
            comptime for p in range(PARTS):
                var dim = (Int32(p * LANES) + lane) * Int32(WIDTH)
                if dim < rows.head_dim:
                    q[h * PARTS + p] = load[WIDTH](rows.q, rows.element(item.row, first_head + Int32(h), dim))
    # With rotary keys: the other half of q, and how fast each dimension turns.
    comptime TURNING = PARTS if ROTARY else 0
    var partner = Array[Vector, HEADS * TURNING](fill=0)  # [HEADS, PARTS]
    var frequency = Array[SIMD[DType.uint64, WIDTH], TURNING](fill=0)
    var position = Int32(0)
    comptime if ROTARY:
        if item.begin < item.end:
            var half = rows.head_dim // 2
            position = rows.row_lengths[unsafe_offset=Int(item.row)] - 1
            comptime for p in range(PARTS):
                comptime for i in range(WIDTH):
                    var dim = (Int32(p * LANES) + lane) * Int32(WIDTH) + Int32(i)
                    if dim < rows.head_dim:
                        var other = dim + half if dim < half else dim - half
                        frequency[p][i] = turns.frequency(min(dim, other))
                        comptime for h in range(HEADS):
                            if h < Int(heads):
                                var at = rows.element(item.row, first_head + Int32(h), other)
                                var x = rows.q[unsafe_offset=at].cast[DType.float32]()
                                partner[h * PARTS + p][i] = -x if dim < half else x

    var pages = Pages(item.row, rows, k)
    # The same number of steps in every team: lanes of one warp shuffle together.
    for base in range(item.begin, item.end, Int32(TEAMS * TOKENS)):
        # All loads of a step come first.
        var keys = Array[SIMD[kv_dtype, WIDTH], TOKENS * PARTS](fill=0)  # [TOKENS, PARTS]
        var values = Array[SIMD[kv_dtype, WIDTH], TOKENS * PARTS](fill=0)
        var missing = Array[Float32, TOKENS](fill=0)
        comptime for t in range(TOKENS):
            var token = base + Int32(t * TEAMS) + team
            if token < item.end:
                var place = pages.place(token)
                if place.page < 0:
                    missing[t] = NOT_A_NUMBER
                else:
                    var k_at = k.offset(Int(place.page), Int(place.slot), Int(kv_head))
                    var v_at = v.offset(Int(place.page), Int(place.slot), Int(kv_head))
                    comptime for p in range(PARTS):
                        var dim = (Int32(p * LANES) + lane) * Int32(WIDTH)
                        if dim < rows.head_dim:
                            keys[t * PARTS + p] = load_raw[WIDTH](k.blocks.ptr, k_at + Int(dim))
                            values[t * PARTS + p] = load_raw[WIDTH](v.blocks.ptr, v_at + Int(dim))

        var scores = Array[Float32, TOKENS * HEADS](fill=0)  # [TOKENS, HEADS]
        comptime for t in range(TOKENS):
            comptime for p in range(PARTS):
                var key = widen(keys[t * PARTS + p])
                comptime if ROTARY:
                    var turn = angle(frequency[p], position - (base + Int32(t * TEAMS) + team))
                    var across = key * sin(turn)
                    key *= cos(turn)
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
                var score = rows.score(dot, slope[h], token)
                scores[t * HEADS + h] = score if token < item.end else MINUS_INFINITY

        comptime for h in range(HEADS):
            var highest = greatest[h]
            comptime for t in range(TOKENS):
                highest = max(highest, scores[t * HEADS + h])
            # Where no score was seen yet, and none is a number, weights are relative to 0.
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

    # The teams' results meet: [TEAMS, HEADS, DIM] and [TEAMS, HEADS].
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
        if dim >= Int(rows.head_dim):
            continue
        var head = first_head + Int32(h)
        var common = MINUS_INFINITY
        comptime for t in range(TEAMS):
            common = max(common, states[unsafe_offset=2 * (t * HEADS + h)])
        var whole = Float32(0)
        var sum = Float32(0)
        comptime for t in range(TEAMS):
            var state = t * HEADS + h
            var share = weight(states[unsafe_offset=2 * state], common)
            whole = share.fma(states[unsafe_offset=2 * state + 1], whole)
            sum = share.fma(sums[unsafe_offset=state * DIM + dim], sum)
        if item.partial == WHOLE:
            var factor = rows.finish(item.row, head, common, whole, writes_lse=dim == 0)
            rows.o.unsafe_store(rows.element(item.row, head, Int32(dim)), (sum * factor).cast[dtype]())
        else:
            var state = Int(item.partial) * Int(rows.num_heads) + Int(head)
            partials.acc.unsafe_store(state * Int(rows.head_dim) + dim, sum)
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
