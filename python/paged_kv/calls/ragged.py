"""The requests of a prefill: ragged query rows over pages, or over contiguous K and V, with masks.

Letters in shapes: B requests, R query rows, N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from paged_kv.arrays import devices
from paged_kv.arrays.host import as_indices, as_numpy
from paged_kv.calls.masks import PackedMask
from paged_kv.calls.offsets import MAX_ROWS, Indices, check_offsets
from paged_kv.calls.rows import Rows
from paged_kv.calls.table import Table
from paged_kv.errors import ContractError, PageTableError, ShapeError

WHY_HOST = "plan reads it on the host"
_COUNTED_AS = "qo_indptr[B]"


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """Query rows of several requests each, and what each request's rows may see, checked; the index arrays may be views
    of the caller's.

    The rows of a request are its last tokens: row i of q_len rows over kv_len tokens stands at kv_len - q_len + i.
    """

    qo_indptr: Indices
    """`[B + 1]`: request b's rows are `qo_indptr[b]` to `qo_indptr[b + 1]`."""
    table: Table
    mask: PackedMask | None = None
    """Counts instead of `causal`."""
    causal: bool = True
    """True if a row sees no token behind its own."""
    name: str = "qo_indptr"

    def __post_init__(self) -> None:
        """Checks how the arrays fit each other.

        Raises:
            ShapeError, PageTableError: the offsets of the rows are none, or of another batch size.
            ContractError: there are too many rows.
        """
        check_offsets(self.qo_indptr, self.name, self.table.batch_size)
        if self.num_rows > MAX_ROWS:
            raise ContractError(f"{self.name}: expected at most {MAX_ROWS} rows, got {self.num_rows}")

    @property
    def num_rows(self) -> int:
        """R."""
        return int(self.qo_indptr[-1])

    @property
    def q_lengths(self) -> Indices:
        """`[B]`, rows of each request."""
        lengths: Indices = np.diff(self.qo_indptr)
        return lengths

    @cached_property
    def rows(self) -> Rows:
        """The rows as the ops take them. Where a request has more rows than tokens, its first stand at negative
        positions.
        """
        q_lens, kv_lens = self.q_lengths, self.table.lengths
        batch = np.repeat(np.arange(len(q_lens), dtype=np.int32), q_lens)
        positions = np.arange(self.num_rows, dtype=np.int32) + (kv_lens - self.qo_indptr[1:])[batch]
        if self.mask is None and self.causal:
            return Rows(self.table, batch, np.maximum(positions + 1, 0), counted_as=_COUNTED_AS)
        masks = None if self.mask is None else self.mask.of_rows(batch, self.qo_indptr, kv_lens)
        return Rows(self.table, batch, kv_lens[batch], positions, masks=masks, counted_as=_COUNTED_AS)

    def __str__(self) -> str:
        longest = self.table.lengths.max(initial=0)
        return f"{self.table.batch_size} requests of up to {longest} tokens with {self.num_rows} query rows"

    def arrays(self) -> tuple[np.ndarray | None, ...]:
        """The rows' offsets, those of the table, and the mask's bytes and offsets."""
        mask = (None, None) if self.mask is None else (self.mask.bits, self.mask.indptr)
        return self.qo_indptr, *self.table.arrays, *mask

    def of_arrays(self, arrays: Sequence[np.ndarray], names: Sequence[str]) -> Self:
        """The plan with other arrays.

        Raises:
            ContractError: they are inconsistent.
        """
        of_table = slice(1, 1 + len(self.table.arrays))
        table = self.table.of_arrays(arrays[of_table], names[of_table])
        mask = None if self.mask is None else PackedMask(arrays[-2], arrays[-1].astype(np.int64))
        batch = replace(self, qo_indptr=as_indices(arrays[0], names[0]), table=table, mask=mask, name=names[0])
        if mask is not None:
            mask.check(batch.q_lengths, table.lengths, (names[-2], names[-1]))
        return batch

    def fixed(self) -> int:
        """The number of rows."""
        return self.num_rows

    def check_fixed(self, fixed: int) -> None:
        """Refuses more rows.

        Raises:
            ContractError: as said.
        """
        if self.num_rows > fixed:
            raise ContractError(f"qo_indptr: expected at most the first plan's {fixed} rows, got {self.num_rows}")

    def requests(self) -> Self:
        """The same in memory of its own."""
        return replace(self, qo_indptr=self.qo_indptr.copy(), table=self.table.owned())


def row_offsets(array: Any, name: str) -> Indices:
    """Offsets of rows that are on the host, of any integer dtype; `RaggedBatch` checks the rest.

    Raises:
        ContractTypeError, ShapeError, PageTableError: as `as_indices`, or it is on a GPU.
    """
    devices.require_host(array, name, WHY_HOST)
    return as_indices(array, name)


def check_equals(name: str, array: Any, expected: np.ndarray, what: str) -> None:
    """Refuses an optional array that says once more what others say, and says something else.

    Raises:
        ContractTypeError: it is no array of integers on the host.
        ShapeError: it has not as many entries as `expected`.
        PageTableError: an entry differs; the message says `what` the expected value is.
    """
    if array is None:
        return
    devices.require_host(array, name, WHY_HOST)
    values = as_indices(as_numpy(array, name).reshape(-1), name)
    if len(values) != len(expected):
        raise ShapeError(f"{name}: expected {len(expected)} entries, got {len(values)}")
    differs = values != expected
    if differs.any():
        b = int(differs.argmax())
        raise PageTableError(f"{name}[{b}]: expected {expected[b]} as in {what}, got {values[b]}")
