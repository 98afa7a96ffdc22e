"""Arrays of the user's that hold a prefill's requests: written by `plan`, read by every `run`.

Letters in shapes: B requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paged_kv.arrays.devices import device_of
from paged_kv.arrays.host import as_indices
from paged_kv.arrays.overlap import Named, check_written
from paged_kv.arrays.types import ArrayDevice
from paged_kv.calls.buffers import INDEX_DTYPES, buffer_view
from paged_kv.calls.masks import PackedMask
from paged_kv.calls.page_table import PageTable
from paged_kv.calls.ragged import RaggedBatch, RaggedRequests, TokenRanges
from paged_kv.errors import ContractError, ShapeError

PAGED_NAMES = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
RAGGED_NAMES = ("qo_indptr_buf", "kv_indptr_buf")
MASK_NAMES = ("custom_mask_buf", "mask_indptr_buf")
_MASK_DTYPES = (np.dtype(np.uint8),)


class RaggedBuffers:
    """A prefill's requests in arrays of the user's. The batch is fixed, and the first plan fixes the most rows.

    Arrays in a GPU's memory are written by `plan` alone, as those of `PageTableBuffers`.

    Args:
        names: `PAGED_NAMES` or `RAGGED_NAMES`.
        arrays: One array for each name: row offsets `[B + 1]`, then page offsets `[B + 1]`, page ids and tokens of the
            last pages `[B]`, or token offsets `[B + 1]`; int32 or int64.
        custom_mask: uint8, for the most bytes of masks that there will be; or None, where no plan has one.
        mask_indptr: `[B + 1]` int32 or int64; or None, likewise.

    Raises:
        ContractError: an array is missing or read-only, or shares memory with another one or within itself.
        ContractTypeError: an array is no array, or of another dtype.
        ShapeError: an array is not 1-D, or the lengths of two do not fit each other.
    """

    def __init__(self, names: Sequence[str], arrays: Sequence[Any], custom_mask: Any, mask_indptr: Any) -> None:
        self._names = tuple(names)
        given = dict(zip(names, arrays, strict=True))
        for name, array in given.items():
            if array is None:
                raise ContractError(f"{name} is needed where the requests live in buffers (use_cuda_graph=True)")
        given |= dict(zip(MASK_NAMES, (custom_mask, mask_indptr), strict=True))
        self._device = device_of(**given)
        self._views = {
            name: buffer_view(self._device, array, name, _MASK_DTYPES if name == MASK_NAMES[0] else INDEX_DTYPES)
            for name, array in given.items()
            if array is not None
        }
        self.batch_size = len(self._views[names[0]]) - 1
        for name, view in self._views.items():
            expected = self.batch_size + (name != "paged_kv_last_page_len_buf")
            if name not in ("paged_kv_indices_buf", MASK_NAMES[0]) and len(view) != expected:
                raise ShapeError(f"{name} has {len(view)} entries, expected {expected}: qo_indptr_buf has B + 1")
        check_written(self._device, list(self._views.items()))
        self._most_rows: int | None = None
        self._facts: tuple[int | None, bool, bool] | None = None  # page_size (None: no pages), has a mask, causal
        self._planned: RaggedRequests | None = None  # where the arrays are not read again

    def on(self, device: ArrayDevice) -> list[Named]:
        """The arrays where they lie on that device, else nothing."""
        return list(self._views.items()) if device == self._device else []

    def fill(self, batch: RaggedBatch) -> None:
        """Copies checked requests into the arrays, which may be the batch's own.

        Raises:
            ShapeError: another batch size, more page ids, or more bytes of masks than fit; nothing was written.
            ContractError: there is a mask and no array for it, or there are more rows than in the first plan.
        """
        sources = self._sources(batch)
        if batch.tokens.batch_size != self.batch_size:
            raise ShapeError(
                f"qo_indptr: a batch of {batch.tokens.batch_size}, the buffers fix it at {self.batch_size}"
            )
        rows = int(batch.qo_indptr[-1])
        if self._most_rows is not None and rows > self._most_rows:
            raise ContractError(f"qo_indptr ends at {rows} rows, the first plan fixed them at {self._most_rows}")
        for name, source in sources.items():
            if name not in self._views:
                raise ContractError(f"{name} is needed for a mask where the requests live in buffers")
            if len(source) > len(self._views[name]):
                raise ShapeError(f"{name} holds {len(self._views[name])} entries, the plan has {len(source)}")
        targets = {name: self._views[name][: len(source)] for name, source in sources.items()}
        readable = self._device.readable
        if readable:  # before anything is written: one array of the user's may be another's source
            sources = {name: self._device.apart(source, list(targets.values())) for name, source in sources.items()}
        planned = None if readable else batch.requests()
        for name, source in sources.items():
            self._device.write(targets[name], source)
        tokens = batch.tokens
        page_size = tokens.page_size if isinstance(tokens, PageTable) else None
        self._facts, self._planned = (page_size, batch.mask is not None, batch.causal), planned
        self._most_rows = rows if self._most_rows is None else self._most_rows

    def read(self) -> RaggedRequests:
        """The requests that the arrays hold now; on a GPU, those that were planned last.

        Raises:
            ContractError: nothing was planned, or the arrays hold no consistent requests.
        """
        if self._facts is None:
            raise ContractError("run: nothing is planned, call plan first")
        if self._planned is not None:
            return self._planned
        page_size, has_mask, causal = self._facts
        # Copies: what is checked is what is read, even where another thread writes to the arrays.
        now = {name: self._device.clone(view) for name, view in self._views.items()}
        rows = as_indices(now[self._names[0]], self._names[0])
        tokens: PageTable | TokenRanges
        if page_size is None:
            tokens = TokenRanges.of(now[self._names[1]], self._names[1])
        else:
            _, indptr, indices, last = self._names
            tokens = PageTable.of(now[indptr], now[indices], now[last], page_size, (indptr, indices, last))
        mask = PackedMask(now[MASK_NAMES[0]], now[MASK_NAMES[1]].astype(np.int64)) if has_mask else None
        batch = RaggedBatch(rows, tokens, mask, causal, self._names[0])
        if mask is not None:
            mask.check(batch.q_lengths, tokens.lengths, MASK_NAMES)
        return batch.requests()

    def _sources(self, batch: RaggedBatch) -> dict[str, np.ndarray]:
        """What is copied into each array."""
        tokens = batch.tokens
        arrays: list[np.ndarray] = [batch.qo_indptr]
        if isinstance(tokens, PageTable):
            arrays += [tokens.indptr, tokens.used_indices, tokens.last_page_len]
        else:
            arrays.append(tokens.indptr)
        sources = dict(zip(self._names, arrays, strict=True))
        if batch.mask is not None:
            sources |= dict(zip(MASK_NAMES, (batch.mask.bits, batch.mask.indptr), strict=True))
        return sources
