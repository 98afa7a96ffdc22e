"""Rows of K and V into pages and out of them, whatever their dtype: the append and gather ops move bits.

What is passed here was checked (`paged_kv.calls.page_table`); NumPy views go in and come out (`paged_kv.arrays.host`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from max.driver import Buffer
from max.dtype import DType

from paged_kv.arrays import devices as places
from paged_kv.arrays import gpu
from paged_kv.arrays.host import cache_operands, to_buffer, to_numpy
from paged_kv.calls.page_table import Indices
from paged_kv.runtime.session import default_runtime
from paged_kv.runtime.variants import Variant

_BITS = {1: DType.uint8, 2: DType.uint16, 4: DType.uint32}


def write_rows(
    k_rows: np.ndarray,
    v_rows: np.ndarray,
    k_view: np.ndarray,
    v_view: np.ndarray,
    pages: Indices,
    slots: Indices,
) -> None:
    """Writes row i of `[N, Hk, D]` to slot `slots[i]` of page `pages[i]`, in place; a row of page -1 is skipped.

    `k_view` and `v_view` are `[page, slot, Hk, D]`, in the dtype of the rows; D of K and of V may differ.
    """
    if not k_rows.size + v_rows.size or not len(pages):
        return
    if k_rows.shape != v_rows.shape:  # the op moves K and V of one shape: each goes as both, its bits written twice
        write_rows(k_rows, k_rows, k_view, k_view, pages, slots)
        write_rows(v_rows, v_rows, v_view, v_view, pages, slots)
        return
    k_view, v_view = _bits(k_view), _bits(v_view)
    k_rows, v_rows = (_separate(_bits(rows), (k_view, v_view)) for rows in (k_rows, v_rows))
    # Each row is a request of one page, so that the cost does not depend on the length of anyone's page table.
    batch = np.where(pages < 0, np.int32(-1), np.arange(len(pages), dtype=np.int32))
    default_runtime().execute(
        _variant("append", k_view),
        to_buffer(k_rows),
        to_buffer(v_rows),
        to_buffer(batch),
        to_buffer(slots),
        *_storage(k_view, v_view, pages.view(np.uint32)[:, None]),
    )


def read_rows(
    k_view: np.ndarray, v_view: np.ndarray, lookup_table: npt.NDArray[np.uint32], lengths: Indices
) -> tuple[np.ndarray, np.ndarray]:
    """The first `lengths[b]` tokens of every request, K and V `[sum(lengths), Hk, D]` in fresh memory.

    `lookup_table` is `[B, max_pages]`.
    """
    dtype, shape = k_view.dtype, (int(lengths.sum()), *k_view.shape[2:])
    if 0 in shape:
        return np.empty(shape, dtype), np.empty(shape, dtype)
    k_view, v_view = _bits(k_view), _bits(v_view)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    like = np.empty((shape[0], *k_view.shape[2:]), np.int8)
    k, v = default_runtime().execute(
        _variant("gather", k_view), to_buffer(indptr), to_buffer(like), *_storage(k_view, v_view, lookup_table)
    )
    return to_numpy(k).view(dtype), to_numpy(v).view(dtype)


def write_rows_on(
    place: places.Place, k_rows: Any, v_rows: Any, k_view: Any, v_view: Any, pages: Any, slots: Any
) -> None:
    """`write_rows` on a GPU, over torch tensors there; `pages` and `slots` are host arrays, or int32 tensors there.

    Enqueued in the order of torch's current stream, not waited for.
    """
    if not k_rows.numel() + v_rows.numel() or not len(pages):
        return
    if k_rows.shape != v_rows.shape:  # as `write_rows` does
        for rows, storage in ((k_rows, k_view), (v_rows, v_view)):
            write_rows_on(place, rows, rows, storage, storage, pages, slots)
        return
    torch = import_module("torch")
    k_view, v_view = _bits_on(k_view), _bits_on(v_view)
    rows = [_bits_on(tensor.contiguous()) for tensor in (k_rows, v_rows)]
    if isinstance(pages, np.ndarray):
        batch = np.where(pages < 0, np.int32(-1), np.arange(len(pages), dtype=np.int32))
        host = [to_buffer(array) for array in (batch, np.array(slots), np.array(pages.view(np.uint32)[:, None]))]
    else:
        numbers = torch.arange(len(pages), dtype=torch.int32, device=pages.device)
        device = [torch.where(pages < 0, -1, numbers).int(), slots, pages.view(torch.uint32)[:, None]]
    bits = _BITS[k_view.element_size()]
    with place.ordered():
        if isinstance(pages, np.ndarray):
            batch_indices, positions, table = (place.upload(buffer) for buffer in host)
        else:
            batch_indices, positions, table = (gpu.tensor_buffer(tensor) for tensor in device)
        k_blocks, v_blocks, view = gpu.cache_operands(k_view, v_view)
        place.runtime.execute(
            Variant("append", bits, bits),
            *(gpu.tensor_buffer(tensor) for tensor in rows),
            batch_indices,
            positions,
            k_blocks,
            v_blocks,
            table,
            view,
        )


def read_rows_on(
    place: places.Place, k_view: Any, v_view: Any, lookup_table: npt.NDArray[np.uint32], lengths: Indices
) -> tuple[Any, Any]:
    """`read_rows` on a GPU: torch tensors in and out, the table and the lengths on the host."""
    torch = import_module("torch")
    shape = (int(lengths.sum()), *k_view.shape[2:])
    if 0 in shape:
        return k_view.new_empty(shape), k_view.new_empty(shape)
    k_bits, v_bits = _bits_on(k_view), _bits_on(v_view)
    bits = _BITS[k_bits.element_size()]
    host = [to_buffer(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)), to_buffer(lookup_table)]
    like = torch.empty((shape[0], *k_bits.shape[2:]), dtype=torch.int8, device=k_view.device)
    with place.ordered():
        indptr, table = (place.upload(buffer) for buffer in host)
        k_blocks, v_blocks, view = gpu.cache_operands(k_bits, v_bits)
        inputs = (indptr, gpu.tensor_buffer(like), k_blocks, v_blocks, table, view)
        found = place.runtime.execute(Variant("gather", bits, bits), *inputs)
    k, v = (torch.from_dlpack(result).view(k_view.dtype) for result in found)
    return k, v


def prepare(dtype: np.dtype, place: places.Place | None = None) -> None:
    """Compiles or loads what moving rows of this dtype needs, on the CPU or on a GPU."""
    runtime = default_runtime() if place is None else place.runtime
    runtime.load(_variant("append", np.empty(0, _unsigned(dtype))).family())


def _unsigned(dtype: np.dtype) -> np.dtype:
    """The unsigned integer that stands for elements of `dtype`: half of one of 8 bytes."""
    return np.dtype(f"u{min(dtype.itemsize, 4)}")


def _bits(array: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers; elements of 8 bytes become two."""
    return array.view(_unsigned(array.dtype))


def _bits_on(tensor: Any) -> Any:
    """`_bits` of a torch tensor."""
    torch = import_module("torch")
    return tensor.view({1: torch.uint8, 2: torch.uint16}.get(tensor.element_size(), torch.uint32))


def _variant(op: Literal["append", "gather"], bits: np.ndarray) -> Variant:
    return Variant(op, _BITS[bits.itemsize], _BITS[bits.itemsize])


def _storage(k_view: np.ndarray, v_view: np.ndarray, lookup_table: npt.NDArray[np.uint32]) -> list[Buffer]:
    """The operands that append and gather share."""
    k_blocks, v_blocks, view = cache_operands(k_view, v_view)
    return [k_blocks, v_blocks, to_buffer(lookup_table), view]


def _separate(rows: np.ndarray, views: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The rows made contiguous, and copied where they may lie in the cache that is about to be written."""
    if any(np.may_share_memory(rows, view) for view in views):
        return rows.copy()
    return np.ascontiguousarray(rows)
