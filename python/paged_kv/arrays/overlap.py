"""The rule for memory that a call writes: it may not overlap itself, nor anything else of the call.

Two views are compared exactly (`ArrayDevice.overlap`) where the search for a common element is short. A view is
compared with itself by its strides: where each step passes all that the smaller steps reach, no two elements meet. That
holds for every slice, transpose and part of a dense array; other small views are searched, others are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from paged_kv.arrays.types import ArrayDevice
from paged_kv.errors import ContractError

Named = tuple[str, Any]
"""A view's name in messages, and the view."""

_FEW_ELEMENTS = 1 << 16
"""So many addresses are compared one by one, some milliseconds."""


def check_written(device: ArrayDevice, written: Sequence[Named], read: Iterable[Named] = ()) -> None:
    """Refuses memory that a call would write twice, or write while it is another argument too.

    Args:
        device: Where all views lie.
        written: The views that the call writes.
        read: The other views of the call. They may overlap each other.

    Raises:
        ContractError: a view of `written` overlaps itself or another one of either.
    """
    others = [*written, *read]
    for i, (name, view) in enumerate(written, 1):
        check_no_overlap_in(device, name, view)
        check_disjoint(device, name, view, others[i:])


def check_disjoint(device: ArrayDevice, name: str, view: Any, others: Iterable[Named]) -> None:
    """Refuses a view that is written and shares memory with one of `others`.

    Raises:
        ContractError: as said.
    """
    for other, seen in others:
        if device.overlap(view, seen):
            raise ContractError(f"{name} shares memory with {other}, and is to be written")


def check_no_overlap_in(device: ArrayDevice, name: str, view: Any) -> None:
    """Refuses a view that is written and in which two elements share memory.

    Raises:
        ContractError: as said.
    """
    shape, strides = tuple(view.shape), tuple(device.strides(view))
    if overlaps_itself(shape, strides, view.itemsize):
        raise ContractError(
            f"{name} is to be written, but some of its elements share memory:"
            f" shape {list(shape)}, strides {list(strides)} bytes"
        )


@lru_cache(1024)
def overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether two elements of a view share a byte; true as well where that is too much to find out.

    Args:
        shape: The shape of the view.
        strides: In bytes.
        itemsize: Bytes of an element.
    """
    if 0 in shape:
        return False
    steps = sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1)
    reached = itemsize
    for stride, size in steps:
        if stride < reached:
            break
        reached += stride * (size - 1)
    else:
        return False
    if steps[0][0] == 0 or math.prod(shape) > _FEW_ELEMENTS:
        return True
    addresses = np.zeros(1, np.int64)  # the first is 0
    for stride, size in steps:
        addresses = (addresses[:, None] + np.arange(size) * stride).reshape(-1)
    addresses.sort()
    return bool((np.diff(addresses) < itemsize).any())
