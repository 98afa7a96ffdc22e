"""The types of arrays and dtypes that the API takes, and what the package asks of a device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from max.driver import Buffer
from max.dtype import DType


class SupportsDLPack(Protocol):
    """An array: NumPy's, torch's, JAX's, MAX's, or any other that offers DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class ShapedArray(SupportsDLPack, Protocol):
    """An array that tells its shape, as those of all named libraries do."""

    @property
    def shape(self) -> Any: ...


class TorchDType(Protocol):
    """A `torch.dtype`, by its attributes; torch is an optional dependency."""

    @property
    def is_floating_point(self) -> bool: ...

    @property
    def itemsize(self) -> int: ...


ArrayT = TypeVar("ArrayT", bound=SupportsDLPack)
"""An array's kind: a result has the kind of the argument that is named for it."""

CacheArrays: TypeAlias = SupportsDLPack | tuple[SupportsDLPack, SupportsDLPack] | list[SupportsDLPack]
"""K and V in one array, or one array each."""

DTypeLike: TypeAlias = npt.DTypeLike | DType | TorchDType
"""A dtype of NumPy, `ml_dtypes`, torch, JAX or MAX, or its name: "float16", "bfloat16", "float8_e4m3fn", ..."""


Shape: TypeAlias = Sequence[int]

Operand: TypeAlias = "np.ndarray | HostMemory | Buffer"
"""An operand of a kernel: on the host an array or its memory, on a GPU a buffer of MAX's."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Elements side by side in the host's memory."""

    address: int
    size: int
    owner: Any
    """Keeps the memory."""


class ArrayDevice(Protocol):
    """A device on which a call's arrays lie: how to see them, and how MAX gets them. The host and each GPU are one."""

    @property
    def index(self) -> int | None:
        """The number of the GPU; None for the host."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The libraries whose arrays `new` makes: "numpy", "torch", "jax"."""

    @property
    def readable(self) -> bool:
        """True if values can be read without waiting for the device: only then are they checked."""

    def view(self, array: Any, name: str) -> Any:
        """A view of an array's memory, strides kept; `ContractTypeError` calls it `name`."""

    def indices(self, array: Any, name: str, ndim: int = 1) -> Any:
        """A view of offsets, page ids, lengths or positions of rank `ndim`, as contiguous integers that hold -1."""

    def dtype(self, view: Any) -> np.dtype[Any]:
        """The NumPy (`ml_dtypes`) dtype of a view's elements."""

    def strides(self, view: Any) -> tuple[int, ...]:
        """In bytes."""

    def is_aligned(self, view: Any, /) -> bool: ...

    def is_writable(self, view: Any, /) -> bool: ...

    def overlap(self, a: Any, b: Any) -> bool:
        """Return whether two views share a byte; True as well where that is too much to find out."""

    def address(self, view: Any) -> int: ...

    def contiguous(self, view: Any) -> Any:
        """The view, or a copy in C order."""

    def separate(self, view: Any, others: Sequence[Any]) -> Any:
        """`contiguous`, and a copy where its memory may be that of `others`, which are about to be written."""

    def clone(self, view: Any) -> Any:
        """A copy in C order."""

    def astype(self, view: Any, dtype: npt.DTypeLike) -> Any: ...

    def select(self, mask: Any, chosen: Any, other: Any) -> Any:
        """`chosen` where the bool view `mask` is true, else `other`."""

    def stack(self, views: Sequence[Any], axis: int) -> Any: ...

    def full(self, shape: Shape, value: float, dtype: npt.DTypeLike) -> Any: ...

    def write(self, view: Any, source: Any) -> None:
        """Copies a view, or a host array, of the same shape into a view's memory."""

    def new(self, shape: Shape, dtype: np.dtype[Any], kind: str, /) -> Any:
        """A fresh array of zeros of the library `kind`, one of `kinds`."""

    def flat(self, view: Any, extent: int) -> Operand:
        """The `extent` elements from a view's first one on, over the same memory."""

    def buffer(self, view: Any) -> Operand:
        """The memory of a contiguous view, or a host array's contents; call it inside `ordered`."""

    def upload(self, array: np.ndarray) -> Operand:
        """A host array's contents on this device; the array has to live until they are used."""

    def ordered(self) -> AbstractContextManager[None]:
        """Work that is enqueued inside follows what is enqueued before, and precedes what comes after."""

    def take(self, result: Any) -> Any:
        """A view of a result's memory."""

    def like(self, array: Any, view: Any) -> Any:
        """A view as an array of the kind of `array`."""


def namespace(view: Any) -> Any:
    """The library of a view: NumPy or torch, whose functions agree as far as this package uses them."""
    return np if isinstance(view, np.ndarray) else sys.modules["torch"]
