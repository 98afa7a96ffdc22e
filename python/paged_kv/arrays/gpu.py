"""Arrays in a GPU's memory: torch tensors into MAX and back, without a copy and in the order of their streams.

A torch CUDA (or ROCm) tensor comes as it is; a MAX buffer on a GPU, or any other DLPack array there, as a torch tensor
over the same memory, so torch has to be installed. Nothing here reads device memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from max.driver import Buffer, Device

from paged_kv.arrays.dlpack_transfer import copied_to, to_max, to_torch, torch_name
from paged_kv.arrays.dtypes import DTYPES, dtype_of
from paged_kv.arrays.host import HOST, check_storage_of, reason, to_buffer
from paged_kv.arrays.streams import Streams
from paged_kv.arrays.types import Shape
from paged_kv.errors import ContractTypeError, ShapeError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TorchArrays:
    """One GPU as an `ArrayDevice`: its views are torch's. Over torch tensors the CPU can stand in for a GPU."""

    device: Device

    readable: ClassVar[bool] = False
    kinds: ClassVar[tuple[str, ...]] = ("torch",)

    @property
    def index(self) -> int | None:
        return None if self.device.is_host else self.device.id

    @property
    def streams(self) -> Streams:
        return Streams(self.device)

    def view(self, array: Any, name: str) -> Tensor:
        """As the protocol says; what torch does with the view follows what MAX has enqueued for a buffer.

        Raises:
            ContractTypeError: it has no dense strided memory that torch can see, or an unsupported dtype.
        """
        torch = sys.modules["torch"]
        if isinstance(array, torch.Tensor):
            tensor = array.detach()
        else:
            if buffer := isinstance(array, Buffer):
                Streams(array.device).before_torch()
            try:
                tensor = to_torch(array, array.device) if buffer else torch.from_dlpack(array)
            except Exception as error:  # other people's code, which may raise anything
                raise ContractTypeError(f"{name}: torch cannot view this array: {reason(error)}") from error
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else tensor.layout
            raise ContractTypeError(f"{name}: a {kind} tensor has no strided memory")
        if tensor.dtype not in _dtypes():
            dtype_of(tensor.dtype, name)
        check_storage_of(tensor, name)
        return tensor

    def indices(self, array: Any, name: str, ndim: int = 1) -> Tensor:
        """As int64; the values of uint32 are read as int32, which has -1.

        Raises:
            ContractTypeError: its elements are no integers.
            ShapeError: its rank is not `ndim`.
        """
        torch = sys.modules["torch"]
        tensor = self.view(array, name)
        if self.dtype(tensor).kind not in "iu":
            raise ContractTypeError(f"{name}: expected an integer dtype, got {tensor.dtype}")
        if tensor.ndim != ndim:
            raise ShapeError(f"{name}: expected {ndim} dimensions, got shape {list(tensor.shape)}")
        return (tensor.view(torch.int32) if tensor.dtype == torch.uint32 else tensor).long()

    def dtype(self, view: Tensor) -> np.dtype[Any]:
        return _dtypes()[view.dtype]

    def strides(self, view: Tensor) -> tuple[int, ...]:
        size = view.itemsize
        return tuple([size * step for step in view.stride()])

    def is_aligned(self, _: Tensor) -> bool:
        return True

    def is_writable(self, _: Tensor) -> bool:
        return True

    def overlap(self, a: Tensor, b: Tensor) -> bool:
        return _may_overlap(a, b) and HOST.overlap(_addresses(a), _addresses(b))

    def address(self, view: Tensor) -> int:
        return view.data_ptr()

    def contiguous(self, view: Tensor) -> Tensor:
        return view.contiguous()

    def separate(self, view: Tensor, others: Sequence[Tensor]) -> Tensor:
        if any(np.may_share_memory(_addresses(view), _addresses(other)) for other in others):
            return self.clone(view)
        return view.contiguous()

    def clone(self, view: Tensor) -> Tensor:
        return view.clone(memory_format=sys.modules["torch"].contiguous_format)

    def astype(self, view: Tensor, dtype: npt.DTypeLike) -> Tensor:
        return view.to(_torch_dtype(dtype))

    def select(self, mask: Tensor, chosen: Tensor, other: Tensor) -> Tensor:
        return sys.modules["torch"].where(mask, chosen, other)

    def stack(self, views: Sequence[Tensor], axis: int) -> Tensor:
        return sys.modules["torch"].stack(list(views), axis)

    def full(self, shape: Shape, value: float, dtype: npt.DTypeLike) -> Tensor:
        torch = import_module("torch")
        return torch.full(tuple(shape), value, dtype=_torch_dtype(dtype), device=torch_name(self.device))

    def write(self, view: Tensor, source: Any) -> None:
        tensor = sys.modules["torch"].from_numpy(np.array(source)) if isinstance(source, np.ndarray) else source
        view.copy_(tensor)
        self.streams.after_torch()

    def new(self, shape: Shape, dtype: np.dtype[Any], _: str) -> Tensor:
        return self.full(shape, 0, dtype)

    def flat(self, view: Tensor, extent: int) -> Buffer:
        return to_max(view.as_strided((extent,), (1,), view.storage_offset()), self.device)

    def buffer(self, view: Any) -> Buffer:
        return self.upload(view) if isinstance(view, np.ndarray) else to_max(view, self.device)

    def upload(self, array: np.ndarray) -> Buffer:
        buffer = to_buffer(array)
        return buffer if self.device.is_host else copied_to(buffer, self.device)

    def ordered(self) -> AbstractContextManager[None]:
        return self.streams.ordered()

    def take(self, buffer: Buffer) -> Tensor:
        return to_torch(buffer, self.device)

    def like(self, array: Any, view: Tensor) -> Any:
        """A MAX buffer where `array` is one, else the tensor itself."""
        if not isinstance(array, Buffer):
            return view
        compact = view.contiguous()
        self.streams.after_torch()
        return to_max(compact, self.device)


@cache
def _dtypes() -> dict[Any, np.dtype[Any]]:
    """The NumPy (`ml_dtypes`) dtype of each torch dtype that comes in."""
    torch = import_module("torch")
    return {getattr(torch, name): dtype for name, dtype in DTYPES.items() if hasattr(torch, name)}


def _torch_dtype(dtype: npt.DTypeLike) -> Any:
    return getattr(import_module("torch"), np.dtype(dtype).name)


def _may_overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether the first byte of each comes before the last of the other: tells most apart without a search."""
    first, second = a.data_ptr(), b.data_ptr()
    return first < second + _extent(b) and second < first + _extent(a)


def _extent(tensor: Tensor) -> int:
    """Bytes from the first to the last of a tensor, whose strides are not negative."""
    elements = sum([(size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)], 1)
    return tensor.itemsize * elements if tensor.numel() else 0


class _Span:
    """A tensor's addresses as NumPy takes them."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.itemsize
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(size * step for step in tensor.stride()),
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr() or size, True),
        }


def _addresses(tensor: Tensor) -> np.ndarray:
    """An array over a tensor's addresses, which must not be read: to compare addresses alone."""
    return np.asarray(_Span(tensor))
