"""The wrappers of ops over rows of activations: taken, normed, rotated, added, gated. On a GPU they are MAX's own.

On the CPU this package's ops compile in a fraction of the time: MAX makes a kernel of each chain of its ops, again for
each shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from max.dtype import DType
from max.graph import Dim, StaticDim, TensorType, TensorValue, ops

from paged_kv.errors import ContractError, ShapeError
from paged_kv.graphs.checks import check_dtype, check_rank, check_tensor, check_value, show
from paged_kv.graphs.paged_cache import DTYPES, constant

TAKE_ROWS = "paged_kv_take_rows"
TAKE_COLUMNS = "paged_kv_take_columns"
RMS_NORM = "paged_kv_rms_norm"
ROTATE = "paged_kv_rotate"
HADAMARD = "paged_kv_hadamard"
ROTARY_TABLES = "paged_kv_rotary_tables"
ADD_SCALED = "paged_kv_add_scaled"
GATE_UNITS = "paged_kv_gate_units"
CHOOSE_EXPERTS = "paged_kv_choose_experts"
GATE_HALVES = "paged_kv_gate_halves"
WEIGHTED_SUM = "paged_kv_weighted_sum"
WIDEN = "paged_kv_widen"
STEP_ROWS = "paged_kv_step_rows"

Activation = Literal["silu", "gelu_tanh", "sigmoid", "relu", "none"]


def take_rows(x: TensorValue, rows: TensorValue) -> TensorValue:
    """`x[rows]`: x `[M, ...]`, rows `[N]` int32; `[N, ...]` in x's dtype.

    On the CPU a row that is none of x's is an error (`ValueError`) when the graph runs.

    Raises:
        ContractError, ContractTypeError, ShapeError: device, dtype or shape of an argument.
    """
    check_tensor("x", x)
    if x.rank < 1:
        raise ShapeError("x: expected rank 1 or more, got 0")
    check_value("rows", rows, DType.int32, [None], x.device)
    if x.device.is_gpu():
        return ops.gather(x, rows, axis=0)
    flat = x if x.rank == 2 else ops.reshape(x, [x.shape[0], -1])
    kind = TensorType(x.dtype, [rows.shape[0], flat.shape[1]], x.device)
    (y,) = ops.custom(TAKE_ROWS, device=x.device, values=[flat, rows], out_types=[kind])
    return y.tensor if x.rank == 2 else ops.reshape(y.tensor, [rows.shape[0], *x.shape[1:]])


def take_columns(x: TensorValue, first: int, width: int, *, groups: int = 1) -> TensorValue:
    """Columns of x `[N, C]`: of each of `groups` groups of `C / groups` columns the `width` ones from `first` on,
    `[N, groups * width]` in x's dtype.

    Raises:
        ContractTypeError, ShapeError: x is no tensor of two dimensions, the second known; it has no such columns.
    """
    check_tensor("x", x)
    if x.rank != 2 or not isinstance(x.shape[1], StaticDim):
        raise ShapeError(f"x: expected two dimensions, the second static, got {show(x.shape)}")
    columns = int(x.shape[1])
    if groups < 1 or columns % groups or not 0 <= first <= first + width <= columns // groups or width < 1:
        raise ShapeError(
            f"x: expected columns {first} to {first + width} in each of {groups} groups, got {columns} in all"
        )
    if x.device.is_gpu():
        grouped = ops.reshape(x, [x.shape[0], groups, columns // groups])
        return ops.reshape(grouped[:, :, first : first + width], [x.shape[0], groups * width])
    place = constant(np.array([groups, first], np.int32))
    kind = TensorType(x.dtype, [x.shape[0], groups * width], x.device)
    (y,) = ops.custom(TAKE_COLUMNS, device=x.device, values=[x, place], out_types=[kind])
    return y.tensor


def split_columns(x: TensorValue, sizes: Sequence[int]) -> list[TensorValue]:
    """All columns of x `[N, C]` in parts of these sizes. Raises as `take_columns`."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [take_columns(x, first, width) for first, width in zip(starts, sizes, strict=True)]


def rms_norm(
    x: TensorValue, weight: TensorValue, eps: float, *, offset: float = 0.0, rounds_once: bool = False
) -> TensorValue:
    """`(offset + weight) * x / sqrt(mean(x^2) + eps)` over the last axis of x `[..., D]`, in float32.

    It is rounded to x's dtype before the weight `[D]`, and after it; only after it where `rounds_once` is true.

    Raises:
        ContractError, ContractTypeError, ShapeError: device, dtype or shape of an argument.
    """
    for name, value in (("x", x), ("weight", weight)):
        check_tensor(name, value)
        check_dtype(name, value.dtype, DTYPES)
    if x.rank < 2:
        raise ShapeError(f"x: expected rank 2 or more, got {x.rank}")
    check_value("weight", weight, weight.dtype, [x.shape[-1]], x.device)
    if x.device.is_gpu():
        return _rms_norm_of_ops(x, weight, eps, offset, rounds_once)
    flat = x if x.rank == 2 else ops.reshape(x, [-1, x.shape[-1]])
    (y,) = ops.custom(
        RMS_NORM,
        device=x.device,
        values=[flat, weight, constant(np.array([eps, offset], np.float32))],
        out_types=[flat.type],
        parameters={"rounds_once": rounds_once},
    )
    return y.tensor if x.rank == 2 else ops.reshape(y.tensor, x.shape)


def _rms_norm_of_ops(x: TensorValue, weight: TensorValue, eps: float, offset: float, rounds_once: bool) -> TensorValue:
    wide = ops.cast(x, DType.float32)
    scaled = wide * ops.rsqrt(ops.mean(wide * wide, axis=-1) + eps)
    if rounds_once:
        return ops.cast((ops.cast(weight, DType.float32) + offset) * scaled, x.dtype)
    if offset:
        weight = weight + offset
    return ops.cast(weight, x.dtype) * ops.cast(scaled, x.dtype)


def rotate(x: TensorValue, cos: TensorValue, sin: TensorValue, *, pairs: bool = False) -> TensorValue:
    """Rotates the halves of the first `2 C` dimensions of every head of x `[N, H, D]` (rotate_half), in float32.

    Args:
        x: The others of its dimensions are copied.
        cos: `[N, C]` float32, of the angle by which dimensions `i` and `C + i` of a row turn.
        sin: `[N, C]` float32, of the same angles.
        pairs: Dimensions `2 i` and `2 i + 1` turn together, and become dimensions `i` and `C + i`.

    Raises:
        ContractError, ContractTypeError, ShapeError: device, dtype or shape of an argument.
    """
    check_tensor("x", x)
    check_dtype("x", x.dtype, DTYPES)
    check_rank("x", x, 3)
    check_value("cos", cos, DType.float32, [x.shape[0], None], x.device)
    check_value("sin", sin, DType.float32, list(cos.shape), x.device)
    if x.device.is_gpu():
        return _rotate_of_ops(x, cos, sin, pairs)
    (y,) = ops.custom(ROTATE, device=x.device, values=[x, cos, sin], out_types=[x.type], parameters={"pairs": pairs})
    return y.tensor


def _rotate_of_ops(x: TensorValue, cos: TensorValue, sin: TensorValue, pairs: bool) -> TensorValue:
    half = int(cos.shape[1])
    cos, sin = ops.unsqueeze(cos, 1), ops.unsqueeze(sin, 1)
    wide = ops.cast(x, DType.float32)
    if pairs:
        paired = ops.reshape(wide[:, :, : 2 * half], [*x.shape[:2], half, 2])
        a, b = paired[:, :, :, 0], paired[:, :, :, 1]
    else:
        a, b = wide[:, :, :half], wide[:, :, half : 2 * half]
    parts = [a * cos - b * sin, b * cos + a * sin]
    if 2 * half < int(x.shape[-1]):
        parts.append(wide[:, :, 2 * half :])
    return ops.cast(ops.concat(parts, -1), x.dtype)


def hadamard(x: TensorValue) -> TensorValue:
    """Every head of x `[N, H, D]` times Sylvester's matrix over sqrt(D), in float32: the Walsh-Hadamard transform.

    D is a power of two from 8 to 512. The matrix is orthogonal and its own inverse: products of q and k that are both
    transformed stay the same, and what a few channels hold is spread over all of them.

    Raises:
        ContractTypeError, ShapeError: dtype, rank or head_dim of x.
    """
    check_tensor("x", x)
    check_dtype("x", x.dtype, DTYPES)
    check_rank("x", x, 3)
    if not isinstance(x.shape[2], StaticDim):
        raise ShapeError(f"x: expected a static head_dim, got {x.shape[2]}")
    head_dim = int(x.shape[2])
    if not is_hadamard_size(head_dim):
        raise ShapeError(f"x: expected head_dim to be a power of two from 8 to 512, got {head_dim}")
    if x.device.is_gpu():
        return _hadamard_of_ops(x, head_dim)
    (y,) = ops.custom(HADAMARD, device=x.device, values=[x], out_types=[x.type], parameters={"head_dim": head_dim})
    return y.tensor


def is_hadamard_size(head_dim: int) -> bool:
    """Return whether `hadamard` takes heads of this head_dim."""
    return 8 <= head_dim <= 512 and head_dim & (head_dim - 1) == 0


def _hadamard_of_ops(x: TensorValue, head_dim: int) -> TensorValue:
    rows, heads, _ = x.shape
    y = ops.cast(x, DType.float32)
    stride = 1
    while stride < head_dim:
        pairs = ops.reshape(y, [rows, heads, head_dim // (2 * stride), 2, stride])
        a, b = pairs[:, :, :, :1], pairs[:, :, :, 1:]
        y = ops.concat([a + b, a - b], 3)
        stride *= 2
    return ops.cast(ops.reshape(y, x.shape) * head_dim**-0.5, x.dtype)


def rotary_tables(
    positions: TensorValue,
    frequencies: np.ndarray,
    *,
    amplitude: float = 1.0,
    past: tuple[int, np.ndarray] | None = None,
) -> tuple[TensorValue, TensorValue]:
    """Cosines and sines, times `amplitude`, of positions `[N]` int32 times frequencies `[C]`: `[N, C]` float32 each.

    Args:
        past: A position, and the frequencies from it on.

    Raises:
        ContractError, ContractTypeError, ShapeError: device, dtype or shape of positions.
    """
    check_tensor("positions", positions)
    check_value("positions", positions, DType.int32, [None], positions.device)
    if positions.device.is_gpu():
        return _rotary_tables_of_ops(positions, frequencies, amplitude, past)
    start, others = past or (np.inf, frequencies)
    (count,) = frequencies.shape
    kind = TensorType(DType.float32, [positions.shape[0], count], positions.device)
    cos, sin = ops.custom(
        ROTARY_TABLES,
        device=positions.device,
        values=[
            positions,
            constant(np.stack([frequencies, others]).astype(np.float32)),
            constant(np.array([amplitude, start], np.float32)),
        ],
        out_types=[kind, kind],
    )
    return cos.tensor, sin.tensor


def _rotary_tables_of_ops(
    positions: TensorValue, frequencies: np.ndarray, amplitude: float, past: tuple[int, np.ndarray] | None
) -> tuple[TensorValue, TensorValue]:
    def angles(of: np.ndarray) -> TensorValue:
        return wide * ops.constant(of.reshape(1, -1), DType.float32, positions.device)

    wide = ops.cast(ops.reshape(positions, [-1, 1]), DType.float32)
    turned = angles(frequencies)
    if past is not None:
        start, others = past
        turned = ops.where(ops.broadcast_to(wide >= float(start), turned.shape), angles(others), turned)
    cos, sin = ops.cos(turned), ops.sin(turned)
    return (cos, sin) if amplitude == 1 else (cos * amplitude, sin * amplitude)


def add_scaled(x: TensorValue, y: TensorValue, factor: float = 1.0) -> TensorValue:
    """`x + factor y`, `[N, D]` each; the product is rounded to y's dtype. Of two dtypes, the sum has MAX's choice."""
    if x.device.is_gpu() or x.dtype != y.dtype or x.dtype not in DTYPES or x.rank != 2 or x.shape != y.shape:
        if factor != 1 and y.dtype in DTYPES:  # of `y * factor` MAX rounds the factor to y's dtype first
            return x + ops.cast(ops.cast(y, DType.float32) * factor, y.dtype)
        return x + (y if factor == 1 else y * factor)
    values = [x, y, constant(np.array([factor], np.float32))]
    (total,) = ops.custom(ADD_SCALED, device=x.device, values=values, out_types=[x.type])
    return total.tensor


def gate_units(gate: TensorValue, up: TensorValue, activation: Activation) -> TensorValue:
    """`activation(gate) up`, `[N, D]`: SiLU, GELU by its tanh approximation, the sigmoid, ReLU or the gate itself. The
    gate is `[N, D]`, or `[N, 1]`, one for each row.
    """
    if gate.device.is_gpu() or gate.dtype not in DTYPES:
        return _activated(gate, activation) * up
    of_rows = gate.rank == 2 and gate.shape[1] == Dim(1)
    check_value("up", up, gate.dtype, [gate.shape[0], None] if of_rows else list(gate.shape), gate.device)
    (y,) = ops.custom(
        GATE_UNITS,
        device=gate.device,
        values=[gate, up],
        out_types=[up.type],
        parameters={"activation": activation},
    )
    return y.tensor


def _activated(x: TensorValue, activation: Activation) -> TensorValue:
    of_max = {"silu": ops.silu, "sigmoid": ops.sigmoid, "relu": ops.relu, "none": lambda x: x}
    return ops.gelu(x, approximate="tanh") if activation == "gelu_tanh" else of_max[activation](x)


def choose_experts(
    logits: TensorValue,
    chosen: int,
    *,
    bias: TensorValue | None = None,
    groups: int = 1,
    chosen_groups: int = 1,
    sigmoid: bool = False,
    sum_to_one: bool = False,
    scale: float = 1.0,
    jitter: float = 0.0,
) -> tuple[TensorValue, TensorValue]:
    """The weights (float32) and indices (int32) of the `chosen` experts of each row of logits `[N, E]` float32, both
    `[N, chosen]`, in the order of their scores. On the CPU alone.

    Args:
        bias: `[E]` float32, added to the scores by which experts are chosen, not to their weights.
        groups: Experts lie in so many groups; they are chosen from the `chosen_groups` whose greatest score (of
            sigmoids, the sum of the two greatest) is greatest.
        sigmoid: Scores are sigmoids, not a softmax.
        sum_to_one: The weights are divided by their sum.
        scale: The weights are multiplied by it.
        jitter: Where it is not 0, each weight is the expert's share of a softmax over those of the experts not chosen
            before it whose logits are near its own, `m`: `(m - x) / max(|x|, m) <= 2 jitter` (PhiMoE's sparse mixture).
            Then scores are those of a softmax, without bias and groups.

    Raises:
        ContractError, ContractTypeError, ShapeError: device, dtype or shape of an argument. Sizes that do not fit each
            other are an error (`ValueError`) when the graph runs.
    """
    check_tensor("logits", logits)
    _check_cpu("logits", logits)
    check_value("logits", logits, DType.float32, [None, None], logits.device)
    if jitter and (bias is not None or groups > 1 or sigmoid):
        raise ContractError("jitter: requires scores of a softmax, without bias and groups")
    if bias is None:
        bias = constant(np.zeros(0, np.float32))
    else:
        check_value("bias", bias, DType.float32, [logits.shape[1]], logits.device)
    sizes = constant(np.array([groups, chosen_groups, sigmoid, sum_to_one], np.int32))
    kinds = [TensorType(dtype, [logits.shape[0], chosen], logits.device) for dtype in (DType.float32, DType.int32)]
    values = [logits, bias, sizes, constant(np.array([scale, jitter], np.float32))]
    weights, experts = ops.custom(CHOOSE_EXPERTS, device=logits.device, values=values, out_types=kinds)
    return weights.tensor, experts.tensor


def gate_halves(x: TensorValue, clamped: tuple[float, float] | None = None) -> TensorValue:
    """The gated units `silu(gate) up` `[N, D]` of the halves gate and up of each row of x `[N, 2 D]`. On the CPU alone.

    Args:
        clamped: alpha and limit; then it is `(up + 1) gate sigmoid(alpha gate)`, with gate at most `limit` and up
            within `-limit` and it.

    Raises:
        ContractError, ContractTypeError, ShapeError: device, dtype or shape of x.
    """
    check_tensor("x", x)
    _check_cpu("x", x)
    check_dtype("x", x.dtype, DTYPES)
    if x.rank != 2 or not isinstance(x.shape[1], StaticDim) or int(x.shape[1]) % 2:
        raise ShapeError(f"x: expected two dimensions, the second static and even, got {show(x.shape)}")
    (y,) = ops.custom(
        GATE_HALVES,
        device=x.device,
        values=[x, constant(np.array(clamped or (0, 0), np.float32))],
        out_types=[TensorType(x.dtype, [x.shape[0], int(x.shape[1]) // 2], x.device)],
        parameters={"activation": "silu" if clamped is None else "clamped"},
    )
    return y.tensor


def weighted_sum(x: TensorValue, weights: TensorValue) -> TensorValue:
    """The sum over the second axis of x `[N, C, D]` by weights `[N, C]` float32, in float32, rounded once to x's dtype:
    `[N, D]`. On the CPU alone.

    Raises:
        ContractError, ContractTypeError, ShapeError: device, dtype or shape of an argument.
    """
    check_tensor("x", x)
    _check_cpu("x", x)
    check_dtype("x", x.dtype, DTYPES)
    check_rank("x", x, 3)
    check_value("weights", weights, DType.float32, [x.shape[0], x.shape[1]], x.device)
    kind = TensorType(x.dtype, [x.shape[0], x.shape[2]], x.device)
    (y,) = ops.custom(WEIGHTED_SUM, device=x.device, values=[x, weights], out_types=[kind])
    return y.tensor


def _check_cpu(name: str, value: TensorValue) -> None:
    if value.device.is_gpu():
        raise ContractError(f"{name}: expected the CPU, where experts run, got {value.device}")


def widened(x: TensorValue) -> TensorValue:
    """X `[N, D]` as float32."""
    if x.dtype == DType.float32 or x.device.is_gpu() or x.dtype not in DTYPES:
        return ops.cast(x, DType.float32)
    kind = TensorType(DType.float32, x.shape, x.device)
    (y,) = ops.custom(WIDEN, device=x.device, values=[x], out_types=[kind])
    return y.tensor


def lengths_and_last_rows(
    positions: TensorValue, row_offsets: TensorValue, batch: Dim | str | int
) -> tuple[TensorValue, TensorValue]:
    """The tokens that each row sees `[N]`, from its position `[N]` int32, and the last row of each of `batch` requests
    `[B]`, from row offsets `[B + 1]` uint32; both int32.
    """
    device = positions.device
    if device.is_gpu():
        last = ops.cast(row_offsets[1:], DType.int32) - 1
        return positions + 1, last.rebind([batch])
    kinds = [positions.type, TensorType(DType.int32, [batch], device)]
    lengths, last_rows = ops.custom(STEP_ROWS, device=device, values=[positions, row_offsets], out_types=kinds)
    return lengths.tensor, last_rows.tensor
