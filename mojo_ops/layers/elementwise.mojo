"""Operations on each element of activations: residual sums, gated units, logits as float32. All in float32."""

from std.math import exp, tanh
from std.utils.numerics import isnan

from ..isa.convert import FloatVector, LANES, narrow, widen
from .rms_norm import rounded
from ..isa.threads import Workers, for_rows

comptime SILU: StaticString = "silu"
comptime GELU_TANH: StaticString = "gelu_tanh"
comptime SIGMOID: StaticString = "sigmoid"
comptime RELU: StaticString = "relu"
comptime NONE: StaticString = "none"


@always_inline
def for_vectors[Part: def[width: Int](Int) -> None, //](part: Part, count: Int, workers: Workers):
    """Calls `part[width](at)` for ranges of `width` elements that make up `count` of them."""

    def task(begin: Int, end: Int) {ref part, var count}:
        for i in range(begin, end):
            if (i + 1) * LANES <= count:
                part[LANES](i * LANES)
            else:
                for at in range(i * LANES, count):
                    part[1](at)

    for_rows(task, (count + LANES - 1) // LANES, LANES, workers)


@no_inline
def add_scaled[
    dtype: DType, //
](
    sum: Pointer[Scalar[dtype], MutUntrackedOrigin],
    x: Pointer[Scalar[dtype], MutUntrackedOrigin],
    y: Pointer[Scalar[dtype], MutUntrackedOrigin],
    factor: Float32,
    count: Int,
    workers: Workers,
):
    """`sum = x + factor y`; the product is rounded to `dtype`, and then the sum. Of float32 it may be one rounding."""

    def part[width: Int](at: Int) {var sum, var x, var y, var factor}:
        var scaled = rounded[dtype](widen[width](y.unsafe_offset(at)) * factor)
        sum.unsafe_store(at, narrow[dtype](widen[width](x.unsafe_offset(at)) + scaled))

    for_vectors(part, count, workers)


@no_inline
def gate_units[
    dtype: DType, //, activation: StaticString
](
    y: Pointer[Scalar[dtype], MutUntrackedOrigin],
    gate: Pointer[Scalar[dtype], MutUntrackedOrigin],
    up: Pointer[Scalar[dtype], MutUntrackedOrigin],
    count: Int,
    workers: Workers,
):
    """`y = activation(gate) up`; the activation is rounded to `dtype`, and then the product."""

    def part[width: Int](at: Int) {var y, var gate, var up}:
        var active = rounded[dtype](activated[activation](widen[width](gate.unsafe_offset(at))))
        y.unsafe_store(at, narrow[dtype](active * widen[width](up.unsafe_offset(at))))

    for_vectors(part, count, workers)


@always_inline
def activated[activation: StaticString](x: SIMD[DType.float32, _]) -> type_of(x):
    """SiLU, `x / (1 + exp(-x))`, the sigmoid, ReLU, x itself, or GELU by its tanh approximation."""
    comptime if activation == NONE:
        return x
    elif activation == RELU:
        return x.lt(0).select(type_of(x)(0), x)  # NaN stays
    elif activation == SILU:
        return x / (1 + exp(-x))
    elif activation == SIGMOID:
        return isnan(x).select(x, 1 / (1 + exp(-x)))  # exp clamps its argument
    else:
        comptime assert activation == GELU_TANH, "the activation is silu, sigmoid, relu, none or gelu_tanh"
        return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@no_inline
def gate_rows[
    dtype: DType, //, activation: StaticString
](
    y: Pointer[Scalar[dtype], MutUntrackedOrigin],
    gate: Pointer[Scalar[dtype], MutUntrackedOrigin],
    up: Pointer[Scalar[dtype], MutUntrackedOrigin],
    rows: Int,
    columns: Int,
    workers: Workers,
):
    """`y = activation(gate) up` with one gate a row; rounded as by `gate_units`."""

    def task(begin: Int, end: Int) {var y, var gate, var up, var columns}:
        for row in range(begin, end):
            var active = rounded[dtype](activated[activation](widen[1](gate.unsafe_offset(row))))[0]
            for at in range(row * columns, (row + 1) * columns):
                y.unsafe_store(at, narrow[dtype](widen[1](up.unsafe_offset(at)) * active))

    for_rows(task, rows, columns, workers)


@no_inline
def widen_all[
    dtype: DType, //
](y: Pointer[Float32, MutUntrackedOrigin], x: Pointer[Scalar[dtype], MutUntrackedOrigin], count: Int, workers: Workers):
    """`y = x`, as float32."""

    def part[width: Int](at: Int) {var y, var x}:
        comptime if dtype.is_floating_point():
            y.unsafe_store(at, widen[width](x.unsafe_offset(at)))
        else:
            y.unsafe_store(at, x.unsafe_load[width=width](at).cast[DType.float32]())

    for_vectors(part, count, workers)


@no_inline
def narrow_all[
    dtype: DType, //
](y: Pointer[Scalar[dtype], MutUntrackedOrigin], x: Pointer[Float32, MutUntrackedOrigin], count: Int, workers: Workers):
    """`y = x`, float32 rounded to `dtype`."""

    def part[width: Int](at: Int) {var y, var x}:
        y.unsafe_store(at, narrow[dtype](x.unsafe_load[width=width](at)))

    for_vectors(part, count, workers)
