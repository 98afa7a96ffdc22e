"""Rows of K and V into pages and out of them, whatever their dtype: the append and gather ops copy bits.

Rows of floats into a cache of codes (int8, or int4 in arrays of uint8) are quantised instead.

What is passed here was checked (`calls.page_table`); views go in and come out (`arrays`). On a GPU a copy is enqueued
in the order of torch's current stream, and not waited for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from max.driver import Buffer
from max.dtype import DType

from paged_kv.arrays.cache_storage import cache_operands
from paged_kv.arrays.dtypes import max_dtype
from paged_kv.arrays.types import ArrayDevice, namespace
from paged_kv.errors import ShapeError
from paged_kv.options import HEAD_DIM_MULTIPLE, Q_DTYPES, SCALE_BYTES
from paged_kv.runtime.session import runtime_on
from paged_kv.runtime.variants import Variant

_UNSIGNED = {1: DType.uint8, 2: DType.uint16, 4: DType.uint32, 8: DType.uint32}
"""By bytes of an element: the unsigned integer that stands for it, or for half of it."""


def write_rows(device: ArrayDevice, k_rows: Any, v_rows: Any, k_view: Any, v_view: Any, pages: Any, slots: Any) -> None:
    """Writes row i of `[N, Hk, D]` to slot `slots[i]` of page `pages[i]`, in place; a row of page -1 is skipped.

    `k_view` and `v_view` are `[page, slot, Hk, D]`, in the dtype of the rows, or codes where those are floats; D of K
    and of V may differ. They share no memory. Rows may lie in theirs: they are then copied first. `pages` and `slots`
    are `[N]` int32, on the host or on the device, in memory of their own.
    """
    if not len(pages) or not math.prod(k_rows.shape) + math.prod(v_rows.shape):
        return
    k_rows, v_rows = (device.apart(rows, (k_view, v_view)) for rows in (k_rows, v_rows))
    if becomes_codes(device.dtype(k_rows), device.dtype(k_view)):
        variant = Variant("append", max_dtype(device.dtype(k_rows)), max_dtype(device.dtype(k_view)))
        _append(device, (k_rows, v_rows), (k_view, v_view), pages, slots, variant)
        return
    k_rows, v_rows = _bits(k_rows), _bits(v_rows)
    k_view, v_view = _bits(k_view), _bits(v_view)
    if k_rows.shape == v_rows.shape:
        _append(device, (k_rows, v_rows), (k_view, v_view), pages, slots)
        return
    # The op copies K and V of one shape: each goes as both, its bits written twice.
    for rows, view in ((k_rows, k_view), (v_rows, v_view)):
        if math.prod(rows.shape):
            _append(device, (rows, rows), (view, view), pages, slots)


def _append(
    device: ArrayDevice,
    rows: tuple[Any, Any],
    views: tuple[Any, Any],
    pages: Any,
    slots: Any,
    variant: Variant | None = None,
) -> None:
    """The op over rows of one shape and storage, all of them unsigned integers unless a variant is given."""
    # Each row is a request of one page, so that the cost does not depend on the length of a page table.
    xp = namespace(pages)
    requests = xp.where(pages < 0, -1, xp.arange(len(pages), dtype=xp.int32, device=pages.device))
    table = pages.view(xp.uint32)[:, None]
    with device.ordered():
        operands = [device.buffer(view) for view in (*rows, requests, slots)]
        variant = variant or _variant("append", views[0].itemsize)
        _execute(device, variant, operands, *views, device.buffer(table))


def read_rows(
    device: ArrayDevice, k_view: Any, v_view: Any, lookup_table: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int32]
) -> tuple[Any, Any]:
    """The first `lengths[b]` tokens of every request, K and V `[sum(lengths), Hk, D]` in fresh memory of the device.

    `lookup_table` `[B, max_pages]` and `lengths` `[B]` lie on the host.
    """
    dtype, shape = k_view.dtype, (int(lengths.sum()), *k_view.shape[2:])
    if 0 in shape:
        return device.full(shape, 0, device.dtype(k_view)), device.full(shape, 0, device.dtype(v_view))
    k_view, v_view = _bits(k_view), _bits(v_view)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    result_shape = device.full((shape[0], *k_view.shape[2:]), 0, np.int8)
    with device.ordered():
        operands = [device.buffer(indptr), device.buffer(result_shape)]
        variant = _variant("gather", k_view.itemsize)
        k, v = _execute(device, variant, operands, k_view, v_view, device.buffer(lookup_table))
    return device.take(k).view(dtype), device.take(v).view(dtype)


def read_codes(
    device: ArrayDevice, k_view: Any, v_view: Any, lookup_table: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int32]
) -> tuple[Any, Any]:
    """`read_rows` of a cache of codes: the numbers that they stand for, float32."""
    shape = (int(lengths.sum()), k_view.shape[2], head_of_codes("cache", k_view))
    if 0 in shape:
        return device.full(shape, 0, np.float32), device.full(shape, 0, np.float32)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    variant = Variant("gather", DType.float32, max_dtype(device.dtype(k_view)))
    with device.ordered():
        operands = [device.buffer(indptr), device.buffer(device.full(shape, 0, np.int8))]
        k, v = _execute(device, variant, operands, k_view, v_view, device.buffer(lookup_table))
    return device.take(k), device.take(v)


def becomes_codes(rows: np.dtype[Any], cache: np.dtype[Any]) -> bool:
    """Whether rows of this dtype are quantised by an append to a cache of that one."""
    return rows.name in Q_DTYPES and cache.name in ("int8", "uint8")


def head_of_codes(name: str, view: Any) -> int:
    """The elements of a head of codes.

    Raises:
        ShapeError: no head is stored in so many bytes; messages call the cache `name`.
    """
    count = int(view.shape[-1]) - SCALE_BYTES
    elements = count if "uint8" not in str(view.dtype) else 2 * count
    if count <= 0 or elements % HEAD_DIM_MULTIPLE:
        stored = f"{name}: heads of {view.shape[-1]} bytes"
        raise ShapeError(f"{stored} are no codes of a multiple of {HEAD_DIM_MULTIPLE} elements and a scale")
    return elements


def prepare(device: ArrayDevice, dtype: np.dtype[Any]) -> None:
    """Compiles or loads what copying rows of this dtype needs."""
    runtime_on(device.index).load(_variant("append", dtype.itemsize).family())


def _execute(
    device: ArrayDevice,
    variant: Variant,
    rows: Sequence[Buffer],
    k_view: Any,
    v_view: Any,
    table: Buffer,
) -> list[Buffer]:
    """Runs an op over views of what it takes; call it inside `ordered`."""
    k_blocks, v_blocks, view = cache_operands(k_view, v_view, device)
    return runtime_on(device.index).execute(variant, *rows, k_blocks, v_blocks, table, view)


def _bits(view: Any) -> Any:
    """The same memory as unsigned integers; elements of 8 bytes become two."""
    return view.view(getattr(namespace(view), _UNSIGNED[view.itemsize].name))


def _variant(op: Literal["append", "gather"], itemsize: int) -> Variant:
    bits = _UNSIGNED[itemsize]
    return Variant(op, bits, bits)
