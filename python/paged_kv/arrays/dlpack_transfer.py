"""Memory that torch and MAX pass to each other through DLPack, without a copy.

Two kinds of arrays do not travel as they are, because not every version of the two takes them: float8 elements go as
bytes, and arrays without an element, whose address may be null, are made anew on the other side.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from max.driver import CPU, Buffer, Device
from max.dtype import DType

from paged_kv.arrays.dtypes import EXTENDED, dtype_of, max_dtype, numpy_dtype

if TYPE_CHECKING:
    from torch import Tensor


_FLOAT8 = frozenset(dtype for dtype in EXTENDED.values() if dtype.size_in_bytes == 1)


def to_max(tensor: Tensor, device: Device | None = None) -> Buffer:
    """A buffer over the memory of a contiguous tensor on `device`, the CPU where it is None; to be called inside
    `Streams.ordered`.
    """
    float8 = _float8().get(tensor.dtype)
    if not tensor.numel():
        return Buffer(float8 or max_dtype(dtype_of(tensor.dtype, "array")), list(tensor.shape), device or CPU())
    if float8 is None:
        return Buffer.from_dlpack(_Capsule(tensor))
    raw = Buffer.from_dlpack(_Capsule(tensor.view(sys.modules["torch"].uint8)))
    return raw.view(float8, list(tensor.shape))


def to_torch(buffer: Buffer, device: Device | None = None) -> Tensor:
    """A tensor over the memory of a buffer on `device`, the CPU where it is None; in order with what torch does next
    once `Streams` has said so.
    """
    torch = sys.modules["torch"]
    if not buffer.num_elements:
        dtype = getattr(torch, numpy_dtype(buffer.dtype).name)
        return torch.empty(tuple(buffer.shape), dtype=dtype, device=torch_name(device or CPU()))
    if buffer.dtype in _FLOAT8 and buffer.is_contiguous:
        raw = _received(buffer.view(DType.uint8, buffer.shape))
        return raw.view(getattr(torch, numpy_dtype(buffer.dtype).name))
    return _received(buffer)


def _received(buffer: Buffer) -> Tensor:
    """By a capsule, which torch takes as it is; a buffer it would ask for a stream: 12 us instead of 5 (H200)."""
    return sys.modules["torch"].utils.dlpack.from_dlpack(buffer.__dlpack__())


def copied_to(buffer: Buffer, device: Device) -> Buffer:
    """A host buffer's contents on a device."""
    if not buffer.num_elements:
        return Buffer(buffer.dtype, list(buffer.shape), device)
    return buffer.to(device)


def torch_name(device: Device) -> str:
    """Return what torch calls a device of MAX."""
    return "cpu" if device.is_host else f"cuda:{device.id}"


@cache
def _float8() -> dict[Any, DType]:
    """MAX's dtype of each float8 of torch."""
    torch = import_module("torch")
    return {getattr(torch, dtype.name): dtype for dtype in _FLOAT8}


class _Capsule:
    """A tensor for a receiver that orders its stream by itself, made by torch's function for it.

    `Tensor.__dlpack__` looks at streams, versions and gradients in Python: 6 us more a tensor (Zen 5, 2026-11-23).
    """

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return sys.modules["torch"].utils.dlpack.to_dlpack(self._tensor)

    def __dlpack_device__(self) -> Any:
        return _ON_CPU if self._tensor.is_cpu else self._tensor.__dlpack_device__()


_ON_CPU = (1, 0)
"""DLPack's kDLCPU, and its number."""
