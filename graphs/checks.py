"""Checks of a value before there is a graph: type, dtype, rank, sizes and device."""

from __future__ import annotations

from collections.abc import Sequence

from max.dtype import DType
from max.graph import DeviceRef, Dim, StaticDim, TensorValue

from paged_kv.errors import ContractError, ContractTypeError, ShapeError


def check_tensor(name: str, value: object) -> None:
    if not isinstance(value, TensorValue):
        raise ContractTypeError(f"{name} must be a graph tensor, not {type(value).__name__}")


def check_value(name: str, value: TensorValue, dtype: DType, shape: Sequence[Dim | None], device: DeviceRef) -> None:
    """Dtype, rank, dimensions (None = any) and device of one argument."""
    check_tensor(name, value)
    if value.dtype != dtype:
        raise ContractTypeError(f"{name}: dtype {value.dtype.name}, expected {dtype.name}")
    if value.rank != len(shape):
        raise ShapeError(f"{name}: rank {value.rank}, expected {len(shape)}")
    for axis, (actual, expected) in enumerate(zip(value.shape, shape, strict=True)):
        # Two static dimensions can be compared now; a symbolic one is checked when the graph runs.
        if isinstance(actual, StaticDim) and isinstance(expected, StaticDim) and actual != expected:
            raise ShapeError(f"{name}: dimension {axis} is {actual}, expected {expected} (shape {show(value.shape)})")
    if value.device != device:
        raise ContractError(f"{name} is on {value.device}, expected {device}")


def names(dtypes: Sequence[DType]) -> str:
    return ", ".join(dtype.name for dtype in dtypes)


def show(shape: Sequence[Dim]) -> str:
    return "[" + ", ".join(str(dim) for dim in shape) + "]"
