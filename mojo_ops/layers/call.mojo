"""The small ops of a step as numbers: what a program hands to the library of layers (`../../python/paged_kv/runtime`).

One library of a dtype serves every shape, so what an op of a graph has as a parameter is a number here. Shapes were
checked when the graph was built; what depends on values is checked here.
"""

from ..cache.checks import check_rows
from ..cache.pointers import constant_at, memory_at
from ..isa.threads import Workers
from .elementwise import GELU_TANH, NONE, RELU, SIGMOID, SILU, add_scaled, gate_rows, gate_units, narrow_all, widen_all
from .experts import ExpertChoice, GatedHalves, WeightedSum
from .hadamard import HadamardRows
from .pointwise import BINARY, Operand, UNARY, binary, mean_of_rows, unary
from .rms_norm import RmsNorm
from .rotary_tables import RotaryTables
from .rotate import RotaryRows
from .step_rows import fill_lengths_and_last_rows
from .take_rows import ColumnSelection, RowSelection

comptime CONVERTED = (DType.bfloat16, DType.float16, DType.int32)
"""Dtypes that become float32, and the first two the other way."""
comptime ACTIVATIONS = (SILU, GELU_TANH, SIGMOID, RELU, NONE)
"""In the order of their numbers (`runtime/program_ops.py`)."""


@fieldwise_init
struct TakeRowsCall(TrivialRegisterPassable):
    """`y[i] = x[rows[i]]`, rows of `row_bytes` bytes."""

    var y: Int
    var x: Int
    var rows: Int
    var count: Int
    var row_bytes: Int
    var available: Int
    """Rows of x."""
    var workers: Workers

    def run(self) raises:
        var selection = RowSelection(
            memory_at[DType.uint8](self.y),
            memory_at[DType.uint8](self.x),
            constant_at[DType.int32](self.rows),
            self.count,
            self.row_bytes,
        )
        check_rows(selection.rows, self.count, self.available)
        selection.copy(self.workers)


@fieldwise_init
struct TakeColumnsCall(TrivialRegisterPassable):
    """`ColumnSelection`, sizes in bytes."""

    var y: Int
    var x: Int
    var rows: Int
    var groups: Int
    var group: Int
    var first: Int
    var each: Int
    var workers: Workers

    def run(self):
        ColumnSelection(
            memory_at[DType.uint8](self.y),
            memory_at[DType.uint8](self.x),
            self.rows,
            self.groups,
            self.group,
            self.first,
            self.each,
        ).copy(self.workers)


@fieldwise_init
struct RmsNormCall(TrivialRegisterPassable):
    """`RmsNorm`; `numbers` is the address of eps and offset, float32."""

    var y: Int
    var x: Int
    var weight: Int
    var rows: Int
    var columns: Int
    var numbers: Int
    var rounds_once: Int
    var wide_weight: Int
    """1 where the weight is float32, else it has x's dtype."""
    var workers: Workers

    def run[dtype: DType](self):
        comptime if dtype != DType.float32:
            if self.wide_weight != 0:
                self.norm[dtype, DType.float32]()
                return
        self.norm[dtype, dtype]()

    def norm[dtype: DType, weight_dtype: DType](self):
        if self.rounds_once != 0:
            self.norm_rounded[dtype, weight_dtype, True]()
        else:
            self.norm_rounded[dtype, weight_dtype, False]()

    def norm_rounded[dtype: DType, weight_dtype: DType, rounds_once: Bool](self):
        var numbers = constant_at[DType.float32](self.numbers)
        RmsNorm[dtype, weight_dtype, rounds_once](
            memory_at[dtype](self.y),
            memory_at[dtype](self.x),
            memory_at[weight_dtype](self.weight),
            self.rows,
            self.columns,
            numbers[unsafe_offset=0],
            numbers[unsafe_offset=1],
        ).run(self.workers)


@fieldwise_init
struct RotateCall(TrivialRegisterPassable):
    """`RotaryRows`."""

    var y: Int
    var x: Int
    var cos: Int
    var sin: Int
    var rows: Int
    var heads: Int
    var head_dim: Int
    var half: Int
    var pairs: Int
    """1: adjacent dimensions are rotated."""
    var workers: Workers

    def run[dtype: DType](self):
        RotaryRows[dtype](
            memory_at[dtype](self.y),
            memory_at[dtype](self.x),
            memory_at[DType.float32](self.cos),
            memory_at[DType.float32](self.sin),
            self.rows,
            self.heads,
            self.head_dim,
            self.half,
            self.pairs != 0,
        ).run(self.workers)


@fieldwise_init
struct HadamardCall(TrivialRegisterPassable):
    """`HadamardRows`."""

    var y: Int
    var x: Int
    var rows: Int
    var heads: Int
    var head_dim: Int
    var workers: Workers

    def run[dtype: DType](self) raises:
        comptime for bits in range(3, 10):
            if self.head_dim == 1 << bits:
                HadamardRows[dtype, 1 << bits](
                    memory_at[dtype](self.y), memory_at[dtype](self.x), self.rows, self.heads
                ).run(self.workers)
                return
        raise Error("head_dim: ", self.head_dim, " is no power of two from 8 to 512")


@fieldwise_init
struct RotaryTablesCall(TrivialRegisterPassable):
    """`RotaryTables`; `numbers` is the address of amplitude and start, float32."""

    var cos: Int
    var sin: Int
    var positions: Int
    var frequencies: Int
    var rows: Int
    var half: Int
    var numbers: Int
    var workers: Workers

    def run(self):
        var numbers = constant_at[DType.float32](self.numbers)
        RotaryTables(
            memory_at[DType.float32](self.cos),
            memory_at[DType.float32](self.sin),
            constant_at[DType.int32](self.positions),
            memory_at[DType.float32](self.frequencies),
            self.rows,
            self.half,
            numbers[unsafe_offset=0],
            numbers[unsafe_offset=1],
        ).fill(self.workers)


@fieldwise_init
struct AddScaledCall(TrivialRegisterPassable):
    """`sum = x + factor y`; `numbers` is the address of the factor, float32."""

    var sum: Int
    var x: Int
    var y: Int
    var count: Int
    var numbers: Int
    var workers: Workers

    def run[dtype: DType](self):
        add_scaled(
            memory_at[dtype](self.sum),
            memory_at[dtype](self.x),
            memory_at[dtype](self.y),
            constant_at[DType.float32](self.numbers)[],
            self.count,
            self.workers,
        )


@fieldwise_init
struct GateUnitsCall(TrivialRegisterPassable):
    """`y = activation(gate) up`, `[rows, columns]`; gate has as many columns, or one."""

    var y: Int
    var gate: Int
    var up: Int
    var rows: Int
    var columns: Int
    var gate_columns: Int
    var activation: Int
    """The index among `ACTIVATIONS`."""
    var workers: Workers

    def run[dtype: DType](self) raises:
        comptime for i in range(5):
            if self.activation == i:
                self.gated[dtype, ACTIVATIONS[i]]()
                return
        raise Error("activation: ", self.activation, " is none of 5")

    def gated[dtype: DType, activation: StaticString](self):
        var y, gate, up = memory_at[dtype](self.y), memory_at[dtype](self.gate), memory_at[dtype](self.up)
        if self.gate_columns == 1 and self.columns != 1:
            gate_rows[activation](y, gate, up, self.rows, self.columns, self.workers)
        else:
            gate_units[activation](y, gate, up, self.rows * self.columns, self.workers)


@fieldwise_init
struct ConvertCall(TrivialRegisterPassable):
    """`y = x` in another dtype; one of the two is float32."""

    var y: Int
    var x: Int
    var count: Int
    var source: Int
    """The index among `CONVERTED`; -1: float32."""
    var target: Int
    var workers: Workers

    def run(self) raises:
        comptime for i in range(3):
            comptime dtype = CONVERTED[i]
            if self.source == i and self.target == -1:
                widen_all(memory_at[DType.float32](self.y), memory_at[dtype](self.x), self.count, self.workers)
                return
            comptime if dtype.is_floating_point():
                if self.target == i and self.source == -1:
                    narrow_all(memory_at[dtype](self.y), memory_at[DType.float32](self.x), self.count, self.workers)
                    return
        raise Error("a conversion of ", self.source, " to ", self.target, " is none")


@fieldwise_init
struct StepRowsCall(TrivialRegisterPassable):
    """`fill_lengths_and_last_rows`."""

    var lengths: Int
    var last: Int
    var positions: Int
    var rows: Int
    var row_offsets: Int
    var batch: Int
    var workers: Workers

    def run(self):
        fill_lengths_and_last_rows(
            memory_at[DType.int32](self.lengths),
            memory_at[DType.int32](self.last),
            constant_at[DType.int32](self.positions),
            self.rows,
            constant_at[DType.uint32](self.row_offsets),
            self.batch,
        )


@fieldwise_init
struct UnaryCall(TrivialRegisterPassable):
    """`y = f(x)` for each element, in float32, rounded once."""

    var y: Int
    var x: Int
    var count: Int
    var function: Int
    """The index among `UNARY`."""
    var workers: Workers

    def run[dtype: DType](self) raises:
        comptime for i in range(6):
            if self.function == i:
                unary[UNARY[i]](memory_at[dtype](self.y), memory_at[dtype](self.x), self.count, self.workers)
                return
        raise Error("function: ", self.function, " is none of 6")


@fieldwise_init
struct BinaryCall(TrivialRegisterPassable):
    """`y = f(x, z)` for each element of `[rows, columns]`, in float32, rounded once; an operand may have one row, one
    column or both.
    """

    var y: Int
    var x: Int
    var x_row: Int
    """Elements from a row of x to the next; 0 where all rows are one."""
    var x_column: Int
    """0 where all columns are one, else 1."""
    var z: Int
    var z_row: Int
    var z_column: Int
    var rows: Int
    var columns: Int
    var function: Int
    """The index among `BINARY`."""
    var workers: Workers

    def run[dtype: DType](self) raises:
        var x = Operand[dtype](memory_at[dtype](self.x), self.x_row, self.x_column)
        var z = Operand[dtype](memory_at[dtype](self.z), self.z_row, self.z_column)
        comptime for i in range(6):
            if self.function == i:
                binary[BINARY[i]](memory_at[dtype](self.y), x, z, self.rows, self.columns, self.workers)
                return
        raise Error("function: ", self.function, " is none of 6")


@fieldwise_init
struct MeanCall(TrivialRegisterPassable):
    """`y[row]` is the mean of row `row` of x `[rows, columns]`, both float32."""

    var y: Int
    var x: Int
    var rows: Int
    var columns: Int
    var workers: Workers

    def run(self):
        mean_of_rows(
            memory_at[DType.float32](self.y),
            memory_at[DType.float32](self.x),
            self.rows,
            self.columns,
            self.workers,
        )


@fieldwise_init
struct ChooseExpertsCall(TrivialRegisterPassable):
    """`ExpertChoice`; `bias` is 0 where there is none."""

    var weights: Int
    var experts: Int
    var logits: Int
    var bias: Int
    var rows: Int
    var count: Int
    var chosen: Int
    var groups: Int
    var chosen_groups: Int
    var has_bias: Int
    var sigmoid: Int
    var sum_to_one: Int
    var numbers: Int
    """The address of the scale and the jitter, float32."""
    var workers: Workers

    def run(self):
        ExpertChoice(
            memory_at[DType.float32](self.weights),
            memory_at[DType.int32](self.experts),
            memory_at[DType.float32](self.logits),
            memory_at[DType.float32](self.bias),
            self.rows,
            self.count,
            self.chosen,
            self.groups,
            self.chosen_groups,
            self.has_bias != 0,
            self.sigmoid != 0,
            self.sum_to_one != 0,
            memory_at[DType.float32](self.numbers)[unsafe_offset=0],
            memory_at[DType.float32](self.numbers)[unsafe_offset=1],
        ).run(self.workers)


@fieldwise_init
struct GateHalvesCall(TrivialRegisterPassable):
    """`GatedHalves`; `numbers` is the address of alpha and limit, float32."""

    var y: Int
    var x: Int
    var rows: Int
    var columns: Int
    var numbers: Int
    var clamped: Int
    """1 for the activation "clamped", else it is "silu"."""
    var workers: Workers

    def run[dtype: DType](self):
        if self.clamped != 0:
            self.gate[dtype, "clamped"]()
        else:
            self.gate[dtype, "silu"]()

    def gate[dtype: DType, activation: StaticString](self):
        var numbers = memory_at[DType.float32](self.numbers)
        GatedHalves[dtype, activation](
            memory_at[dtype](self.y),
            memory_at[dtype](self.x),
            self.rows,
            self.columns,
            numbers[unsafe_offset=0],
            numbers[unsafe_offset=1],
        ).run(self.workers)


@fieldwise_init
struct WeightedSumCall(TrivialRegisterPassable):
    """`WeightedSum`."""

    var y: Int
    var x: Int
    var weights: Int
    var rows: Int
    var count: Int
    var columns: Int
    var workers: Workers

    def run[dtype: DType](self):
        WeightedSum[dtype](
            memory_at[dtype](self.y),
            memory_at[dtype](self.x),
            memory_at[DType.float32](self.weights),
            self.rows,
            self.count,
            self.columns,
        ).run(self.workers)
