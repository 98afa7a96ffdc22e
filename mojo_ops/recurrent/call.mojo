"""The linear recurrence as numbers: a program calls it in a library of kernels."""

from ..cache.pointers import constant_at, memory_at
from ..isa.threads import Workers
from .linear_recurrence import Heads, LinearRecurrence
from .step_states import StepStates


@fieldwise_init
struct RecurrenceCall(TrivialRegisterPassable):
    """The operands of `LinearRecurrence` of one layer: addresses, then sizes. The table is checked by the caller."""

    var o: Int
    var x: Int
    var decays: Int
    """`[T, H]`: the decay itself, and in `rates` the rate."""
    var rates: Int
    var skip: Int
    """`[H]` float32; where there is the delta rule, nothing."""
    var matrices: Int
    var offsets: Int
    var sources: Int
    var save_offsets: Int
    var counts: Int
    var slots: Int
    var requests: Int
    var rows: Int
    var heads: Int
    var key_heads: Int
    var key_dim: Int
    var value_dim: Int
    var width: Int
    """Elements of a row of x: all queries, all keys, all values."""
    var normed: Int
    """1: q and k are divided by their lengths."""
    var numbers: Int
    """The address of `[1]` float32: q's scale."""
    var workers: Workers

    def run[delta: Bool](self):
        var keys = self.key_heads * self.key_dim
        var states = StepStates(
            constant_at[DType.uint32](self.offsets),
            constant_at[DType.int32](self.sources),
            constant_at[DType.uint32](self.save_offsets),
            constant_at[DType.int32](self.counts),
            constant_at[DType.int32](self.slots),
            self.requests,
        )
        LinearRecurrence[delta, given=True](
            memory_at[DType.float32](self.o),
            memory_at[DType.float32](self.x),
            memory_at[DType.float32](self.decays),
            memory_at[DType.float32](self.rates),
            memory_at[DType.float32](0),
            memory_at[DType.float32](0),
            memory_at[DType.float32](self.skip),
            memory_at[DType.float32](self.matrices),
            states,
            Heads(
                self.heads,
                self.key_heads,
                self.key_dim,
                self.value_dim,
                0,
                keys,
                2 * keys,
                self.width,
                False,
            ),
            self.rows,
            1,
            0,
            memory_at[DType.float32](self.numbers)[],
            0,
            0,
            self.normed != 0,
        ).run(self.workers)
