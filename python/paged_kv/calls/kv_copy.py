"""Rows of K and V into pages and out of them, whatever their dtype: the append and gather ops copy bits.

Rows of floats into a cache of codes (int8, or int4 in arrays of uint8) are quantised instead.

What is passed here was checked (`calls.table`); views go in and come out (`arrays`). On a GPU a copy is enqueued
in the order of torch's current stream, and not waited for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
from max.dtype import DType

from paged_kv.arrays.dtypes import DTYPES, max_dtype
from paged_kv.arrays.pages import Pages
from paged_kv.arrays.types import ArrayDevice, Operand, namespace
from paged_kv.call_layouts import APPEND, CACHE_TABLE
from paged_kv.calls.offsets import offsets_of
from paged_kv.calls.table import Table
from paged_kv.kv_formats import KVFormat
from paged_kv.options import stored_elements
from paged_kv.runtime.session import runtime_on
from paged_kv.runtime.variants import Variant

_ADDRESSES = APPEND.part("batch_indices positions")
_UNSIGNED = {1: DType.uint8, 2: DType.uint16, 4: DType.uint32, 8: DType.uint32}
"""By bytes of an element: the unsigned integer that stands for it, or for half of it."""


@dataclass(frozen=True, eq=False)
class Slots:
    """The places of an append's rows: the page, -1 for a row that is skipped, and the slot of each, `[N]` int32.

    They lie on the host or on a device, in memory of their own.
    """

    pages: Any
    slots: Any

    @staticmethod
    def mapped(numbers: Any, page_size: int) -> Slots:
        """The slots `[N]` that are numbered through all pages, `page * page_size + slot`; a negative one is skipped."""
        xp = namespace(numbers)
        pages = xp.where(numbers < 0, -1, numbers // page_size)
        return Slots(xp.asarray(pages, dtype=xp.int32), xp.asarray(numbers % page_size, dtype=xp.int32))

    @cached_property
    def requests(self) -> Any:
        """Each row is a request of one page, so that the cost does not depend on the length of a page table."""
        pages = self.pages
        xp = namespace(pages)
        return xp.where(pages < 0, -1, xp.arange(len(pages), dtype=xp.int32, device=pages.device))

    @cached_property
    def table(self) -> Any:
        """The pages of these requests, `[N, 1]` uint32."""
        return self.pages.view(namespace(self.pages).uint32)[:, None]

    @cached_property
    def addresses(self) -> tuple[bytes, bytes]:
        """Addresses of the rows' requests and slots on the host, and of their page table with its shape."""
        for array in (self.requests, self.slots, self.pages):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
        where = _ADDRESSES.pack(self.requests.ctypes.data, self.slots.ctypes.data)
        return where, CACHE_TABLE.pack(self.pages.ctypes.data, len(self.pages), 1)


def write_rows(pages: Pages, k_rows: Any, v_rows: Any, slots: Slots) -> None:
    """Writes rows `[N, Hk, D]` to their slots, in place.

    The pages have the dtype of the rows, or codes where those are floats; D of K and of V may differ. K and V share no
    memory. Rows may lie in theirs: they are then copied first.
    """
    if not len(slots.pages) or not math.prod(k_rows.shape) + math.prod(v_rows.shape):
        return
    device = pages.device
    k_rows, v_rows = (device.separate(rows, (pages.k, pages.v)) for rows in (k_rows, v_rows))
    variant = _variant("append", device.dtype(k_rows), pages.dtype)
    if k_rows.dtype == pages.k.dtype:
        k_rows, v_rows, pages = _bits(k_rows), _bits(v_rows), _as_bits(pages)
    if k_rows.shape == v_rows.shape:
        _append(pages, variant, (k_rows, v_rows), slots)
        return
    # The op copies K and V of one shape: each goes as both, its bits written twice.
    for rows, view in ((k_rows, pages.k), (v_rows, pages.v)):
        if math.prod(rows.shape):
            _append(Pages(view, view, device), variant, (rows, rows), slots)


def _append(pages: Pages, variant: Variant, rows: tuple[Any, Any], slots: Slots) -> None:
    """The op over K and V of one shape and storage."""
    device = pages.device
    with device.ordered():
        operands = [device.buffer(view) for view in (*rows, slots.requests, slots.slots)]
        _execute(pages, variant, operands, device.buffer(slots.table))


def read_rows(pages: Pages, table: Table, kv_format: KVFormat | None = None) -> tuple[Any, Any]:
    """The tokens of every request, K and V `[N, Hk, D]` in fresh memory of the device: in the cache's dtype, or of
    codes, where `kv_format` names them, the numbers that they stand for, float32. The table lies on the host.

    Raises:
        ShapeError: no head of such codes is stored in so many bytes.
    """
    device, array_dtype, stored = pages.device, pages.k.dtype, pages.dtype
    dtype = stored if kv_format is None else DTYPES["float32"]
    head_dim = stored_elements(kv_format or "", pages.k.shape[3])
    indptr = offsets_of(table.lengths).astype(np.int32)
    shape = (int(indptr[-1]), pages.k.shape[2], head_dim)
    if 0 in shape:
        return device.full(shape, 0, dtype), device.full(shape, 0, dtype)
    variant = _variant("gather", dtype, stored)
    if kv_format is None:
        pages = _as_bits(pages)
        shape = (*shape[:2], pages.k.shape[3])
    with device.ordered():
        operands = [device.buffer(indptr), device.buffer(device.full(shape, 0, np.int8))]
        results = _execute(pages, variant, operands, device.buffer(table.lookup_table))
    k, v = map(device.take, results)
    return (k.view(array_dtype), v.view(array_dtype)) if kv_format is None else (k, v)


def prepare(device: ArrayDevice, rows: np.dtype[Any], cache: np.dtype[Any]) -> None:
    """Compiles or loads what writing rows of this dtype to a cache of that one needs."""
    runtime_on(device.index).load(_variant("append", rows, cache).bundle())


def _execute(pages: Pages, variant: Variant, rows: Sequence[Operand], table: Operand) -> list[Any]:
    """Runs an op over pages of what it takes; call it inside `ordered`."""
    k_blocks, v_blocks, view = pages.operands()
    return runtime_on(pages.device.index).execute(variant, *rows, k_blocks, v_blocks, table, view)


def _as_bits(pages: Pages) -> Pages:
    return Pages(_bits(pages.k), _bits(pages.v), pages.device)


def _bits(view: Any) -> Any:
    """The same memory as unsigned integers; elements of 8 bytes become two."""
    return view.view(getattr(namespace(view), _UNSIGNED[view.itemsize].name))


@lru_cache(256)
def _variant(op: Literal["append", "gather"], rows: np.dtype[Any], cache: np.dtype[Any]) -> Variant:
    """Return the variant for rows and a cache of one dtype, whose bits are copied, or of floats over codes."""
    if rows != cache:
        return Variant(op, max_dtype(rows), max_dtype(cache))
    bits = _UNSIGNED[cache.itemsize]
    return Variant(op, bits, bits)
