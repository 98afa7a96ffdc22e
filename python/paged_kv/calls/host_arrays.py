"""Arrays on the host that a call without a kernel's plan reads and writes: checked views, and writes all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paged_kv.arrays.autograd_writes import mark_written, refuse_gradients
from paged_kv.arrays.host import HOST
from paged_kv.arrays.overlap import check_written
from paged_kv.calls.plan import check_dtype
from paged_kv.errors import ContractError, ShapeError
from paged_kv.options import Q_DTYPES

Floats = npt.NDArray[np.float32]


def floats(name: str, array: Any, shape: Sequence[int | None], legal: Sequence[str] = Q_DTYPES) -> Floats:
    """An array of floats as float32.

    Raises: as `checked`, and
        ContractError: it does not fit in memory.
    """
    view = checked(name, array, shape, legal)
    try:
        return np.ascontiguousarray(view.astype(np.float32))
    except MemoryError as error:
        raise ContractError(f"{name}: shape {list(view.shape)} of float32 does not fit in memory") from error


def checked(name: str, array: Any, shape: Sequence[int | None], legal: Sequence[str] = Q_DTYPES) -> npt.NDArray[Any]:
    """A view of an array of this shape (None: any size) and one of these dtypes.

    Raises:
        ContractTypeError: it is no array of them.
        ShapeError: its shape is another one.
    """
    view = HOST.view(array, name)
    check_dtype(f"{name}: dtype", HOST.dtype(view), legal)
    if view.ndim != len(shape) or any(size not in (None, got) for size, got in zip(shape, view.shape, strict=True)):
        expected = ["any" if size is None else size for size in shape]
        raise ShapeError(f"{name}: expected shape {expected}, got {list(view.shape)}")
    return view


class Written(NamedTuple):
    """An array that a call writes to, and its view."""

    name: str
    array: Any
    view: npt.NDArray[Any]

    @staticmethod
    def of(name: str, array: Any, shape: Sequence[int | None], legal: Sequence[str] = Q_DTYPES) -> Written:
        """An array of this shape and one of these dtypes.

        Raises: as `checked`, and
            ContractTypeError: it requires a gradient.
            ContractError: it cannot be written.
        """
        refuse_gradients(**{name: array})
        view = checked(name, array, shape, legal)
        if not HOST.is_writable(view):
            raise ContractError(f"{name} is read-only, and is to be changed in place")
        return Written(name, array, view)


def write_all(results: Sequence[tuple[Written, Any, Any]], read: Mapping[str, Any]) -> None:
    """Writes results: each an array, the places in it, and their values.

    Raises:
        ContractError: arrays share memory with each other or with what the call reads; nothing is written then.
    """
    others = [(name, HOST.view(array, name)) for name, array in read.items() if array is not None]
    check_written(HOST, [(into.name, into.view) for into, _, _ in results], others)
    mark_written([into.array for into, _, _ in results])
    with np.errstate(over="ignore", invalid="ignore"):  # a number that float16 does not have is infinite there
        for into, places, values in results:
            into.view[places] = np.asarray(values).astype(into.view.dtype)
