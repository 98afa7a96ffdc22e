"""The wrappers of the linear ops; `ops.py` has the ops over pages, and names these too."""

from __future__ import annotations

from collections.abc import Sequence

from max.dtype import DType
from max.graph import TensorType, TensorValue, ops

from paged_kv.errors import ContractError
from paged_kv.graphs.checks import check_dtype, check_rank, check_tensor, check_value
from paged_kv.graphs.paged_cache import DTYPES

LINEAR = "paged_kv_linear"
EXPERT_LINEAR = "paged_kv_expert_linear"
ADAPTER_LINEAR = "paged_kv_adapter_linear"


def linear(x: TensorValue, w: TensorValue) -> TensorValue:
    """`x w^T`: x `[M, K]`, w `[N, K]` as checkpoints store it; `[M, N]` in x's dtype, accumulated in float32.

    On the CPU by this package's op, on a GPU by MAX's matmul.
    """
    return linear_group(x, [w])[0]


def linear_group(x: TensorValue, ws: Sequence[TensorValue]) -> list[TensorValue]:
    """`linear` of one x by each of several weights of one dtype, to the bit: on the CPU one op, which packs x once."""
    for name, value in (("x", x), *(("w", w) for w in ws)):
        check_rank(name, value, 2)
        check_dtype(name, value.dtype, DTYPES)
    for w in ws:
        check_value("w", w, ws[0].dtype, [None, x.shape[1]], x.device)
    if x.device.is_gpu():
        return [ops.matmul(x, ops.transpose(w, 0, 1)) for w in ws]
    kinds = [TensorType(x.dtype, [x.shape[0], w.shape[0]], x.device) for w in ws]
    return [y.tensor for y in ops.custom(LINEAR, device=x.device, values=[x, *ws], out_types=kinds)]


def expert_linear(x: TensorValue, w: TensorValue, experts: TensorValue) -> TensorValue:
    """`x w[e]^T`, where each row has a weight of its own out of the stack w `[E, N, K]`.

    `experts` `[T, C]` int32 are those of `C` choices of each token; -1 gives zeros. x is `[T, K]`, each row for all
    choices of its token, or `[T, C, K]`, a row for each choice. `[T, C, N]` in x's dtype, accumulated in float32; a row
    has the bits that `linear` gives it. A weight is read once, whatever the number of its rows, and only where it has
    rows. On the CPU alone.

    Raises:
        ContractError, ContractTypeError, ShapeError: device, dtype or shape of an argument. An expert that is none of
            w's is an error (`ValueError`) when the graph runs.
    """
    for name, value, ranks in (("x", x, (2, 3)), ("w", w, (3,))):
        check_tensor(name, value)
        check_rank(name, value, *ranks)
        check_dtype(name, value.dtype, DTYPES)
    if x.device.is_gpu():
        raise ContractError(f"x: expected the CPU, where experts run, got {x.device}")
    check_value("w", w, w.dtype, [None, None, x.shape[-1]], x.device)
    check_value("experts", experts, DType.int32, [x.shape[0], None if x.rank == 2 else x.shape[1]], x.device)
    tokens, choices = experts.shape
    rows = x if x.rank == 2 else ops.reshape(x, [tokens * choices, x.shape[2]])
    (y,) = ops.custom(
        EXPERT_LINEAR,
        device=x.device,
        values=[rows, w, ops.reshape(experts, [tokens * choices])],
        out_types=[TensorType(x.dtype, [tokens * choices, w.shape[1]], x.device)],
    )
    return ops.reshape(y.tensor, [tokens, choices, w.shape[1]])


def adapter_linear(
    y: TensorValue, x: TensorValue, a: TensorValue, b: TensorValue, adapters: TensorValue
) -> TensorValue:
    """`y + (x a[e]^T) b[e]`, where each row has the matrices of an adapter of its own: `[T, N]` in y's dtype.

    y `[T, N]`, x `[T, K]`, the stacks a `[E, R, K]` and b `[E, R, N]`, each of one dtype; `adapters` `[T]` int32, of
    which -1 is none, whose row is y's own. Sums are float32, x a^T is not rounded, and the result is rounded once. On
    the CPU alone.

    Raises:
        ContractError, ContractTypeError, ShapeError: device, dtype or shape of an argument. An adapter that is none of
            the stacks' is an error (`ValueError`) when the graph runs.
    """
    for name, value, rank in (("y", y, 2), ("x", x, 2), ("a", a, 3)):
        check_tensor(name, value)
        check_rank(name, value, rank)
        check_dtype(name, value.dtype, DTYPES)
    if x.device.is_gpu():
        raise ContractError(f"x: expected the CPU, where adapters run, got {x.device}")
    check_value("x", x, y.dtype, [y.shape[0], None], y.device)
    check_value("a", a, a.dtype, [None, None, x.shape[1]], x.device)
    check_value("b", b, a.dtype, [a.shape[0], a.shape[1], y.shape[1]], x.device)
    check_value("adapters", adapters, DType.int32, [y.shape[0]], x.device)
    kind = TensorType(y.dtype, y.shape, y.device)
    (result,) = ops.custom(ADAPTER_LINEAR, device=x.device, values=[y, x, a, b, adapters], out_types=[kind])
    return result.tensor
