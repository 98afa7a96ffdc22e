"""Results made of a call's indices, for the calls that follow with the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from paged_kv.arrays.host import as_numpy

_MOST_ENTRIES = 1 << 16
"""Entries of a page table that are copied to be compared with the next call's."""
Made = TypeVar("Made")


class RememberedPlan(Generic[Made]):
    """The result of the last call's indices, for the next call with equal ones, as the layers of a model make them.

    A copy of the indices is kept to compare with; nothing of the result is the caller's memory.
    """

    def __init__(self, make: Callable[..., Made]) -> None:
        self._make = make
        self._last: tuple[Any, Made | None] = (), None  # read and replaced as one value, by any number of threads

    def of(self, sizes: tuple[int | None, ...], **indices: Any) -> Made:
        """`make(*sizes, **indices)`, remembered; the last of `indices` may be None."""
        arrays = [as_numpy(array, name) for name, array in indices.items() if array is not None]
        if sum(array.size for array in arrays) > _MOST_ENTRIES:
            return self._make(*sizes, **indices)
        key = (sizes, *((array.shape, array.dtype, array.tobytes()) for array in arrays))
        last_key, made = self._last
        if made is None or key != last_key:
            made = self._make(*sizes, **indices)
            self._last = key, made
        return made
