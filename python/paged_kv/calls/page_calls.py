"""The signatures of the functions of `paged_kv.page`, which documents them: one function each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_kv.arguments import LARGEST_INDEX, integer
from paged_kv.arrays import devices
from paged_kv.arrays.cache_storage import check_layout
from paged_kv.arrays.types import ArrayDevice
from paged_kv.calls.append import CsrArguments, WritableCache, csr_lengths, dense_table, slots_after_last
from paged_kv.calls.page_table import MAX_ROWS, check_count, check_offsets, checked_last_tokens
from paged_kv.calls.token_slots import last_tokens
from paged_kv.errors import ContractTypeError, PageTableError, ShapeError


@dataclass(frozen=True)
class Signature:
    """One of the signatures of a function: the names of its arguments in order, and what it calls."""

    call: Callable[..., Any]
    names: tuple[str, ...]
    takes_layout: bool = False
    """Whether `kv_layout` may follow."""

    def fits(self, num_positional: int, keywords: frozenset[str], has_layout: bool) -> bool:
        """Whether a call gives exactly these arguments; `num_positional` and `keywords` leave `kv_layout` out."""
        return (
            num_positional + len(keywords) == len(self.names)
            and keywords == frozenset(self.names[num_positional:])
            and has_layout <= self.takes_layout
        )


def choose(function: str, args: tuple[Any, ...], kwargs: dict[str, Any], signatures: tuple[Signature, ...]) -> Any:
    """Calls the signature that a call's arguments fit: by their number and names, else by the first one's rank.

    Raises:
        ContractTypeError: they fit none.
    """
    layout_by_position = bool(args) and isinstance(args[-1], str)
    has_layout = layout_by_position or "kv_layout" in kwargs
    keywords = frozenset(kwargs) - {"kv_layout"}
    fitting = [s for s in signatures if s.fits(len(args) - layout_by_position, keywords, has_layout)]
    if len(fitting) > 1:  # the second of two signatures has the dense page table
        device = devices.device_of(page_table=args[0])
        fitting = [fitting[device.view(args[0], "page_table").ndim == 2]]
    if not fitting:
        given = [f"{len(args)} positional", *kwargs]
        known = "; ".join(f"({', '.join([*s.names, *['kv_layout'] * s.takes_layout])})" for s in signatures)
        raise ContractTypeError(f"{function}: its arguments ({', '.join(given)}) fit none of its signatures: {known}")
    return fitting[0].call(*args, **kwargs)


def append_at(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
) -> None:
    check_layout(kv_layout)
    arguments = {"append_key": append_key, "append_value": append_value}
    cache = WritableCache.paged(paged_kv_cache, kv_layout, "paged_kv_cache", **arguments)
    rows = cache.rows(append_key, append_value, ("append_key", "append_value"))
    table = CsrArguments(kv_indices, kv_indptr, kv_last_page_len)
    cache.write(rows, table.slots_at(cache, batch_indices, positions, len(rows[0])))


def append_last(
    append_key: Any,
    append_value: Any,
    append_indptr: Any,
    kv_data: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
) -> None:
    check_layout(kv_layout)
    cache = WritableCache.paged(kv_data, kv_layout, "kv_data", append_key=append_key, append_value=append_value)
    rows = cache.rows(append_key, append_value, ("append_key", "append_value"))
    table = CsrArguments(kv_indices, kv_indptr, kv_last_page_len)
    cache.write(rows, table.slots_of_last(cache, append_indptr, len(rows[0])))


def append_dense(
    k: Any, v: Any, kv_cache: Any, page_table: Any, last_page_len: Any, page_size: int, kv_layout: str = "NHD"
) -> None:
    check_layout(kv_layout)
    cache = WritableCache.paged(kv_cache, kv_layout, "kv_cache", k=k, v=v)
    _append_one_each(k, v, cache, page_table, last_page_len, page_size)


def append_mla_at(
    append_ckv: Any,
    append_kpe: Any,
    batch_indices: Any,
    positions: Any,
    ckv_cache: Any,
    kpe_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
) -> None:
    cache = WritableCache.latent_pair(ckv_cache, kpe_cache, append_ckv=append_ckv, append_kpe=append_kpe)
    rows = cache.rows(append_ckv, append_kpe, ("append_ckv", "append_kpe"), num_axes=2)
    table = CsrArguments(kv_indices, kv_indptr, kv_last_page_len)
    cache.write(rows, table.slots_at(cache, batch_indices, positions, len(rows[0])))


def append_mla_dense(k: Any, v: Any, mla_kv_cache: Any, page_table: Any, last_page_len: Any, page_size: int) -> None:
    cache, num_axes = WritableCache.latent(mla_kv_cache, k, v)
    _append_one_each(k, v, cache, page_table, last_page_len, page_size, num_axes)


def _append_one_each(
    k: Any, v: Any, cache: WritableCache, page_table: Any, last_page_len: Any, page_size: int, num_axes: int = 3
) -> None:
    """One row a request, to the slot after its last token."""
    size = integer("page_size", page_size, 1, LARGEST_INDEX)
    if size != cache.page_size:
        raise ShapeError(f"page_size is {size}, {cache.name} has pages of {cache.page_size}")
    rows = cache.rows(k, v, ("k", "v"), num_axes)
    cache.write(rows, slots_after_last(cache, page_table, last_page_len, len(rows[0])))


def positions_of_rows(append_indptr: Any, seq_lens: Any, nnz: int) -> tuple[Any, Any]:
    nnz, names = integer("nnz", nnz, 0, MAX_ROWS), ("append_indptr", "seq_lens")
    device = devices.device_of(append_indptr=append_indptr, seq_lens=seq_lens)
    offsets, lengths = device.indices(append_indptr, names[0]), device.indices(seq_lens, names[1])
    if device.readable:
        check_offsets(offsets, names[0], len(lengths))
        if nnz < offsets[-1]:
            raise PageTableError(f"append_indptr ends at {offsets[-1]}, past nnz = {nnz}")
        batch, positions = checked_last_tokens(offsets, lengths, nnz, names)
    else:
        check_count(offsets, lengths, names)
        batch, positions = last_tokens(offsets, lengths, nnz)
    return like_index(device, append_indptr, batch), like_index(device, append_indptr, positions)


def positions_dense(page_table: Any, last_page_len: Any, page_size: int) -> tuple[Any, Any]:
    device = devices.device_of(page_table=page_table, last_page_len=last_page_len)
    if not device.readable:
        raise devices.unreadable("page_table", "how many tokens it holds would have to be read back")
    lengths = dense_table(device, page_table, last_page_len, page_size).lengths
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if offsets[-1] > MAX_ROWS:
        raise PageTableError(f"page_table holds {offsets[-1]} tokens, over {MAX_ROWS}")
    batch, positions = last_tokens(offsets.astype(np.int32), lengths, int(offsets[-1]))
    return like_index(device, page_table, batch), like_index(device, page_table, positions)


def lengths_csr(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> Any:
    device = devices.device_of(kv_indptr=kv_indptr, kv_last_page_len=kv_last_page_len)
    return like_index(device, kv_indptr, csr_lengths(device, kv_indptr, kv_last_page_len, page_size))


def lengths_dense(page_table: Any, last_page_len: Any, page_size: int) -> Any:
    device = devices.device_of(page_table=page_table, last_page_len=last_page_len)
    return like_index(device, page_table, dense_table(device, page_table, last_page_len, page_size).lengths)


def like_index(device: ArrayDevice, array: Any, indices: Any) -> Any:
    """Indices as an array of the kind of `array`, int64 where that is int64, else int32."""
    wide = device.dtype(device.view(array, "array")) == np.int64
    return device.like(array, device.astype(indices, np.int64 if wide else np.int32))


_CSR = ("kv_indices", "kv_indptr", "kv_last_page_len")
_DENSE = ("page_table", "last_page_len", "page_size")

APPEND = (
    Signature(
        append_at,
        ("append_key", "append_value", "batch_indices", "positions", "paged_kv_cache", *_CSR),
        takes_layout=True,
    ),
    Signature(append_last, ("append_key", "append_value", "append_indptr", "kv_data", *_CSR), takes_layout=True),
    Signature(append_dense, ("k", "v", "kv_cache", *_DENSE), takes_layout=True),
)
APPEND_MLA = (
    Signature(
        append_mla_at, ("append_ckv", "append_kpe", "batch_indices", "positions", "ckv_cache", "kpe_cache", *_CSR)
    ),
    Signature(append_mla_dense, ("k", "v", "mla_kv_cache", *_DENSE)),
)
BATCH_INDICES_POSITIONS = (
    Signature(positions_of_rows, ("append_indptr", "seq_lens", "nnz")),
    Signature(positions_dense, _DENSE),
)
SEQ_LENS = (Signature(lengths_csr, ("kv_indptr", "kv_last_page_len", "page_size")), Signature(lengths_dense, _DENSE))
