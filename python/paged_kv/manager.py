"""A paged KV cache together with its books: the manager that FlashInfer's documents sketch, with correct allocation."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

import numpy as np

from paged_kv.arguments import integer
from paged_kv.arrays.devices import place_named
from paged_kv.arrays.gpu import to_tensor
from paged_kv.arrays.host import as_numpy, dtype_of, like, sample_array
from paged_kv.calls.append_slots import Storage
from paged_kv.calls.kv_copy import prepare
from paged_kv.calls.page_table import Indices
from paged_kv.errors import ContractError, RequestError
from paged_kv.pool import PagePool


class PagedKVCacheManager:
    """One layer's pages and the requests that own them. A token that needs a page takes one; `free` gives them back.

    `kv_cache` is an array `[max_num_pages, 2, page_size, num_kv_heads, head_dim]` (NHD), zeros at first; `pool` keeps
    the books. Request ids are any hashable values.

    Args:
        max_num_pages: Pages in the cache.
        page_size: Tokens in a page.
        num_kv_heads: KV heads.
        head_dim: Elements of a head.
        dtype: A name, or a dtype of NumPy, torch, JAX or MAX.
        device: Of `kv_cache` and of the tokens that are appended: None or the CPU, or a GPU as torch names it ("cuda",
            "cuda:1"). Page tables are on the host wherever the cache is: that is where `plan` takes them.
        kind: "torch" or "numpy", what `kv_cache` and page tables are. By default torch where the program has imported
            it or the device is a GPU, else NumPy.

    Raises:
        ContractTypeError, ContractError: a size is no integer or too small, an unknown dtype, kind or device.
        ToolchainError: MAX does not see that GPU, or torch is missing.
    """

    def __init__(
        self,
        max_num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: Any = "float16",
        device: Any = None,
        kind: str | None = None,
    ) -> None:
        place = None if device is None else place_named(device)
        self.pool = PagePool(max_num_pages, page_size)
        self.max_num_pages = self.pool.num_pages
        self.page_size = self.pool.page_size
        self.num_kv_heads = integer("num_kv_heads", num_kv_heads, 1)
        self.head_dim = integer("head_dim", head_dim, 1)
        shape = (self.max_num_pages, 2, self.page_size, self.num_kv_heads, self.head_dim)
        if kind not in (None, "numpy", "torch"):
            raise ContractError(f"kind must be 'numpy' or 'torch', not {kind!r}")
        if kind == "numpy" and place is not None:
            raise ContractError(f"kind must be 'torch' for a cache on {device}, not 'numpy'")
        self._kind = sample_array(kind or ("torch" if place or "torch" in sys.modules else "numpy"))
        element = dtype_of(dtype, "dtype")
        self.kv_cache = like(self._kind, np.zeros(shape, element)) if place is None else place.zeros(shape, element)

    def append(self, request_id: Hashable, k: Any, v: Any) -> None:
        """Appends one token, k and v `[num_kv_heads, head_dim]`, or `n` of them, `[n, ...]`; starts an unknown request.

        Raises:
            PoolExhausted: too few pages are free; nothing was taken or written.
            ContractTypeError, ShapeError: as `append_paged_kv_cache`.
        """
        storage = Storage.paged(self.kv_cache, "NHD", "kv_cache", k=k, v=v)
        read = as_numpy if storage.place is None else to_tensor
        rows = storage.rows(_tokens(read(k, "k")), _tokens(read(v, "v")), ("k", "v"))
        prepare(dtype_of(storage.k.dtype, "kv_cache"), storage.place)  # what can fail comes before the books
        known, start = self._length(request_id) is not None, self.get_seq_len(request_id)
        count = len(rows[0])
        (self.pool.reserve if known else self.pool.start)(request_id, count)
        page_slot, slots = np.divmod(np.arange(start, start + count, dtype=np.int32), np.int32(self.page_size))
        storage.write(rows, (self._pages(request_id)[page_slot], slots))

    def get_page_table(self, request_id: Hashable) -> Any:
        """The request's pages in token order, int32 `[ceil(length / page_size)]`; None for an unknown request."""
        return None if self._length(request_id) is None else like(self._kind, self._pages(request_id))

    def get_seq_len(self, request_id: Hashable) -> int:
        """The request's tokens; 0 for an unknown request."""
        return self._length(request_id) or 0

    def free(self, request_id: Hashable) -> None:
        """Forgets the request; its pages are free again, their contents stay until they are overwritten.

        Raises:
            RequestError: the request is unknown, or was freed before.
        """
        self.pool.free(request_id)

    def _length(self, request_id: Hashable) -> int | None:
        try:
            return self.pool.length(request_id)
        except RequestError:
            return None

    def _pages(self, request_id: Hashable) -> Indices:
        return np.array(self.pool.pages(request_id), np.int32)


def _tokens(rows: Any) -> Any:
    """One token `[Hk, D]` as the only one of `[1, Hk, D]`."""
    return rows[None] if rows.ndim == 2 else rows
