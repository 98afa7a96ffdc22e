"""Appends and gathers of torch's tensors, by a library of kernels.

Letters in shapes: N tokens, Hk KV heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_kv.arguments import integer
from paged_kv.arrays.autograd_writes import mark_written
from paged_kv.arrays.host import HOST, as_numpy
from paged_kv.arrays.pages import Pages
from paged_kv.call_layouts import APPEND, CACHE_TABLE, GATHER, TOKEN_ROWS
from paged_kv.calls.append import WritableCache
from paged_kv.calls.kv_copy import Slots, read_rows
from paged_kv.calls.offsets import offsets_of
from paged_kv.calls.table import Table
from paged_kv.errors import ShapeError
from paged_kv.kv_formats import FORMATS, KVFormat
from paged_kv.options import stored_dtype, stored_elements, stored_head
from paged_kv.runtime.libraries import COPIED, Function, kernel
from paged_kv.runtime.thread_pool import workers
from paged_kv.torch.memory import CacheLayout, holds, layout, output

_MOST_LAYOUTS = 256
(_ROWS,) = TOKEN_ROWS.parts("k v count k_heads k_dim v_heads v_dim")
APPEND.parts("rows", "batch_indices positions", "cache")
_, _ADDRESS, _ = GATHER.parts("rows", "indptr", "cache")

_layouts: dict[tuple[Any, ...], CacheLayout] = {}
"""Layouts of calls that were checked: the cache, and of appends its rows, and where its V lies from its K."""


def check_ranks(k_cache: Tensor, v_cache: Tensor | None, layer: Any) -> None:
    """Refuses tensors of another rank than a cache has, with its layers where there is a `layer`, and with K and V in
    one tensor where there is no `v_cache`.

    Raises:
        ShapeError: as said, or one tensor is not of K and V.
    """
    rank = 4 + (layer is not None) + (v_cache is None)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache is not None and cache.dim() != rank:
            layered = " where a layer is given" if layer is not None else ""
            both = (
                " and no v_cache" if v_cache is None and layered else " where no v_cache is given" * (v_cache is None)
            )
            raise ShapeError(f"{name}: expected {rank} dimensions{layered}{both}, got shape {tuple(cache.shape)}")
    if v_cache is None and k_cache.shape[-5] != 2:
        raise ShapeError(f"k_cache: dimension {rank - 5}: expected 2 (K and V), got shape {tuple(k_cache.shape)}")


def pages_of(k_cache: Tensor, v_cache: Tensor | None, layer: int | None) -> tuple[Tensor, Tensor]:
    """K and V `[pages, page_size, Hk, D]`, views of the tensors that an operator is given.

    Raises:
        ShapeError: as `check_ranks`, or K and V have not the same number of layers.
        ContractError: there is no such layer.
    """
    check_ranks(k_cache, v_cache, layer)
    if layer is not None:
        count = k_cache.shape[0]
        if v_cache is not None and v_cache.shape[0] != count:
            raise ShapeError(f"v_cache has {v_cache.shape[0]} layers, k_cache has {count}")
        layer = integer("layer", layer, 0, count - 1)
        k_cache, v_cache = k_cache[layer], None if v_cache is None else v_cache[layer]
    return (k_cache[0], k_cache[1]) if v_cache is None else (k_cache, v_cache)


def checked_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> CacheLayout:
    """The layout of a cache that rows K and V `[N, Hk, D]` are to be written to.

    Raises:
        ContractTypeError, ShapeError, ContractError: a tensor does not fit the others, or cannot be written.
    """
    distance = v_cache.data_ptr() - k_cache.data_ptr()
    key = (k.shape[1:], v.shape[1:], k.dtype, v.dtype, *layout(k_cache, v_cache), distance)
    of_cache = _layouts.get(key)
    if of_cache is None or k.shape[0] != v.shape[0]:
        check_caches(k_cache=k_cache, v_cache=v_cache)
        WritableCache.paged((k_cache, v_cache), "NHD", "cache", k=k, v=v).rows(k, v, ("k", "v"))
        of_cache = _remember(key, k_cache, v_cache)
    return of_cache


def append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, of_cache: CacheLayout, slots: Slots) -> None:
    """Writes rows to their slots; `of_cache` is `checked_append`, and codes are made of floats.

    Raises:
        ShapeError: there are more or fewer slots than rows.
    """
    if len(slots.pages) != k.shape[0]:
        raise ShapeError(f"k has {k.shape[0]} rows, there are {len(slots.pages)} slots")
    if not k.numel():
        return
    mark_written((k_cache, v_cache))
    write = _kernel("append", k.dtype, k_cache.dtype)
    k_rows, v_rows = k.contiguous(), v.contiguous()
    if (
        write is None
        or not of_cache.held_by(k_cache, v_cache)
        or not (holds(k_rows, k_rows.numel()) and holds(v_rows, v_rows.numel()))
        or any(_may_overlap(rows, cache, of_cache) for rows in (k_rows, v_rows) for cache in (k_cache, v_cache))
    ):
        cache = WritableCache.paged((k_cache, v_cache), "NHD", "cache", k=k, v=v)
        cache.write(cache.rows(k, v, ("k", "v")), slots)
        return
    where, table = slots.addresses
    rows = _ROWS.pack(k_rows.data_ptr(), v_rows.data_ptr(), *k_rows.shape, *v_rows.shape[1:])
    write(rows + where + of_cache.storage(k_cache, v_cache) + table + workers())


def check_caches(**caches: Tensor) -> None:
    """Each is an array of rank 4, by the name that the caller knows.

    Raises:
        ContractTypeError, ShapeError: as said.
    """
    for name, cache in caches.items():
        if as_numpy(cache, name).ndim != 4:
            raise ShapeError(f"{name}: expected 4 dimensions, got shape {tuple(cache.shape)}")


def gather(k_cache: Tensor, v_cache: Tensor, table: Table) -> tuple[Tensor, Tensor]:
    """The tokens of every request, K and V `[N, Hk, D]`: in the cache's dtype, of codes in float32.

    Raises:
        ContractTypeError, ShapeError, ContractError: the cache is none.
        PageTableError: a page id is not one of the cache's.
    """
    key = layout(k_cache, v_cache)
    of_cache = _layouts.get(key)
    if of_cache is None:
        check_caches(k_cache=k_cache, v_cache=v_cache)
        Pages.of((k_cache, v_cache), "NHD", "cache")
        of_cache = _remember(key, k_cache, v_cache)
    table.check(len(k_cache))
    kv_format = FORMATS.get(_name(k_cache.dtype))
    dtype = k_cache.dtype if kv_format is None else torch.float32
    offsets = offsets_of(table.lengths).astype(np.int32)
    read = _kernel("gather", dtype, k_cache.dtype)
    if read is None or not of_cache.held_by(k_cache, v_cache):
        tokens = read_rows(Pages.of((k_cache, v_cache), "NHD", "cache"), table, kv_format)
        return HOST.like(k_cache, tokens[0]), HOST.like(v_cache, tokens[1])
    count, head_dim = int(offsets[-1]), stored_elements(kv_format or "", k_cache.shape[3])
    shape = count, k_cache.shape[2], head_dim
    k, v = (torch.empty(shape, dtype=dtype, device=cache.device) for cache in (k_cache, v_cache))
    if k.numel():
        rows = _ROWS.pack(output(k, dtype), output(v, dtype), *k.shape, *v.shape[1:]) + _ADDRESS.pack(
            offsets.ctypes.data
        )
        lookup_table = table.lookup_table
        pages = CACHE_TABLE.pack(lookup_table.ctypes.data, *lookup_table.shape)
        read(rows + of_cache.storage(k_cache, v_cache) + pages + workers())
    return k, v


def quantised(kv_format: KVFormat, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K and V `[N, Hk, D]` of floats as a cache of codes holds them, `[N, Hk, bytes]`."""
    count, heads, head_dim = k.shape
    shape = (count, 1, heads, stored_head(kv_format, head_dim))  # a page of one slot for each token
    dtype = getattr(torch, stored_dtype(kv_format))
    k_codes, v_codes = (torch.empty(shape, dtype=dtype, device=rows.device) for rows in (k, v))
    pages = np.arange(count, dtype=np.int32)
    of_cache = checked_append(k, v, k_codes, v_codes)
    append(k, v, k_codes, v_codes, of_cache, Slots(pages, np.zeros_like(pages)))
    return k_codes[:, 0], v_codes[:, 0]


def widened(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return what codes of K and V `[N, Hk, bytes]` stand for, `[N, Hk, D]` float32."""
    count = len(k)
    pages = Table.padded(np.arange(count, dtype=np.int32)[None], np.array([count], np.int32), 1)  # of one slot each
    return gather(k[:, None], v[:, None], pages)


def _remember(key: tuple[Any, ...], k_cache: Tensor, v_cache: Tensor) -> CacheLayout:
    if len(_layouts) >= _MOST_LAYOUTS:
        _layouts.clear()
    of_cache = _layouts[key] = CacheLayout.of(k_cache, v_cache)
    return of_cache


def _kernel(kind: str, rows: torch.dtype, cache: torch.dtype) -> Function | None:
    """Return what moves rows; None for elements of another size than those that are copied."""
    if rows != cache:
        return kernel(kind, _name(rows), _name(cache))
    copied = COPIED.get(rows.itemsize)
    return None if copied is None else kernel(kind, copied, copied)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _may_overlap(rows: Tensor, cache: Tensor, of_cache: CacheLayout) -> bool:
    """Return whether rows may lie in the memory of K or of V; those between its elements count too."""
    at, begin, size = rows.data_ptr(), cache.data_ptr(), cache.itemsize
    longest = max(of_cache.k_extent, of_cache.v_extent)
    return at < begin + longest * size and begin < at + rows.numel() * rows.itemsize
