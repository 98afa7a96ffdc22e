"""A paged KV cache together with its page pool: the manager of FlashInfer's documents, with correct allocation."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

import numpy as np

from paged_kv.arguments import LARGEST_INDEX, integer, one_of
from paged_kv.arrays import devices
from paged_kv.arrays.dtypes import cache_dtype_of
from paged_kv.arrays.host import like, sample_array
from paged_kv.arrays.types import DTypeLike, SupportsDLPack
from paged_kv.calls.append import WritableCache, new_cache
from paged_kv.calls.kv_copy import Slots
from paged_kv.errors import RequestError
from paged_kv.pool import PagePool


class PagedKVCacheManager:
    """One layer's pages and the requests that own them. A token that needs a page takes one; `free` gives them back.

    `kv_cache` is an array `[max_num_pages, 2, page_size, num_kv_heads, head_dim]` (NHD), zeros at first; `pool` says
    which request owns which page. Request ids are any hashable values that equal themselves.

    Threads may share a manager: an operation waits for the one in progress. What interrupts an append, such as
    KeyboardInterrupt, leaves the request with all of the new tokens or none.

    Args:
        max_num_pages: Pages in the cache.
        page_size: Tokens in a page.
        num_kv_heads: KV heads.
        head_dim: Elements of a head.
        dtype: A name, or a dtype of NumPy, torch, JAX or MAX. int8 and int4 are codes with a scale a token and KV head
            (docs/quantised-cache.md): `append` takes floats, and the last dimension of `kv_cache`, int8 or uint8, is
            the bytes of a head.
        device: The device of `kv_cache` and of the tokens that are appended: None or the CPU, or a GPU as torch names
            it ("cuda", "cuda:1"). Page tables are on the host wherever the cache is: that is where `plan` takes them.
        kind: "torch" or "numpy", what `kv_cache` and page tables are. By default torch where the program has imported
            it or the device is a GPU, else NumPy.

    Raises:
        ContractTypeError, ContractError: a size is no integer, too small or above 2^31 - 1, the cache does not fit in
            memory, an unknown dtype, kind or device.
        ShapeError: codes of a head_dim that is no multiple of 8, or of int4 below 16.
        ToolchainError: MAX does not see that GPU, or torch is missing.

    Examples:
        >>> import numpy as np
        >>> manager = PagedKVCacheManager(8, 4, num_kv_heads=2, head_dim=8, dtype="float32", kind="numpy")
        >>> rows = np.ones((5, 2, 8), np.float32)
        >>> manager.append("a", rows, rows)
        >>> manager.get_page_table("a").tolist(), manager.get_seq_len("a"), manager.pool.num_free
        ([0, 1], 5, 6)
        >>> manager.free("a")
        >>> manager.pool.num_free
        8
    """

    def __init__(
        self,
        max_num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: DTypeLike = "float16",
        device: Any = None,
        kind: str | None = None,
    ) -> None:
        at = devices.device_named(device)
        self.pool = PagePool(integer("max_num_pages", max_num_pages, 0, LARGEST_INDEX), page_size)
        self.max_num_pages = self.pool.num_pages
        self.page_size = self.pool.page_size
        self.num_kv_heads = integer("num_kv_heads", num_kv_heads, 1, LARGEST_INDEX)
        self.head_dim = integer("head_dim", head_dim, 1, LARGEST_INDEX)
        shape = (self.max_num_pages, 2, self.page_size, self.num_kv_heads, self.head_dim)
        element = cache_dtype_of(dtype, "dtype")
        one_of("kind", kind, (None, *(library for library in ("numpy", "torch") if library in at.kinds)))
        kind = kind or ("torch" if "torch" in sys.modules else "numpy")
        self._sample = sample_array(kind)
        self.kv_cache = new_cache(at, "kv_cache", shape, element, kind)

    def append(self, request_id: Hashable, k: SupportsDLPack, v: SupportsDLPack) -> None:
        """Appends one token, k and v `[num_kv_heads, head_dim]`, or `n` of them, `[n, ...]`; starts an unknown request.

        Raises:
            PoolExhausted: too few pages are free; nothing was taken or written.
            ContractTypeError, ShapeError: as `append_paged_kv_cache`; or `request_id` is not hashable.
            ContractError: `request_id` does not equal itself.
        """
        cache = WritableCache.paged(self.kv_cache, "NHD", "kv_cache", k=k, v=v)
        device = cache.pages.device
        rows = cache.rows(_tokens(device.view(k, "k")), _tokens(device.view(v, "v")), ("k", "v"))
        cache.prepare(rows)  # what can fail comes before the pool changes
        count = len(rows[0])

        def write(slot: int, pages: tuple[int, ...]) -> None:
            page, slots = np.divmod(np.arange(slot, slot + count, dtype=np.int64), self.page_size)
            cache.write(rows, Slots(np.array(pages, np.int32)[page], slots.astype(np.int32)))

        self.pool.extend(request_id, count, write)  # the tokens count once they are written

    def get_page_table(self, request_id: Hashable) -> Any:
        """The request's pages in token order, int32 `[ceil(length / page_size)]`; None for an unknown request."""
        try:
            return like(self._sample, np.array(self.pool.pages(request_id), np.int32))
        except RequestError:
            return None

    def get_seq_len(self, request_id: Hashable) -> int:
        """The request's tokens; 0 for an unknown request."""
        try:
            return self.pool.length(request_id)
        except RequestError:
            return 0

    def free(self, request_id: Hashable) -> None:
        """Forgets the request; its pages are free again, their contents stay until they are overwritten.

        Raises:
            RequestError: the request is unknown, or was freed before.
        """
        self.pool.free(request_id)


def _tokens(rows: Any) -> Any:
    """One token `[Hk, D]` as the only one of `[1, Hk, D]`."""
    return rows[None] if rows.ndim == 2 else rows
