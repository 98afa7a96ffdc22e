"""Attention on any GPU: vector loads, warp shuffles, float32 arithmetic. The fallback, and the reference.

A CTA serves one item of the schedule for one KV head and up to `HEADS` query heads of its group, which share every
load of K and V. Its threads form teams of lanes: a team takes one token at a time, each lane 16 bytes of its head (8 of
a float8 or int8 head, 4 of int4), and keeps a softmax state of its own (`teams.mojo`). Scales of codes multiply a
token's score and weight.
"""

from std.math import ceildiv, cos, sin
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.host import DeviceContext

from ...cache.gpu_loads import CODE_BYTES, check_alignment, load, load_raw, widen_stored
from ...cache.paged_kv_cache import DynamicKVCache
from ...isa.codes import is_codes, scale_of, units_of
from ..softmax import MINUS_INFINITY
from .combine import enqueue_combine
from .params import GpuAttentionParams, NOT_A_NUMBER
from .rope import RotaryFrequencies, rotation_angle
from .row_page_table import RowPageTable, TokenSlot
from .row_masks import GpuRowMasks, RowMask
from .scheduler import PartialOutputs, Schedule, Workspace, enqueue_schedule, multiprocessors
from .split_kv import INVALID_ROW, NO_ROW, ScheduleBounds
from .teams import THREADS, TeamState, sum_of_team


def attend_generic[
    dtype: DType, o_dtype: DType, Masks: GpuRowMasks, kv_dtype: DType, //
](
    ctx: DeviceContext,
    params: GpuAttentionParams[dtype, o_dtype, Masks],
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
    var dim = max(Int(params.head_dim), Int(params.value_dim()))
    var group = Int(params.num_heads) // k.num_heads()
    if rotary.rotates():
        comptime if is_codes(kv_dtype):
            raise Error("options: rope_theta is not 0, keys of codes are not rotated")
        # Two kernels a pair of dtypes: half of the lanes idle where head_dim is small, and a lane keeps two parts of q.
        if dim <= 128:
            launch_generic[128, 4, True](ctx, params, k, v, rotary, group, batch_invariant)
        else:
            launch_generic[512, 2, True](ctx, params, k, v, rotary, group, batch_invariant)
        return
    # The kernel for the next larger head_dim, and for the least number of heads that holds the group. With masks there
    # are fewer, because each takes time to compile.
    comptime if Masks.has_masks:
        if dim <= 128:
            launch_generic_for_group[128](ctx, params, k, v, group, batch_invariant)
        else:
            launch_generic_for_group[512](ctx, params, k, v, group, batch_invariant)
    else:
        if dim <= 64:
            launch_generic_for_group[64](ctx, params, k, v, group, batch_invariant)
        elif dim <= 128:
            launch_generic_for_group[128](ctx, params, k, v, group, batch_invariant)
        elif dim <= 256:
            launch_generic_for_group[256](ctx, params, k, v, group, batch_invariant)
        else:
            launch_generic_for_group[512](ctx, params, k, v, group, batch_invariant)


def launch_generic_for_group[
    dtype: DType, o_dtype: DType, Masks: GpuRowMasks, kv_dtype: DType, //, DIM: Int
](
    ctx: DeviceContext,
    params: GpuAttentionParams[dtype, o_dtype, Masks],
    k: DynamicKVCache[kv_dtype],
    v: DynamicKVCache[kv_dtype],
    group: Int,
    batch_invariant: Bool,
) raises:
    # HEADS * DIM bounds the registers: 64 numbers each for the queries and the sums of a lane.
    comptime most = 4 if DIM > 256 else 8
    var none = RotaryFrequencies(0, 1)
    # With masks there are fewer; with one head at a `DIM` of 512 a register of some spills.
    comptime if not (Masks.has_masks and DIM > 256):
        if group == 1:
            launch_generic[DIM, 1](ctx, params, k, v, none, group, batch_invariant)
            return
    comptime if not Masks.has_masks:
        if group <= 4:
            launch_generic[DIM, 4](ctx, params, k, v, none, group, batch_invariant)
            return
    launch_generic[DIM, most](ctx, params, k, v, none, group, batch_invariant)


def launch_generic[
    dtype: DType, o_dtype: DType, Masks: GpuRowMasks, kv_dtype: DType, //, DIM: Int, HEADS: Int, ROTARY: Bool = False
](
    ctx: DeviceContext,
    params: GpuAttentionParams[dtype, o_dtype, Masks],
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
    var workspace = Workspace(ctx, bounds, Int(params.num_heads), Int(params.value_dim()))
    var schedule = workspace.schedule()
    var partials = workspace.partials()
    enqueue_schedule(ctx, params, schedule)
    comptime kernel = attend_item_on_any_gpu[dtype, o_dtype, Masks, kv_dtype, DIM, HEADS, ROTARY]
    ctx.enqueue_function[kernel](
        params, k, v, schedule, partials, rotary, grid_dim=(bounds.items, k.num_heads(), parts), block_dim=THREADS
    )
    enqueue_combine(ctx, params, schedule, partials)
    _ = workspace^


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)))
def attend_item_on_any_gpu[
    dtype: DType, o_dtype: DType, Masks: GpuRowMasks, kv_dtype: DType, DIM: Int, HEADS: Int, ROTARY: Bool
](
    params: GpuAttentionParams[dtype, o_dtype, Masks],
    k: DynamicKVCache[kv_dtype],
    v: DynamicKVCache[kv_dtype],
    schedule: Schedule,
    partials: PartialOutputs,
    rotary: RotaryFrequencies,
):
    """One item for KV head `block_idx.y` and heads `[HEADS * block_idx.z, ...)` of its group."""
    # Rotations and masks take registers: with four tokens at once some kernels spill.
    comptime State = TeamState[kv_dtype, DIM, HEADS, 2 if ROTARY or Masks.has_masks else 4]
    comptime Shape = State.Shape
    comptime TEAMS = Shape.TEAMS
    comptime TOKENS = Shape.TOKENS

    var item = schedule.item(Int(block_idx.x))
    if item.row == NO_ROW:
        return
    var group = params.num_heads // Int32(k.num_heads())
    var kv_head = Int32(block_idx.y)
    var first_of_part = Int32(Int(block_idx.z) * HEADS)
    var heads = min(Int32(HEADS), group - first_of_part)
    var first_head = kv_head * group + first_of_part
    var team = Int32(thread_idx.x // Shape.LANES)
    var lane = Int32(thread_idx.x % Shape.LANES)

    var state = State(NOT_A_NUMBER if item.end == INVALID_ROW else 0)
    var queries = TeamQueries[Shape.WIDTH, Shape.LANES, Shape.PARTS, HEADS, ROTARY](
        params, item.row, first_head, heads, lane
    )
    var origin = Int32(0)
    var mask = RowMask(-1, 0)
    if item.begin < item.end:
        origin = params.masks.first_position(params.request(item.row))
        mask = params.masks.mask(item.row)
        comptime if ROTARY:
            queries.read_rotary(params, rotary, item.row, first_head, heads, lane)
    var pages = RowPageTable(item.row, params, k)
    # The same number of steps in every team: lanes of one warp shuffle together.
    for base in range(item.begin, item.end, Int32(TEAMS * TOKENS)):
        var tokens = TeamTokens[kv_dtype, Shape.WIDTH, Shape.LANES, Shape.PARTS, TOKENS]()
        # All loads of a step come first.
        comptime for t in range(TOKENS):
            var token = base + Int32(t * TEAMS) + team
            tokens.seen[t] = token < item.end and params.masks.sees(mask, token)
            if tokens.seen[t]:
                tokens.load[t](params, k, v, pages.locate(token), kv_head, lane)

        var scores = State.Scores(fill=0)  # [TOKENS, HEADS]
        comptime for t in range(TOKENS):
            var token = base + Int32(t * TEAMS) + team
            comptime for p in range(Shape.PARTS):
                queries.add_dots[t, p, signed=Masks.has_masks](
                    widen_stored[Shape.WIDTH](tokens.keys[t * Shape.PARTS + p]), origin + token, scores
                )
        comptime for t in range(TOKENS):
            var token = base + Int32(t * TEAMS) + team
            comptime for h in range(HEADS):
                var dot = sum_of_team[Shape.LANES](scores[t * HEADS + h])
                comptime if is_codes(kv_dtype):
                    dot *= tokens.k_scales[t]
                dot += tokens.missing[t]
                var score = params.score(dot, queries.slope[h], origin + token)
                scores[t * HEADS + h] = score if tokens.seen[t] else MINUS_INFINITY

        state.weigh(scores)
        comptime for t in range(TOKENS):
            comptime if is_codes(kv_dtype):
                comptime for h in range(HEADS):
                    scores[t * HEADS + h] *= tokens.v_scales[t]
            comptime for p in range(Shape.PARTS):
                state.add[t, p](scores, widen_stored[Shape.WIDTH](tokens.values[t * Shape.PARTS + p]))
    state.finish(params, item, partials, team, lane, first_head, heads)


struct TeamQueries[WIDTH: Int, LANES: Int, PARTS: Int, HEADS: Int, ROTARY: Bool]:
    """The queries of `HEADS` heads of a row, in registers; each lane has its elements (`teams.mojo`)."""

    comptime Vector = SIMD[DType.float32, Self.WIDTH]
    comptime ROTARY_PARTS = Self.PARTS if Self.ROTARY else 0

    var q: Array[Self.Vector, Self.HEADS * Self.PARTS]
    """`[HEADS, PARTS]`."""
    var slope: Array[Float32, Self.HEADS]
    var partner: Array[Self.Vector, Self.HEADS * Self.ROTARY_PARTS]
    """`[HEADS, PARTS]`: with rotary keys, the other half of q with its sign."""
    var frequency: Array[SIMD[DType.uint64, Self.WIDTH], Self.ROTARY_PARTS]
    """`[PARTS]`: how fast each dimension rotates."""
    var position: Int32

    @always_inline
    def __init__(out self, params: GpuAttentionParams, row: Int32, first_head: Int32, heads: Int32, lane: Int32):
        """Reads q of `heads` heads from `first_head` on."""
        self.q = Array[Self.Vector, Self.HEADS * Self.PARTS](fill=0)
        self.slope = Array[Float32, Self.HEADS](fill=0)
        self.partner = Array[Self.Vector, Self.HEADS * Self.ROTARY_PARTS](fill=0)
        self.frequency = Array[SIMD[DType.uint64, Self.WIDTH], Self.ROTARY_PARTS](fill=0)
        self.position = 0
        comptime for h in range(Self.HEADS):
            if h < Int(heads):
                self.slope[h] = params.slope(first_head + Int32(h))
                comptime for p in range(Self.PARTS):
                    var dim = (Int32(p * Self.LANES) + lane) * Int32(Self.WIDTH)
                    if dim < params.head_dim:
                        self.q[h * Self.PARTS + p] = load[Self.WIDTH](
                            params.q, params.element(row, first_head + Int32(h), dim)
                        )

    @always_inline
    def read_rotary(
        mut self,
        params: GpuAttentionParams,
        rotary: RotaryFrequencies,
        row: Int32,
        first_head: Int32,
        heads: Int32,
        lane: Int32,
    ):
        """Reads what rotary keys take besides, for a row that has tokens."""
        var half = params.head_dim // 2
        self.position = params.position(row)
        comptime for p in range(Self.PARTS):
            comptime for i in range(Self.WIDTH):
                var dim = (Int32(p * Self.LANES) + lane) * Int32(Self.WIDTH) + Int32(i)
                if dim < params.head_dim:
                    var other = dim + half if dim < half else dim - half
                    self.frequency[p][i] = rotary.frequency(min(dim, other))
                    comptime for h in range(Self.HEADS):
                        if h < Int(heads):
                            var at = params.element(row, first_head + Int32(h), other)
                            var x = params.q[unsafe_offset=at].cast[DType.float32]()
                            self.partner[h * Self.PARTS + p][i] = -x if dim < half else x

    @always_inline
    def add_dots[
        t: Int, p: Int, *, signed: Bool
    ](self, var key: Self.Vector, position: Int32, mut dots: Array[Float32, _]):
        """Adds vector `p` of the key of the step's `t`-th token, at `position`, to `dots` `[TOKENS, HEADS]`."""
        comptime if Self.ROTARY:
            var angle = rotation_angle[signed=signed](self.frequency[p], self.position - position)
            var across = key * sin(angle)
            key *= cos(angle)
            comptime for h in range(Self.HEADS):
                comptime for i in range(Self.WIDTH):
                    dots[t * Self.HEADS + h] = self.partner[h * Self.PARTS + p][i].fma(
                        across[i], dots[t * Self.HEADS + h]
                    )
        comptime for h in range(Self.HEADS):
            comptime for i in range(Self.WIDTH):
                dots[t * Self.HEADS + h] = self.q[h * Self.PARTS + p][i].fma(key[i], dots[t * Self.HEADS + h])


struct TeamTokens[kv_dtype: DType, WIDTH: Int, LANES: Int, PARTS: Int, TOKENS: Int]:
    """K and V of a team's tokens of one step, as they are stored, in registers; each lane has its elements."""

    comptime UNITS = units_of(Self.kv_dtype, Self.WIDTH)
    comptime Stored = Array[SIMD[Self.kv_dtype, Self.UNITS], Self.TOKENS * Self.PARTS]
    comptime Scales = Array[Float32, Self.TOKENS if is_codes(Self.kv_dtype) else 0]

    var keys: Self.Stored
    """`[TOKENS, PARTS]`."""
    var values: Self.Stored
    """`[TOKENS, PARTS]`."""
    var k_scales: Self.Scales
    var v_scales: Self.Scales
    var missing: Array[Float32, Self.TOKENS]
    """NaN for a token whose page id is outside the pool, else 0."""
    var seen: Array[Bool, Self.TOKENS]
    """False for a token past the item or hidden by the row's mask, which is not loaded."""

    @always_inline
    def __init__(out self):
        self.keys = Self.Stored(fill=0)
        self.values = Self.Stored(fill=0)
        self.k_scales = Self.Scales(fill=0)
        self.v_scales = Self.Scales(fill=0)
        self.missing = Array[Float32, Self.TOKENS](fill=0)
        self.seen = Array[Bool, Self.TOKENS](fill=False)

    @always_inline
    def load[
        t: Int
    ](
        mut self,
        params: GpuAttentionParams,
        k: DynamicKVCache[Self.kv_dtype],
        v: DynamicKVCache[Self.kv_dtype],
        at: TokenSlot,
        kv_head: Int32,
        lane: Int32,
    ):
        """Loads the step's `t`-th token."""
        if at.page < 0:
            self.missing[t] = NOT_A_NUMBER
            return
        var k_at = k.offset(Int(at.page), Int(at.slot), Int(kv_head))
        var v_at = v.offset(Int(at.page), Int(at.slot), Int(kv_head))
        comptime for p in range(Self.PARTS):
            var dim = (Int32(p * Self.LANES) + lane) * Int32(Self.WIDTH)
            var unit = units_of(Self.kv_dtype, Int(dim))
            if dim < params.head_dim:
                self.keys[t * Self.PARTS + p] = load_raw[Self.UNITS](k.blocks.ptr, k_at + unit)
                comptime if not params.Masks.has_masks:
                    self.values[t * Self.PARTS + p] = load_raw[Self.UNITS](v.blocks.ptr, v_at + unit)
            comptime if params.Masks.has_masks:
                if dim < params.value_dim():
                    self.values[t * Self.PARTS + p] = load_raw[Self.UNITS](v.blocks.ptr, v_at + unit)
        comptime if is_codes(Self.kv_dtype):
            var k_head = k.blocks.ptr.unsafe_offset(k_at)
            var v_head = v.blocks.ptr.unsafe_offset(v_at)
            self.k_scales[t] = scale_of[alignment=CODE_BYTES](k_head, Int(params.head_dim))
            self.v_scales[t] = scale_of[alignment=CODE_BYTES](v_head, Int(params.value_dim()))
