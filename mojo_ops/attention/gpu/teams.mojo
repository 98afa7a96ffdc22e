"""Teams of lanes: each takes one token at a time and keeps a softmax state; a CTA merges its teams' states at the end.

A lane holds vectors of a head: the first element of vector `p` of lane `l` is `(p * LANES + l) * WIDTH`.
"""

from std.math import exp2
from std.memory import unsafe_stack_allocation
from max.gpu import WARP_SIZE, barrier, thread_idx
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp

from ...cache.gpu_loads import vector_width
from ..softmax import MINUS_INFINITY
from .combine import rescale_factor
from .params import GpuAttentionParams
from .row_masks import GpuRowMasks
from .scheduler import PartialOutputs
from .split_kv import SplitItem, WHOLE_ROW

comptime THREADS = 128


struct TeamShape[kv_dtype: DType, DIM: Int, HEADS: Int, MOST_TOKENS: Int]:
    """The teams of a CTA's threads, and the loads of each lane."""

    comptime WIDTH = vector_width[Self.kv_dtype]()
    comptime LANES = min(WARP_SIZE, Self.DIM // Self.WIDTH)
    """Lanes of a team: they hold one head of one token."""
    comptime PARTS = Self.DIM // (Self.WIDTH * Self.LANES)
    """Vectors that a lane holds of it."""
    comptime TEAMS = THREADS // Self.LANES
    comptime TOKENS = Self.MOST_TOKENS if Self.HEADS * Self.WIDTH * Self.PARTS <= 32 else 2
    """Tokens that a team loads at once, to have many loads in flight."""


struct TeamState[kv_dtype: DType, DIM: Int, HEADS: Int, MOST_TOKENS: Int]:
    """The state of a team's softmax for `HEADS` query heads, in registers; each lane has its elements of the sums."""

    comptime Shape = TeamShape[Self.kv_dtype, Self.DIM, Self.HEADS, Self.MOST_TOKENS]
    comptime PARTS = Self.Shape.PARTS
    comptime Vector = SIMD[DType.float32, Self.Shape.WIDTH]
    comptime Scores = Array[Float32, Self.Shape.TOKENS * Self.HEADS]
    """`[TOKENS, HEADS]`: of the tokens of one step, the same in every lane of the team."""

    var acc: Array[Self.Vector, Self.HEADS * Self.PARTS]
    """`[HEADS, PARTS]`: sums of weighted values, relative to `greatest`."""
    var greatest: Array[Float32, Self.HEADS]
    var total: Array[Float32, Self.HEADS]

    @always_inline
    def __init__(out self, total: Float32):
        self.acc = Array[Self.Vector, Self.HEADS * Self.PARTS](fill=0)
        self.greatest = Array[Float32, Self.HEADS](fill=MINUS_INFINITY)
        self.total = Array[Float32, Self.HEADS](fill=total)

    @always_inline
    def weigh(mut self, mut scores: Self.Scores):
        """Adds the weights of a step's tokens, which take the place of their scores."""
        comptime for h in range(Self.HEADS):
            var highest = self.greatest[h]
            comptime for t in range(Self.Shape.TOKENS):
                highest = max(highest, scores[t * Self.HEADS + h])
            # Where no score above -inf was seen, weights are relative to 0.
            var maximum = highest if highest != MINUS_INFINITY else 0
            var factor = exp2(self.greatest[h] - maximum)
            self.greatest[h] = highest
            self.total[h] *= factor
            comptime for p in range(Self.PARTS):
                self.acc[h * Self.PARTS + p] *= factor
            comptime for t in range(Self.Shape.TOKENS):
                var w = exp2(scores[t * Self.HEADS + h] - maximum)
                scores[t * Self.HEADS + h] = w
                self.total[h] += w

    @always_inline
    def add[t: Int, p: Int](mut self, weights: Self.Scores, value: Self.Vector):
        """Adds vector `p` of the step's `t`-th token."""
        comptime for h in range(Self.HEADS):
            self.acc[h * Self.PARTS + p] = value.fma(
                Self.Vector(weights[t * Self.HEADS + h]), self.acc[h * Self.PARTS + p]
            )

    @always_inline
    def finish[
        dtype: DType, o_dtype: DType, Masks: GpuRowMasks, //
    ](
        self,
        params: GpuAttentionParams[dtype, o_dtype, Masks],
        item: SplitItem,
        partials: PartialOutputs,
        team: Int32,
        lane: Int32,
        first_head: Int32,
        heads: Int32,
    ):
        """Merges the states of the CTA's teams in their order; writes o and lse of `heads` heads, or a partial
        result.
        """
        comptime Shape = Self.Shape
        # [TEAMS, HEADS, DIM] and [TEAMS, HEADS].
        var sums = unsafe_stack_allocation[
            Shape.TEAMS * Self.HEADS * Self.DIM, Float32, address_space=AddressSpace.SHARED, alignment=16
        ]()
        var states = unsafe_stack_allocation[2 * Shape.TEAMS * Self.HEADS, Float32, address_space=AddressSpace.SHARED]()
        comptime for h in range(Self.HEADS):
            var state = Int(team) * Self.HEADS + h
            if lane == 0:
                states[unsafe_offset=2 * state] = self.greatest[h]
                states[unsafe_offset=2 * state + 1] = self.total[h]
            comptime for p in range(Self.PARTS):
                var dim = (p * Shape.LANES + Int(lane)) * Shape.WIDTH
                sums.unsafe_store[alignment=16](state * Self.DIM + dim, self.acc[h * Self.PARTS + p])
        barrier()
        var value_dim = Int(params.value_dim())
        for i in range(Int(thread_idx.x), Int(heads) * Self.DIM, THREADS):
            var h, dim = divmod(i, Self.DIM)
            if dim >= value_dim:
                continue
            var head = first_head + Int32(h)
            var common = MINUS_INFINITY
            comptime for t in range(Shape.TEAMS):
                common = max(common, states[unsafe_offset=2 * (t * Self.HEADS + h)])
            var whole = Float32(0)
            var sum = Float32(0)
            comptime for t in range(Shape.TEAMS):
                var state = t * Self.HEADS + h
                var part_factor = rescale_factor(states[unsafe_offset=2 * state], common)
                whole = part_factor.fma(states[unsafe_offset=2 * state + 1], whole)
                sum = part_factor.fma(sums[unsafe_offset=state * Self.DIM + dim], sum)
            if item.partial == WHOLE_ROW:
                var factor = params.finish(item.row, head, common, whole, writes_lse=dim == 0)
                params.o.unsafe_store(params.o_element(item.row, head, Int32(dim)), (sum * factor).cast[o_dtype]())
            else:
                var state = Int(item.partial) * Int(params.num_heads) + Int(head)
                partials.acc.unsafe_store(state * value_dim + dim, sum)
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
