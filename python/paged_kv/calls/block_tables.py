"""The arguments `block_tables` and `seq_lens` of FlashInfer: a dense page table, padded, and tokens of each request.

Letters in shapes: B requests, n the most pages of a request. Arrays lie on the host.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from paged_kv.arguments import LARGEST_INDEX
from paged_kv.arrays import devices
from paged_kv.arrays.host import as_indices, as_numpy
from paged_kv.arrays.pages import Pages
from paged_kv.calls.offsets import Indices
from paged_kv.errors import ContractError, PageTableError, ShapeError

WHY_HOST = "the page table is checked on the host"


def dense_entries(table: Any, name: str) -> Indices:
    """The page ids `[B, n]` as int32; uint32's 0xFFFFFFFF, which pads, becomes -1.

    Raises:
        ContractTypeError, ShapeError, PageTableError: it is no array `[B, n]` of integers that fit in int32.
    """
    entries = as_numpy(table, name)
    return as_indices(entries.view(np.int32) if entries.dtype == np.uint32 else entries, name, 2)


def block_entries(block_tables: Any, batch: int, name: str = "block_tables") -> Indices:
    """`dense_entries` of B = `batch` requests on the host.

    Raises:
        ContractTypeError, ShapeError, PageTableError: as said.
    """
    devices.require_host(block_tables, name, WHY_HOST)
    entries = dense_entries(block_tables, name)
    if len(entries) != batch:
        raise ShapeError(f"{name}: expected a row for each of {batch} requests, got shape {list(entries.shape)}")
    return entries


def one_table(block_tables: Any, lengths: Indices, pages: Pages) -> tuple[Indices, Pages]:
    """The smaller page ids of K and V out of `block_tables [B, 2, n]`, as `block_entries`, and the pages of K and of V
    under these ids.

    Raises:
        ContractTypeError, ShapeError, PageTableError: as `block_entries`.
        ContractError: the difference is not the same for all pages that the `lengths` `[B]` use.
    """
    devices.require_host(block_tables, "block_tables", WHY_HOST)
    both = as_numpy(block_tables, "block_tables")
    if both.ndim != 3 or both.shape[1] != 2:
        raise ShapeError(f"block_tables: expected [B, 2, n], the pages of K and of V, got shape {list(both.shape)}")
    of_k, of_v = (block_entries(both[:, i], len(lengths)) for i in (0, 1))
    used = np.arange(of_k.shape[1]) < -(-lengths[:, None] // np.int32(pages.page_size))
    shifts = (of_v.astype(np.int64) - of_k)[used]
    if not len(shifts):
        return of_k, pages
    if (shifts != shifts[0]).any():
        b = int(np.nonzero(used)[0][(shifts != shifts[0]).argmax()])
        raise ContractError(
            f"block_tables: request {b} has pages of V that are not {shifts[0]} after those of K, as the first ones"
        )
    shift, most = int(shifts[0]), pages.num_pages
    if shift >= 0:
        return of_k, replace(pages, k=pages.k[: most - shift], v=pages.v[shift:])
    return of_v, replace(pages, k=pages.k[-shift:], v=pages.v[: most + shift])


def checked_lengths(
    seq_lens: Any,
    batch: int | None = None,
    max_seq_len: int = LARGEST_INDEX,
    name: str = "seq_lens",
    most_name: str = "max_seq_len",
) -> Indices:
    """`seq_lens` as int32 `[B]`, of `batch` requests where that is not None.

    Raises:
        ContractTypeError, ShapeError: it is no array `[B]` of integers on the host.
        PageTableError: a length is negative.
        ContractError: a length is over `max_seq_len`, which messages call `most_name`.
    """
    devices.require_host(seq_lens, name, WHY_HOST)
    lengths = as_indices(seq_lens, name)
    if batch is not None and len(lengths) != batch:
        raise ShapeError(f"{name}: expected shape [B] = [{batch}], got {list(lengths.shape)}")
    if lengths.min(initial=0) < 0:
        b = int(lengths.argmin())
        raise PageTableError(f"{name}: request {b}: expected at least 0 tokens, got {lengths[b]}")
    if lengths.max(initial=0) > max_seq_len:
        b = int(lengths.argmax())
        raise ContractError(
            f"{most_name}: expected at least {lengths[b]}, the tokens of request {b} ({name}), got {max_seq_len}"
        )
    return lengths
