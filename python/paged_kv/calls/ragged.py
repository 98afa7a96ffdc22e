"""The requests of a prefill: ragged query rows over pages, or over contiguous K and V, with masks.

Letters in shapes: B requests, R query rows, N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from paged_kv.arrays import devices
from paged_kv.arrays.host import as_indices, as_numpy
from paged_kv.calls.masks import PackedMask
from paged_kv.calls.page_table import MAX_ROWS, PageTable, check_offsets
from paged_kv.calls.rows import Int32s, LookupTable, Rows
from paged_kv.errors import ContractError, PageTableError, ShapeError
from paged_kv.options import NO_PAGE

WHY_HOST = "plan reads it on the host"
_COUNTED_AS = "qo_indptr[B]"


@dataclass(frozen=True, eq=False)
class TokenRanges:
    """Requests whose tokens lie side by side in one array: request b's are `indptr[b]` to `indptr[b + 1]`.

    The kernels see pages that begin at every token and overlap: a request's first page begins at its first token. No
    page may run past the array, so a page is as long as the last request that has tokens: where another one's last page
    runs past its end, it ends within that request.
    """

    indptr: Int32s
    """`[B + 1]`"""
    name: str

    @staticmethod
    def of(indptr: Any, name: str) -> TokenRanges:
        """Checked offsets of any kind.

        Raises:
            ContractTypeError, ShapeError, PageTableError: as `as_indices` and `check_offsets`.
        """
        offsets = as_indices(indptr, name)
        check_offsets(offsets, name)
        return TokenRanges(offsets, name)

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.indptr) - 1

    @cached_property
    def lengths(self) -> Int32s:
        """`[B]`, tokens of each request."""
        lengths: Int32s = np.diff(self.indptr)
        return lengths

    def lookup_table(self) -> LookupTable:
        """The overlapping pages of each request."""
        used = self.lengths[self.lengths > 0]
        page_size = int(used[-1]) if len(used) else 1
        num_pages = -(-self.lengths // page_size)
        column = np.arange(num_pages.max(initial=0))
        pages = self.indptr[:-1, None].astype(np.int64) + column * page_size
        entries = np.where(column < num_pages[:, None], pages, NO_PAGE).astype(np.uint32)
        highest = int((self.indptr[:-1] + (num_pages - 1) * page_size)[num_pages > 0].max(initial=-1))
        return LookupTable(entries, num_pages, page_size, highest)


@dataclass(frozen=True, eq=False)
class RaggedRequests:
    """Query rows of several requests each, and what each request's rows may see. Nothing of it is the caller's memory.

    The rows of a request are its last tokens: row i of q_len rows over kv_len tokens stands at kv_len - q_len + i.
    """

    qo_indptr: Int32s
    """`[B + 1]`: request b's rows are `qo_indptr[b]` to `qo_indptr[b + 1]`."""
    kv_lengths: Int32s
    """`[B]`, tokens of each request."""
    table: LookupTable
    mask: PackedMask | None
    """Counts instead of `causal`."""
    causal: bool
    """True if a row sees no token behind its own."""

    @property
    def num_rows(self) -> int:
        """R."""
        return int(self.qo_indptr[-1])

    @cached_property
    def rows(self) -> Rows:
        """The rows as the ops take them. Where a request has more rows than tokens, its first stand at negative
        positions.
        """
        q_lens = np.diff(self.qo_indptr)
        batch = np.repeat(np.arange(len(q_lens), dtype=np.int32), q_lens)
        positions = np.arange(self.num_rows, dtype=np.int32) + (self.kv_lengths - self.qo_indptr[1:])[batch]
        if self.mask is None and self.causal:
            return Rows(self.table, batch, np.maximum(positions + 1, 0), counted_as=_COUNTED_AS)
        masks = None if self.mask is None else self.mask.of_rows(batch, self.qo_indptr, self.kv_lengths)
        return Rows(self.table, batch, self.kv_lengths[batch], positions, masks=masks, counted_as=_COUNTED_AS)

    def __str__(self) -> str:
        longest = self.kv_lengths.max(initial=0)
        return f"{len(self.kv_lengths)} requests of up to {longest} tokens with {self.num_rows} query rows"


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """The requests of a prefill as its `plan` is given them, checked. The index arrays may be views of the caller's."""

    qo_indptr: Int32s
    tokens: PageTable | TokenRanges
    mask: PackedMask | None
    causal: bool
    name: str = "qo_indptr"

    def __post_init__(self) -> None:
        """Checks how the arrays fit each other.

        Raises:
            ShapeError, PageTableError: the offsets of the rows are none, or of another batch size.
            ContractError: there are too many rows.
        """
        check_offsets(self.qo_indptr, self.name, self.tokens.batch_size)
        if self.qo_indptr[-1] > MAX_ROWS:
            raise ContractError(f"{self.name} ends at {self.qo_indptr[-1]} rows, over {MAX_ROWS}")

    @property
    def q_lengths(self) -> Int32s:
        """`[B]`, rows of each request."""
        lengths: Int32s = np.diff(self.qo_indptr)
        return lengths

    def arrays(self) -> tuple[np.ndarray | None, ...]:
        """The rows' offsets, the page table or the tokens' offsets, and the mask's bytes and offsets."""
        mask = (None, None) if self.mask is None else (self.mask.bits, self.mask.indptr)
        tokens = self.tokens
        if isinstance(tokens, PageTable):
            return self.qo_indptr, tokens.indptr, tokens.used_indices, tokens.last_page_len, *mask
        return self.qo_indptr, tokens.indptr, *mask

    def of_arrays(self, arrays: Sequence[np.ndarray], names: Sequence[str]) -> RaggedBatch:
        """The plan with other arrays.

        Raises:
            ContractError: they are inconsistent.
        """
        qo_indptr, name = as_indices(arrays[0], names[0]), names[0]
        mask = None
        if self.mask is not None:
            mask = PackedMask(arrays[-2], arrays[-1].astype(np.int64))
        tokens: PageTable | TokenRanges
        if isinstance(self.tokens, PageTable):
            indptr, indices, last = arrays[1:4]
            tokens = PageTable.of(indptr, indices, last, self.tokens.page_size, (names[1], names[2], names[3]))
        else:
            tokens = TokenRanges.of(arrays[1], names[1])
        batch = RaggedBatch(qo_indptr, tokens, mask, self.causal, name)
        if mask is not None:
            mask.check(batch.q_lengths, tokens.lengths, (names[-2], names[-1]))
        return batch

    def fixed(self) -> int:
        """The number of rows."""
        return int(self.qo_indptr[-1])

    def check_fixed(self, fixed: int) -> None:
        """Refuses more rows.

        Raises:
            ContractError: as said.
        """
        if self.fixed() > fixed:
            raise ContractError(f"qo_indptr ends at {self.fixed()} rows, the first plan fixed them at {fixed}")

    def requests(self) -> RaggedRequests:
        """Return what a run takes of it."""
        tokens = self.tokens
        table = LookupTable.of(tokens) if isinstance(tokens, PageTable) else tokens.lookup_table()
        return RaggedRequests(self.qo_indptr.copy(), tokens.lengths, table, self.mask, self.causal)


def row_offsets(array: Any, name: str) -> Int32s:
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
    found = as_indices(as_numpy(array, name).reshape(-1), name)
    if len(found) != len(expected):
        raise ShapeError(f"{name} has {len(found)} entries, expected {len(expected)}")
    differs = found != expected
    if differs.any():
        b = int(differs.argmax())
        raise PageTableError(f"{name}[{b}] is {found[b]}, {what} says {expected[b]}")


def page_table_of_lengths(kv_indptr: Any, kv_indices: Any, kv_len_arr: Any, page_size: int) -> PageTable:
    """The checked page table of requests whose lengths are given in tokens; pages past them are left out.

    Raises:
        ContractTypeError, ShapeError, PageTableError: as `PageTable.of`; or a length is negative or needs more pages
            than the request has.
    """
    names = ("kv_indptr", "kv_indices", "kv_len_arr")
    offsets, indices, lengths = (
        as_indices(array, name) for array, name in zip((kv_indptr, kv_indices, kv_len_arr), names, strict=True)
    )
    check_offsets(offsets, names[0], len(lengths))
    if offsets[-1] > len(indices):
        raise ShapeError(f"kv_indices has {len(indices)} entries, kv_indptr ends at {offsets[-1]}")
    owned, needed = np.diff(offsets), -(-lengths.astype(np.int64) // page_size)
    wrong = (lengths < 0) | (needed > owned)
    if wrong.any():
        b = int(wrong.argmax())
        raise PageTableError(
            f"kv_len_arr: request {b} has {lengths[b]} tokens, its {owned[b]} pages of {page_size} hold"
            f" {owned[b] * page_size}"
        )
    if (needed < owned).any():
        column = np.arange(offsets[-1]) - np.repeat(offsets[:-1], owned)
        indices = indices[: offsets[-1]][column < np.repeat(needed, owned)]
        offsets = np.concatenate([[0], np.cumsum(needed)]).astype(np.int32)
    return PageTable.of(offsets, indices, np.where(lengths > 0, (lengths - 1) % page_size + 1, 0), page_size, names)
