"""The rows of a decode step: the lengths and pages of the planned requests, as the attention op takes them.

Letters in shapes: B requests.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from max.driver import Buffer

from paged_kv.arrays.devices import Place, device_index, place_of
from paged_kv.arrays.gpu import numpy_dtype, to_tensor
from paged_kv.arrays.host import as_numpy, to_buffer
from paged_kv.calls.page_table import PageTable
from paged_kv.errors import ContractError, ContractTypeError, PageTableError, ShapeError

_BUFFER_NAMES = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
_INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


@dataclass(frozen=True, eq=False)
class Rows:
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
    _uploaded: dict[Place, tuple[Buffer, ...]] = field(default_factory=dict)

    @staticmethod
    def of(table: PageTable) -> Rows:
        """The rows of a checked page table."""
        used = table.used_indices.view(np.uint32)
        highest = int(used.max()) if len(used) else -1
        return Rows._make(table.lengths, table.num_pages, table.dense(), highest)

    @staticmethod
    def of_one(length: int) -> Rows:
        """The row of one request whose `length` tokens are page 0."""
        pages = int(length > 0)
        counts = np.array([pages], np.int32)
        return Rows._make(np.array([length], np.int32), counts, np.zeros((1, 1), np.uint32), pages - 1)

    @staticmethod
    def _make(
        lengths: npt.NDArray[np.int32],
        num_pages: npt.NDArray[np.int32],
        lookup_table: npt.NDArray[np.uint32],
        highest_page: int,
    ) -> Rows:
        row_batch = np.arange(len(lengths), dtype=np.int32)
        operands = (to_buffer(row_batch), to_buffer(lengths), to_buffer(lookup_table))
        return Rows(lengths, num_pages, lookup_table, highest_page, operands)

    def on(self, place: Place) -> tuple[Buffer, Buffer, Buffer]:
        """`operands` in the memory of a device: copied there once, which waits for nothing."""
        if place not in self._uploaded:
            self._uploaded[place] = tuple(place.upload(operand) for operand in self.operands)
        row_batch, row_lengths, lookup_table = self._uploaded[place]
        return row_batch, row_lengths, lookup_table

    @property
    def batch(self) -> int:
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


class FixedTable:
    """A page table in three arrays of the user's: written by `plan`, read by every `run`.

    Arrays in a GPU's memory are written by `plan` alone: reading them would wait for the device, so `run` uses the
    table that was planned last, and what is written to them in between does not count.

    Args:
        indptr: `[B + 1]`.
        indices: Long enough for the most page indices there will be.
        last_page_len: `[B]`.

    Raises:
        ContractError: an array is missing or read-only.
        ContractTypeError: an array is no array, or neither int32 nor int64.
        ShapeError: an array is not 1-D, or `indptr` has not one entry more than `last_page_len`.
    """

    def __init__(self, indptr: Any, indices: Any, last_page_len: Any) -> None:
        self._place = place_of(**dict(zip(_BUFFER_NAMES, (indptr, indices, last_page_len), strict=True)))
        self._planned: Rows | None = None
        self._indptr = _index_buffer(indptr, _BUFFER_NAMES[0])
        self._indices = _index_buffer(indices, _BUFFER_NAMES[1])
        self._last_page_len = _index_buffer(last_page_len, _BUFFER_NAMES[2])
        self.batch = len(self._last_page_len)
        if len(self._indptr) != self.batch + 1:
            raise ShapeError(
                f"paged_kv_indptr_buffer has {len(self._indptr)} entries, expected {self.batch + 1}:"
                f" one more than paged_kv_last_page_len_buffer"
            )

    def fill(self, table: PageTable) -> None:
        """Copies a checked table into the arrays.

        Raises:
            ShapeError: it has another batch size, or more indices than fit; nothing was written.
        """
        if table.batch_size != self.batch:
            raise ShapeError(f"indptr: a batch of {table.batch_size}, the buffers fix it at {self.batch}")
        used = len(table.used_indices)
        if used > len(self._indices):
            raise ShapeError(f"indices: {used} page ids, paged_kv_indices_buffer holds {len(self._indices)}")
        buffers = (self._indptr, self._indices[:used], self._last_page_len)
        arrays = (table.indptr, table.used_indices, table.last_page_len)
        if self._place is None:
            for buffer, array in zip(buffers, arrays, strict=True):
                buffer[:] = array
            return
        self._planned = Rows.of(table)
        torch = sys.modules["torch"]
        for buffer, array in zip(buffers, arrays, strict=True):
            buffer.copy_(torch.from_numpy(np.array(array)))

    def rows(self, page_size: int) -> Rows:
        """The rows of what the arrays hold now.

        Raises:
            PageTableError: that is no consistent page table.
        """
        if self._place is not None:
            if self._planned is None:
                raise ContractError("run: nothing is planned, call plan first")
            return self._planned
        return Rows.of(PageTable.of(self._indptr, self._indices, self._last_page_len, page_size, _BUFFER_NAMES))


def _index_buffer(array: Any, name: str) -> Any:
    """A writable view of one of the user's arrays: NumPy's, or on a GPU torch's."""
    if array is None:
        raise ContractError(f"{name} is needed where the page table lives in buffers (use_cuda_graph=True)")
    on_gpu = device_index(array) is not None
    view: Any = to_tensor(array, name) if on_gpu else as_numpy(array, name)
    dtype = numpy_dtype(view, name) if on_gpu else view.dtype
    if dtype not in _INDEX_DTYPES:
        raise ContractTypeError(f"{name}: dtype {dtype.name}, expected int32 or int64")
    if view.ndim != 1:
        raise ShapeError(f"{name}: shape {list(view.shape)}, expected one dimension")
    if not on_gpu and not view.flags.writeable:
        raise ContractError(f"{name} is read-only, and plan writes to it")
    return view
