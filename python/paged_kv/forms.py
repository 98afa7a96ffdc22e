"""The forms of the functions of `paged_kv.page`, which documents them: one function each."""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_kv import gpu
from paged_kv.arrays import as_indices, as_numpy, check_storage, like, overlap, paged_views
from paged_kv.attend import check_layout
from paged_kv.checks import KV_NAMES, Indices, PageTable, check_offsets, integer
from paged_kv.errors import ContractError, ContractTypeError, PageTableError, ShapeError
from paged_kv.moves import write_rows, write_rows_on


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
    place = gpu.place_of(append_key=append_key, append_value=append_value, paged_kv_cache=paged_kv_cache)
    if place is not None:
        table_arrays = (kv_indptr, kv_indices, kv_last_page_len)
        arrays = (append_key, append_value, batch_indices, positions, paged_kv_cache)
        _append_on_gpu(place, *arrays, table_arrays, kv_layout)
        return
    k_view, v_view = paged_views(paged_kv_cache, kv_layout, writable=True)
    table = PageTable.of(kv_indptr, kv_indices, kv_last_page_len, k_view.shape[1], KV_NAMES)
    rows = check_rows(append_key, append_value, k_view, v_view, ("append_key", "append_value"))
    _write(rows, k_view, v_view, table, *_row_indices(batch_indices, positions, len(rows[0])))


def _append_on_gpu(
    place: gpu.Place,
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    table_arrays: tuple[Any, Any, Any],
    kv_layout: str,
) -> None:
    """Form 1 on a GPU: with indices on the host as ever, or all of them on the GPU, where they stay unread."""
    check_layout(kv_layout)
    k_view, v_view = gpu.paged_views(paged_kv_cache, kv_layout)
    rows = []
    for name, array, view in (("append_key", append_key, k_view), ("append_value", append_value, v_view)):
        tensor = gpu.to_tensor(array, name)
        if tensor.ndim != 3 or tensor.shape[1:] != view.shape[2:]:
            wanted = ", ".join(map(str, ("N", *view.shape[2:])))
            raise ShapeError(f"{name} must be [{wanted}] for this cache, its shape is {tuple(tensor.shape)}")
        if tensor.dtype != view.dtype:
            raise ContractTypeError(f"{name}: dtype {tensor.dtype}, the cache's is {view.dtype}")
        rows.append(tensor)
    if len(rows[1]) != len(rows[0]):
        raise ShapeError(f"append_value has {len(rows[1])} rows, append_key has {len(rows[0])}")
    names = ("batch_indices", "positions", *KV_NAMES)
    indices = (batch_indices, positions, *table_arrays)
    if gpu.place_of(**dict(zip(names, indices, strict=True))) is None:
        table = PageTable.of(*table_arrays, k_view.shape[1], KV_NAMES)
        table.check_pages(len(k_view))
        pages, slots = table.slots(*_row_indices(batch_indices, positions, len(rows[0])))
    else:
        tensors = [gpu.to_tensor(array, name) for array, name in zip(indices, names, strict=True)]
        for tensor, name in zip(tensors, names, strict=True):
            if tensor.ndim != 1 or gpu.numpy_dtype(tensor, name).kind not in "iu":
                raise ContractTypeError(f"{name} must be one-dimensional integers, not {tensor.dtype}{[*tensor.shape]}")
        for tensor, name in zip(tensors[:2], names, strict=False):
            if len(tensor) != len(rows[0]):
                raise ShapeError(f"{name} has {len(tensor)} entries, there are {len(rows[0])} rows to append")
        batch, at, indptr, page_ids, _ = tensors
        pages, slots = gpu.row_slots((indptr, page_ids), batch, at, k_view.shape[1], len(k_view))
    write_rows_on(place, rows[0], rows[1], k_view, v_view, pages, slots)


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
    k_view, v_view = paged_views(kv_data, kv_layout, "kv_data", writable=True)
    table = PageTable.of(kv_indptr, kv_indices, kv_last_page_len, k_view.shape[1], KV_NAMES)
    rows = check_rows(append_key, append_value, k_view, v_view, ("append_key", "append_value"))
    offsets = as_indices(append_indptr, "append_indptr")
    check_offsets(offsets, "append_indptr", table.batch_size)
    if offsets[-1] != len(rows[0]):
        raise ShapeError(f"append_key has {len(rows[0])} rows, append_indptr ends at {offsets[-1]}")
    _write(rows, k_view, v_view, table, *_last_tokens(offsets, table.lengths, len(rows[0]), "kv_last_page_len"))


def append_dense(
    k: Any, v: Any, kv_cache: Any, page_table: Any, last_page_len: Any, page_size: int, kv_layout: str = "NHD"
) -> None:
    k_view, v_view = paged_views(kv_cache, kv_layout, "kv_cache", writable=True)
    _append_one_each(k, v, k_view, v_view, page_table, last_page_len, page_size, "kv_cache")


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
    ckv, kpe = as_numpy(ckv_cache, "ckv_cache"), as_numpy(kpe_cache, "kpe_cache")
    check_storage(ckv, "ckv_cache", 3, writable=True)
    check_storage(kpe, "kpe_cache", 3, writable=True)
    if kpe.shape[:2] != ckv.shape[:2]:
        raise ShapeError(f"kpe_cache: [pages, page_size] is {kpe.shape[:2]}, ckv_cache's is {ckv.shape[:2]}")
    if kpe.dtype != ckv.dtype:
        raise ContractTypeError(f"kpe_cache: dtype {kpe.dtype} differs from ckv_cache's {ckv.dtype}")
    if overlap(ckv, kpe):
        raise ContractError("kpe_cache shares memory with ckv_cache: they would overwrite each other")
    table = PageTable.of(kv_indptr, kv_indices, kv_last_page_len, ckv.shape[1], KV_NAMES)
    k_view, v_view = ckv[:, :, None], kpe[:, :, None]  # one head
    rows = check_rows(append_ckv, append_kpe, k_view, v_view, ("append_ckv", "append_kpe"), num_axes=2)
    _write(rows, k_view, v_view, table, *_row_indices(batch_indices, positions, len(rows[0])))


def append_mla_dense(k: Any, v: Any, mla_kv_cache: Any, page_table: Any, last_page_len: Any, page_size: int) -> None:
    cache, width = as_numpy(mla_kv_cache, "mla_kv_cache"), as_numpy(k, "k").shape[-1:]
    if cache.ndim not in (3, 4):
        raise ShapeError(f"mla_kv_cache must have 3 or 4 dimensions, its shape is {cache.shape}")
    check_storage(cache, "mla_kv_cache", cache.ndim, writable=True)
    num_axes = cache.ndim - 1
    if num_axes == 2:
        cache = cache[:, :, None]  # one head
    split = width[0] if width else 0
    _append_one_each(
        k, v, cache[..., :split], cache[..., split:], page_table, last_page_len, page_size, "mla_kv_cache", num_axes
    )


def _append_one_each(
    k: Any,
    v: Any,
    k_view: np.ndarray,
    v_view: np.ndarray,
    page_table: Any,
    last_page_len: Any,
    page_size: int,
    cache_name: str,
    num_axes: int = 3,
) -> None:
    """One row a request, to the slot after its last token."""
    table = PageTable.from_dense(page_table, last_page_len, page_size)
    if page_size != k_view.shape[1]:
        raise ShapeError(f"page_size is {page_size}, {cache_name} has pages of {k_view.shape[1]}")
    rows = check_rows(k, v, k_view, v_view, ("k", "v"), num_axes)
    if len(rows[0]) != table.batch_size:
        raise ShapeError(f"k has {len(rows[0])} rows, page_table has {table.batch_size} requests")
    _write(rows, k_view, v_view, table, np.arange(table.batch_size, dtype=np.int32), table.lengths)


def _write(
    rows: tuple[np.ndarray, np.ndarray],
    k_view: np.ndarray,
    v_view: np.ndarray,
    table: PageTable,
    batch_indices: Indices,
    positions: Indices,
) -> None:
    """The last checks, then the write."""
    table.check_pages(len(k_view))
    write_rows(*rows, k_view, v_view, *table.slots(batch_indices, positions))


def _row_indices(batch_indices: Any, positions: Any, num_rows: int) -> tuple[Indices, Indices]:
    batch, at = as_indices(batch_indices, "batch_indices"), as_indices(positions, "positions")
    for indices, name in ((batch, "batch_indices"), (at, "positions")):
        if len(indices) != num_rows:
            raise ShapeError(f"{name} has {len(indices)} entries, there are {num_rows} rows to append")
    return batch, at


def check_rows(
    k: Any, v: Any, k_view: np.ndarray, v_view: np.ndarray, names: tuple[str, str], num_axes: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    """New rows `[N, Hk, D]`, as a cache of views `[page, slot, Hk, D]` takes them; `[N, D]`, one head, for 2 axes."""
    checked = []
    for array, view, name in zip((k, v), (k_view, v_view), names, strict=True):
        rows = as_numpy(array, name)
        row_shape = view.shape[2:] if num_axes == 3 else view.shape[3:]
        if rows.ndim != num_axes or rows.shape[1:] != row_shape:
            wanted = ", ".join(map(str, ("N", *row_shape)))
            raise ShapeError(f"{name} must be [{wanted}] for this cache, its shape is {rows.shape}")
        if rows.dtype != view.dtype:
            raise ContractTypeError(f"{name}: dtype {rows.dtype}, the cache's is {view.dtype}")
        checked.append(rows if num_axes == 3 else rows[:, None])
    if len(checked[1]) != len(checked[0]):
        raise ShapeError(f"{names[1]} has {len(checked[1])} rows, {names[0]} has {len(checked[0])}")
    return checked[0], checked[1]


def positions_of_rows(append_indptr: Any, seq_lens: Any, nnz: int) -> tuple[Any, Any]:
    offsets, lengths = as_indices(append_indptr, "append_indptr"), as_indices(seq_lens, "seq_lens")
    check_offsets(offsets, "append_indptr", len(lengths))
    nnz = integer("nnz", nnz, 0)
    if nnz < offsets[-1]:
        raise PageTableError(f"append_indptr ends at {offsets[-1]}, past nnz = {nnz}")
    batch, positions = _last_tokens(offsets, lengths, nnz, "seq_lens")
    return like_index(append_indptr, batch), like_index(append_indptr, positions)


def positions_dense(page_table: Any, last_page_len: Any, page_size: int) -> tuple[Any, Any]:
    lengths = PageTable.from_dense(page_table, last_page_len, page_size).lengths
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if offsets[-1] >= 2**31:
        raise PageTableError(f"page_table holds {offsets[-1]} tokens, over 2^31 - 1")
    batch, positions = _last_tokens(offsets.astype(np.int32), lengths, int(offsets[-1]), "page_table")
    return like_index(page_table, batch), like_index(page_table, positions)


def lengths_csr(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> Any:
    offsets = as_indices(kv_indptr, "kv_indptr")
    check_offsets(offsets, "kv_indptr")
    unknown = np.broadcast_to(np.int32(0), (int(offsets[-1]),))  # the ids of the pages do not matter here
    table = PageTable(offsets, unknown, as_indices(kv_last_page_len, "kv_last_page_len"), page_size, KV_NAMES)
    table.check()
    return like_index(kv_indptr, table.lengths)


def lengths_dense(page_table: Any, last_page_len: Any, page_size: int) -> Any:
    return like_index(page_table, PageTable.from_dense(page_table, last_page_len, page_size).lengths)


def like_index(array: Any, indices: Indices) -> Any:
    """Indices as an array of the kind of `array`, int64 where that is int64, else int32."""
    wide = as_numpy(array, "array").dtype == np.int64
    return like(array, indices.astype(np.int64) if wide else indices)


def _last_tokens(offsets: Indices, lengths: Indices, num_rows: int, lengths_name: str) -> tuple[Indices, Indices]:
    """The request and the position of rows that are the last tokens of their requests; -1 and 0 for padding."""
    counts = np.diff(offsets)
    short = counts > lengths
    if short.any():
        b = int(short.argmax())
        raise PageTableError(f"append_indptr: request {b} appends {counts[b]} tokens, {lengths_name} says {lengths[b]}")
    batch = np.full(num_rows, -1, np.int32)
    positions = np.zeros(num_rows, np.int32)
    end = int(offsets[-1])
    batch[:end] = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    positions[:end] = np.arange(end, dtype=np.int32) + np.repeat(lengths - offsets[1:], counts)
    return batch, positions
