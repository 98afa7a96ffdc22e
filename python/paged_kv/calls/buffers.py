"""Arrays of the user's that hold a page table: written by `plan`, read by every `run`.

Letters in shapes: B requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paged_kv.arrays.devices import device_of
from paged_kv.arrays.overlap import Named, check_written
from paged_kv.arrays.types import ArrayDevice
from paged_kv.calls.page_table import PageTable
from paged_kv.calls.rows import Rows
from paged_kv.errors import ContractError, ContractTypeError, ShapeError

_BUFFER_NAMES = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


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
        self._page_size: int | None = None
        self._planned: Rows | None = None  # where the arrays are not read again
        self._indptr, self._indices, self._last_page_len = (buffer_view(self._device, a, n) for n, a in arrays.items())
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
            self._planned = Rows.of_decode(table)
        sources: Sequence[np.ndarray] = (table.indptr, table.used_indices, table.last_page_len)
        targets = (self._indptr, self._indices[:used], self._last_page_len)
        if self._device.readable:
            sources = [self._device.apart(source, targets) for source in sources]
        for target, source in zip(targets, sources, strict=True):
            self._device.write(target, source)
        self._page_size = table.page_size

    def read(self) -> Rows:
        """The requests that the arrays hold now; on a GPU, those that were planned last.

        Raises:
            ContractError: nothing was planned.
            PageTableError: that is no consistent page table.
        """
        if self._page_size is None:
            raise ContractError("run: nothing is planned, call plan first")
        if self._planned is not None:
            return self._planned
        # Copies: what is checked is what is read, even where another thread writes to the arrays.
        indptr, indices, last_page_len = (self._device.clone(view) for _, view in self.views)
        return Rows.of_decode(PageTable.of(indptr, indices, last_page_len, self._page_size, _BUFFER_NAMES))


def buffer_view(device: ArrayDevice, array: Any, name: str, dtypes: Sequence[np.dtype[Any]] = INDEX_DTYPES) -> Any:
    """A writable view of one of the user's arrays.

    Raises:
        ContractTypeError: it is no array, or of none of the dtypes.
        ShapeError: it is not 1-D.
        ContractError: it is read-only.
    """
    view = device.view(array, name)
    dtype = device.dtype(view)
    if dtype not in dtypes:
        raise ContractTypeError(f"{name}: dtype {dtype.name}, expected {' or '.join(d.name for d in dtypes)}")
    if view.ndim != 1:
        raise ShapeError(f"{name}: shape {list(view.shape)}, expected one dimension")
    if not device.is_writable(view):
        raise ContractError(f"{name} is read-only, and plan writes to it")
    return view
