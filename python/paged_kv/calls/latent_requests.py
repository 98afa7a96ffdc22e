"""The requests of latent attention: query rows, page lists and lengths, and arrays of the user's that hold them.

Letters in shapes: B requests, R query rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from paged_kv.arrays import devices
from paged_kv.arrays.host import as_indices
from paged_kv.arrays.overlap import Named, check_written
from paged_kv.arrays.types import ArrayDevice
from paged_kv.calls.buffers import buffer_view
from paged_kv.calls.dense_tables import block_entries, dense_table
from paged_kv.calls.page_table import Indices
from paged_kv.calls.ragged import WHY_HOST, RaggedBatch, page_table_of_lengths
from paged_kv.calls.rows import LookupTable, Rows
from paged_kv.errors import ContractError, PageTableError, ShapeError

NAMES = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")


@dataclass(frozen=True, eq=False)
class LatentBatch:
    """What `plan` is given of the requests. The arrays may be views of the caller's."""

    qo_indptr: Indices
    """`[B + 1]`: request b's rows are `qo_indptr[b]` to `qo_indptr[b + 1]`, its last tokens."""
    kv_indptr: Indices
    """`[B + 1]`"""
    kv_indices: Indices
    """`[kv_indptr[B]]` or longer"""
    kv_len_arr: Indices
    """`[B]`, tokens of each request: no more than its pages hold."""
    page_size: int
    causal: bool

    @staticmethod
    def of(arrays: Sequence[Any], page_size: int, causal: bool) -> LatentBatch:
        """Four index arrays of any kind on the host, in the order of `NAMES`; `rows` checks how they fit each other.

        Raises:
            ContractTypeError, ShapeError: an array is none `[n]` of integers on the host.
        """
        found = []
        for name, array in zip(NAMES, arrays, strict=True):
            devices.require_host(array, name, WHY_HOST)
            found.append(as_indices(array, name))
        # Only so many offsets count as there are requests.
        return LatentBatch(found[0], found[1][: len(found[3]) + 1], found[2], found[3], page_size, causal)

    @cached_property
    def rows(self) -> Rows:
        """The rows and pages as the op takes them.

        Raises:
            ShapeError, PageTableError, ContractError: the arrays do not fit each other.
        """
        table = page_table_of_lengths(self.kv_indptr, self.kv_indices, self.kv_len_arr, self.page_size)
        rows = RaggedBatch(self.qo_indptr, table, None, self.causal).requests().rows(False)
        return replace(rows, table=replace(rows.table, name="kv_indices"))

    @property
    def arrays(self) -> tuple[Indices, ...]:
        """In the order of `NAMES`, no longer than they count."""
        used = self.kv_indices[: int(self.kv_indptr[-1])]
        return self.qo_indptr, self.kv_indptr, used, self.kv_len_arr


class LatentBuffers:
    """Requests in four arrays of the user's: written by `plan`, read by every `run`; on a GPU by `plan` alone.

    Args:
        arrays: In the order of `NAMES`, int32 or int64; page ids for the most there will be.

    Raises:
        ContractError: an array is missing or read-only, or shares memory with another one or within itself.
        ContractTypeError: an array is no array, or neither int32 nor int64.
        ShapeError: an array is not 1-D, or the lengths of two do not fit each other.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        given = dict(zip(NAMES, arrays, strict=True))
        for name, array in given.items():
            if array is None:
                raise ContractError(f"{name} is needed where the requests live in buffers (use_cuda_graph=True)")
        self._device = devices.device_of(**given)
        self._views = {name: buffer_view(self._device, array, name) for name, array in given.items()}
        self.batch_size = len(self._views["kv_len_arr"])
        for name in ("qo_indptr", "kv_indptr"):
            if len(self._views[name]) != self.batch_size + 1:
                raise ShapeError(
                    f"{name} has {len(self._views[name])} entries, expected {self.batch_size + 1}: one more than"
                    " kv_len_arr"
                )
        check_written(self._device, list(self._views.items()))
        self._planned: LatentBatch | None = None

    def on(self, device: ArrayDevice) -> list[Named]:
        """The arrays where they lie on that device, else nothing."""
        return list(self._views.items()) if device == self._device else []

    def fill(self, batch: LatentBatch) -> None:
        """Copies checked requests into the arrays, which may be the batch's own.

        Raises:
            ShapeError: another batch size, or more page ids than fit; nothing was written.
        """
        sources: list[np.ndarray] = list(batch.arrays)
        if len(batch.kv_len_arr) != self.batch_size:
            raise ShapeError(f"kv_len_arr: a batch of {len(batch.kv_len_arr)}, the buffers fix it at {self.batch_size}")
        if len(sources[2]) > len(self._views["kv_indices"]):
            held = len(self._views["kv_indices"])
            raise ShapeError(f"kv_indices: {len(sources[2])} page ids, the buffer holds {held}")
        targets = [view[: len(source)] for view, source in zip(self._views.values(), sources, strict=True)]
        if self._device.readable:
            sources = [self._device.apart(source, targets) for source in sources]
        for target, source in zip(targets, sources, strict=True):
            self._device.write(target, source)
        self._planned = batch

    def read(self) -> Rows:
        """The requests that the arrays hold now; on a GPU, those that were planned last.

        Raises:
            ContractError: nothing was planned.
            ShapeError, PageTableError: they are inconsistent.
        """
        if self._planned is None:
            raise ContractError("run: nothing is planned, call plan first")
        if not self._device.readable:
            return self._planned.rows
        # Copies: what is checked is what is read, even where another thread writes to the arrays.
        now = [self._device.clone(view) for view in self._views.values()]
        return LatentBatch.of(now, self._planned.page_size, self._planned.causal).rows


def rows_of_dense(kv_len: Any, page_table: Any, page_size: int) -> Rows:
    """One row a request, which sees all its tokens, from lengths `[B]` and a page table `[B, n]`.

    Raises:
        ContractTypeError, ShapeError, PageTableError: an array is not as said, or a length is negative or more than the
            pages hold.
    """
    lengths, table = _dense(kv_len, "kv_len", page_table, page_size)
    return Rows(table, np.arange(len(lengths), dtype=np.int32), lengths)


def csr_of_dense(seq_lens: Any, block_tables: Any, page_size: int) -> tuple[Indices, Indices, Indices]:
    """`kv_indptr`, `kv_indices` and `kv_len_arr` of lengths `[B]` and a page table `[B, n]`; raises as above."""
    lengths, table = _dense(seq_lens, "seq_lens", block_tables, page_size)
    used = np.arange(table.entries.shape[1]) < table.num_pages[:, None]
    indptr = np.concatenate([[0], np.cumsum(table.num_pages)]).astype(np.int32)
    return indptr, table.entries[used].view(np.int32), lengths


def _dense(lengths: Any, name: str, page_table: Any, page_size: int) -> tuple[Indices, LookupTable]:
    devices.require_host(lengths, name, WHY_HOST)
    found = as_indices(lengths, name).copy()
    if found.min(initial=0) < 0:
        b = int(found.argmin())
        raise PageTableError(f"{name}: request {b} has {found[b]} tokens")
    return found, dense_table(block_entries(page_table, len(found)), found, page_size)
