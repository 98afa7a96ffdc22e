"""The wrappers of ops over the states of recurrent layers. CPU only."""

from __future__ import annotations

from typing import Literal

import numpy as np
from max.dtype import DType
from max.graph import Dim, StaticDim, TensorType, TensorValue, ops

from paged_kv.errors import ContractError, ShapeError
from paged_kv.graphs.checks import check_dtype, check_rank, check_tensor, check_value, show
from paged_kv.graphs.paged_cache import DTYPES, constant
from paged_kv.graphs.states import States

CAUSAL_CONV1D = "paged_kv_causal_conv1d"
LINEAR_RECURRENCE = "paged_kv_linear_recurrence"
GATED_NORM = "paged_kv_gated_norm"


def causal_conv1d(
    states: States,
    x: TensorValue,
    weight: TensorValue,
    bias: TensorValue | None = None,
    *,
    activation: Literal["silu", "none"] = "silu",
) -> TensorValue:
    """`bias + sum_j weight[:, j] * x[t - K + 1 + j]` for each row t of its request, through the activation: `[T, C]`
    float32. The windows of the states are replaced.

    Args:
        states: Have windows of K - 1 inputs of C channels.
        x: `[T, C]`, float32, bfloat16 or float16.
        weight: `[C, K]`, K from 2 to 16.
        bias: `[C]` in weight's dtype.
        activation: SiLU, or none.

    Raises:
        ContractError, ContractTypeError, ShapeError: device, dtype or shape of an argument. A table that does not fit
            its rows, saves or slots is an error (`ValueError`) when the graph runs, before anything is written.
    """
    for name, value, rank in (("x", x, 2), ("weight", weight, 2)):
        _check_float(name, value, rank)
    check_value("weight", weight, weight.dtype, [x.shape[1], None], x.device)
    if bias is None:
        bias = constant(np.zeros(0, np.float32))
        bias = bias if weight.dtype == DType.float32 else ops.cast(bias, weight.dtype)
    else:
        check_value("bias", bias, weight.dtype, [x.shape[1]], x.device)
    (y,) = ops.inplace_custom(
        CAUSAL_CONV1D,
        device=x.device,
        values=[x, weight, bias, *states.operands(states.windows)],
        out_types=[TensorType(DType.float32, x.shape, x.device)],
        parameters={"activation": activation},
    )
    return y.tensor


def gated_delta_rule(
    states: States,
    qkv: TensorValue,
    a: TensorValue,
    b: TensorValue,
    a_log: TensorValue,
    dt_bias: TensorValue,
    *,
    key_heads: int,
    key_dim: int,
    tiled: bool = False,
) -> TensorValue:
    """Gated DeltaNet (arXiv:2412.06464): `S = exp(g) S`, `S = S + k (sigmoid(b) (v - S^T k))^T`, `o = S^T q` for each
    row and head, with `g = -exp(a_log) softplus(a + dt_bias)`; q and k are divided by their lengths, q also by
    sqrt(key_dim). `[T, H * Dv]` float32; the matrices of the states, S `[key_dim, Dv]`, are replaced.

    Args:
        states: Have matrices.
        qkv: `[T, 2 * key_heads * key_dim + H * Dv]` float32: all queries, all keys, all values.
        a, b: `[T, H]` float32.
        a_log, dt_bias: `[H]` float32.
        key_heads: Heads of q and k, which divide H.
        key_dim: Dimensions of a key.
        tiled: Head h has key head `h % key_heads`, else `h // (H / key_heads)`.

    Raises: as `causal_conv1d`.
    """
    keys = key_heads * key_dim
    parts = (0, keys, 2 * keys)
    values = _static("qkv", qkv) - 2 * keys
    check_value("b", b, DType.float32, list(a.shape), qkv.device)
    numbers = (key_dim**-0.5, 0.0, 0.0)
    skip = constant(np.zeros(0, np.float32))
    return _recurrence(states, qkv, a, b, a_log, dt_bias, skip, key_heads, values, parts, tiled, numbers, delta=True)


def selective_scan(
    states: States,
    xbc: TensorValue,
    dt: TensorValue,
    a_log: TensorValue,
    d: TensorValue,
    dt_bias: TensorValue,
    *,
    groups: int,
    state_size: int,
    dt_range: tuple[float, float] = (0.0, float("inf")),
    tiled: bool = False,
) -> TensorValue:
    """Mamba-2 (arXiv:2405.21060): `S = exp(-exp(a_log) t) S + B (t x)^T`, `y = S^T C + d x` for each row and head, with
    `t = softplus(dt + dt_bias)` clamped to `dt_range`. `[T, H * P]` float32; the matrices of the states, S
    `[state_size, P]`, are replaced.

    Args:
        states: Have matrices.
        xbc: `[T, H * P + 2 * groups * state_size]` float32: x of all heads, B of all groups, C of all groups.
        dt: `[T, H]` float32.
        a_log, d, dt_bias: `[H]` float32.
        groups: Groups of heads, which share B and C.
        state_size: Rows of S.
        dt_range: The least and the greatest time step.
        tiled: As of `gated_delta_rule`.

    Raises: as `causal_conv1d`.
    """
    of_groups = groups * state_size
    values = _static("xbc", xbc) - 2 * of_groups
    parts = (values + of_groups, values, 0)
    none = constant(np.zeros((0, 1), np.float32))
    numbers = (1.0, *dt_range)
    return _recurrence(states, xbc, dt, none, a_log, dt_bias, d, groups, values, parts, tiled, numbers, delta=False)


def gated_norm(
    x: TensorValue,
    z: TensorValue,
    weight: TensorValue,
    eps: float,
    *,
    groups: int = 1,
    gate_first: bool = False,
) -> TensorValue:
    """`weight * norm(x) * silu(z)` of x `[T, D]` float32 and z `[T, D]`, in z's dtype; the norm is the RMS norm of each
    `len(weight)` columns, or of each of `groups` groups of all columns.

    Args:
        x: Rows.
        z: Gates.
        weight: `[D / n]`, the same for each of n heads; of groups, `[D]`.
        eps: Added to the mean of squares.
        groups: Groups of columns with norms of their own.
        gate_first: The gate multiplies x before the norm.

    Raises:
        ContractError, ContractTypeError, ShapeError: device, dtype or shape of an argument.
    """
    check_value("x", x, DType.float32, [None, None], x.device)
    _check_float("z", z, 2)
    check_value("z", z, z.dtype, list(x.shape), x.device)
    _check_float("weight", weight, 1)
    width, count = _static("x", x), int(weight.shape[0])
    columns = count // groups
    if columns < 1 or count % groups or width % columns:
        raise ShapeError(f"weight: expected {groups} groups that divide x's {width} columns, got {count} elements")
    flat = [ops.reshape(value, [-1, columns]) for value in (x, z)]
    (y,) = ops.custom(
        GATED_NORM,
        device=x.device,
        values=[*flat, weight, constant(np.array([eps], np.float32))],
        out_types=[flat[1].type],
        parameters={"gate_first": gate_first},
    )
    return ops.reshape(y.tensor, x.shape)


def _recurrence(
    states: States,
    x: TensorValue,
    a: TensorValue,
    b: TensorValue,
    rates: TensorValue,
    bias: TensorValue,
    skip: TensorValue,
    key_heads: int,
    values: int,
    parts: tuple[int, int, int],
    tiled: bool,
    numbers: tuple[float, float, float],
    *,
    delta: bool,
) -> TensorValue:
    check_value("x", x, DType.float32, [None, None], x.device)
    check_value("gates", a, DType.float32, [x.shape[0], None], x.device)
    heads = _static("gates", a)
    for name, value in (("a_log", rates), ("dt_bias", bias), *(() if delta else (("d", skip),))):
        check_value(name, value, DType.float32, [Dim(heads)], x.device)
    if values < heads or values % heads or heads % key_heads:
        raise ShapeError(
            f"x: expected {key_heads} key heads to divide {heads} heads, and these the values, got {values}"
        )
    sizes = constant(np.array([key_heads, values // heads, *parts, tiled], np.int32))
    (o,) = ops.inplace_custom(
        LINEAR_RECURRENCE,
        device=x.device,
        values=[x, a, b, rates, bias, skip, sizes, constant(np.array(numbers, np.float32)),
                *states.operands(states.matrices)],
        out_types=[TensorType(DType.float32, [x.shape[0], values], x.device)],
        parameters={"delta": delta},
    )  # fmt: skip
    return o.tensor


def _check_float(name: str, value: TensorValue, rank: int) -> None:
    check_tensor(name, value)
    if value.device.is_gpu():
        raise ContractError(f"{name}: expected the CPU, where recurrent layers run, got {value.device}")
    check_dtype(name, value.dtype, DTYPES)
    check_rank(name, value, rank)


def _static(name: str, value: TensorValue) -> int:
    """The number of columns."""
    check_tensor(name, value)
    if value.rank != 2 or not isinstance(value.shape[1], StaticDim):
        raise ShapeError(f"{name}: expected two dimensions, the second static, got {show(value.shape)}")
    return int(value.shape[1])
