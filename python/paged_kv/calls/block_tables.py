"""Page tables with a row a request, padded, as FlashInfer's `block_tables` and `seq_lens` have them.

Letters in shapes: B requests, n the most pages of a request. Arrays lie on the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_kv.arguments import LARGEST_INDEX, integer
from paged_kv.arrays import devices
from paged_kv.arrays.host import as_indices, as_numpy
from paged_kv.calls.page_table import Indices, PageTable
from paged_kv.calls.rows import LookupTable
from paged_kv.errors import ContractError, PageTableError, ShapeError

_WHY_HOST = "the page table is checked on the host"


def check_same_table(table: PageTable, block_tables: Any, seq_lens: Any) -> None:
    """Refuses a dense table, or lengths, that say something else than a checked page table; None says nothing.

    Raises:
        ContractTypeError, ShapeError: it is no array `[B, n]`, or `[B]`, of integers on the host.
        PageTableError: another page or another length; the message names the request.
    """
    batch = table.batch_size
    if seq_lens is not None:
        lengths = _lengths(seq_lens, batch)
        differs = lengths != table.lengths
        if differs.any():
            b = int(differs.argmax())
            raise PageTableError(f"seq_lens: request {b} has {lengths[b]} tokens, {table.lengths[b]} by its pages")
    if block_tables is not None:
        entries = block_entries(block_tables, batch)
        counts = table.num_pages
        if entries.shape[1] < counts.max(initial=0):
            b = int(counts.argmax())
            raise ShapeError(f"block_tables: {entries.shape[1]} entries a request, request {b} has {counts[b]} pages")
        used = np.arange(entries.shape[1]) < counts[:, None]
        request, slot = np.nonzero(used)
        differs = entries[request, slot] != table.used_indices
        if differs.any():
            i = int(differs.argmax())
            found = f"request {request[i]}, slot {slot[i]} holds page id {entries[request[i], slot[i]]}"
            raise PageTableError(f"block_tables: {found}, indices has {table.used_indices[i]}")


def lookup_table_of(entries: Indices, lengths: Indices, page_size: int) -> LookupTable:
    """The pages of each request: the first `ceil(lengths[b] / page_size)` entries of row b; the rest may be anything.

    Args:
        entries: `[B, n]`, `block_entries`; copied.
        lengths: `[B]`, not negative.
        page_size: Tokens of a page.

    Raises:
        ContractError: page_size is over 2^31 - 1.
        PageTableError: a request has more tokens than its entries hold.
    """
    counts = -(-lengths // np.int32(integer("page_size", page_size, 1, LARGEST_INDEX)))
    if counts.max(initial=0) > entries.shape[1]:
        b = int(counts.argmax())
        raise PageTableError(
            f"seq_lens: request {b} has {lengths[b]} tokens, over its {entries.shape[1]} block_tables entries of"
            f" {page_size}"
        )
    pages = entries.view(np.uint32).copy()
    used = pages[np.arange(pages.shape[1]) < counts[:, None]]
    return LookupTable(pages, counts, page_size, int(used.max()) if len(used) else -1, "block_tables")


def block_entries(block_tables: Any, batch: int) -> Indices:
    """`block_tables` as int32 `[B, n]`; uint32's 0xFFFFFFFF, which pads, becomes -1.

    Raises:
        ContractTypeError, ShapeError, PageTableError: it is no array `[B, n]` of integers that fit in int32.
    """
    devices.require_host(block_tables, "block_tables", _WHY_HOST)
    entries = as_numpy(block_tables, "block_tables")
    if entries.dtype == np.uint32:
        entries = entries.view(np.int32)
    entries = as_indices(entries, "block_tables", 2)
    if len(entries) != batch:
        raise ShapeError(f"block_tables: shape {list(entries.shape)}, expected a row for each of {batch} requests")
    return entries


def one_table(block_tables: Any, lengths: Indices, page_size: int) -> tuple[Indices, int, int]:
    """The smaller page ids of K and V out of `block_tables [B, 2, n]`, as `block_entries`, and what is to be added to
    them for K and for V.

    Raises:
        ContractTypeError, ShapeError, PageTableError: as `block_entries`.
        ContractError: the difference is not the same for all pages that the `lengths` `[B]` use.
    """
    devices.require_host(block_tables, "block_tables", _WHY_HOST)
    both = as_numpy(block_tables, "block_tables")
    if both.ndim != 3 or both.shape[1] != 2:
        raise ShapeError(f"block_tables: shape {list(both.shape)}, expected [B, 2, n]: the pages of K and of V")
    of_k, of_v = (block_entries(both[:, i], len(lengths)) for i in (0, 1))
    used = np.arange(of_k.shape[1]) < -(-lengths[:, None] // np.int32(page_size))
    shifts = (of_v.astype(np.int64) - of_k)[used]
    if not len(shifts):
        return of_k, 0, 0
    if (shifts != shifts[0]).any():
        b = int(np.nonzero(used)[0][(shifts != shifts[0]).argmax()])
        raise ContractError(
            f"block_tables: request {b} has pages of V that are not {shifts[0]} after those of K, as the first ones"
        )
    shift = int(shifts[0])
    return (of_k, 0, shift) if shift >= 0 else (of_v, -shift, 0)


def checked_lengths(seq_lens: Any, batch: int, max_seq_len: int) -> Indices:
    """`seq_lens` as int32 `[B]`.

    Raises:
        ContractTypeError, ShapeError: it is no array `[B]` of integers on the host.
        PageTableError: a length is negative.
        ContractError: a length is over `max_seq_len`.
    """
    lengths = _lengths(seq_lens, batch)
    if lengths.max(initial=0) > max_seq_len:
        b = int(lengths.argmax())
        raise ContractError(f"max_seq_len is {max_seq_len}, request {b} has {lengths[b]} tokens (seq_lens)")
    return lengths


def _lengths(seq_lens: Any, batch: int) -> Indices:
    devices.require_host(seq_lens, "seq_lens", _WHY_HOST)
    lengths = as_indices(seq_lens, "seq_lens")
    if len(lengths) != batch:
        raise ShapeError(f"seq_lens: shape {list(lengths.shape)}, expected [B] = [{batch}]")
    if lengths.min(initial=0) < 0:
        b = int(lengths.argmin())
        raise PageTableError(f"seq_lens: request {b} has {lengths[b]} tokens")
    return lengths
