"""The contract of page tables on the host and of the rows that are written through them, in one place.

Letters in shapes: B requests, N new tokens. Index arrays are int32 (`arrays.host.as_indices`). A message names the
argument, the request and the value. The table that is checked is FlashInfer's (CSR): request b owns the pages
`indices[indptr[b] : indptr[b + 1]]` in token order and holds `(pages - 1) * page_size + last_page_len[b]` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import LARGEST_INDEX, integer
from paged_kv.arrays.host import as_indices, as_numpy
from paged_kv.calls.token_slots import last_tokens, lengths_of, token_slots
from paged_kv.errors import PageTableError, ShapeError
from paged_kv.options import NO_PAGE

Indices = npt.NDArray[np.int32]

CSR_NAMES = ("indptr", "indices", "last_page_len")
KV_NAMES = ("kv_indptr", "kv_indices", "kv_last_page_len")
DENSE_NAMES = ("page_table", "page_table", "last_page_len")

MAX_ROWS = 2**25
"""Rows that batch indices and positions are made for at most: some 1.5 GiB of memory, well past any step's tokens."""

_WIDE_ROW = 64  # entries from which a slice copy per row beats one masked copy of all rows


@dataclass(frozen=True, eq=False)
class PageTable:
    """The pages of each request. Only `indices[:indptr[-1]]` are ever looked at.

    The arrays are views of the caller's: nothing derived from them holds once the caller changes them, `dense()` apart.
    """

    indptr: Indices
    """`[B + 1]`"""
    indices: Indices
    """`[indptr[-1]]` or longer"""
    last_page_len: Indices
    """`[B]`, tokens in the last page; unused for a request without pages, but from 0 to page_size there too."""
    page_size: int
    """Tokens in a page."""
    names: tuple[str, str, str] = CSR_NAMES
    """The names of the three arrays in messages."""
    may_be_unfilled: bool = False
    """True if a last page may hold 0 tokens: where the lengths are those before an append."""

    @staticmethod
    def of(
        indptr: Any, indices: Any, last_page_len: Any, page_size: int, names: tuple[str, str, str] = CSR_NAMES
    ) -> PageTable:
        """The checked table of three index arrays of any kind.

        Raises:
            ContractTypeError, ShapeError, PageTableError: as `as_indices` and `check`.
        """
        offsets, entries = as_indices(indptr, names[0]), as_indices(indices, names[1])
        table = PageTable(offsets, entries, as_indices(last_page_len, names[2]), page_size, names)
        table.check()
        return table

    @staticmethod
    def of_lengths(indptr: Any, last_page_len: Any, page_size: int, names: tuple[str, str, str]) -> PageTable:
        """As `of`, where page ids do not matter: all of them are 0."""
        offsets = as_indices(indptr, names[0])
        check_offsets(offsets, names[0])
        entries = np.broadcast_to(np.int32(0), (int(offsets[-1]),))
        table = PageTable(offsets, entries, as_indices(last_page_len, names[2]), page_size, names)
        table.check()
        return table

    @staticmethod
    def from_dense(page_table: Any, last_page_len: Any, page_size: int, *, may_be_unfilled: bool = True) -> PageTable:
        """The checked table of `page_table [B, max_pages]`, whose rows end at their first -1 (uint32: 0xFFFFFFFF).

        Raises:
            ContractTypeError, ShapeError, PageTableError: as `of`, or a page follows a -1.
        """
        entries = as_numpy(page_table, "page_table")
        if entries.dtype == np.uint32:
            entries = entries.view(np.int32)
        entries = as_indices(entries, "page_table", 2)
        used = entries != -1
        counts = used.sum(axis=1)
        if not used.all():
            gaps = used & (np.arange(entries.shape[1]) >= counts[:, None])
            if gaps.any():
                request, slot = np.argwhere(gaps)[0]
                page = entries[request, slot]
                raise PageTableError(f"page_table: request {request} has page {page} in slot {slot}, after a -1")
            entries = entries[used]
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        fill = as_indices(last_page_len, "last_page_len")
        table = PageTable(indptr, entries.reshape(-1), fill, page_size, DENSE_NAMES, may_be_unfilled)
        table.check()
        return table

    def check(self) -> None:
        """Checks everything but the page ids: see `check_pages`.

        Raises:
            ContractTypeError, ContractError: `page_size` is not an integer of at least 1.
            ShapeError: `indptr` is empty, or `last_page_len` is not `[B]`.
            PageTableError: `indptr` does not start at 0, decreases or ends past `indices`; `last_page_len` is not in
                `[1, page_size]` for a request with pages, `[0, page_size]` for one without; a length exceeds int32.
        """
        size = integer("page_size", self.page_size, 1, LARGEST_INDEX)
        indptr_name, indices_name, last_name = self.names
        check_offsets(self.indptr, indptr_name)
        if len(self.last_page_len) != self.batch_size:
            raise ShapeError(
                f"{last_name} must have B = {self.batch_size} entries, as {indptr_name} has {len(self.indptr)};"
                f" it has {len(self.last_page_len)}"
            )
        counts, last = self.num_pages, self.last_page_len
        if self.indptr[-1] > len(self.indices):
            b = int(np.argmax(self.indptr[1:] > len(self.indices)))
            entries = f"{indices_name} has {len(self.indices)} entries"
            raise PageTableError(f"{indptr_name}: request {b} ends at {self.indptr[b + 1]}, {entries}")
        lowest = np.int32(0) if self.may_be_unfilled else (counts > 0).astype(np.int32)
        wrong = (last < lowest) | (last > size)
        if wrong.any():
            b = int(wrong.argmax())
            least = int(not self.may_be_unfilled and counts[b] > 0)
            raise PageTableError(f"{last_name}: request {b} has {last[b]}, outside [{least}, page_size = {size}]")
        longest = int(counts.max(initial=0))
        if longest * size > LARGEST_INDEX:
            b = int(counts.argmax())
            raise PageTableError(f"{indptr_name}: request {b} has {longest} pages of {size}, over 2^31 - 1 tokens")

    def check_pages(self, num_pages: int) -> None:
        """Refuses a used page id outside the pool's `[0, num_pages)`.

        Raises:
            PageTableError: names the request, the slot in its list of pages, and the id.
        """
        used = self.used_indices
        # Read as unsigned, a negative id is a huge one: a single pass tells.
        if used.size and int(used.view(np.uint32).max()) >= num_pages:
            at = int(((used < 0) | (used >= num_pages)).argmax())
            b = int(np.searchsorted(self.indptr, at, side="right")) - 1
            raise PageTableError(
                f"{self.names[1]}: request {b}, slot {at - self.indptr[b]} holds page id {used[at]},"
                f" outside the pool's [0, {num_pages})"
            )

    @property
    def batch_size(self) -> int:
        return len(self.indptr) - 1

    @property
    def used_indices(self) -> Indices:
        """`[indptr[-1]]`, the page ids that some request owns."""
        return self.indices[: int(self.indptr[-1])]

    @cached_property
    def num_pages(self) -> Indices:
        """`[B]`, pages of each request."""
        return np.diff(self.indptr)

    @cached_property
    def lengths(self) -> Indices:
        """`[B]`, tokens of each request: 0 for one without pages."""
        lengths: Indices = lengths_of(self.num_pages, self.last_page_len, int(self.page_size))
        return lengths

    def dense(self) -> npt.NDArray[np.uint32]:
        """A fresh lookup table `[B, max_pages]`: row b holds the pages of request b, then NO_PAGE."""
        counts, used = self.num_pages, self.used_indices.view(np.uint32)
        widest = int(counts.max(initial=0))
        if widest * self.batch_size == used.size:
            return used.reshape(self.batch_size, widest).copy()
        table = np.full((self.batch_size, widest), NO_PAGE, np.uint32)
        if widest < _WIDE_ROW:
            table[np.arange(widest) < counts[:, None]] = used
        else:
            offsets = self.indptr.tolist()
            for row, begin, end in zip(table, offsets, offsets[1:], strict=False):
                row[: end - begin] = used[begin:end]
        return table

    def slots(
        self, batch_indices: Indices, positions: Indices, pool_pages: int | None = None
    ) -> tuple[Indices, Indices]:
        """The page and the slot that each of N rows is written to, `[N]` int32 each; page -1 for a row of batch -1.

        Raises:
            PageTableError: a page id is not one of the pool's `pool_pages`, where given; a row names no request, stands
                past its request's pages, or is the second for its slot.
        """
        if pool_pages is not None:
            self.check_pages(pool_pages)
        table = (self.indptr[:-1], self.num_pages, self.indices)
        pages, slots = token_slots(*table, batch_indices, positions, int(self.page_size))
        rows = np.arange(len(pages))
        if pages.min(initial=0) < 0:
            rows = np.flatnonzero(pages >= 0)
            if len(rows) != np.count_nonzero(batch_indices != -1):
                self._refuse_rows(batch_indices, positions)
        self._check_unique(pages, slots, rows, batch_indices)
        return pages, slots

    def _refuse_rows(self, batch_indices: Indices, positions: Indices) -> None:
        """Raises the error of the first row that has no slot."""
        wrong = (batch_indices < -1) | (batch_indices >= self.batch_size)
        if wrong.any():
            row = int(wrong.argmax())
            raise PageTableError(
                f"batch_indices: row {row} names request {batch_indices[row]}, the page table has {self.batch_size}"
            )
        kept = np.flatnonzero(batch_indices >= 0)
        num_pages, column = self.num_pages[batch_indices[kept]], positions[kept] // np.int32(self.page_size)
        i = int(((column < 0) | (column >= num_pages)).argmax())
        row = kept[i]
        raise PageTableError(
            f"positions: row {row} (request {batch_indices[row]}) has position {positions[row]},"
            f" outside the request's {num_pages[i]} pages of {self.page_size}"
        )

    def last_tokens(self, offsets: Indices, num_rows: int, names: tuple[str, str]) -> tuple[Indices, Indices]:
        """The request and the position of rows `[offsets[b], offsets[b + 1])`, the last tokens of request b.

        Raises:
            ShapeError, PageTableError: as `check_offsets`; or they do not end at `num_rows`, or a request has more rows
                than tokens. Messages call `offsets` and the lengths `names`.
        """
        check_offsets(offsets, names[0], self.batch_size)
        if offsets[-1] != num_rows:
            raise ShapeError(f"append_key has {num_rows} rows, {names[0]} ends at {offsets[-1]}")
        return checked_last_tokens(offsets, self.lengths, num_rows, names)

    def _check_unique(self, pages: Indices, slots: Indices, rows: np.ndarray, batch_indices: Indices) -> None:
        """Refuses two of some rows for one slot of one page."""
        address = pages[rows].astype(np.int64) * self.page_size + slots[rows]
        ordered = np.sort(address)
        repeated = ordered[1:] == ordered[:-1]
        if repeated.any():
            twice = ordered[int(repeated.argmax())]
            first, second = (int(row) for row in rows[np.flatnonzero(address == twice)[:2]])
            raise PageTableError(
                f"positions: rows {first} and {second} (requests {batch_indices[first]} and {batch_indices[second]})"
                f" both write slot {twice % self.page_size} of page {twice // self.page_size}"
            )


def check_offsets(offsets: Indices, name: str, batch_size: int | None = None) -> None:
    """Refuses offsets `[B + 1]` that do not start at 0, decrease, or are not of `batch_size` requests.

    Raises:
        ShapeError, PageTableError: as said; the message calls them `name`.
    """
    if not len(offsets) or (batch_size is not None and len(offsets) != batch_size + 1):
        wanted = "B + 1" if batch_size is None else f"B + 1 = {batch_size + 1}"
        raise ShapeError(f"{name} must have {wanted} entries, it has {len(offsets)}")
    if offsets[0] != 0:
        raise PageTableError(f"{name}[0] must be 0, not {offsets[0]}")
    decreases = offsets[1:] < offsets[:-1]  # a difference could overflow
    if decreases.any():
        b = int(decreases.argmax())
        raise PageTableError(f"{name} decreases at request {b}: from {offsets[b]} to {offsets[b + 1]}")


def check_count(offsets: Any, per_request: Any, names: tuple[str, str]) -> None:
    """Refuses offsets `[B + 1]` that are not of as many requests as an array `[B]` has entries.

    Raises:
        ShapeError: as said.
    """
    if len(offsets) != len(per_request) + 1:
        raise ShapeError(
            f"{names[0]} must have B + 1 = {len(per_request) + 1} entries, as {names[1]} has {len(per_request)};"
            f" it has {len(offsets)}"
        )


def checked_last_tokens(
    offsets: Indices, lengths: Indices, num_rows: int, names: tuple[str, str]
) -> tuple[Indices, Indices]:
    """`token_slots.last_tokens` of offsets that were checked.

    Raises:
        PageTableError: a request has more rows than tokens; messages call offsets and lengths `names`.
    """
    counts = np.diff(offsets)
    short = counts > lengths
    if short.any():
        b = int(short.argmax())
        raise PageTableError(f"{names[0]}: request {b} appends {counts[b]} tokens, {names[1]} says {lengths[b]}")
    batch, positions = last_tokens(offsets, lengths, num_rows)
    return batch.astype(np.int32, copy=False), positions.astype(np.int32, copy=False)
