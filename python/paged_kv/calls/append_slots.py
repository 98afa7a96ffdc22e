"""Where appended rows go: the storage that is written, and the slots that a page table gives, on the host or on a GPU.

A GPU's index arrays may lie on the host, where they are checked as ever, or all of them on that GPU, where they stay
unread: a row without a place in the table is then skipped, and of two rows for one slot the last wins.
Letters in shapes: B requests, N new rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_kv.arrays import devices as places
from paged_kv.arrays import gpu
from paged_kv.arrays.host import as_indices, as_numpy, check_storage, overlap, paged_views
from paged_kv.calls import gpu_page_table as gpu_tables
from paged_kv.calls.kv_copy import write_rows, write_rows_on
from paged_kv.calls.page_table import KV_NAMES, Indices, PageTable, check_offsets
from paged_kv.errors import ContractError, ContractTypeError, PageTableError, ShapeError

Slots = tuple[Any, Any]
"""The page, -1 for none, and the slot of each row, `[N]` int32: NumPy arrays, or tensors on a GPU."""


@dataclass(frozen=True, eq=False)
class Storage:
    """A cache that rows are to be written to; every array of it and every row lies on one device."""

    k: Any
    """A view `[page, slot, Hk, D]`: NumPy's, or a torch tensor on a GPU."""
    v: Any
    """The same, though its D may differ."""
    name: str
    """What messages call it."""
    place: places.Place | None
    """The GPU; None on the host."""

    @staticmethod
    def paged(cache: Any, kv_layout: str, name: str, **rows: Any) -> Storage:
        """A paged cache of K and V, for `rows` by the names of their arguments; see `paged_views`."""
        place = places.place_of(**rows, **{name: cache})
        k, v = (paged_views if place is None else gpu.paged_views)(cache, kv_layout, name, writable=True)
        return Storage(k, v, name, place)

    @staticmethod
    def latent_pair(ckv_cache: Any, kpe_cache: Any, **rows: Any) -> Storage:
        """Latent attention's two caches, `[pages, page_size, D]` each, as one of one head."""
        place = places.place_of(**rows, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
        ckv, kpe = (_writable(place, a, n, 3) for a, n in ((ckv_cache, "ckv_cache"), (kpe_cache, "kpe_cache")))
        if kpe.shape[:2] != ckv.shape[:2]:
            pages = tuple(ckv.shape[:2])
            raise ShapeError(f"kpe_cache: [pages, page_size] is {tuple(kpe.shape[:2])}, ckv_cache's is {pages}")
        if kpe.dtype != ckv.dtype:
            raise ContractTypeError(f"kpe_cache: dtype {kpe.dtype} differs from ckv_cache's {ckv.dtype}")
        if overlap(ckv, kpe) if place is None else gpu.share_memory(ckv, kpe):
            raise ContractError("kpe_cache shares memory with ckv_cache: they would overwrite each other")
        return Storage(ckv[:, :, None], kpe[:, :, None], "ckv_cache", place)

    @staticmethod
    def latent(cache: Any, k: Any, v: Any) -> tuple[Storage, int]:
        """One cache for k and v, `[pages, page_size, Hk, W]` or `[pages, page_size, W]`; and the axes of its rows."""
        name = "mla_kv_cache"
        place = places.place_of(k=k, v=v, **{name: cache})
        view = (as_numpy if place is None else gpu.to_tensor)(cache, name)
        if view.ndim not in (3, 4):
            raise ShapeError(f"{name} must have 3 or 4 dimensions, its shape is {tuple(view.shape)}")
        view = _writable(place, cache, name, view.ndim)
        num_axes = view.ndim - 1
        if num_axes == 2:
            view = view[:, :, None]  # one head
        width = (as_numpy if place is None else gpu.to_tensor)(k, "k").shape[-1:]
        split = width[0] if width else 0
        return Storage(view[..., :split], view[..., split:], name, place), num_axes

    @property
    def page_size(self) -> int:
        return int(self.k.shape[1])

    @property
    def num_pages(self) -> int:
        return int(self.k.shape[0])

    def rows(self, k: Any, v: Any, names: tuple[str, str], num_axes: int = 3) -> tuple[Any, Any]:
        """New rows `[N, Hk, D]`, as this cache takes them; `[N, D]`, one head, for 2 axes."""
        return check_rows(k, v, self.k, self.v, names, num_axes, self.place)

    def write(self, rows: tuple[Any, Any], slots: Slots) -> None:
        """Writes checked rows to their slots."""
        if self.place is None:
            write_rows(*rows, self.k, self.v, *slots)
        else:
            write_rows_on(self.place, *rows, self.k, self.v, *slots)


@dataclass(frozen=True)
class CsrTable:
    """A page table as the functions of `page` get it, not yet looked at; names are those of `KV_NAMES`."""

    kv_indices: Any
    kv_indptr: Any
    kv_last_page_len: Any

    def slots_at(self, storage: Storage, batch_indices: Any, positions: Any, num_rows: int) -> Slots:
        """Of rows that are token `positions[i]` of request `batch_indices[i]`."""
        names = ("batch_indices", "positions")
        if self._on_gpu(batch_indices=batch_indices, positions=positions):
            batch, at = (gpu_tables.indices_of(a, n) for a, n in ((batch_indices, names[0]), (positions, names[1])))
            _check_entries(names, (batch, at), num_rows)
            return self._device_slots(storage, batch, at)
        batch, at = as_indices(batch_indices, names[0]), as_indices(positions, names[1])
        table = self._checked(storage)
        _check_entries(names, (batch, at), num_rows)
        return table.slots(batch, at)

    def slots_of_last(self, storage: Storage, append_indptr: Any, num_rows: int) -> Slots:
        """Of rows `[append_indptr[b], append_indptr[b + 1])` that are the last tokens of request b."""
        if self._on_gpu(append_indptr=append_indptr):
            offsets = gpu_tables.indices_of(append_indptr, "append_indptr")
            indptr = gpu_tables.indices_of(self.kv_indptr, "kv_indptr")
            last = gpu_tables.indices_of(self.kv_last_page_len, "kv_last_page_len")
            check_count(indptr, last, ("kv_indptr", "kv_last_page_len"))
            check_count(offsets, last, ("append_indptr", "kv_last_page_len"))
            lengths = gpu_tables.csr_lengths(indptr, last, storage.page_size)
            return self._device_slots(storage, *gpu_tables.last_tokens(offsets, lengths, num_rows))
        table = self._checked(storage)
        offsets = as_indices(append_indptr, "append_indptr")
        check_offsets(offsets, "append_indptr", table.batch_size)
        if offsets[-1] != num_rows:
            raise ShapeError(f"append_key has {num_rows} rows, append_indptr ends at {offsets[-1]}")
        return table.slots(*last_tokens(offsets, table.lengths, num_rows, "kv_last_page_len"))

    def _on_gpu(self, **indices: Any) -> bool:
        """Whether the table and `indices` are on a GPU: all of them, or none."""
        arrays = (self.kv_indptr, self.kv_indices, self.kv_last_page_len)
        return places.place_of(**indices, **dict(zip(KV_NAMES, arrays, strict=True))) is not None

    def _checked(self, storage: Storage) -> PageTable:
        table = PageTable.of(self.kv_indptr, self.kv_indices, self.kv_last_page_len, storage.page_size, KV_NAMES)
        table.check_pages(storage.num_pages)
        return table

    def _device_slots(self, storage: Storage, batch: Any, positions: Any) -> Slots:
        indptr = gpu_tables.indices_of(self.kv_indptr, "kv_indptr")
        indices = gpu_tables.indices_of(self.kv_indices, "kv_indices")
        sizes = (storage.page_size, storage.num_pages)
        return gpu_tables.csr_slots(indptr, indices, batch, positions, *sizes)


def slots_after_last(storage: Storage, page_table: Any, last_page_len: Any, num_rows: int) -> Slots:
    """Of one row a request of a dense page table: the slot after its last token."""
    size = storage.page_size
    if places.place_of(page_table=page_table, last_page_len=last_page_len) is not None:
        entries = gpu_tables.indices_of(page_table, "page_table", 2)
        last = gpu_tables.indices_of(last_page_len, "last_page_len")
        if len(last) != len(entries):
            raise ShapeError(f"last_page_len has {len(last)} entries, page_table has {len(entries)} rows")
        _check_requests(num_rows, len(entries))
        lengths = gpu_tables.dense_lengths(entries, last, size)
        return gpu_tables.dense_slots(entries, lengths, size, storage.num_pages)
    table = PageTable.from_dense(page_table, last_page_len, size)
    _check_requests(num_rows, table.batch_size)
    table.check_pages(storage.num_pages)
    return table.slots(np.arange(table.batch_size, dtype=np.int32), table.lengths)


def check_rows(
    k: Any,
    v: Any,
    k_view: Any,
    v_view: Any,
    names: tuple[str, str],
    num_axes: int = 3,
    place: places.Place | None = None,
) -> tuple[Any, Any]:
    """New rows `[N, Hk, D]`, as a cache of views `[page, slot, Hk, D]` takes them; `[N, D]`, one head, for 2 axes."""
    checked = []
    for array, view, name in zip((k, v), (k_view, v_view), names, strict=True):
        rows = (as_numpy if place is None else gpu.to_tensor)(array, name)
        row_shape = view.shape[2:] if num_axes == 3 else view.shape[3:]
        if rows.ndim != num_axes or rows.shape[1:] != row_shape:
            wanted = ", ".join(map(str, ("N", *row_shape)))
            raise ShapeError(f"{name} must be [{wanted}] for this cache, its shape is {tuple(rows.shape)}")
        if rows.dtype != view.dtype:
            raise ContractTypeError(f"{name}: dtype {rows.dtype}, the cache's is {view.dtype}")
        checked.append(rows if num_axes == 3 else rows[:, None])
    if len(checked[1]) != len(checked[0]):
        raise ShapeError(f"{names[1]} has {len(checked[1])} rows, {names[0]} has {len(checked[0])}")
    return checked[0], checked[1]


def check_count(offsets: Any, per_request: Any, names: tuple[str, str]) -> None:
    """Refuses offsets `[B + 1]` that are not of as many requests as an array `[B]` has entries."""
    if len(offsets) != len(per_request) + 1:
        raise ShapeError(
            f"{names[0]} must have B + 1 = {len(per_request) + 1} entries, as {names[1]} has {len(per_request)};"
            f" it has {len(offsets)}"
        )


def last_tokens(offsets: Indices, lengths: Indices, num_rows: int, lengths_name: str) -> tuple[Indices, Indices]:
    """The request and the position of rows that are the last tokens of their requests; -1 and 0 for padding."""
    counts = np.diff(offsets)
    short = counts > lengths
    if short.any():
        b = int(short.argmax())
        raise PageTableError(f"append_indptr: request {b} appends {counts[b]} tokens, {lengths_name} says {lengths[b]}")
    batch = np.full(num_rows, -1, np.int32)
    positions = np.zeros(num_rows, np.int32)
    end = int(offsets[-1])
    batch[:end] = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    positions[:end] = np.arange(end, dtype=np.int32) + np.repeat(lengths - offsets[1:], counts)
    return batch, positions


def _writable(place: places.Place | None, array: Any, name: str, ndim: int) -> Any:
    """An array's view, NumPy's or on a GPU torch's, which is to be written in place."""
    if place is None:
        view: Any = as_numpy(array, name)
        check_storage(view, name, ndim, writable=True)
    else:
        view = gpu.to_tensor(array, name)
        gpu.check_storage(view, name, ndim, writable=True)
    return view


def _check_entries(names: tuple[str, str], arrays: tuple[Any, Any], num_rows: int) -> None:
    for indices, name in zip(arrays, names, strict=True):
        if len(indices) != num_rows:
            raise ShapeError(f"{name} has {len(indices)} entries, there are {num_rows} rows to append")


def _check_requests(num_rows: int, batch_size: int) -> None:
    if num_rows != batch_size:
        raise ShapeError(f"k has {num_rows} rows, page_table has {batch_size} requests")
