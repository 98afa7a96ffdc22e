"""Arrays in and out of MAX without a copy.

Inside this package every array is a NumPy view of the caller's memory. NumPy has no bfloat16 or float8: those are
`ml_dtypes` dtypes, which DLPack does not carry, so their bytes travel and the receiver is told their type.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from max.driver import Buffer
from max.dtype import DType

from paged_kv.errors import ContractError, ContractTypeError, PageTableError, ShapeError

_EXTENDED = {
    np.dtype(ml_dtypes.bfloat16): DType.bfloat16,
    np.dtype(ml_dtypes.float8_e4m3fn): DType.float8_e4m3fn,
    np.dtype(ml_dtypes.float8_e5m2): DType.float8_e5m2,
}
_NUMPY = {dtype: numpy for numpy, dtype in _EXTENDED.items()}
_RAW = {dtype: np.dtype(f"u{dtype.itemsize}") for dtype in _EXTENDED}
_DTYPES = {
    dtype.name: dtype
    for dtype in [
        *map(np.dtype, "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()),
        *_EXTENDED,
    ]
}
_SUPPORTED = frozenset(_DTYPES.values())
_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}
_INT32 = np.dtype(np.int32)
_LARGEST = 2**31 - 1
_CPU = 1  # DLPack's kDLCPU


def as_numpy(array: Any, name: str) -> np.ndarray:
    """A NumPy view of a CPU array's memory, strides kept: NumPy, torch, JAX, MAX or anything with `__dlpack__`.

    bfloat16 and float8 become `ml_dtypes` dtypes. A torch tensor that requires a gradient is detached, as decoding
    computes none. The view of a JAX array is read-only.

    Raises:
        ContractTypeError: `array`, called `name` in the message, is no array, not on the CPU, or of another dtype.
    """
    if isinstance(array, np.ndarray):
        view = array if type(array) is np.ndarray else array.view(np.ndarray)
    elif (torch := sys.modules.get("torch")) is not None and isinstance(array, torch.Tensor):
        return _from_torch(array, name)
    else:
        view = _from_dlpack(array, name)
    if view.dtype not in _SUPPORTED:
        raise ContractTypeError(f"{name}: dtype {view.dtype} is none of {', '.join(_DTYPES)}")
    return view


def like(array: Any, result: np.ndarray) -> Any:
    """`result` as an array of the kind of `array`: torch, JAX or MAX where that is one, else NumPy.

    Nothing is copied, except by JAX where its alignment asks for it.
    """
    if isinstance(array, np.ndarray):
        return result
    if (torch := sys.modules.get("torch")) is not None and isinstance(array, torch.Tensor):
        raw = _RAW.get(result.dtype)
        if raw is None:
            return torch.from_numpy(result)
        return torch.from_numpy(result.view(raw)).view(getattr(torch, result.dtype.name))
    if isinstance(array, Buffer):
        return to_buffer(np.ascontiguousarray(result))
    if _is_jax(array):
        return sys.modules["jax"].numpy.asarray(result)
    if _is_max_tensor(array):
        return type(array)(storage=to_buffer(np.ascontiguousarray(result)))
    return result


def sample_array(kind: str) -> Any:
    """An empty array for `like`, of the kind "numpy", "torch" or "jax"; imports the library."""
    return import_module({"numpy": "numpy", "torch": "torch", "jax": "jax.numpy"}[kind]).zeros(0)


def kind_of_dtype(dtype: Any) -> str:
    """Whose dtype it is: "torch", "jax" (`jax.numpy.float32`, which is no NumPy dtype), else "numpy"."""
    owner = type(dtype).__module__.partition(".")[0]
    return owner if owner in ("torch", "jax") else "numpy"


def as_indices(array: Any, name: str, ndim: int = 1) -> npt.NDArray[np.int32]:
    """Offsets, page ids, lengths or positions as C-contiguous int32; a view where they are that already.

    Raises:
        ContractTypeError: as `as_numpy`, or the dtype is not an integer.
        ShapeError: the rank is not `ndim`.
        PageTableError: a value does not fit in int32; the message says where it stands.
    """
    indices = as_numpy(array, name)
    if indices.dtype.kind not in "iu":
        raise ContractTypeError(f"{name}: dtype must be an integer, not {indices.dtype}")
    if indices.ndim != ndim:
        raise ShapeError(f"{name} must have {ndim} dimensions, its shape is {indices.shape}")
    if indices.dtype != _INT32:
        if indices.size and (indices.max() > _LARGEST or indices.min() < ~_LARGEST):
            at = np.argwhere((indices > _LARGEST) | (indices < ~_LARGEST))[0]
            raise PageTableError(f"{name}{at.tolist()} is {indices[tuple(at)]}, which does not fit in int32")
        return indices.astype(np.int32, order="C")
    return np.ascontiguousarray(indices)


def dtype_of(dtype: Any, name: str) -> np.dtype:
    """The NumPy (`ml_dtypes`) dtype that is meant by a name, or by a dtype of NumPy, torch, JAX or MAX.

    Names are "float16", "bfloat16", "float8_e4m3fn" and the like, "torch." in front or not.

    Raises:
        ContractTypeError: it is none of the supported dtypes.
    """
    found: np.dtype | None = None
    if isinstance(dtype, str) or type(dtype).__module__ == "torch":
        short = str(dtype).removeprefix("torch.")
        found = _DTYPES.get(_ALIASES.get(short, short))
    elif dtype is not None:
        try:
            found = _DTYPES.get(dtype.name) if isinstance(dtype, DType) else np.dtype(dtype)
        except (TypeError, ValueError):
            found = None
    if found is None or found not in _SUPPORTED:
        raise ContractTypeError(f"{name}: {dtype!r} is none of {', '.join(_DTYPES)}")
    return found


def paged_views(
    paged_kv_cache: Any, kv_layout: str, name: str = "paged_kv_cache", *, writable: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """K and V of a paged cache as `[page, slot, kv_head, head_dim]` views of its memory.

    Args:
        paged_kv_cache: One array NHD `[pages, 2, page_size, Hk, D]` or HND `[pages, 2, Hk, page_size, D]`, or a tuple
            `(k, v)` of such arrays without the 2. Any strides that are not negative, the last one 1.
        kv_layout: "NHD" or "HND".
        name: What a message calls the cache.
        writable: Refuses memory that cannot be written, or in which two elements are one.

    Raises:
        ContractTypeError: as `as_numpy`, or K and V differ in dtype.
        ShapeError: the rank is wrong, dimension 1 is not 2, or K and V differ in shape.
        ContractError: unknown `kv_layout`, a stride as above, not `writable`.
    """
    if kv_layout not in ("NHD", "HND"):
        raise ContractError(f"kv_layout must be 'NHD' or 'HND', not {kv_layout!r}")
    pair = isinstance(paged_kv_cache, tuple | list)
    if pair:
        if len(paged_kv_cache) != 2:
            raise ShapeError(f"{name}: a tuple must hold K and V, not {len(paged_kv_cache)} arrays")
        names = (f"{name}[0]", f"{name}[1]")
        arrays = [as_numpy(array, of) for array, of in zip(paged_kv_cache, names, strict=True)]
        for array, of in zip(arrays, names, strict=True):
            check_storage(array, of, 4, writable)
        k, v = arrays
        if v.dtype != k.dtype:
            raise ContractTypeError(f"{names[1]}: dtype {v.dtype} differs from {names[0]}'s {k.dtype}")
        if v.shape != k.shape:
            raise ShapeError(f"{names[1]}: shape {v.shape} differs from {names[0]}'s {k.shape}")
        if writable and overlap(k, v):
            raise ContractError(f"{names[1]} shares memory with {names[0]}: K and V would overwrite each other")
    else:
        both = as_numpy(paged_kv_cache, name)
        check_storage(both, name, 5, writable)
        if both.shape[1] != 2:
            raise ShapeError(f"{name}: dimension 1 must be 2 (K and V), its shape is {both.shape}")
        k, v = both[:, 0], both[:, 1]
    return (k, v) if kv_layout == "NHD" else (k.swapaxes(1, 2), v.swapaxes(1, 2))


def check_storage(array: np.ndarray, name: str, ndim: int, writable: bool) -> None:
    """Refuses storage that the ops cannot address: see `paged_views`."""
    if array.ndim != ndim:
        raise ShapeError(f"{name} must have {ndim} dimensions, its shape is {array.shape}")
    strides = [stride for size, stride in zip(array.shape, array.strides, strict=True) if size > 1]
    if array.size and (min(strides, default=0) < 0 or not array.flags.aligned):
        raise ContractError(f"{name} has a negative stride or unaligned elements: strides {array.strides} bytes")
    if array.size and array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        stride = array.strides[-1] // array.itemsize
        raise ContractError(f"{name}: the elements of a head must lie side by side, their stride is {stride}")
    if writable and not array.flags.writeable:
        raise ContractError(f"{name} is read-only and would be written in place (JAX arrays: see paged_kv.cache)")
    if writable and array.size and 0 in strides:
        raise ContractError(f"{name} is written in place, but a stride of 0 makes elements share memory")


def to_buffer(array: Any) -> Buffer:
    """A CPU buffer over the memory of any C-contiguous DLPack array or NumPy (`ml_dtypes`) array."""
    if isinstance(array, Buffer):
        return array
    if isinstance(array, np.ndarray) and array.dtype in _EXTENDED:
        return Buffer.from_dlpack(array.view(_RAW[array.dtype])).view(_EXTENDED[array.dtype], array.shape)
    return Buffer.from_dlpack(array)


def to_numpy(buffer: Buffer) -> np.ndarray:
    """A NumPy array over the memory of a CPU buffer."""
    if buffer.dtype in _NUMPY:
        raw = buffer.view(DType.uint16 if buffer.dtype == DType.bfloat16 else DType.uint8, buffer.shape)
        return raw.to_numpy().view(_NUMPY[buffer.dtype])
    return buffer.to_numpy()


def numpy_dtype(dtype: DType) -> np.dtype:
    """The NumPy (or `ml_dtypes`) dtype of a MAX dtype."""
    return _NUMPY.get(dtype) or np.dtype(dtype.to_numpy())


def cache_operands(k_view: np.ndarray, v_view: np.ndarray) -> tuple[Buffer, Buffer, Buffer]:
    """Flat storage of K and of V and the 12 numbers of `view` (`mojo_ops/ops.mojo`), nothing copied.

    `k_view` and `v_view` are `[page, slot, Hk, D]` views of any storage with a unit last stride.
    """
    numbers = list(k_view.shape)
    flat = []
    for view in (k_view, v_view):
        strides = [stride // view.itemsize for stride in view.strides]
        extent = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, strides, strict=True))
        raw = view.view(_RAW.get(view.dtype, view.dtype))  # as_strided does not know float8_e5m2
        elements = np.lib.stride_tricks.as_strided(raw, (extent if view.size else 0,), (view.itemsize,))
        flat.append(elements.view(view.dtype))
        numbers += [0, *strides[:3]]
    return to_buffer(flat[0]), to_buffer(flat[1]), to_buffer(np.array(numbers, np.int64))


@cache
def _torch_views() -> dict[Any, tuple[Any, np.dtype]]:
    """By torch dtype: the torch dtype to view it as where NumPy has not its like, and its NumPy dtype."""
    torch: Any = sys.modules["torch"]
    raw = {1: torch.uint8, 2: torch.int16}
    return {
        getattr(torch, name): (raw[dtype.itemsize] if dtype in _EXTENDED else None, dtype)
        for name, dtype in _DTYPES.items()
        if hasattr(torch, name)
    }


def _from_torch(tensor: Any, name: str) -> np.ndarray:
    if tensor.device.type != "cpu":
        raise ContractTypeError(f"{name} is on device {tensor.device}, it must be on the CPU")
    try:
        raw, dtype = _torch_views()[tensor.dtype]
    except KeyError:
        raise ContractTypeError(f"{name}: dtype {tensor.dtype} is none of {', '.join(_DTYPES)}") from None
    if tensor.requires_grad:
        tensor = tensor.detach()
    try:
        return tensor.numpy() if raw is None else tensor.view(raw).numpy().view(dtype)
    except (RuntimeError, TypeError) as error:  # sparse, or not materialised
        raise ContractTypeError(f"{name}: this {tensor.layout} tensor has no NumPy view") from error


def _from_dlpack(array: Any, name: str) -> np.ndarray:
    if _is_max_tensor(array):
        array = array.driver_tensor
    device = getattr(array, "__dlpack_device__", None)
    if device is None:
        raise ContractTypeError(f"{name} must be an array (NumPy, torch, JAX, MAX or DLPack), not {_kind(array)}")
    if device()[0] != _CPU:
        raise ContractTypeError(f"{name} ({_kind(array)}) must be on the CPU, its DLPack device is {device()}")
    if isinstance(array, Buffer) and array.dtype.name not in _DTYPES:
        raise ContractTypeError(f"{name}: dtype {array.dtype.name} is none of {', '.join(_DTYPES)}")
    try:
        if isinstance(array, Buffer):
            return to_numpy(array)
        return np.asarray(array) if _is_jax(array) else np.from_dlpack(array)
    except (RuntimeError, ValueError, TypeError, BufferError) as error:
        raise ContractTypeError(f"{name} ({_kind(array)}) has no NumPy view: {error}") from error


def overlap(k: np.ndarray, v: np.ndarray) -> bool:
    """Whether two arrays share an element; False where that is too hard to say."""
    max_work: Any = 10_000
    try:
        return np.shares_memory(k, v, max_work=max_work)
    except np.exceptions.TooHardError:
        return False


def _kind(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}".removeprefix("builtins.")


def _is_jax(array: Any) -> bool:
    return type(array).__module__.partition(".")[0] in ("jax", "jaxlib") and "jax" in sys.modules


def _is_max_tensor(array: Any) -> bool:
    return type(array).__module__.startswith("max.experimental") and hasattr(array, "driver_tensor")
