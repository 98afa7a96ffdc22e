"""The linear recurrence as numbers: a program calls it in a library of kernels."""

from ..cache.pointers import constant_at, memory_at
from ..isa.threads import Workers
from .causal_conv1d import CausalConv1d
from .gated_norm import GatedNorm
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


@fieldwise_init
struct StatesMemory(TrivialRegisterPassable):
    """The table of a step by which states are read and saved, as addresses and sizes."""

    var row_offsets: Int
    var sources: Int
    var save_offsets: Int
    var save_counts: Int
    var save_slots: Int
    var requests: Int
    var saves: Int
    var slots: Int
    """Slots of the buffer of states."""

    def states(self, rows: Int) raises -> StepStates:
        """The table, checked for a step of `rows` rows."""
        var states = StepStates(
            constant_at[DType.uint32](self.row_offsets),
            constant_at[DType.int32](self.sources),
            constant_at[DType.uint32](self.save_offsets),
            constant_at[DType.int32](self.save_counts),
            constant_at[DType.int32](self.save_slots),
            self.requests,
        )
        states.check(rows, self.saves, self.slots)
        return states


def clear_padding(y: Int, states: StepStates, rows: Int, columns: Int):
    """Writes zeros to the rows of y past the last request's."""
    var at = memory_at[DType.float32](y)
    for index in range(states.first_row(states.requests) * columns, rows * columns):
        at[unsafe_offset=index] = 0


@fieldwise_init
struct CausalConv1dCall(TrivialRegisterPassable):
    """`CausalConv1d`."""

    var y: Int
    var x: Int
    var weight: Int
    var bias: Int
    var has_bias: Int
    var windows: Int
    var rows: Int
    var channels: Int
    var kernel: Int
    var layers: Int
    var layer: Int
    var silu: Int
    var wide_weight: Int
    """1 where weight and bias are float32, else they have x's dtype."""
    var states: StatesMemory
    var workers: Workers

    def run[dtype: DType](self) raises:
        comptime if dtype != DType.float32:
            if self.wide_weight != 0:
                self.run_weights[dtype, DType.float32]()
                return
        self.run_weights[dtype, dtype]()

    def run_weights[dtype: DType, weight_dtype: DType](self) raises:
        if self.silu != 0:
            self.convolve[dtype, weight_dtype, True]()
        else:
            self.convolve[dtype, weight_dtype, False]()

    def convolve[dtype: DType, weight_dtype: DType, silu: Bool](self) raises:
        var states = self.states.states(self.rows)
        clear_padding(self.y, states, self.rows, self.channels)
        CausalConv1d[dtype, weight_dtype, silu](
            memory_at[DType.float32](self.y),
            memory_at[dtype](self.x),
            memory_at[weight_dtype](self.weight),
            memory_at[weight_dtype](self.bias),
            self.has_bias != 0,
            memory_at[DType.float32](self.windows),
            states,
            self.channels,
            self.kernel,
            self.layers,
            self.layer,
        ).run(self.workers)


@fieldwise_init
struct LayerRecurrenceCall(TrivialRegisterPassable):
    """`LinearRecurrence` as a step of a model has it, all float32; `sizes` and `numbers` as `paged_kv_linear_recurrence`
    has them.
    """

    var o: Int
    var x: Int
    var a: Int
    var b: Int
    var rates: Int
    var bias: Int
    var skip: Int
    var matrices: Int
    var rows: Int
    var heads: Int
    var key_dim: Int
    var width: Int
    var sizes: Int
    var numbers: Int
    var layers: Int
    var layer: Int
    var delta: Int
    var states: StatesMemory
    var workers: Workers

    def run(self) raises:
        if self.delta != 0:
            self.advance[True]()
        else:
            self.advance[False]()

    def advance[delta: Bool](self) raises:
        var sizes = constant_at[DType.int32](self.sizes)
        var numbers = constant_at[DType.float32](self.numbers)
        var heads = Heads(
            self.heads,
            Int(sizes[unsafe_offset=0]),
            self.key_dim,
            Int(sizes[unsafe_offset=1]),
            Int(sizes[unsafe_offset=2]),
            Int(sizes[unsafe_offset=3]),
            Int(sizes[unsafe_offset=4]),
            self.width,
            sizes[unsafe_offset=5] != 0,
        )
        var states = self.states.states(self.rows)
        clear_padding(self.o, states, self.rows, heads.heads * heads.value_dim)
        LinearRecurrence[delta](
            memory_at[DType.float32](self.o),
            memory_at[DType.float32](self.x),
            memory_at[DType.float32](self.a),
            memory_at[DType.float32](self.b),
            memory_at[DType.float32](self.rates),
            memory_at[DType.float32](self.bias),
            memory_at[DType.float32](self.skip),
            memory_at[DType.float32](self.matrices),
            states,
            heads,
            states.first_row(states.requests),
            self.layers,
            self.layer,
            numbers[unsafe_offset=0],
            numbers[unsafe_offset=1],
            numbers[unsafe_offset=2],
            delta,
        ).run(self.workers)


@fieldwise_init
struct GatedNormCall(TrivialRegisterPassable):
    """`GatedNorm`; `numbers` is the address of eps, float32."""

    var y: Int
    var x: Int
    var z: Int
    var weight: Int
    var rows: Int
    var columns: Int
    var weight_rows: Int
    var numbers: Int
    var gate_first: Int
    var wide_weight: Int
    """1 where the weight is float32, else it has z's dtype."""
    var workers: Workers

    def run[dtype: DType](self):
        comptime if dtype != DType.float32:
            if self.wide_weight != 0:
                self.run_weights[dtype, DType.float32]()
                return
        self.run_weights[dtype, dtype]()

    def run_weights[dtype: DType, weight_dtype: DType](self):
        if self.gate_first != 0:
            self.norm[dtype, weight_dtype, True]()
        else:
            self.norm[dtype, weight_dtype, False]()

    def norm[dtype: DType, weight_dtype: DType, gate_first: Bool](self):
        GatedNorm[dtype, weight_dtype, gate_first](
            memory_at[dtype](self.y),
            memory_at[DType.float32](self.x),
            memory_at[dtype](self.z),
            memory_at[weight_dtype](self.weight),
            self.rows,
            self.columns,
            self.weight_rows,
            constant_at[DType.float32](self.numbers)[],
        ).run(self.workers)
