"""The forms of the functions of `paged_kv.page`, which documents them: one function each, on the host and on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_kv.arguments import integer
from paged_kv.arrays import devices as places
from paged_kv.arrays import gpu
from paged_kv.arrays.host import as_indices, as_numpy, like
from paged_kv.calls import gpu_page_table as gpu_tables
from paged_kv.calls.append_slots import CsrTable, Storage, check_count, last_tokens, slots_after_last
from paged_kv.calls.page_table import KV_NAMES, Indices, PageTable, check_offsets
from paged_kv.calls.plan import check_layout
from paged_kv.errors import ContractTypeError, PageTableError, ShapeError


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
    cache = (paged_kv_cache, kv_layout, "paged_kv_cache")
    storage = Storage.paged(*cache, append_key=append_key, append_value=append_value)
    rows = storage.rows(append_key, append_value, ("append_key", "append_value"))
    table = CsrTable(kv_indices, kv_indptr, kv_last_page_len)
    storage.write(rows, table.slots_at(storage, batch_indices, positions, len(rows[0])))


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
    storage = Storage.paged(kv_data, kv_layout, "kv_data", append_key=append_key, append_value=append_value)
    rows = storage.rows(append_key, append_value, ("append_key", "append_value"))
    table = CsrTable(kv_indices, kv_indptr, kv_last_page_len)
    storage.write(rows, table.slots_of_last(storage, append_indptr, len(rows[0])))


def append_dense(
    k: Any, v: Any, kv_cache: Any, page_table: Any, last_page_len: Any, page_size: int, kv_layout: str = "NHD"
) -> None:
    check_layout(kv_layout)
    storage = Storage.paged(kv_cache, kv_layout, "kv_cache", k=k, v=v)
    _append_one_each(k, v, storage, page_table, last_page_len, page_size)


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
    storage = Storage.latent_pair(ckv_cache, kpe_cache, append_ckv=append_ckv, append_kpe=append_kpe)
    rows = storage.rows(append_ckv, append_kpe, ("append_ckv", "append_kpe"), num_axes=2)
    table = CsrTable(kv_indices, kv_indptr, kv_last_page_len)
    storage.write(rows, table.slots_at(storage, batch_indices, positions, len(rows[0])))


def append_mla_dense(k: Any, v: Any, mla_kv_cache: Any, page_table: Any, last_page_len: Any, page_size: int) -> None:
    storage, num_axes = Storage.latent(mla_kv_cache, k, v)
    _append_one_each(k, v, storage, page_table, last_page_len, page_size, num_axes)


def _append_one_each(
    k: Any, v: Any, storage: Storage, page_table: Any, last_page_len: Any, page_size: int, num_axes: int = 3
) -> None:
    """One row a request, to the slot after its last token."""
    size = integer("page_size", page_size, 1)
    if size != storage.page_size:
        raise ShapeError(f"page_size is {size}, {storage.name} has pages of {storage.page_size}")
    rows = storage.rows(k, v, ("k", "v"), num_axes)
    storage.write(rows, slots_after_last(storage, page_table, last_page_len, len(rows[0])))


def positions_of_rows(append_indptr: Any, seq_lens: Any, nnz: int) -> tuple[Any, Any]:
    nnz = integer("nnz", nnz, 0)
    place = places.place_of(append_indptr=append_indptr, seq_lens=seq_lens)
    if place is not None:
        device_offsets = gpu_tables.indices_of(append_indptr, "append_indptr")
        device_lengths = gpu_tables.indices_of(seq_lens, "seq_lens")
        check_count(device_offsets, device_lengths, ("append_indptr", "seq_lens"))
        found = gpu_tables.last_tokens(device_offsets, device_lengths, nnz)
        return _like_index_on(place, append_indptr, found[0]), _like_index_on(place, append_indptr, found[1])
    offsets, lengths = as_indices(append_indptr, "append_indptr"), as_indices(seq_lens, "seq_lens")
    check_offsets(offsets, "append_indptr", len(lengths))
    if nnz < offsets[-1]:
        raise PageTableError(f"append_indptr ends at {offsets[-1]}, past nnz = {nnz}")
    batch, positions = last_tokens(offsets, lengths, nnz, "seq_lens")
    return like_index(append_indptr, batch), like_index(append_indptr, positions)


def positions_dense(page_table: Any, last_page_len: Any, page_size: int) -> tuple[Any, Any]:
    if places.place_of(page_table=page_table, last_page_len=last_page_len) is not None:
        raise ContractTypeError(
            "page_table is on a GPU: how many tokens it holds would have to be read back (page_table.cpu())"
        )
    lengths = PageTable.from_dense(page_table, last_page_len, page_size).lengths
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if offsets[-1] >= 2**31:
        raise PageTableError(f"page_table holds {offsets[-1]} tokens, over 2^31 - 1")
    batch, positions = last_tokens(offsets.astype(np.int32), lengths, int(offsets[-1]), "page_table")
    return like_index(page_table, batch), like_index(page_table, positions)


def lengths_csr(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> Any:
    place = places.place_of(kv_indptr=kv_indptr, kv_last_page_len=kv_last_page_len)
    if place is not None:
        size = integer("page_size", page_size, 1)
        indptr = gpu_tables.indices_of(kv_indptr, "kv_indptr")
        last = gpu_tables.indices_of(kv_last_page_len, "kv_last_page_len")
        check_count(indptr, last, ("kv_indptr", "kv_last_page_len"))
        return _like_index_on(place, kv_indptr, gpu_tables.csr_lengths(indptr, last, size))
    offsets = as_indices(kv_indptr, "kv_indptr")
    check_offsets(offsets, "kv_indptr")
    unknown = np.broadcast_to(np.int32(0), (int(offsets[-1]),))  # the ids of the pages do not matter here
    table = PageTable(offsets, unknown, as_indices(kv_last_page_len, "kv_last_page_len"), page_size, KV_NAMES)
    table.check()
    return like_index(kv_indptr, table.lengths)


def lengths_dense(page_table: Any, last_page_len: Any, page_size: int) -> Any:
    place = places.place_of(page_table=page_table, last_page_len=last_page_len)
    if place is not None:
        size = integer("page_size", page_size, 1)
        table = gpu_tables.indices_of(page_table, "page_table", 2)
        last = gpu_tables.indices_of(last_page_len, "last_page_len")
        if len(last) != len(table):
            raise ShapeError(f"last_page_len has {len(last)} entries, page_table has {len(table)} rows")
        return _like_index_on(place, page_table, gpu_tables.dense_lengths(table, last, size))
    return like_index(page_table, PageTable.from_dense(page_table, last_page_len, page_size).lengths)


def like_index(array: Any, indices: Indices) -> Any:
    """Indices as an array of the kind of `array`, int64 where that is int64, else int32."""
    wide = as_numpy(array, "array").dtype == np.int64
    return like(array, indices.astype(np.int64) if wide else indices)


def _like_index_on(place: places.Place, array: Any, indices: Any) -> Any:
    """`like_index` on a GPU."""
    wide = gpu.numpy_dtype(gpu.to_tensor(array, "array"), "array") == np.int64
    return gpu.like_of(place, array, indices if wide else indices.int())
