"""Merging states of attention over disjoint keys: outputs `v` and their base-2 lse `s` become those over all keys.

A state whose lse is -inf has seen no key: its output is ignored, whatever it holds, NaN included.
"""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import log2
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.utils.numerics import isfinite

from ..cache.pointers import constant_at, memory_at
from ..isa.threads import Workers, for_rows
from .softmax import MINUS_INFINITY, exp2

comptime MERGE_THREADS = 128


@fieldwise_init
struct States[dtype: DType](DevicePassable, TrivialRegisterPassable):
    """`count` states of every row and head, and the memory of the merged state."""

    comptime device_type: AnyType = Self

    var v: Pointer[Scalar[Self.dtype], ImmUntrackedOrigin]
    """`[S, count, H, D]`."""
    var s: Pointer[Float32, ImmUntrackedOrigin]
    """`[S, count, H]`, base 2."""
    var merged_v: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[S, H, D]`."""
    var merged_s: Pointer[Float32, MutUntrackedOrigin]
    """`[S, H]`."""
    var count: Int64
    var num_heads: Int64
    var head_dim: Int64

    def _to_device_type(self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return String("States[", Self.dtype, "]")

    @staticmethod
    def get_device_type_name() -> String:
        return Self.get_type_name()

    @always_inline
    def merge(self, index: Int, first: Int, step: Int):
        """Merges the states of row and head `index`: of the output, elements `first`, `first + step` and so on.

        All callers of one index compute the same lse and weights, from the same numbers in the same order.
        """
        var heads = Int(self.num_heads)
        var count = Int(self.count)
        var dim = Int(self.head_dim)
        var row, head = divmod(index, heads)
        var state = row * count * heads + head
        var greatest = MINUS_INFINITY
        for i in range(count):
            var s = self.s[unsafe_offset=state + i * heads]
            greatest = s if s > greatest else greatest
        var total = Float32(0)
        for i in range(count):
            total += state_weight(self.s[unsafe_offset=state + i * heads], greatest)
        # Not `total == 0`: where an lse is NaN, so is the total.
        if first == 0:
            var empty = greatest == MINUS_INFINITY and total == 0
            self.merged_s.unsafe_store(index, MINUS_INFINITY if empty else greatest + log2(total))
        for d in range(first, dim, step):
            var sum = Float32(0)
            for i in range(count):
                var factor = state_weight(self.s[unsafe_offset=state + i * heads], greatest)
                if factor != 0:  # 0 * NaN would be NaN
                    sum += factor * self.v[unsafe_offset=(state + i * heads) * dim + d].cast[DType.float32]()
            var mean = sum / total if total != 0 else 0
            if not isfinite(mean):
                mean = self.mean_in_float64(state, d, greatest)
            self.merged_v.unsafe_store(index * dim + d, mean.cast[Self.dtype]())

    def mean_in_float64(self, state: Int, d: Int, greatest: Float32) -> Float32:
        """Element `d` of the output of the states from `state` on: their sum may overflow float32, not their mean."""
        var heads = Int(self.num_heads)
        var dim = Int(self.head_dim)
        var sum = Float64(0)
        var total = Float64(0)
        for i in range(Int(self.count)):
            var factor = state_weight(self.s[unsafe_offset=state + i * heads], greatest).cast[DType.float64]()
            total += factor
            if factor != 0:
                sum += factor * self.v[unsafe_offset=(state + i * heads) * dim + d].cast[DType.float64]()
        return (sum / total).cast[DType.float32]()


@always_inline
def state_weight(s: Float32, greatest: Float32) -> Float32:
    """The weight of a state relative to the one with the greatest lse; 0 where it has seen no key, NaN of a NaN."""
    return exp2(s - greatest) if s != MINUS_INFINITY else 0


@fieldwise_init
struct MergeCall(TrivialRegisterPassable):
    """Merged_v `[S, H, D]` and merged_s `[S, H]` of v `[S, n, H, D]` and s `[S, n, H]`, as numbers."""

    var merged_v: Int
    var merged_s: Int
    var v: Int
    var s: Int
    var num_rows: Int
    var num_states: Int
    var num_heads: Int
    var head_dim: Int
    var workers: Workers

    def states[dtype: DType](self) -> States[dtype]:
        return States[dtype](
            constant_at[dtype](self.v),
            constant_at[DType.float32](self.s),
            memory_at[dtype](self.merged_v),
            memory_at[DType.float32](self.merged_s),
            Int64(self.num_states),
            Int64(self.num_heads),
            Int64(self.head_dim),
        )

    def run[dtype: DType](self):
        """Computes it on the CPU."""
        merge_on_cpu(self.states[dtype](), self.num_rows, self.workers)


def merge_on_gpu[dtype: DType, //](ctx: DeviceContext, states: States[dtype], rows: Int) raises:
    """Enqueues the merge of `rows` rows."""
    var blocks = rows * Int(states.num_heads)
    if blocks > 0:
        comptime kernel = merge_kernel[dtype]
        ctx.enqueue_function[kernel](states, grid_dim=blocks, block_dim=MERGE_THREADS)


def merge_kernel[dtype: DType](states: States[dtype]):
    """One CTA a row and head."""
    states.merge(Int(block_idx.x), Int(thread_idx.x), MERGE_THREADS)


def merge_on_cpu[dtype: DType, //](states: States[dtype], rows: Int, workers: Workers):
    """Merges `rows` rows on up to `workers` threads, each a range of rows and heads."""

    def merge(begin: Int, end: Int) {var states}:
        for at in range(begin, end):
            states.merge(at, 0, 1)

    for_rows(merge, rows * Int(states.num_heads), Int(states.count * states.head_dim), workers)
