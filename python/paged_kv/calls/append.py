"""Appending: the cache that is written, its new rows, and the slots that a page table gives them.

Index arrays that can be read are checked. Those on a GPU stay unread: a row without a slot in the table is then
skipped, and of two rows for one slot the last wins. Letters in shapes: B requests, N new rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from paged_kv.arrays import devices
from paged_kv.arrays.autograd_writes import mark_written, refuse_gradients
from paged_kv.arrays.dtypes import DTYPES
from paged_kv.arrays.host import HOST
from paged_kv.arrays.overlap import check_disjoint
from paged_kv.arrays.pages import Pages, check_storage
from paged_kv.arrays.types import ArrayDevice, Shape, namespace
from paged_kv.calls.kv_copy import Slots, prepare, write_rows
from paged_kv.calls.remembered_plan import RememberedPlan
from paged_kv.calls.table import KV_NAMES, Table
from paged_kv.errors import ContractTypeError, PageTableError, ShapeError
from paged_kv.kv_formats import FORMATS
from paged_kv.options import Q_DTYPES, stored_dtype, stored_elements, stored_head


def new_cache(device: ArrayDevice, name: str, shape: Shape, dtype: np.dtype[Any], kind: str) -> Any:
    """A cache of this dtype and zeros, whose last dimension is head_dim: of int8 and int4 what their codes take.

    Raises:
        ContractError: it does not fit in memory; the message calls it `name`.
        ShapeError: codes of a head_dim that is no multiple of 8, or of int4 below 16.
    """
    stored = (*shape[:-1], stored_head(dtype.name, shape[-1]))
    return devices.allocate(device, name, stored, DTYPES[stored_dtype(dtype.name)], kind)


@dataclass(frozen=True, eq=False)
class WritableCache:
    """A cache that rows are to be written to; it and the rows lie on one device."""

    pages: Pages
    arrays: tuple[Any, ...]
    """The caller's, of which the pages are views."""
    takes_codes: bool = False
    """True if int8 and uint8 may be codes: attention reads none of latents."""

    @staticmethod
    def paged(cache: Any, kv_layout: str, name: str, **rows: Any) -> WritableCache:
        """A paged cache of K and V, for `rows` by the names of their arguments; see `Pages.of`."""
        device = devices.device_of(**rows, **{name: cache})
        is_pair = isinstance(cache, tuple | list)
        refuse_gradients(**({f"{name}[{i}]": array for i, array in enumerate(cache)} if is_pair else {name: cache}))
        pages = Pages.of(cache, kv_layout, name, device=device, writable=True)
        arrays = tuple(cache) if is_pair else (cache,)
        return WritableCache(pages, arrays, takes_codes=True)

    @staticmethod
    def pair(key_cache: Any, value_cache: Any, **rows: Any) -> WritableCache:
        """K and V in an array each, `[pages, page_size, Hk, D]`, for `rows` by the names of their arguments."""
        arrays = {"key_cache": key_cache, "value_cache": value_cache}
        device = devices.device_of(**rows, **arrays)
        refuse_gradients(**arrays)
        names = ("key_cache", "value_cache")
        pages = Pages.of((key_cache, value_cache), "NHD", "key_cache", device=device, writable=True, names=names)
        return WritableCache(pages, (key_cache, value_cache), takes_codes=True)

    @staticmethod
    def latent_pair(ckv_cache: Any, kpe_cache: Any, **rows: Any) -> WritableCache:
        """Latent attention's two caches, `[pages, page_size, D]` each, as one of one head."""
        device = devices.device_of(**rows, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
        refuse_gradients(ckv_cache=ckv_cache, kpe_cache=kpe_cache)
        ckv, kpe = (device.view(a, n) for a, n in ((ckv_cache, "ckv_cache"), (kpe_cache, "kpe_cache")))
        for view, name in ((ckv, "ckv_cache"), (kpe, "kpe_cache")):
            check_storage(device, view, name, 3, writable=True)
        if kpe.shape[:2] != ckv.shape[:2]:
            got, expected = list(kpe.shape[:2]), list(ckv.shape[:2])
            raise ShapeError(f"kpe_cache: expected ckv_cache's [pages, page_size] {expected}, got {got}")
        if kpe.dtype != ckv.dtype:
            raise ContractTypeError(f"kpe_cache: expected ckv_cache's dtype {ckv.dtype}, got {kpe.dtype}")
        check_disjoint(device, "kpe_cache", kpe, [("ckv_cache", ckv)])
        pages = Pages(ckv[:, :, None], kpe[:, :, None], device, "ckv_cache")
        return WritableCache(pages, (ckv_cache, kpe_cache))

    @staticmethod
    def latent(cache: Any, k: Any, v: Any) -> tuple[WritableCache, int]:
        """One cache for k and v, `[pages, page_size, Hk, W]` or `[pages, page_size, W]`; and the axes of its rows."""
        name = "mla_kv_cache"
        device = devices.device_of(k=k, v=v, **{name: cache})
        refuse_gradients(**{name: cache})
        view = device.view(cache, name)
        if view.ndim not in (3, 4):
            raise ShapeError(f"{name}: expected 3 or 4 dimensions, got shape {list(view.shape)}")
        check_storage(device, view, name, view.ndim, writable=True)
        num_axes = view.ndim - 1
        if num_axes == 2:
            view = view[:, :, None]  # one head
        width = device.view(k, "k").shape[-1:]
        split = width[0] if width else 0
        return WritableCache(Pages(view[..., :split], view[..., split:], device, name), (cache,)), num_axes

    def rows(self, k: Any, v: Any, names: tuple[str, str], num_axes: int = 3) -> tuple[Any, Any]:
        """New rows `[N, Hk, D]`, as this cache takes them; `[N, D]`, one head, for 2 axes.

        They have its dtype, and are copied; or are floats for a cache of int8 or uint8 whose heads have another size
        than theirs, and are quantised: then D is that of the codes.
        """
        checked, pages, device = [], self.pages, self.pages.device
        for array, view, name in zip((k, v), (pages.k, pages.v), names, strict=True):
            rows = device.view(array, name)
            row_shape = view.shape[2:] if num_axes == 3 else view.shape[3:]
            kv_format = FORMATS.get(device.dtype(view).name) if self.takes_codes else None
            if kv_format and device.dtype(rows).name in Q_DTYPES and rows.shape[-1:] != row_shape[-1:]:
                row_shape = (*row_shape[:-1], stored_elements(kv_format, row_shape[-1], pages.name))
            elif rows.dtype != view.dtype:
                raise ContractTypeError(f"{name}: expected the cache's dtype {view.dtype}, got {rows.dtype}")
            if rows.ndim != num_axes or rows.shape[1:] != row_shape:
                expected = ", ".join(map(str, ("N", *row_shape)))
                raise ShapeError(f"{name}: expected [{expected}] for this cache, got shape {list(rows.shape)}")
            checked.append(rows if num_axes == 3 else rows[:, None])
        if len(checked[1]) != len(checked[0]):
            raise ShapeError(f"{names[1]}: expected {names[0]}'s {len(checked[0])} rows, got {len(checked[1])}")
        if checked[1].dtype != checked[0].dtype:
            raise ContractTypeError(
                f"{names[1]}: expected {names[0]}'s dtype {checked[0].dtype}, got {checked[1].dtype}"
            )
        return checked[0], checked[1]

    def prepare(self, rows: tuple[Any, Any]) -> None:
        """Compiles or loads what `write` of such rows needs."""
        device = self.pages.device
        prepare(device, device.dtype(rows[0]), self.pages.dtype)

    def write(self, rows: tuple[Any, Any], slots: Slots) -> None:
        """Writes checked rows to their slots."""
        mark_written(self.arrays)
        write_rows(self.pages, *rows, slots)


def slots_at(pages: Pages, num_rows: int, **indices: Any) -> Slots:
    """Return the slots of rows that are token `positions[i]` of request `batch_indices[i]`.

    Args:
        pages: The pages of the cache.
        num_rows: N.
        indices: `batch_indices`, `positions`, and the three arrays of a page table by `KV_NAMES`.
    """
    device = devices.device_of(**indices)
    sizes = pages.page_size, pages.num_pages, num_rows
    return _slots.of(sizes, **indices) if device.readable else _slots_on(device, *sizes, **indices)


def _slots_on(
    device: ArrayDevice,
    page_size: int,
    num_pages: int,
    num_rows: int,
    batch_indices: Any,
    positions: Any,
    kv_indptr: Any,
    kv_indices: Any,
    kv_last_page_len: Any,
) -> Slots:
    names = ("batch_indices", "positions")
    batch, at = (device.indices(a, n) for a, n in zip((batch_indices, positions), names, strict=True))
    table = Table.csr(kv_indptr, kv_indices, kv_last_page_len, page_size, KV_NAMES, device)
    for indices, name in zip((batch, at), names, strict=True):
        if len(indices) != num_rows:
            raise ShapeError(f"{name}: expected an entry for each of {num_rows} rows, got {len(indices)}")
    return Slots(*table.slots(batch, at, num_pages))


_slots = RememberedPlan(partial(_slots_on, HOST))
"""A model appends to each of its layers with the same indices."""


def slots_of_last(
    pages: Pages, num_rows: int, append_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_last_page_len: Any
) -> Slots:
    """Return the slots of rows `[append_indptr[b], append_indptr[b + 1])` that are the last tokens of request b."""
    arrays = kv_indptr, kv_indices, kv_last_page_len
    device = devices.device_of(append_indptr=append_indptr, **dict(zip(KV_NAMES, arrays, strict=True)))
    table = Table.csr(*arrays, pages.page_size, KV_NAMES, device)
    offsets = device.indices(append_indptr, "append_indptr")
    batch, at = table.last_tokens(offsets, num_rows, ("append_indptr", "kv_last_page_len"))
    return Slots(*table.slots(batch, at, pages.num_pages))


def slots_after_last(pages: Pages, page_table: Any, last_page_len: Any, num_rows: int) -> Slots:
    """Return the slots of one row a request of a dense page table: the slot after its last token."""
    device = devices.device_of(page_table=page_table, last_page_len=last_page_len)
    table = Table.dense(page_table, last_page_len, pages.page_size, device=device)
    if num_rows != table.batch_size:
        raise ShapeError(f"k: expected a row for each of {table.batch_size} requests, got {num_rows}")
    xp, lengths = namespace(table.lengths), table.lengths
    requests = xp.arange(table.batch_size, dtype=lengths.dtype, device=lengths.device)
    return Slots(*table.slots(requests, lengths, pages.num_pages))


def slots_numbered(pages: Pages, slot_mapping: Any) -> Slots:
    """Return the slots `[N]` that are numbered through all pages; -1 is a row that is skipped.

    Raises:
        ContractTypeError, ShapeError: it is no array `[N]` of integers.
        PageTableError: it is on the host, and a slot is none of the cache's, or that of two rows.
    """
    device = devices.device_of(slot_mapping=slot_mapping)
    sizes = pages.page_size, pages.num_pages
    if device.readable:
        return _numbered.of(sizes, slot_mapping=slot_mapping)
    numbers = device.indices(slot_mapping, "slot_mapping")
    return Slots.mapped(namespace(numbers).where(numbers < sizes[0] * sizes[1], numbers, -1), pages.page_size)


def _numbered_on_host(page_size: int, num_pages: int, slot_mapping: Any) -> Slots:
    name, total = "slot_mapping", page_size * num_pages
    numbers = HOST.indices(slot_mapping, name)
    wrong = (numbers < -1) | (numbers >= total)
    if wrong.any():
        row = int(wrong.argmax())
        raise PageTableError(f"{name}: row {row}: expected -1 to {total - 1}, got {numbers[row]}")
    slots, counts = np.unique(numbers[numbers >= 0], return_counts=True)
    if (counts > 1).any():
        twice = slots[int((counts > 1).argmax())]
        first, second = np.flatnonzero(numbers == twice)[:2]
        raise PageTableError(f"{name}: rows {first} and {second} both write slot {twice}")
    return Slots.mapped(numbers, page_size)


_numbered = RememberedPlan(_numbered_on_host)
