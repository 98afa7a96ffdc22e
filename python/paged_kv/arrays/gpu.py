"""Arrays in a GPU's memory: torch tensors into MAX and back, without a copy and in the order of their streams.

A torch CUDA (or ROCm) tensor comes as it is; a MAX buffer on a GPU, or any other DLPack array there, as a torch tensor
over the same memory, so torch has to be installed. `paged_kv.arrays.devices` orders the streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from max.driver import Buffer

from paged_kv.arrays.devices import Place
from paged_kv.arrays.host import dtype_of, overlap, to_buffer
from paged_kv.errors import ContractError, ContractTypeError, ShapeError

Tensor = Any
"""A torch tensor on a GPU."""


def to_tensor(array: Any, name: str) -> Tensor:
    """The torch tensor over an array's memory; what torch does with it follows what MAX has enqueued for a buffer.

    Raises:
        ContractTypeError: it has no dense strided memory that torch can see.
    """
    torch = import_module("torch")
    if isinstance(array, torch.Tensor):
        tensor = array.detach()
    else:
        if isinstance(array, Buffer):
            Place(array.device).before_torch()
        try:
            tensor = torch.from_dlpack(array)
        except (RuntimeError, TypeError, ValueError, BufferError) as error:
            raise ContractTypeError(f"{name}: torch cannot view this array: {error}") from error
    if tensor.layout != torch.strided:
        raise ContractTypeError(f"{name}: a {tensor.layout} tensor has no strided memory")
    return tensor


@dataclass(frozen=True)
class Facts:
    """What is checked of an array, where it is no NumPy array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @staticmethod
    def of(tensor: Tensor, name: str) -> Facts:
        return Facts(tuple(tensor.shape), numpy_dtype(tensor, name))


def numpy_dtype(tensor: Tensor, name: str) -> np.dtype[Any]:
    """The NumPy (`ml_dtypes`) dtype of a tensor's."""
    return dtype_of(tensor.dtype, name)


class _Capsule:
    """A tensor for a receiver that orders its stream by itself: DLPack's stream -1."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return self._tensor.__dlpack__() if self._tensor.device.type == "cpu" else self._tensor.__dlpack__(stream=-1)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def tensor_buffer(tensor: Tensor) -> Buffer:
    """A buffer over a contiguous tensor's memory; call it inside `Place.ordered`."""
    return Buffer.from_dlpack(_Capsule(tensor))


def like(array: Any, result: Buffer) -> Any:
    """A result as an array of the kind of `array`: a MAX buffer where that is one, else a torch tensor."""
    if isinstance(array, Buffer):
        return result
    return import_module("torch").from_dlpack(result)


def like_of(place: Place, array: Any, tensor: Tensor) -> Any:
    """A tensor that torch has made as an array of the kind of `array`: a MAX buffer where that is one."""
    if not isinstance(array, Buffer):
        return tensor
    compact = tensor.contiguous()
    place.after_torch()
    return tensor_buffer(compact)


def paged_views(
    paged_kv_cache: Any, kv_layout: str, name: str = "paged_kv_cache", *, writable: bool = False
) -> tuple[Tensor, Tensor]:
    """K and V of a paged cache as `[page, slot, kv_head, head_dim]` tensors; as `paged_kv.arrays.host.paged_views`.

    Raises: as that function.
    """
    if isinstance(paged_kv_cache, tuple | list):
        if len(paged_kv_cache) != 2:
            raise ShapeError(f"{name}: a tuple must hold K and V, not {len(paged_kv_cache)} arrays")
        k, v = (to_tensor(array, f"{name}[{i}]") for i, array in enumerate(paged_kv_cache))
        for i, tensor in enumerate((k, v)):
            check_storage(tensor, f"{name}[{i}]", 4, writable)
        if v.dtype != k.dtype:
            raise ContractTypeError(f"{name}[1]: dtype {v.dtype} differs from {name}[0]'s {k.dtype}")
        if v.shape != k.shape:
            raise ShapeError(f"{name}[1]: shape {tuple(v.shape)} differs from {name}[0]'s {tuple(k.shape)}")
        if writable and share_memory(k, v):
            raise ContractError(f"{name}[1] shares memory with {name}[0]: K and V would overwrite each other")
    else:
        both = to_tensor(paged_kv_cache, name)
        check_storage(both, name, 5, writable)
        if both.shape[1] != 2:
            raise ShapeError(f"{name}: dimension 1 must be 2 (K and V), its shape is {tuple(both.shape)}")
        k, v = both[:, 0], both[:, 1]
    return (k, v) if kv_layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))


def check_storage(tensor: Tensor, name: str, ndim: int, writable: bool = False) -> None:
    """As `paged_kv.arrays.host.check_storage`; torch has no negative strides, and no memory that is read-only."""
    if tensor.ndim != ndim:
        raise ShapeError(f"{name} must have {ndim} dimensions, its shape is {tuple(tensor.shape)}")
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ContractError(
            f"{name}: the elements of a head must lie side by side, their stride is {tensor.stride(-1)}"
        )
    if (
        writable
        and tensor.numel()
        and 0 in [step for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    ):
        raise ContractError(f"{name} is written in place, but a stride of 0 makes elements share memory")


def share_memory(k: Tensor, v: Tensor) -> bool:
    """Whether two tensors share an element, from their addresses alone; as `paged_kv.arrays.host.overlap`."""
    return overlap(*(np.asarray(_Addresses(tensor)) for tensor in (k, v)))


class _Addresses:
    """A tensor as NumPy sees addresses: an array over them must not be read."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(size * step for step in tensor.stride()),
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr() or size, True),
        }


def cache_operands(k_view: Tensor, v_view: Tensor) -> tuple[Buffer, Buffer, Buffer]:
    """As `paged_kv.arrays.host.cache_operands`: flat storage of K and of V on the device, `view` on the host."""
    numbers = list(k_view.shape)
    flat = []
    for view in (k_view, v_view):
        strides = view.stride()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, strides, strict=True))
        elements = view.as_strided((extent if view.numel() else 0,), (1,), view.storage_offset())
        flat.append(tensor_buffer(elements))
        numbers += [0, *strides[:3]]
    return flat[0], flat[1], to_buffer(np.array(numbers, np.int64))
