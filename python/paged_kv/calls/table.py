"""Page tables: the pages of each request, its tokens, and the page and slot of each row.

Every page table that callers give becomes a `Table` and is checked here. Letters in shapes: B requests, N rows. An
error message names the argument, the request and the value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import LARGEST_INDEX, integer
from paged_kv.arrays import devices
from paged_kv.arrays.host import HOST, as_indices
from paged_kv.arrays.types import ArrayDevice, namespace
from paged_kv.calls.block_tables import WHY_HOST, block_entries, checked_lengths, dense_entries
from paged_kv.calls.offsets import Indices, check_count, check_offsets, checked_last_tokens, last_tokens, offsets_of
from paged_kv.errors import PageTableError, ShapeError
from paged_kv.options import NO_PAGE

Names = Sequence[str]
"""Names in error messages: of the offsets, the page ids, and the lengths or last pages."""

CSR_NAMES = ("indptr", "indices", "last_page_len")
KV_NAMES = ("kv_indptr", "kv_indices", "kv_last_page_len")
LENGTH_NAMES = ("kv_indptr", "kv_indices", "kv_len_arr")
DENSE_NAMES = ("page_table", "page_table", "last_page_len")
BLOCK_NAMES = ("block_tables", "block_tables", "seq_lens")

_WIDE_ROW = 64  # entries from which a slice copy per row beats one masked copy of all rows


@dataclass(frozen=True, eq=False)
class Table:
    """The pages of each request, in token order, and its number of tokens; all arrays are int32."""

    entries: Any
    """Page ids: `[B, n]` in the table's own memory; or with `starts` the caller's, `[sum of num_pages]`."""
    num_pages: Any
    """`[B]`, the number of pages of each request."""
    lengths: Any
    """`[B]`, the number of tokens of each request: 0 for one without pages."""
    page_size: int
    """Tokens in a page."""
    highest_page: int = -1
    """The highest page id of all requests; -1 where there is none. A negative id counts as unsigned, above any cache's
    pages."""
    names: Names = CSR_NAMES
    starts: Any = None
    """`[B]`, where each request's pages begin in flat `entries`."""
    arrays: tuple[Any, ...] = ()
    """The caller's index arrays that it was made of; none where the table owns its memory."""
    remake: Callable[[Sequence[Any], Names], Table] | None = None
    """Makes a table in the same way of other arrays and their names."""
    parts: tuple[Table, ...] = ()
    """The tables that were joined: messages have their names and request numbers."""

    @staticmethod
    def csr(
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        page_size: int,
        names: Names = CSR_NAMES,
        device: ArrayDevice = HOST,
    ) -> Table:
        """The table of FlashInfer's three index arrays: request b has the pages `indices[indptr[b] : indptr[b + 1]]`
        and `(pages - 1) * page_size + last_page_len[b]` tokens.

        Args:
            indptr: `[B + 1]`, from 0.
            indices: `[indptr[B]]` or longer.
            last_page_len: `[B]`, tokens in the last page; unused for a request without pages, but from 0 to page_size
                there too.
            page_size: Tokens in a page.
            names: The names of the arrays.
            device: Where they lie. On a GPU only their types and shapes are checked.

        Raises:
            ContractTypeError, ContractError: an array is no integer array, or `page_size` no integer of 1 to 2^31 - 1.
            ShapeError: `indptr` is empty, `last_page_len` is not `[B]`, or an array is not 1-D.
            PageTableError: `indptr` does not start at 0, decreases or ends past `indices`; `last_page_len` is not in
                `[1, page_size]` for a request with pages, `[0, page_size]` for one without; a length exceeds int32.
        """
        offsets, entries, last = _indices(device, (indptr, indices, last_page_len), names)
        size = integer("page_size", page_size, 1, LARGEST_INDEX)
        if not device.readable:
            return DeviceTable.of_offsets(offsets, entries, last, size, names)
        num_pages, total = _counts(offsets, last, names), int(offsets[-1])
        if total > len(entries):
            b = int(np.argmax(offsets[1:] > len(entries)))
            raise PageTableError(
                f"{names[0]}: request {b} ends at {offsets[b + 1]}, {names[1]} has {len(entries)} entries"
            )
        _check_full_pages(num_pages, last, size, names)
        used = entries[:total]
        return Table(
            used,
            num_pages,
            _lengths(num_pages, last, size),
            size,
            _highest(used),
            names,
            offsets[:-1],
            (offsets, used, last),
            lambda arrays, names: Table.csr(arrays[0], arrays[1], arrays[2], size, names),
        )

    @staticmethod
    def csr_lengths(
        indptr: Any, last_page_len: Any, page_size: int, names: Names = CSR_NAMES, device: ArrayDevice = HOST
    ) -> Any:
        """The number of tokens `[B]` of each request of a CSR table; its page ids are not needed.

        Raises: as `csr`.
        """
        offsets, last = device.indices(indptr, names[0]), device.indices(last_page_len, names[2])
        size = integer("page_size", page_size, 1, LARGEST_INDEX)
        if not device.readable:
            check_count(offsets, last, (names[0], names[2]))
            return _lengths(offsets[1:] - offsets[:-1], last, size)
        num_pages = _counts(offsets, last, names)
        _check_full_pages(num_pages, last, size, names)
        return _lengths(num_pages, last, size)

    @staticmethod
    def of_lengths(indptr: Any, indices: Any, lengths: Any, page_size: int, names: Names = LENGTH_NAMES) -> Table:
        """The table of requests whose lengths `[B]` are given in tokens; pages past a length are left out.

        Raises:
            ContractTypeError, ShapeError, PageTableError: as `csr`; or a length is negative or needs more pages than
                the request has.
        """
        offsets, entries, tokens = _indices(HOST, (indptr, indices, lengths), names)
        size = integer("page_size", page_size, 1, LARGEST_INDEX)
        check_offsets(offsets, names[0], len(tokens))
        total = int(offsets[-1])
        if total > len(entries):
            raise ShapeError(
                f"{names[1]}: expected at least {total} entries, the end of {names[0]}, got {len(entries)}"
            )
        owned, needed = np.diff(offsets), _pages_of(tokens, size)
        wrong = (tokens < 0) | (needed > owned)
        if wrong.any():
            b = int(wrong.argmax())
            raise PageTableError(
                f"{names[2]}: request {b} has {tokens[b]} tokens, its {owned[b]} pages of {size} hold"
                f" {int(owned[b]) * size}"
            )
        _check_longest(needed, size, names)
        arrays = (offsets, entries[:total], tokens)
        used, starts = entries[:total], offsets[:-1]
        if (needed < owned).any():
            used = used[np.arange(total) - np.repeat(starts, owned) < np.repeat(needed, owned)]
            starts = offsets_of(needed)[:-1].astype(np.int32)
        return Table(
            used,
            needed,
            tokens,
            size,
            _highest(used),
            names,
            starts,
            arrays,
            lambda others, names: Table.of_lengths(others[0], others[1], others[2], size, names),
        )

    @staticmethod
    def of_tokens(indptr: Any, names: Names) -> Table:
        """Requests whose tokens lie side by side in one array: request b's are `indptr[b]` to `indptr[b + 1]`.

        A page id is the index of the page's first token, so pages overlap. A page is as long as the last request that
        has tokens: another request's last page then ends within the array too.

        Raises:
            ContractTypeError, ShapeError, PageTableError: as `as_indices` and `check_offsets`.
        """
        (offsets,) = _indices(HOST, (indptr,), names)
        check_offsets(offsets, names[0])
        lengths = np.diff(offsets)
        used = lengths[lengths > 0]
        size = int(used[-1]) if len(used) else 1
        num_pages = _pages_of(lengths, size)
        column = np.arange(num_pages.max(initial=0))
        pages = np.where(column < num_pages[:, None], offsets[:-1, None].astype(np.int64) + column * size, -1)
        highest = int(pages.max(initial=-1))
        return Table(
            pages.astype(np.int32), num_pages, lengths, size, highest, names, None, (offsets,), _of_other_tokens
        )

    @staticmethod
    def dense(
        page_table: Any, last_page_len: Any, page_size: int, names: Names = DENSE_NAMES, device: ArrayDevice = HOST
    ) -> Table:
        """The table of `page_table [B, n]`, whose rows end at their first -1 (uint32: 0xFFFFFFFF); a last page may have
        0 tokens, where the lengths are those before an append.

        Raises:
            ContractTypeError, ContractError, ShapeError, PageTableError: as `csr`, or a page follows a -1.
        """
        if not device.readable:
            return DeviceTable.of_rows(device, page_table, last_page_len, page_size, names)
        entries = dense_entries(page_table, names[1])
        used = entries != -1
        num_pages = used.sum(axis=1, dtype=np.int32)
        if not used.all():
            gaps = used & (np.arange(entries.shape[1]) >= num_pages[:, None])
            if gaps.any():
                b, slot = np.argwhere(gaps)[0]
                raise PageTableError(f"{names[1]}: request {b} has page {entries[b, slot]} in slot {slot}, after a -1")
        last = as_indices(last_page_len, names[2])
        size = integer("page_size", page_size, 1, LARGEST_INDEX)
        if len(last) != len(entries):
            raise ShapeError(f"{names[2]}: expected B = {len(entries)} entries, got {len(last)}")
        _check_last_pages(num_pages, last, size, names, np.int32(0))
        highest = _highest(entries[used])
        return Table(entries.copy(), num_pages, _lengths(num_pages, last, size), size, highest, names)

    @staticmethod
    def padded(block_tables: Any, lengths: Indices, page_size: int, names: Names = BLOCK_NAMES) -> Table:
        """The table of `block_tables [B, n]`: the first `ceil(lengths[b] / page_size)` entries of row b are request b's
        pages, the rest may be anything.

        Args:
            block_tables: Page ids of any kind on the host.
            lengths: `[B]` tokens, `checked_lengths`.
            page_size: Tokens in a page.
            names: The names of the arrays.

        Raises:
            ContractError: page_size is no integer of 1 to 2^31 - 1.
            ContractTypeError, ShapeError, PageTableError: as `block_entries`; or a request has more tokens than its
                entries hold.
        """
        entries = block_entries(block_tables, len(lengths), names[1])
        size = integer("page_size", page_size, 1, LARGEST_INDEX)
        num_pages = _pages_of(lengths, size)
        if num_pages.max(initial=0) > entries.shape[1]:
            b = int(num_pages.argmax())
            raise PageTableError(
                f"{names[2]}: request {b} has {lengths[b]} tokens, over its {entries.shape[1]} {names[1]} entries of"
                f" {size}"
            )
        highest = _highest(_used(entries, num_pages))
        return Table(entries.copy(), num_pages, lengths.copy(), size, highest, names)

    @staticmethod
    def of_one(length: int) -> Table:
        """One request, whose `length` tokens are page 0."""
        pages = int(length > 0)
        counts = np.array([pages], np.int32)
        return Table(np.zeros((1, 1), np.int32), counts, np.array([length], np.int32), max(length, 1), pages - 1)

    @staticmethod
    def joined(tables: Sequence[Table]) -> Table:
        """The requests of several tables of one page_size, table after table."""
        parts = tuple(table.owned() for table in tables)
        ends = offsets_of([len(part.entries) for part in parts]).tolist()
        entries = np.full((ends[-1], max(part.entries.shape[1] for part in parts)), -1, np.int32)
        for part, begin, end in zip(parts, ends, ends[1:], strict=False):
            entries[begin:end, : part.entries.shape[1]] = part.entries
        num_pages, lengths = (np.concatenate([getattr(part, of) for part in parts]) for of in ("num_pages", "lengths"))
        highest = max(part.highest_page for part in parts)
        return Table(entries, num_pages, lengths, parts[0].page_size, highest, parts=parts)

    def of_arrays(self, arrays: Sequence[Any], names: Names) -> Table:
        """A table made like this one of other arrays, in the order of `self.arrays`.

        Raises: as the method that made this one.
        """
        assert self.remake is not None
        return self.remake(arrays, names)

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.num_pages)

    @property
    def used(self) -> Indices:
        """The page ids that some request owns, request after request."""
        return _used(self.entries, self.num_pages) if self.starts is None else self.entries

    @property
    def lookup_table(self) -> npt.NDArray[np.uint32]:
        """The pages as the kernels take them, `[B, max_pages]`: row b begins with the pages of request b. Fresh memory
        unless the table owns its own.
        """
        if self.starts is None:
            return self.entries.view(np.uint32)
        counts, used = self.num_pages, self.used.view(np.uint32)
        widest = int(counts.max(initial=0))
        if widest * self.batch_size == used.size:
            return used.reshape(self.batch_size, widest).copy()
        table = np.full((self.batch_size, widest), NO_PAGE, np.uint32)
        if widest < _WIDE_ROW:
            table[np.arange(widest) < counts[:, None]] = used
        else:
            ends = offsets_of(counts).tolist()
            for row, begin, end in zip(table, ends, ends[1:], strict=False):
                row[: end - begin] = used[begin:end]
        return table

    def owned(self) -> Table:
        """The same table in its own memory, which changes of the caller's arrays do not reach."""
        if self.starts is None and not self.arrays:
            return self
        entries, lengths = self.lookup_table.view(np.int32), self.lengths.copy()
        return Table(entries, self.num_pages, lengths, self.page_size, self.highest_page, self.names)

    def check(self, num_pages: int) -> None:
        """Refuses a used page id outside a cache's `[0, num_pages)`.

        Raises:
            PageTableError: names the request, the slot in its list of pages, and the id.
        """
        if self.highest_page < num_pages:
            return
        for part in self.parts:
            part.check(num_pages)
        used, ends = self.used, np.cumsum(self.num_pages)
        at = int((used.view(np.uint32) >= num_pages).argmax())
        b = int(np.searchsorted(ends, at, side="right"))
        slot = at - (ends[b] - self.num_pages[b])
        raise PageTableError(
            f"{self.names[1]}: request {b}, slot {slot} holds page id {used[at]}, outside the cache's [0, {num_pages})"
        )

    def check_same(self, block_tables: Any, seq_lens: Any) -> None:
        """Refuses a padded table or lengths that differ from this table; None is not compared.

        Raises:
            ContractTypeError, ShapeError: it is no array `[B, n]`, or `[B]`, of integers on the host.
            PageTableError: another page or another length; the message names the request.
        """
        if seq_lens is not None:
            lengths = checked_lengths(seq_lens, self.batch_size)
            differs = lengths != self.lengths
            if differs.any():
                b = int(differs.argmax())
                raise PageTableError(
                    f"seq_lens: request {b}: expected {self.lengths[b]} tokens by its pages, got {lengths[b]}"
                )
        if block_tables is not None:
            entries, counts = block_entries(block_tables, self.batch_size), self.num_pages
            if entries.shape[1] < counts.max(initial=0):
                b = int(counts.argmax())
                raise ShapeError(
                    f"block_tables: {entries.shape[1]} entries a request, request {b} has {counts[b]} pages"
                )
            request, slot = np.nonzero(np.arange(entries.shape[1]) < counts[:, None])
            padded, used = entries[request, slot], self.used
            differs = padded != used
            if differs.any():
                i = int(differs.argmax())
                where = f"request {request[i]}, slot {slot[i]} holds page id {padded[i]}"
                raise PageTableError(f"block_tables: {where}, indices has {used[i]}")

    def slots(self, batch_indices: Any, positions: Any, num_pages: int | None = None) -> tuple[Any, Any]:
        """The page and the slot that each of N rows is written to, `[N]` int32 each; page -1 for a row of batch -1.

        Args:
            batch_indices: `[N]` int32, the request of each row.
            positions: `[N]` int32, its position.
            num_pages: The number of pages of the cache, where page ids are to be checked.

        Raises:
            PageTableError: as `check`; a row names no request, stands past its request's pages, or is the second for
                its slot.
        """
        if num_pages is not None:
            self.check(num_pages)
        pages, slots = self._places(batch_indices, positions)
        rows = np.arange(len(pages))
        if pages.min(initial=0) < 0:
            rows = np.flatnonzero(pages >= 0)
            if len(rows) != np.count_nonzero(batch_indices != -1):
                self._refuse_rows(batch_indices, positions)
        self._check_unique(pages, slots, rows, batch_indices)
        return pages, slots

    def last_tokens(self, offsets: Any, num_rows: int, names: tuple[str, str]) -> tuple[Any, Any]:
        """The request and the position of rows `[offsets[b], offsets[b + 1])`, the last tokens of request b.

        Raises:
            ShapeError, PageTableError: as `check_offsets`; or they do not end at `num_rows`, or a request has more rows
                than tokens. Messages call `offsets` and the lengths `names`.
        """
        check_offsets(offsets, names[0], self.batch_size)
        if offsets[-1] != num_rows:
            raise ShapeError(f"{names[0]}: expected an end at append_key's {num_rows} rows, got {offsets[-1]}")
        return checked_last_tokens(offsets, self.lengths, num_rows, names)

    def _places(self, batch: Any, positions: Any) -> tuple[Any, Any]:
        """`slots` without refusals, on the host or a GPU: page -1 and slot 0 for a row without a request in the table
        or with a token outside its pages.
        """
        xp, entries, starts = namespace(positions), self.entries, self.starts
        if starts is None:
            starts, entries = np.arange(len(entries)) * entries.shape[1], entries.reshape(-1)
        if not len(starts) or not len(entries):
            return xp.full_like(positions, -1), xp.zeros_like(positions)
        # Products with a mask cost less than `where` with a scalar.
        has_slot = (batch >= 0) & (batch < len(starts))
        request = batch * has_slot
        column = positions // self.page_size
        has_slot &= (column >= 0) & (column < self.num_pages[request])
        page = entries[(starts[request] + column) * has_slot]
        return xp.where(has_slot, page, -1), (positions - column * self.page_size) * has_slot

    def _refuse_rows(self, batch_indices: Indices, positions: Indices) -> None:
        """Raises the error of the first row that has no slot."""
        wrong = (batch_indices < -1) | (batch_indices >= self.batch_size)
        if wrong.any():
            row = int(wrong.argmax())
            raise PageTableError(
                f"batch_indices: row {row}: expected -1 to {self.batch_size - 1}, got {batch_indices[row]}"
            )
        busy = np.flatnonzero(batch_indices >= 0)
        num_pages, column = self.num_pages[batch_indices[busy]], positions[busy] // np.int32(self.page_size)
        i = int(((column < 0) | (column >= num_pages)).argmax())
        row = busy[i]
        raise PageTableError(
            f"positions: row {row} (request {batch_indices[row]}) has position {positions[row]},"
            f" outside the request's {num_pages[i]} pages of {self.page_size}"
        )

    def _check_unique(self, pages: Indices, slots: Indices, rows: np.ndarray, batch_indices: Indices) -> None:
        """Refuses two of `rows` that write the same slot of the same page."""
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


class DeviceTable(Table):
    """A table in a GPU's memory: int64 tensors of checked types and shapes, whose values are not read on the host."""

    @staticmethod
    def of_offsets(offsets: Any, entries: Any, last: Any, page_size: int, names: Names) -> DeviceTable:
        """As `Table.csr`. A request whose pages end outside `entries` has fewer pages, but all its tokens."""
        check_count(offsets, last, (names[0], names[2]))
        starts, num_pages = offsets[:-1], offsets[1:] - offsets[:-1]
        xp = namespace(starts)
        room = xp.where(starts >= 0, len(entries) - starts, 0)
        lengths = _lengths(num_pages, last, page_size)
        return DeviceTable(entries, xp.minimum(num_pages, room), lengths, page_size, names=names, starts=starts)

    @staticmethod
    def of_rows(device: ArrayDevice, page_table: Any, last_page_len: Any, page_size: int, names: Names) -> DeviceTable:
        """As `Table.dense`."""
        size = integer("page_size", page_size, 1, LARGEST_INDEX)
        entries, last = device.indices(page_table, names[1], 2), device.indices(last_page_len, names[2])
        if len(last) != len(entries):
            raise ShapeError(f"{names[2]}: expected B = {len(entries)} entries, got {len(last)}")
        xp = namespace(entries)
        starts = xp.arange(len(entries), dtype=xp.int64, device=entries.device) * entries.shape[1]
        num_pages = (entries != -1).cumprod(1).sum(1)
        lengths = _lengths(num_pages, last, size)
        return DeviceTable(entries.reshape(-1), num_pages, lengths, size, names=names, starts=starts)

    def slots(self, batch_indices: Any, positions: Any, num_pages: int | None = None) -> tuple[Any, Any]:
        """As `Table.slots`, but a row that it refuses has page -1, which an append skips: a row without a slot in the
        table, or whose page is not one of the cache's `num_pages`.
        """
        pages, slots = self._places(batch_indices, positions)
        is_valid = (pages >= 0) & (pages < num_pages)
        xp = namespace(positions)
        return xp.where(is_valid, pages, -1).int(), xp.where(is_valid, slots, 0).int()

    def last_tokens(self, offsets: Any, num_rows: int, names: tuple[str, str]) -> tuple[Any, Any]:
        """As `Table.last_tokens`; a row that it refuses has request -1.

        Raises:
            ShapeError: `offsets` is not `[B + 1]`.
        """
        check_count(offsets, self.num_pages, names)
        return last_tokens(offsets, self.lengths, num_rows)


def _indices(device: ArrayDevice, arrays: Sequence[Any], names: Names) -> list[Any]:
    """The index arrays of a table as views on its device.

    Raises:
        ContractTypeError, ShapeError, PageTableError: as `ArrayDevice.indices`; or one is on a GPU, its table is not.
    """
    if device is HOST:
        for array, name in zip(arrays, names, strict=True):
            devices.require_host(array, name, WHY_HOST)
    return [device.indices(array, name) for array, name in zip(arrays, names, strict=True)]


def _of_other_tokens(arrays: Sequence[Any], names: Names) -> Table:
    return Table.of_tokens(arrays[0], names)


def _pages_of(lengths: Indices, page_size: int) -> Indices:
    """The pages that tokens take, `[B]`."""
    return -(-lengths // np.int32(page_size))


def _counts(offsets: Indices, last_page_len: Indices, names: Names) -> Indices:
    """The pages of each request of `csr`, `[B]`."""
    check_offsets(offsets, names[0])
    num_pages = np.diff(offsets)
    if len(last_page_len) != len(num_pages):
        expected = f"B = {len(num_pages)} entries, as {names[0]} has {len(offsets)}"
        raise ShapeError(f"{names[2]}: expected {expected}, got {len(last_page_len)}")
    return num_pages


def _check_full_pages(num_pages: Indices, last_page_len: Indices, page_size: int, names: Names) -> None:
    """Refuses an empty last page, as `csr` does."""
    _check_last_pages(num_pages, last_page_len, page_size, names, (num_pages > 0).astype(np.int32))


def _lengths(num_pages: Any, last_page_len: Any, page_size: int) -> Any:
    """`[B]`, tokens of each request: 0 for one without pages."""
    return namespace(num_pages).where(num_pages > 0, (num_pages - 1) * page_size + last_page_len, 0)


def _used(entries: Indices, num_pages: Indices) -> Indices:
    """The first `num_pages[b]` entries of each row."""
    return entries[np.arange(entries.shape[1]) < num_pages[:, None]]


def _highest(used: Indices) -> int:
    """`Table.highest_page`."""
    return int(used.view(np.uint32).max()) if len(used) else -1


def _check_last_pages(num_pages: Indices, last: Indices, size: int, names: Names, least: Any) -> None:
    """Refuses a last page of other than `least` to `size` tokens, and requests that are too long."""
    wrong = (last < least) | (last > size)
    if wrong.any():
        b = int(wrong.argmax())
        low = np.broadcast_to(least, last.shape)[b]
        raise PageTableError(f"{names[2]}: request {b}: expected {low} to page_size = {size}, got {last[b]}")
    _check_longest(num_pages, size, names)


def _check_longest(num_pages: Indices, size: int, names: Names) -> None:
    """Refuses a request whose pages hold more tokens than int32 counts."""
    longest = int(num_pages.max(initial=0))
    if longest * size > LARGEST_INDEX:
        b = int(num_pages.argmax())
        raise PageTableError(f"{names[0]}: request {b} has {longest} pages of {size}, over 2^31 - 1 tokens")
