"""Arrays in the host's memory: NumPy views of any library's arrays, and MAX buffers over them, without a copy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from max.driver import Buffer
from max.dtype import DType

from paged_kv.arrays.dtypes import DTYPES, EXTENDED, FROM_MAX, RAW, SUPPORTED
from paged_kv.arrays.types import HostMemory, Shape
from paged_kv.errors import ContractTypeError, PageTableError, ShapeError

_INT32 = np.dtype(np.int32)
_LARGEST = 2**31 - 1
_MOST_INDICES = 2**28
"""1 GiB as int32. An expanded array can have more in little memory, and would be copied."""
_CPU = 1  # DLPack's kDLCPU
_SEARCH_STEPS: Any = 10_000


def as_numpy(array: Any, name: str) -> np.ndarray:
    """A NumPy view of a CPU array's memory, strides kept: NumPy, torch, JAX, MAX or anything with `__dlpack__`.

    bfloat16 and float8 become `ml_dtypes` dtypes. A torch tensor that requires a gradient is detached, as decoding
    computes none. The view of a JAX array is read-only.

    Raises:
        ContractTypeError: `array`, called `name` in the message, is no array, not on the CPU, or of another dtype.
    """
    if isinstance(array, np.ndarray):
        if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
            raise ContractTypeError(f"{name} is a masked array, whose mask would not count: give its .data")
        view = array if type(array) is np.ndarray else array.view(np.ndarray)
    elif (torch := sys.modules.get("torch")) is not None and isinstance(array, torch.Tensor):
        return _from_torch(array, name)
    else:
        view = _from_dlpack(array, name)
    if view.dtype not in SUPPORTED:
        raise ContractTypeError(f"{name}: dtype {view.dtype} is none of {', '.join(DTYPES)}")
    return view


def like(array: Any, result: np.ndarray) -> Any:
    """`result` as an array of the kind of `array`: torch, JAX or MAX where that is one, else NumPy.

    Nothing is copied, except by JAX where it needs another alignment. A JAX array lies on the device of `array`.
    """
    if isinstance(array, np.ndarray):
        return result
    if (torch := sys.modules.get("torch")) is not None and isinstance(array, torch.Tensor):
        raw = RAW.get(result.dtype)
        if raw is None:
            return torch.from_numpy(result)
        return torch.from_numpy(result.view(raw)).view(getattr(torch, result.dtype.name))
    if isinstance(array, Buffer):
        return to_buffer(np.ascontiguousarray(result))
    if _is_jax(array):
        return sys.modules["jax"].device_put(result, min(array.devices(), key=lambda device: device.id))
    if _is_max_tensor(array):
        return type(array)(storage=to_buffer(np.ascontiguousarray(result)))
    return result


def sample_array(kind: str) -> Any:
    """An empty array on the CPU for `like`, of the kind "numpy", "torch" or "jax"; imports the library."""
    if kind == "torch":
        torch = import_module(kind)
        return torch.zeros(0, dtype=torch.float32, device="cpu")
    empty = np.zeros(0, np.float32)
    if kind == "jax":
        jax = import_module(kind)
        return jax.device_put(empty, jax.devices("cpu")[0])
    return empty


def as_indices(array: Any, name: str, ndim: int = 1) -> npt.NDArray[np.int32]:
    """Offsets, page ids, lengths or positions as C-contiguous int32; a view where they are that already.

    Raises:
        ContractTypeError: as `as_numpy`, or the dtype is not an integer.
        ShapeError: the rank is not `ndim`, or there are more than 2^28 entries.
        PageTableError: a value does not fit in int32; the message says where it stands.
    """
    indices = as_numpy(array, name)
    if indices.dtype.kind not in "iu":
        raise ContractTypeError(f"{name}: expected an integer dtype, got {indices.dtype}")
    if indices.ndim != ndim:
        raise ShapeError(f"{name}: expected {ndim} dimensions, got shape {list(indices.shape)}")
    if indices.size > _MOST_INDICES:
        raise ShapeError(f"{name}: expected at most 2^28 entries, got shape {list(indices.shape)}")
    if indices.dtype != _INT32:
        if indices.size and (indices.max() > _LARGEST or indices.min() < ~_LARGEST):
            at = np.argwhere((indices > _LARGEST) | (indices < ~_LARGEST))[0]
            raise PageTableError(f"{name}{at.tolist()} is {indices[tuple(at)]}, which does not fit in int32")
        return indices.astype(np.int32, order="C")
    return np.ascontiguousarray(indices)


def to_buffer(array: Any) -> Buffer:
    """A CPU buffer over the memory of any C-contiguous DLPack array or NumPy (`ml_dtypes`) array."""
    if isinstance(array, Buffer):
        return array
    if isinstance(array, np.ndarray) and array.dtype in EXTENDED:
        return Buffer.from_dlpack(array.view(RAW[array.dtype])).view(EXTENDED[array.dtype], array.shape)
    return Buffer.from_dlpack(array)


def to_numpy(buffer: Buffer) -> np.ndarray:
    """A NumPy array over the memory of a CPU buffer."""
    dtype = FROM_MAX.get(buffer.dtype)
    if dtype is None:
        return buffer.to_numpy()
    raw = DType.uint16 if dtype.itemsize == 2 else DType.uint8
    return buffer.view(raw, buffer.shape).to_numpy().view(dtype)


class HostArrays:
    """The host as an `ArrayDevice`: its views are NumPy's."""

    index: int | None = None
    readable = True
    kinds = ("numpy", "torch", "jax")

    def view(self, array: Any, name: str) -> np.ndarray:
        return as_numpy(array, name)

    def indices(self, array: Any, name: str, ndim: int = 1) -> npt.NDArray[np.int32]:
        return as_indices(array, name, ndim)

    def dtype(self, view: np.ndarray) -> np.dtype[Any]:
        return view.dtype

    def strides(self, view: np.ndarray) -> tuple[int, ...]:
        return view.strides

    def is_aligned(self, view: np.ndarray) -> bool:
        return view.flags.aligned

    def is_writable(self, view: np.ndarray) -> bool:
        return view.flags.writeable

    def overlap(self, a: np.ndarray, b: np.ndarray) -> bool:
        try:
            return np.shares_memory(a, b, max_work=_SEARCH_STEPS)
        except (np.exceptions.TooHardError, OverflowError, ValueError):  # too long a search, or too far a stride
            return True

    def address(self, view: np.ndarray) -> int:
        return view.ctypes.data if view.size else 0  # MAX's buffers without elements lie nowhere

    def contiguous(self, view: np.ndarray) -> np.ndarray:
        flags = view.flags
        return view if flags.c_contiguous and flags.aligned else view.copy()

    def separate(self, view: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
        if any(np.may_share_memory(view, other) for other in others):
            return view.copy()
        return self.contiguous(view)

    def clone(self, view: np.ndarray) -> np.ndarray:
        return view.copy()

    def astype(self, view: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
        target = np.dtype(dtype)
        if view.dtype == target:
            return view
        with np.errstate(over="ignore", invalid="ignore"):  # past the largest comes infinity, as in torch
            if target == _SATURATING:
                view = np.clip(view.astype(np.float32), -_LARGEST_SATURATING, _LARGEST_SATURATING)
            return view.astype(target)

    def select(self, mask: np.ndarray, chosen: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.where(mask, chosen, other)

    def stack(self, views: Sequence[np.ndarray], axis: int) -> np.ndarray:
        return np.stack(views, axis)

    def full(self, shape: Shape, value: float, dtype: npt.DTypeLike) -> np.ndarray:
        return np.full(tuple(shape), value, dtype)

    def write(self, view: np.ndarray, source: np.ndarray) -> None:
        view[...] = source

    def new(self, shape: Shape, dtype: np.dtype[Any], kind: str) -> Any:
        return like(sample_array(kind), np.zeros(tuple(shape), dtype))

    def flat(self, view: np.ndarray, extent: int) -> HostMemory:
        return HostMemory(self.address(view), extent, view)

    def buffer(self, view: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(view)

    def upload(self, array: np.ndarray) -> np.ndarray:
        return array

    def ordered(self) -> AbstractContextManager[None]:
        return _AT_ONCE

    def take(self, result: np.ndarray) -> np.ndarray:
        return result

    def like(self, array: Any, view: np.ndarray) -> Any:
        return like(array, view)


_AT_ONCE = nullcontext()
_SATURATING = np.dtype(ml_dtypes.float8_e4m3fn)
_LARGEST_SATURATING = 448.0
"""It has no infinity: torch turns larger numbers into the largest, `ml_dtypes` into NaN."""

HOST = HostArrays()
"""The host, which every process has."""


@cache
def _torch_views() -> dict[Any, tuple[Any, np.dtype]]:
    """By torch dtype: the torch dtype to view it as where NumPy has not its like, and its NumPy dtype."""
    torch: Any = sys.modules["torch"]
    raw = {1: torch.uint8, 2: torch.int16}
    return {
        getattr(torch, name): (raw[dtype.itemsize] if dtype in EXTENDED else None, dtype)
        for name, dtype in DTYPES.items()
        if hasattr(torch, name)
    }


def _from_torch(tensor: Any, name: str) -> np.ndarray:
    if not tensor.is_cpu:
        raise ContractTypeError(f"{name}: expected a tensor on the CPU, got one on {tensor.device}")
    try:
        raw, dtype = _torch_views()[tensor.dtype]
    except KeyError:
        raise ContractTypeError(f"{name}: dtype {tensor.dtype} is none of {', '.join(DTYPES)}") from None
    if tensor.requires_grad:
        tensor = tensor.detach()
    try:
        view = tensor.numpy() if raw is None else tensor.view(raw).numpy().view(dtype)
        check_storage_of(tensor, name)
    except ContractTypeError:
        raise
    except Exception as error:  # sparse, or not materialised; of a subclass anything
        raise ContractTypeError(f"{name}: this {tensor.layout} tensor has no NumPy view") from error
    return view


def check_storage_of(tensor: Any, name: str) -> None:
    """Refuses a torch tensor whose storage was made smaller than what its elements take (`resize_(0)` frees it).

    Raises:
        ContractTypeError: as said.
    """
    reached = tensor.numel()
    if not tensor.is_contiguous():
        reached = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed, held = (tensor.storage_offset() + reached) * tensor.itemsize, tensor.untyped_storage().nbytes()
    if held < needed and tensor.numel():
        raise ContractTypeError(
            f"{name}: its elements take {needed} bytes of storage, which holds {held}: was it freed?"
        )


def dlpack_device(array: Any, name: str) -> tuple[int, int] | None:
    """The kind and the number of the device of a DLPack array; None for what is no array.

    Raises:
        ContractTypeError: it cannot say.
    """
    if isinstance(array, type):  # it has its arrays' methods
        return None
    try:
        method = getattr(array, "__dlpack_device__", None)
        if method is None:
            return None
        kind, index = method()
        return int(kind), int(index)
    except Exception as error:  # other people's code, which may raise anything
        raise ContractTypeError(f"{name} ({_kind(array)}): its __dlpack_device__ fails: {reason(error)}") from error


def _from_dlpack(array: Any, name: str) -> np.ndarray:
    try:
        if _is_max_tensor(array):
            array = array.driver_tensor
    except Exception as error:
        raise ContractTypeError(f"{name} ({_kind(array)}) has no memory: {reason(error)}") from error
    device = dlpack_device(array, name)
    if device is None:
        raise ContractTypeError(f"{name}: expected an array (NumPy, torch, JAX, MAX or DLPack), got {_kind(array)}")
    if device[0] != _CPU:
        raise ContractTypeError(f"{name} ({_kind(array)}): expected an array on the CPU, got DLPack device {device}")
    if isinstance(array, Buffer) and array.dtype.name not in DTYPES:
        raise ContractTypeError(f"{name}: dtype {array.dtype.name} is none of {', '.join(DTYPES)}")
    try:
        if isinstance(array, Buffer):
            return to_numpy(array)
        return np.asarray(array) if _is_jax(array) else np.from_dlpack(array)
    except Exception as error:  # other people's code, which may raise anything
        raise ContractTypeError(f"{name} ({_kind(array)}) has no NumPy view: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Return what an exception of other code says, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _kind(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}".removeprefix("builtins.")


def _is_jax(array: Any) -> bool:
    return type(array).__module__.partition(".")[0] in ("jax", "jaxlib") and "jax" in sys.modules


def _is_max_tensor(array: Any) -> bool:
    return type(array).__module__.startswith("max.experimental") and hasattr(array, "driver_tensor")
