"""The requests of a decode step: their lengths and pages, as the attention op takes them.

Letters in shapes: B requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from max.driver import Buffer

from paged_kv.arrays.devices import device_of
from paged_kv.arrays.host import to_buffer
from paged_kv.arrays.overlap import Named, check_written
from paged_kv.arrays.types import ArrayDevice
from paged_kv.calls.page_table import PageTable
from paged_kv.errors import ContractError, ContractTypeError, PageTableError, ShapeError

_BUFFER_NAMES = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
_INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """One query row a request, and the pages that each may read. Nothing of it is the caller's memory."""

    lengths: npt.NDArray[np.int32]
    """`[B]`, in tokens."""
    num_pages: npt.NDArray[np.int32]
    """`[B]`, pages of each request."""
    lookup_table: npt.NDArray[np.uint32]
    """`[B, max_pages]`."""
    highest_page: int
    """-1 where no page is used. A negative id counts as its unsigned reading: no pool is that large."""
    operands: tuple[Buffer, Buffer, Buffer]
    """row_batch, row_lengths and lookup_table as the op takes them, on the host."""
    _uploaded: dict[ArrayDevice, tuple[Buffer, Buffer, Buffer]] = field(default_factory=dict)

    @staticmethod
    def of(table: PageTable) -> DecodeBatch:
        """The requests of a checked page table."""
        used = table.used_indices.view(np.uint32)
        highest = int(used.max()) if len(used) else -1
        return DecodeBatch._make(table.lengths, table.num_pages, table.dense(), highest)

    @staticmethod
    def of_one(length: int) -> DecodeBatch:
        """One request whose `length` tokens are page 0."""
        pages = int(length > 0)
        counts = np.array([pages], np.int32)
        return DecodeBatch._make(np.array([length], np.int32), counts, np.zeros((1, 1), np.uint32), pages - 1)

    @staticmethod
    def _make(
        lengths: npt.NDArray[np.int32],
        num_pages: npt.NDArray[np.int32],
        lookup_table: npt.NDArray[np.uint32],
        highest_page: int,
    ) -> DecodeBatch:
        row_batch = np.arange(len(lengths), dtype=np.int32)
        operands = (to_buffer(row_batch), to_buffer(lengths), to_buffer(lookup_table))
        return DecodeBatch(lengths, num_pages, lookup_table, highest_page, operands)

    def operands_on(self, device: ArrayDevice) -> tuple[Buffer, Buffer, Buffer]:
        """`operands` in the memory of a device: copied there once, which waits for nothing."""
        found = self._uploaded.get(device)
        if found is None:
            row_batch, row_lengths, lookup_table = (device.upload(operand) for operand in self.operands)
            found = self._uploaded[device] = row_batch, row_lengths, lookup_table
        return found

    @property
    def size(self) -> int:
        """B."""
        return len(self.lengths)

    def check_pages(self, num_pages: int) -> None:
        """Refuses a page id outside `[0, num_pages)`.

        Raises:
            PageTableError: names request, slot and id.
        """
        if self.highest_page < num_pages:
            return
        used = np.arange(self.lookup_table.shape[1]) < self.num_pages[:, None]
        request, slot = np.argwhere(used & (self.lookup_table >= num_pages))[0]
        page = self.lookup_table.view(np.int32)[request, slot]
        raise PageTableError(
            f"indices: request {request}, slot {slot} holds page id {page}, outside the cache's [0, {num_pages})"
        )


class PageTableBuffers:
    """A page table in three arrays of the user's: written by `plan`, read by every `run`.

    Arrays in a GPU's memory are written by `plan` alone: reading them would wait for the device, so `run` uses the
    table that was planned last, and what is written to them in between does not count.

    One thread at a time may call it; the wrapper that owns it sees to that. Other code that writes to the arrays, or
    another wrapper over the same ones, has to wait until no call of this one is under way.

    Args:
        indptr: `[B + 1]`.
        indices: Long enough for the most page indices there will be.
        last_page_len: `[B]`.

    Raises:
        ContractError: an array is missing or read-only, or shares memory with another one or within itself.
        ContractTypeError: an array is no array, or neither int32 nor int64.
        ShapeError: an array is not 1-D, or `indptr` has not one entry more than `last_page_len`.
    """

    def __init__(self, indptr: Any, indices: Any, last_page_len: Any) -> None:
        arrays = dict(zip(_BUFFER_NAMES, (indptr, indices, last_page_len), strict=True))
        for name, array in arrays.items():
            if array is None:
                raise ContractError(f"{name} is needed where the page table lives in buffers (use_cuda_graph=True)")
        self._device = device_of(**arrays)
        self._planned: DecodeBatch | None = None
        self._indptr, self._indices, self._last_page_len = (self._view(a, n) for n, a in arrays.items())
        self.batch_size = len(self._last_page_len)
        if len(self._indptr) != self.batch_size + 1:
            raise ShapeError(
                f"paged_kv_indptr_buffer has {len(self._indptr)} entries, expected {self.batch_size + 1}:"
                f" one more than paged_kv_last_page_len_buffer"
            )
        check_written(self._device, self.views)

    @property
    def views(self) -> list[Named]:
        """The three arrays with the names that messages have for them."""
        return list(zip(_BUFFER_NAMES, (self._indptr, self._indices, self._last_page_len), strict=True))

    def on(self, device: ArrayDevice) -> list[Named]:
        """`views` where they lie on that device, else nothing."""
        return self.views if device == self._device else []

    def fill(self, table: PageTable) -> None:
        """Copies a checked table into the arrays, which may be the table's own.

        Raises:
            ShapeError: it has another batch size, or more indices than fit; nothing was written.
        """
        if table.batch_size != self.batch_size:
            raise ShapeError(f"indptr: a batch of {table.batch_size}, the buffers fix it at {self.batch_size}")
        used = len(table.used_indices)
        if used > len(self._indices):
            raise ShapeError(f"indices: {used} page ids, paged_kv_indices_buffer holds {len(self._indices)}")
        if not self._device.readable:
            self._planned = DecodeBatch.of(table)
        sources: Sequence[np.ndarray] = (table.indptr, table.used_indices, table.last_page_len)
        targets = (self._indptr, self._indices[:used], self._last_page_len)
        if self._device.readable:
            sources = [self._device.apart(source, targets) for source in sources]
        for target, source in zip(targets, sources, strict=True):
            self._device.write(target, source)

    def batch(self, page_size: int) -> DecodeBatch:
        """The requests that the arrays hold now; on a GPU, those that were planned last.

        Raises:
            ContractError: nothing was planned.
            PageTableError: that is no consistent page table.
        """
        if self._device.readable:
            # Copies: what is checked is what is read, even where another thread writes to the arrays.
            indptr, indices, last_page_len = (self._device.clone(view) for _, view in self.views)
            return DecodeBatch.of(PageTable.of(indptr, indices, last_page_len, page_size, _BUFFER_NAMES))
        if self._planned is None:
            raise ContractError("run: nothing is planned, call plan first")
        return self._planned

    def _view(self, array: Any, name: str) -> Any:
        """A writable view of one of the user's arrays."""
        view = self._device.view(array, name)
        dtype = self._device.dtype(view)
        if dtype not in _INDEX_DTYPES:
            raise ContractTypeError(f"{name}: dtype {dtype.name}, expected int32 or int64")
        if view.ndim != 1:
            raise ShapeError(f"{name}: shape {list(view.shape)}, expected one dimension")
        if not self._device.is_writable(view):
            raise ContractError(f"{name} is read-only, and plan writes to it")
        return view
