"""The registered ops of a layer beside attention and products, over rows of activations. CPU only.

MAX has ops for all of it. These compile in a fraction of their time: one body serves every shape.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from max.runtime.asyncrt import parallelism_level
from std.sys import size_of

from .cache.checks import check_equal, check_rows
from .cache.pointers import untracked, untracked_immutable
from .layers.elementwise import add_scaled, gate_rows, gate_units, widen_all
from .layers.experts import ExpertChoice, GatedHalves, WeightedSum
from .layers.hadamard import GREATEST_HEAD_DIM, HadamardRows, LEAST_HEAD_DIM
from .layers.rms_norm import RmsNorm
from .layers.rotary_tables import RotaryTables
from .layers.rotate import RotaryRows
from .layers.step_rows import fill_lengths_and_last_rows
from .layers.take_rows import ColumnSelection, RowSelection


@extensibility.register("paged_kv_take_rows")
struct TakeRows:
    """Copies rows: `y[i] = x[rows[i]]`. CPU only.

    x `[M, D]`, rows `[N]` int32, y `[N, D]` in x's dtype.
    """

    @staticmethod
    def execute[
        dtype: DType, //, target: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        rows: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_take_rows runs on the CPU alone")
        check_equal("y: its number of rows", y.dim_size(0), rows.dim_size(0))
        check_equal("y: its number of columns", y.dim_size(1), x.dim_size(1))
        var selection = RowSelection(
            untracked(y.unsafe_ptr()).unsafe_bitcast[UInt8](),
            untracked(x.unsafe_ptr()).unsafe_bitcast[UInt8](),
            untracked_immutable(rows.unsafe_ptr()),
            rows.dim_size(0),
            x.dim_size(1) * size_of[dtype](),
        )
        check_rows(selection.rows, selection.count, x.dim_size(0))
        selection.copy(parallelism_level(None))


@extensibility.register("paged_kv_take_columns")
struct TakeColumns:
    """Copies columns: of each of G groups of x's columns, those from `first` on that make up y. CPU only.

    x `[N, C]`, y `[N, W]` in x's dtype; place `[2]` int32: G, which divides C and W, and first.
    """

    @staticmethod
    def execute[
        dtype: DType, //, target: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        place: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_take_columns runs on the CPU alone")
        check_equal("place: its length", place.dim_size(0), 2)
        check_equal("y: its number of rows", y.dim_size(0), x.dim_size(0))
        var groups, first = Int(place[0]), Int(place[1])
        if groups < 1 or x.dim_size(1) % groups != 0 or y.dim_size(1) % groups != 0:
            raise Error("place: ", groups, " groups do not divide ", x.dim_size(1), " and ", y.dim_size(1), " columns")
        var group, each = x.dim_size(1) // groups, y.dim_size(1) // groups
        if first < 0 or first + each > group:
            raise Error("place: columns ", first, " to ", first + each, " of ", group)
        comptime size = size_of[dtype]()
        ColumnSelection(
            untracked(y.unsafe_ptr()).unsafe_bitcast[UInt8](),
            untracked(x.unsafe_ptr()).unsafe_bitcast[UInt8](),
            x.dim_size(0),
            groups,
            group * size,
            first * size,
            each * size,
        ).copy(parallelism_level(None))


@extensibility.register("paged_kv_rms_norm")
struct RmsNormRows:
    """Computes `(offset + weight) * x / sqrt(mean(x^2) + eps)` for each row, in float32. CPU only.

    x, y `[N, D]`; weight `[D]`; numbers `[2]` float32: eps, offset. It is rounded to x's dtype before the weight, and
    after it; only after it where `rounds_once`.
    """

    @staticmethod
    def execute[
        dtype: DType, weight_dtype: DType, //, target: StaticString, rounds_once: Bool
    ](
        y: OutputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        weight: InputTensor[dtype=weight_dtype, rank=1, ...],
        numbers: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_rms_norm runs on the CPU alone")
        check_equal("weight: its length", weight.dim_size(0), x.dim_size(1))
        check_equal("numbers: its length", numbers.dim_size(0), 2)
        var eps_and_offset = untracked(numbers.unsafe_ptr())
        RmsNorm[dtype, weight_dtype, rounds_once](
            untracked(y.unsafe_ptr()),
            untracked(x.unsafe_ptr()),
            untracked(weight.unsafe_ptr()),
            x.dim_size(0),
            x.dim_size(1),
            eps_and_offset[unsafe_offset=0],
            eps_and_offset[unsafe_offset=1],
        ).run(parallelism_level(None))


@extensibility.register("paged_kv_rotate")
struct Rotate:
    """Rotates the first `2 C` dimensions of every head as `RotaryRows` says, in float32; the others are copied. CPU
    only.

    x, y `[N, H, D]`; cos, sin `[N, C]` float32, `2 C <= D`; pairs: of adjacent dimensions.
    """

    @staticmethod
    def execute[
        dtype: DType, //, target: StaticString, pairs: Bool
    ](
        y: OutputTensor[dtype=dtype, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        cos: InputTensor[dtype=DType.float32, rank=2, ...],
        sin: InputTensor[dtype=DType.float32, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_rotate runs on the CPU alone")
        check_equal("cos: its number of rows", cos.dim_size(0), x.dim_size(0))
        check_equal("sin: its number of rows", sin.dim_size(0), x.dim_size(0))
        check_equal("sin: its number of columns", sin.dim_size(1), cos.dim_size(1))
        if 2 * cos.dim_size(1) > x.dim_size(2):
            raise Error("cos: its ", cos.dim_size(1), " columns are too many for heads of ", x.dim_size(2))
        RotaryRows[dtype](
            untracked(y.unsafe_ptr()),
            untracked(x.unsafe_ptr()),
            untracked(cos.unsafe_ptr()),
            untracked(sin.unsafe_ptr()),
            x.dim_size(0),
            x.dim_size(1),
            x.dim_size(2),
            cos.dim_size(1),
            pairs,
        ).run(parallelism_level(None))


@extensibility.register("paged_kv_hadamard")
struct Hadamard:
    """Transforms every head by Walsh and Hadamard's matrix over sqrt(head_dim), in float32. CPU only.

    x, y `[N, H, D]`; the parameter head_dim is D, a power of two from 8 to 512. Twice is x again, to rounding.
    """

    @staticmethod
    def execute[
        dtype: DType, //, target: StaticString, head_dim: Int
    ](y: OutputTensor[dtype=dtype, rank=3, ...], x: InputTensor[dtype=dtype, rank=3, ...], ctx: DeviceContext) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_hadamard runs on the CPU alone")
        comptime if head_dim < LEAST_HEAD_DIM or head_dim > GREATEST_HEAD_DIM or head_dim & (head_dim - 1) != 0:
            raise Error("head_dim: ", head_dim, " is no power of two from 8 to 512")
        else:
            check_equal("x: its head_dim", x.dim_size(2), head_dim)
            check_equal("y: its number of elements", y.size(), x.size())
            HadamardRows[dtype, head_dim](
                untracked(y.unsafe_ptr()), untracked(x.unsafe_ptr()), x.dim_size(0), x.dim_size(1)
            ).run(parallelism_level(None))


@extensibility.register("paged_kv_rotary_tables")
struct MakeRotaryTables:
    """Computes `amplitude cos(positions[t] frequencies[i])`, and the same of sin, in float32. CPU only.

    positions `[N]` int32; frequencies `[2, C]` float32, the second row for positions from a start on; numbers `[2]`
    float32: amplitude, start. cos, sin `[N, C]`.
    """

    @staticmethod
    def execute[
        target: StaticString
    ](
        cos: OutputTensor[dtype=DType.float32, rank=2, ...],
        sin: OutputTensor[dtype=DType.float32, rank=2, ...],
        positions: InputTensor[dtype=DType.int32, rank=1, ...],
        frequencies: InputTensor[dtype=DType.float32, rank=2, ...],
        numbers: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_rotary_tables runs on the CPU alone")
        check_equal("frequencies: its number of rows", frequencies.dim_size(0), 2)
        check_equal("cos: its number of rows", cos.dim_size(0), positions.dim_size(0))
        check_equal("cos: its number of columns", cos.dim_size(1), frequencies.dim_size(1))
        check_equal("numbers: its length", numbers.dim_size(0), 2)
        var amplitude_and_start = untracked(numbers.unsafe_ptr())
        RotaryTables(
            untracked(cos.unsafe_ptr()),
            untracked(sin.unsafe_ptr()),
            untracked_immutable(positions.unsafe_ptr()),
            untracked(frequencies.unsafe_ptr()),
            positions.dim_size(0),
            frequencies.dim_size(1),
            amplitude_and_start[unsafe_offset=0],
            amplitude_and_start[unsafe_offset=1],
        ).fill(parallelism_level(None))


@extensibility.register("paged_kv_add_scaled")
struct AddScaled:
    """Computes `x + factor y`, `[N, D]`; numbers `[1]` float32: factor. CPU only."""

    @staticmethod
    def execute[
        dtype: DType, //, target: StaticString
    ](
        sum: OutputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        y: InputTensor[dtype=dtype, rank=2, ...],
        numbers: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_add_scaled runs on the CPU alone")
        check_equal("y: its number of elements", y.size(), x.size())
        check_equal("numbers: its length", numbers.dim_size(0), 1)
        add_scaled(
            untracked(sum.unsafe_ptr()),
            untracked(x.unsafe_ptr()),
            untracked(y.unsafe_ptr()),
            untracked(numbers.unsafe_ptr())[],
            x.size(),
            parallelism_level(None),
        )


@extensibility.register("paged_kv_gate_units")
struct GateUnits:
    """Computes `activation(gate) up`, `[N, D]`; gate is `[N, D]` or `[N, 1]`; activation: "silu", "gelu_tanh", "sigmoid",
    "relu" or "none". CPU only.
    """

    @staticmethod
    def execute[
        dtype: DType, //, target: StaticString, activation: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=2, ...],
        gate: InputTensor[dtype=dtype, rank=2, ...],
        up: InputTensor[dtype=dtype, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_gate_units runs on the CPU alone")
        if gate.dim_size(1) == 1 and up.dim_size(1) != 1:
            check_equal("gate: its number of rows", gate.dim_size(0), up.dim_size(0))
            gate_rows[activation](
                untracked(y.unsafe_ptr()),
                untracked(gate.unsafe_ptr()),
                untracked(up.unsafe_ptr()),
                up.dim_size(0),
                up.dim_size(1),
                parallelism_level(None),
            )
            return
        check_equal("up: its number of elements", up.size(), gate.size())
        gate_units[activation](
            untracked(y.unsafe_ptr()),
            untracked(gate.unsafe_ptr()),
            untracked(up.unsafe_ptr()),
            gate.size(),
            parallelism_level(None),
        )


@extensibility.register("paged_kv_choose_experts")
struct ChooseExperts:
    """Chooses the experts of each row and their weights, as `ExpertChoice` says. CPU only.

    logits `[N, E]` float32; bias `[E]` float32, or empty; sizes `[4]` int32: groups, chosen groups, 1 for sigmoids,
    1 for weights whose sum is 1; scale `[2]` float32: that of weights, and the jitter. weights `[N, C]` float32,
    experts `[N, C]` int32.
    """

    @staticmethod
    def execute[
        target: StaticString
    ](
        weights: OutputTensor[dtype=DType.float32, rank=2, ...],
        experts: OutputTensor[dtype=DType.int32, rank=2, ...],
        logits: InputTensor[dtype=DType.float32, rank=2, ...],
        bias: InputTensor[dtype=DType.float32, rank=1, ...],
        sizes: InputTensor[dtype=DType.int32, rank=1, ...],
        scale: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_choose_experts runs on the CPU alone")
        var count = logits.dim_size(1)
        check_equal("experts: its number of rows", experts.dim_size(0), logits.dim_size(0))
        check_equal("weights: its number of elements", weights.size(), experts.size())
        check_equal("sizes: its length", sizes.dim_size(0), 4)
        check_equal("scale: its length", scale.dim_size(0), 2)
        var has_bias = bias.dim_size(0) > 0
        if has_bias:
            check_equal("bias: its length", bias.dim_size(0), count)
        var size = untracked_immutable(sizes.unsafe_ptr())
        var groups, chosen_groups = Int(size[unsafe_offset=0]), Int(size[unsafe_offset=1])
        var sigmoid = size[unsafe_offset=2] != 0
        if groups < 1 or count % groups != 0 or (groups > 1 and sigmoid and count == groups):
            raise Error("sizes: ", groups, " groups do not divide ", count, " experts")
        if chosen_groups < 1 or chosen_groups > groups:
            raise Error("sizes: ", chosen_groups, " of ", groups, " groups are chosen")
        if experts.dim_size(1) > count // groups * chosen_groups:
            raise Error("experts: ", experts.dim_size(1), " of ", count // groups * chosen_groups, " are chosen")
        ExpertChoice(
            untracked(weights.unsafe_ptr()),
            untracked(experts.unsafe_ptr()),
            untracked(logits.unsafe_ptr()),
            untracked(bias.unsafe_ptr()),
            logits.dim_size(0),
            count,
            experts.dim_size(1),
            groups,
            chosen_groups,
            has_bias,
            sigmoid,
            size[unsafe_offset=3] != 0,
            untracked(scale.unsafe_ptr())[unsafe_offset=0],
            untracked(scale.unsafe_ptr())[unsafe_offset=1],
        ).run(parallelism_level(None))


@extensibility.register("paged_kv_gate_halves")
struct GateHalves:
    """Computes gated units of the halves of each row, as `GatedHalves` says. CPU only.

    x `[N, 2 D]`, y `[N, D]`; numbers `[2]` float32: alpha, limit; activation: "silu" or "clamped".
    """

    @staticmethod
    def execute[
        dtype: DType, //, target: StaticString, activation: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        numbers: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_gate_halves runs on the CPU alone")
        check_equal("y: its number of rows", y.dim_size(0), x.dim_size(0))
        check_equal("x: its number of columns", x.dim_size(1), 2 * y.dim_size(1))
        check_equal("numbers: its length", numbers.dim_size(0), 2)
        var alpha_and_limit = untracked(numbers.unsafe_ptr())
        GatedHalves[dtype, activation](
            untracked(y.unsafe_ptr()),
            untracked(x.unsafe_ptr()),
            y.dim_size(0),
            y.dim_size(1),
            alpha_and_limit[unsafe_offset=0],
            alpha_and_limit[unsafe_offset=1],
        ).run(parallelism_level(None))


@extensibility.register("paged_kv_weighted_sum")
struct SumByWeights:
    """Sums rows by weights: x `[N, C, D]`, weights `[N, C]` float32, y `[N, D]`, as `WeightedSum` says. CPU only."""

    @staticmethod
    def execute[
        dtype: DType, //, target: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        weights: InputTensor[dtype=DType.float32, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_weighted_sum runs on the CPU alone")
        check_equal("weights: its number of rows", weights.dim_size(0), x.dim_size(0))
        check_equal("weights: its number of columns", weights.dim_size(1), x.dim_size(1))
        check_equal("y: its number of rows", y.dim_size(0), x.dim_size(0))
        check_equal("y: its number of columns", y.dim_size(1), x.dim_size(2))
        WeightedSum[dtype](
            untracked(y.unsafe_ptr()),
            untracked(x.unsafe_ptr()),
            untracked(weights.unsafe_ptr()),
            x.dim_size(0),
            x.dim_size(1),
            x.dim_size(2),
        ).run(parallelism_level(None))


@extensibility.register("paged_kv_widen")
struct Widen:
    """Copies x `[N, D]` as float32. CPU only."""

    @staticmethod
    def execute[
        dtype: DType, //, target: StaticString
    ](
        y: OutputTensor[dtype=DType.float32, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_widen runs on the CPU alone")
        check_equal("y: its number of elements", y.size(), x.size())
        widen_all(untracked(y.unsafe_ptr()), untracked(x.unsafe_ptr()), x.size(), parallelism_level(None))


@extensibility.register("paged_kv_step_rows")
struct StepRows:
    """Fills what rows see, and each request's last row. CPU only.

    positions `[N]` int32, row_offsets `[B + 1]` uint32; lengths `[N]`, last `[B]` int32.
    """

    @staticmethod
    def execute[
        target: StaticString
    ](
        lengths: OutputTensor[dtype=DType.int32, rank=1, ...],
        last: OutputTensor[dtype=DType.int32, rank=1, ...],
        positions: InputTensor[dtype=DType.int32, rank=1, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_step_rows runs on the CPU alone")
        check_equal("lengths: its length", lengths.dim_size(0), positions.dim_size(0))
        check_equal("row_offsets: its length", row_offsets.dim_size(0), last.dim_size(0) + 1)
        fill_lengths_and_last_rows(
            untracked(lengths.unsafe_ptr()),
            untracked(last.unsafe_ptr()),
            untracked_immutable(positions.unsafe_ptr()),
            positions.dim_size(0),
            untracked_immutable(row_offsets.unsafe_ptr()),
            last.dim_size(0),
        )
