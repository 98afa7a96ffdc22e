"""Checks of a value before there is a graph: type, dtype, rank, sizes and device."""

from __future__ import annotations

from collections.abc import Sequence

from max.dtype import DType
from max.graph import BufferValue, DeviceRef, Dim, StaticDim, TensorValue

from paged_kv.errors import ContractError, ContractTypeError, ShapeError


def check_tensor(name: str, value: object) -> None:
    if not isinstance(value, TensorValue):
        raise ContractTypeError(f"{name}: expected a graph tensor, got {type(value).__name__}")


def check_value(name: str, value: TensorValue, dtype: DType, shape: Sequence[Dim | None], device: DeviceRef) -> None:
    """Dtype, rank, dimensions (None = any) and device of one argument."""
    check_tensor(name, value)
    check_dtype(name, value.dtype, [dtype])
    check_rank(name, value, len(shape))
    for axis, (actual, expected) in enumerate(zip(value.shape, shape, strict=True)):
        # Two static dimensions can be compared now; a symbolic one is checked when the graph runs.
        if isinstance(actual, StaticDim) and isinstance(expected, StaticDim) and actual != expected:
            raise ShapeError(
                f"{name}: expected dimension {axis} to be {expected}, got {actual} (shape {show(value.shape)})"
            )
    if value.device != device:
        raise ContractError(f"{name}: expected device {device}, got {value.device}")


def check_dtype(name: str, dtype: DType, dtypes: Sequence[DType]) -> None:
    """Refuses the dtype of an argument that is none of `dtypes`."""
    if dtype not in dtypes:
        raise ContractTypeError(f"{name}: expected dtype {' or '.join(each.name for each in dtypes)}, got {dtype.name}")


def check_rank(name: str, value: TensorValue | BufferValue, *ranks: int) -> None:
    """Refuses an argument of another rank."""
    if value.rank not in ranks:
        raise ShapeError(f"{name}: expected rank {' or '.join(map(str, ranks))}, got {value.rank}")


def show(shape: Sequence[Dim]) -> str:
    return "[" + ", ".join(str(dim) for dim in shape) + "]"
