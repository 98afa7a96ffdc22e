"""The registered ops of recurrent layers: a convolution over the last tokens, a matrix state, a gated norm. CPU only.

Operands that the ops over states share, after their own:
    windows or matrices: the slots of the states, float32, changed in place.
    layer: `[1]` int64, the place of the layer among those that are recurrent.
    row_offsets `[B + 1]` uint32, sources `[B]` int32, save_offsets `[B + 1]` uint32, save_counts and save_slots `[S]`
        int32: where each request's state is read and saved (`recurrent/step_states.mojo`).
Rows past the last request's are padding; their outputs are 0.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from max.runtime.asyncrt import parallelism_level

from .cache.checks import check_equal
from .cache.pointers import untracked, untracked_immutable
from .isa.convert import LANES
from .recurrent.causal_conv1d import CausalConv1d, MAX_KERNEL
from .recurrent.gated_norm import GatedNorm
from .recurrent.linear_recurrence import Heads, LinearRecurrence
from .recurrent.step_states import StepStates


def states_of(
    row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
    sources: InputTensor[dtype=DType.int32, rank=1, ...],
    save_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
    save_counts: InputTensor[dtype=DType.int32, rank=1, ...],
    save_slots: InputTensor[dtype=DType.int32, rank=1, ...],
    rows: Int,
    slots: Int,
) raises -> StepStates:
    """The table of a step, checked."""
    var requests = sources.dim_size(0)
    check_equal("row_offsets: its length", row_offsets.dim_size(0), requests + 1)
    check_equal("save_offsets: its length", save_offsets.dim_size(0), requests + 1)
    check_equal("save_slots: its length", save_slots.dim_size(0), save_counts.dim_size(0))
    var states = StepStates(
        untracked_immutable(row_offsets.unsafe_ptr()),
        untracked_immutable(sources.unsafe_ptr()),
        untracked_immutable(save_offsets.unsafe_ptr()),
        untracked_immutable(save_counts.unsafe_ptr()),
        untracked_immutable(save_slots.unsafe_ptr()),
        requests,
    )
    states.check(rows, save_counts.dim_size(0), slots)
    return states


def layer_of(layer: InputTensor[dtype=DType.int64, rank=1, ...], layers: Int) raises -> Int:
    """The layer, one of `layers`."""
    check_equal("layer: its length", layer.dim_size(0), 1)
    var found = Int(layer[0])
    if found < 0 or found >= layers:
        raise Error("layer: it is ", found, ", there are states of ", layers)
    return found


@extensibility.register("paged_kv_causal_conv1d")
struct CausalConv:
    """Convolves each channel with its last inputs, as `CausalConv1d` says.

    x `[T, C]`, weight `[C, K]`, bias `[C]` or `[0]`; y `[T, C]` float32; windows `[slots, layers, K - 1, C]`;
    activation: "silu" or "none".
    """

    @staticmethod
    def execute[
        dtype: DType, weight_dtype: DType, //, target: StaticString, activation: StaticString
    ](
        y: OutputTensor[dtype=DType.float32, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        weight: InputTensor[dtype=weight_dtype, rank=2, ...],
        bias: InputTensor[dtype=weight_dtype, rank=1, ...],
        windows: MutableInputTensor[dtype=DType.float32, rank=4, ...],
        layer: InputTensor[dtype=DType.int64, rank=1, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        sources: InputTensor[dtype=DType.int32, rank=1, ...],
        save_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        save_counts: InputTensor[dtype=DType.int32, rank=1, ...],
        save_slots: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_causal_conv1d runs on the CPU alone")
        comptime assert activation == "silu" or activation == "none", "the activation is silu or none"
        var channels, kernel = x.dim_size(1), weight.dim_size(1)
        check_equal("weight: its number of channels", weight.dim_size(0), channels)
        if kernel < 2 or kernel > MAX_KERNEL:
            raise Error("weight: ", kernel, " inputs of a channel, expected 2 to ", MAX_KERNEL)
        if bias.dim_size(0) > 0:
            check_equal("bias: its length", bias.dim_size(0), channels)
        check_equal("windows: their number of inputs", windows.dim_size(2), kernel - 1)
        check_equal("windows: their number of channels", windows.dim_size(3), channels)
        check_equal("y: its number of elements", y.size(), x.size())
        var states = states_of(
            row_offsets, sources, save_offsets, save_counts, save_slots, x.dim_size(0), windows.dim_size(0)
        )
        var at = untracked(y.unsafe_ptr())
        for index in range(states.first_row(states.requests) * channels, y.size()):
            at.unsafe_offset(index)[] = 0
        CausalConv1d[dtype, weight_dtype, activation == "silu"](
            at,
            untracked(x.unsafe_ptr()),
            untracked(weight.unsafe_ptr()),
            untracked(bias.unsafe_ptr()),
            bias.dim_size(0) > 0,
            untracked(windows.unsafe_ptr()),
            states,
            channels,
            kernel,
            windows.dim_size(1),
            layer_of(layer, windows.dim_size(1)),
        ).run(parallelism_level(None))


@extensibility.register("paged_kv_linear_recurrence")
struct Recurrence:
    """Advances the matrix state of each head and reads it, as `LinearRecurrence` says.

    x `[T, width]`; a and, where `delta`, b `[T, H]`; rates, bias `[H]`, skip `[H]` or `[0]`; o `[T, H * Dv]`; matrices
    `[slots, layers, H, blocks, Dk, 16]`; all float32. sizes `[6]` int32: key heads, the value's dimensions, the places
    of q, k and v in a row, 1 for tiled heads. numbers `[3]` float32: q_scale, least and most time step. Without `delta`
    b is `[0, H]`.
    """

    @staticmethod
    def execute[
        target: StaticString, delta: Bool
    ](
        o: OutputTensor[dtype=DType.float32, rank=2, ...],
        x: InputTensor[dtype=DType.float32, rank=2, ...],
        a: InputTensor[dtype=DType.float32, rank=2, ...],
        b: InputTensor[dtype=DType.float32, rank=2, ...],
        rates: InputTensor[dtype=DType.float32, rank=1, ...],
        bias: InputTensor[dtype=DType.float32, rank=1, ...],
        skip: InputTensor[dtype=DType.float32, rank=1, ...],
        sizes: InputTensor[dtype=DType.int32, rank=1, ...],
        numbers: InputTensor[dtype=DType.float32, rank=1, ...],
        matrices: MutableInputTensor[dtype=DType.float32, rank=6, ...],
        layer: InputTensor[dtype=DType.int64, rank=1, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        sources: InputTensor[dtype=DType.int32, rank=1, ...],
        save_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        save_counts: InputTensor[dtype=DType.int32, rank=1, ...],
        save_slots: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_linear_recurrence runs on the CPU alone")
        check_equal("sizes: its length", sizes.dim_size(0), 6)
        check_equal("numbers: its length", numbers.dim_size(0), 3)
        var heads = Heads(
            matrices.dim_size(2),
            Int(sizes[0]),
            matrices.dim_size(4),
            Int(sizes[1]),
            Int(sizes[2]),
            Int(sizes[3]),
            Int(sizes[4]),
            x.dim_size(1),
            sizes[5] != 0,
        )
        if heads.key_heads < 1 or heads.heads % heads.key_heads != 0:
            raise Error("sizes: ", heads.heads, " heads are no multiple of ", heads.key_heads, " key heads")
        var keys = heads.key_heads * heads.key_dim
        var values = heads.heads * heads.value_dim
        for place in range(3):
            var first = Int(sizes[2 + place])
            if first < 0 or first + (values if place == 2 else keys) > heads.width:
                raise Error("sizes: part ", place, " of x begins at ", first, " of ", heads.width, " elements")
        check_equal("matrices: their blocks", matrices.dim_size(3), heads.blocks())
        check_equal("matrices: the columns of a block", matrices.dim_size(5), LANES)
        check_equal("o: its number of rows", o.dim_size(0), x.dim_size(0))
        check_equal("o: its number of columns", o.dim_size(1), values)
        check_equal("a: its number of elements", a.size(), x.dim_size(0) * heads.heads)
        check_equal("b: its number of elements", b.size(), a.size() if delta else 0)
        check_equal("rates: its length", rates.dim_size(0), heads.heads)
        check_equal("bias: its length", bias.dim_size(0), heads.heads)
        check_equal("skip: its length", skip.dim_size(0), 0 if delta else heads.heads)
        var states = states_of(
            row_offsets, sources, save_offsets, save_counts, save_slots, x.dim_size(0), matrices.dim_size(0)
        )
        var at = untracked(o.unsafe_ptr())
        for index in range(states.first_row(states.requests) * values, o.size()):
            at.unsafe_offset(index)[] = 0
        LinearRecurrence[delta](
            at,
            untracked(x.unsafe_ptr()),
            untracked(a.unsafe_ptr()),
            untracked(b.unsafe_ptr()),
            untracked(rates.unsafe_ptr()),
            untracked(bias.unsafe_ptr()),
            untracked(skip.unsafe_ptr()),
            untracked(matrices.unsafe_ptr()),
            states,
            heads,
            states.first_row(states.requests),
            matrices.dim_size(1),
            layer_of(layer, matrices.dim_size(1)),
            numbers[0],
            numbers[1],
            numbers[2],
            delta,
        ).run(parallelism_level(None))


@extensibility.register("paged_kv_gated_norm")
struct NormWithGate:
    """Norms rows and multiplies by gates, as `GatedNorm` says.

    x `[N, D]` float32, z `[N, D]`, weight `[W]` of a multiple of D elements, numbers `[1]` float32: eps; y `[N, D]` in
    z's dtype.
    """

    @staticmethod
    def execute[
        dtype: DType, weight_dtype: DType, //, target: StaticString, gate_first: Bool
    ](
        y: OutputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=DType.float32, rank=2, ...],
        z: InputTensor[dtype=dtype, rank=2, ...],
        weight: InputTensor[dtype=weight_dtype, rank=1, ...],
        numbers: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            raise Error("paged_kv_gated_norm runs on the CPU alone")
        var columns = x.dim_size(1)
        check_equal("z: its number of elements", z.size(), x.size())
        check_equal("y: its number of elements", y.size(), x.size())
        check_equal("numbers: its length", numbers.dim_size(0), 1)
        if columns < 1 or weight.dim_size(0) < columns or weight.dim_size(0) % columns != 0:
            raise Error("weight: ", weight.dim_size(0), " elements are no multiple of ", columns)
        GatedNorm[dtype, weight_dtype, gate_first](
            untracked(y.unsafe_ptr()),
            untracked(x.unsafe_ptr()),
            untracked(z.unsafe_ptr()),
            untracked(weight.unsafe_ptr()),
            x.dim_size(0),
            columns,
            weight.dim_size(0) // columns,
            numbers[0],
        ).run(parallelism_level(None))
