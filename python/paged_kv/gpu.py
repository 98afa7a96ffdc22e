"""Arrays in a GPU's memory: torch tensors into MAX and back, without a copy and in the order of their streams.

A torch CUDA (or ROCm) tensor comes as it is; a MAX buffer on a GPU, or any other DLPack array there, as a torch tensor
over the same memory, so torch has to be installed. Nothing here reads device memory, and no call waits for the device:
MAX's stream is made to wait for torch's current one, and that for MAX's when the call was enqueued.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from max.driver import CPU, Accelerator, Buffer, Device

from paged_kv.arrays import dtype_of, overlap, to_buffer
from paged_kv.errors import ContractError, ContractTypeError, ShapeError, ToolchainError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paged_kv.runtime import Runtime

Tensor = Any
"""A torch tensor on a GPU."""

_GPUS = (2, 10)  # DLPack's kDLCUDA and kDLROCM


def device_index(array: Any) -> int | None:
    """The number of the GPU whose memory an array is in; None for the CPU's, and for what is no array."""
    if isinstance(array, np.ndarray):
        return None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return int(array.device.index or 0) if array.device.type == "cuda" else None
    found = getattr(array, "__dlpack_device__", None)
    if found is None:
        return None
    kind, index = found()
    return int(index) if int(kind) in _GPUS else None


def place_of(**arrays: Any) -> Place | None:
    """The GPU that all of some arrays are on, those that are None left out; None where they are on the CPU.

    An argument that is a tuple or list stands for its entries.

    Raises:
        ContractTypeError: they are on different devices.
        ToolchainError: MAX does not see that GPU, or torch is missing.
    """
    flat = {}
    for name, array in arrays.items():
        if isinstance(array, tuple | list):
            flat.update({f"{name}[{i}]": entry for i, entry in enumerate(array)})
        elif array is not None:
            flat[name] = array
    found = {name: device_index(array) for name, array in flat.items()}
    (first, index), *others = found.items()
    for name, other in others:
        if other != index:
            raise ContractTypeError(f"{name} is on {_called(other)}, {first} is on {_called(index)}")
    return None if index is None else gpu(index)


def _called(index: int | None) -> str:
    return "the CPU" if index is None else f"GPU {index}"


@cache
def gpu(index: int) -> Place:
    """One GPU of this process.

    Raises:
        ToolchainError: MAX does not see it, or torch is missing.
    """
    try:
        import_module("torch")
    except ImportError as error:
        raise ToolchainError("arrays on a GPU need torch; install paged-kv[torch]") from error
    try:
        device = Accelerator(index)
    except (RuntimeError, ValueError) as error:
        raise ToolchainError(f"GPU {index}: MAX finds no such device ({' '.join(str(error).split())})") from error
    return Place(device)


def place_named(device: Any) -> Place | None:
    """The GPU that torch calls so ("cuda", "cuda:1", a `torch.device`); None for the CPU.

    Raises:
        ContractError: it is neither.
        ToolchainError: MAX does not see that GPU, or torch is missing.
    """
    kind, _, index = str(device).partition(":")
    if kind == "cpu":
        return None
    if kind != "cuda" or not (index or "0").isdecimal():
        raise ContractError(f"device must be the CPU or a GPU ('cuda', 'cuda:1'), not {device!r}")
    return gpu(int(index or 0))


@dataclass(frozen=True)
class Place:
    """A device that calls run on: MAX's device and its stream."""

    device: Device

    @property
    def runtime(self) -> Runtime:
        """The compiled variants on this device."""
        from paged_kv.runtime import runtime_on

        return runtime_on(None if self.device.is_host else self.device.id)

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Work that is enqueued inside follows what torch's current stream holds, and precedes what comes after."""
        if self.device.is_host:
            yield
            return
        with self._streams() as (ours, theirs):
            ours.wait_stream(theirs)
            try:
                yield
            finally:
                theirs.wait_stream(ours)

    def after_torch(self) -> None:
        """MAX's stream waits for torch's current one: for buffers that torch has just written."""
        if not self.device.is_host:
            with self._streams() as (ours, theirs):
                ours.wait_stream(theirs)

    def before_torch(self) -> None:
        """The other way round: for buffers that torch is about to read."""
        if not self.device.is_host:
            with self._streams() as (ours, theirs):
                theirs.wait_stream(ours)

    @contextmanager
    def _streams(self) -> Iterator[tuple[Any, Any]]:
        """MAX's stream and torch's current one, on this device."""
        torch = sys.modules["torch"]
        with torch.cuda.device(self.device.id):
            # MAX's stream may be the legacy default one, which has no handle.
            handle = self.device.default_queue.native_stream_handle
            ours = torch.cuda.ExternalStream(handle) if handle else torch.cuda.default_stream()
            yield ours, torch.cuda.current_stream()

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Tensor:
        """A fresh torch tensor in this device's memory."""
        torch = import_module("torch")
        at = "cpu" if self.device.is_host else f"cuda:{self.device.id}"
        return torch.zeros(tuple(shape), dtype=getattr(torch, dtype.name), device=at)

    def upload(self, buffer: Buffer) -> Buffer:
        """A host buffer's contents in this device's memory; the host buffer has to live until it is used there."""
        return buffer if self.device.is_host else buffer.to(self.device)


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
    place.after_torch()
    return tensor_buffer(tensor.contiguous())


def paged_views(
    paged_kv_cache: Any, kv_layout: str, name: str = "paged_kv_cache", *, writable: bool = False
) -> tuple[Tensor, Tensor]:
    """K and V of a paged cache as `[page, slot, kv_head, head_dim]` tensors; as `paged_kv.arrays.paged_views`.

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
    """As `paged_kv.arrays.check_storage`; torch has no negative strides, and no memory that is read-only."""
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
    """Whether two tensors share an element, from their addresses alone; as `paged_kv.arrays.overlap`."""
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
    """As `paged_kv.arrays.cache_operands`: flat storage of K and of V on the device, `view` on the host."""
    numbers = list(k_view.shape)
    flat = []
    for view in (k_view, v_view):
        strides = view.stride()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, strides, strict=True))
        elements = view.as_strided((extent if view.numel() else 0,), (1,), view.storage_offset())
        flat.append(tensor_buffer(elements))
        numbers += [0, *strides[:3]]
    return flat[0], flat[1], to_buffer(np.array(numbers, np.int64))


HOST = Place(CPU())
"""The CPU as a place: what runs on a GPU can be tried on it."""
