"""Continuous batching (`generate_batch`) on transformers' own pages, which its scheduler hands out and shares.

transformers keeps pages of all layers of one kind in one tensor, `[blocks, layers, K and V, page, Hk, D]`; a layer's K
and V are strided views of it. Its scheduler, its prefix sharing and its writes stay; what changes is what is read: here
pages, and not an index of every token, after which all requests attend as one row under a mask.

A sliding layer's pages are a ring: token p lies in slot `p % window`. After a decode row has stored its token, the ring
holds its window and nothing else, in some order, which attention does not depend on. The rows of a longer prompt are
computed before they are stored, over what the ring holds of the past and the new tokens.

transformers has its pages in bytes, of which an allocator makes views: so they may hold codes, and every row attends to
what codes stand for, those of the new tokens included. Letters in shapes: T new tokens, Hq query heads, Hk KV heads, D
head dimension, S numbers of a head in a page: D, or what its codes and their scale take (`options.stored_head`).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR, PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.utils import find_head_dim, find_num_key_value_heads

from paged_kv.calls.offsets import offsets_of
from paged_kv.calls.ragged import RaggedBatch
from paged_kv.calls.rows import Rows
from paged_kv.calls.table import Table
from paged_kv.kv_formats import FORMATS, KVFormat
from paged_kv.options import stored_dtype, stored_head
from paged_kv.torch.attention import TensorAttention, planned
from paged_kv.torch.cache import quantised
from paged_kv.transformers.cache import LAYER
from paged_kv.transformers.running import NAMES, format_of

_STEP = "_paged_kv_step"
"""The attribute of a step's indices by which its layers find what they share."""
_NAMES = ("read_index", "read_index", "cu_seq_lens_k")
_lock = threading.Lock()


@contextmanager
def on_blocks() -> Iterator[None]:
    """Let a manager of `generate_batch` make its cache of this package's pages.

    transformers has names of its own for the two classes, so one manager at a time does so. Another thread's, which is
    not served, may get them meanwhile: they behave as transformers' own where a model is not on pages.
    """
    with _lock:
        cache, allocators = continuous_api.PagedAttentionCache, dict(ATTN_TYPE_TO_ALLOCATOR)

        def restore() -> None:
            continuous_api.PagedAttentionCache = cache
            ATTN_TYPE_TO_ALLOCATOR.update(allocators)

        try:
            continuous_api.PagedAttentionCache = PagedBlocks
            ATTN_TYPE_TO_ALLOCATOR.update(full_attention=PagedFullAllocator, sliding_attention=PagedSlidingAllocator)
            yield
        finally:
            try:
                restore()
            finally:
                restore()  # the first one may have been interrupted


class PagedBlocks(PagedAttentionCache):  # type: ignore[misc] # transformers has no types
    """transformers' cache of `generate_batch`: where pages hold codes, `num_blocks` still counts blocks of `page_size`
    tokens, for which transformers takes what the model's dtype takes.
    """

    def __init__(self, config: Any, continuous_batching_config: Any, *args: Any, dtype: Any, **kwargs: Any) -> None:
        kv_format, settings = format_of(config), continuous_batching_config
        if kv_format is None:
            super().__init__(config, settings, *args, dtype=dtype, **kwargs)
            return
        sizes = find_num_key_value_heads(config), find_head_dim(config)
        counted, stored = (
            PagedFullAllocator.get_bytes_per_page(*sizes, kind, settings.page_size)
            for kind in (dtype, _dtype_of(kv_format, dtype))
        )
        if settings.num_blocks is not None:
            settings = copy.copy(settings)
            settings.num_blocks = -(-settings.num_blocks * stored // counted)
        super().__init__(config, settings, *args, dtype=dtype, **kwargs)
        self.num_blocks = self.num_sectors * self.bytes_per_sector // (config.num_hidden_layers * stored)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Marks the new K for the attention, which stores it; models of transformers 5.24 call this before it."""
        if not self.layer_to_allocator[layer_idx].on_pages:
            states: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, kwargs)
            return states
        setattr(key_states, LAYER, self)
        return key_states, value_states


class _OnPages(FullAttentionCacheAllocator):  # type: ignore[misc]
    """Methods that the allocators of both kinds of layers share."""

    def __init__(self, *args: Any, config: Any, cache_dtype: Any, **kwargs: Any) -> None:
        self.kv_format = format_of(config)
        super().__init__(*args, config=config, cache_dtype=_dtype_of(self.kv_format, cache_dtype), **kwargs)
        self.head_dim: int = stored_head(self.kv_format or "", find_head_dim(config))
        self.on_pages = config._attn_implementation in NAMES.values()

    @classmethod
    def get_bytes_per_page(cls, num_key_value_heads: int, head_dim: int, cache_dtype: Any, page_size: int) -> int:
        """Return the bytes of K and V of one layer, codes with their scales where the dtype is that of codes."""
        codes = FORMATS.get(str(cache_dtype).removeprefix("torch."), "")
        size: int = super().get_bytes_per_page(
            num_key_value_heads, stored_head(codes, head_dim), cache_dtype, page_size
        )
        return size


class PagedFullAllocator(_OnPages):
    """transformers' pages of full attention; for models on this package, what is read are page ids."""

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """The page ids of a request's tokens."""
        if not self.on_pages:
            return super().get_read_indices(request_id, past_length, query_length)
        return self.block_table[request_id][: -(-(past_length + query_length) // self.tokens_per_page)]


class PagedSlidingAllocator(_OnPages, SlidingAttentionCacheAllocator):  # type: ignore[misc]
    """transformers' ring of pages; for models on this package, what is read by a decode row are page ids."""

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """The page ids of a decode row's window; of several rows the slots of the past tokens that they see."""
        if not self.on_pages:
            return super().get_read_indices(request_id, past_length, query_length)
        if query_length == 1:
            return self.block_table[request_id][: -(-min(past_length + 1, self.sliding_window) // self.tokens_per_page)]
        return super().get_read_indices(request_id, past_length, query_length)[:-query_length]


@dataclass(frozen=True, eq=False)
class _Longer:
    """The rows of one request that are computed over the past tokens of a ring and the new ones, side by side."""

    begin: int
    end: int
    past: Tensor
    """Slots of the past tokens."""
    rows: Rows


@dataclass(frozen=True, eq=False)
class _Step:
    """State that the layers of one kind share in a forward pass."""

    fresh: Rows | None
    """All rows, over the new tokens alone: no request has past tokens."""
    paged: Rows | None
    """Rows over pages; None where there are none."""
    chosen: Tensor | None
    """The rows that `paged` has; None for all."""
    longer: list[_Longer]


def attend_batch(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    cache: Any,
    batch: dict[str, Any],
) -> Tensor:
    """Stores the new K and V `[1, Hk, T, D]` of all requests, and attends: query `[1, Hq, T, D]`, `[1, T, Hq, D]`.

    Raises:
        ContractError: a value is out of range.
    """
    layer = module.layer_idx
    allocator = cache.layer_to_allocator[layer]
    window = getattr(allocator, "sliding_window", None)
    read, write = (batch[name][allocator.index] for name in ("read_index", "write_index"))
    step: _Step | None = getattr(write, _STEP, None)
    if step is None:
        lengths = np.diff(batch["cu_seq_lens_k"][allocator.layer_type].numpy())
        step = _plan(batch["cu_seq_lens_q"].numpy(), lengths, read, allocator.tokens_per_page, window)
        setattr(write, _STEP, step)

    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # [T, H, D]
    if allocator.kv_format is not None:
        k, v = quantised(allocator.kv_format, k, v)  # [T, Hk, S]

    def attention(page_size: int | None, window_left: int) -> TensorAttention:
        sizes = (query.shape[1], k.shape[1], k.shape[2], page_size)
        return planned(sizes, (q.dtype, k.dtype), (scaling, window_left, softcap or 0.0, False))

    def over_tokens(rows: Rows, some_q: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        page_size = None if allocator.kv_format is None else allocator.tokens_per_page
        return attention(page_size, -1 if window is None else window - 1).over_tokens(rows, some_q, *kv, sinks)[0]

    k_slots, v_slots = allocator._kv_token_views[layer]
    parts = []
    for longer in step.longer:  # before the ring is written
        own = slice(longer.begin, longer.end)
        kv = torch.cat([k_slots[longer.past], k[own]]), torch.cat([v_slots[longer.past], v[own]])
        parts.append((own, over_tokens(longer.rows, q[own], kv)))
    k_slots.index_copy_(0, write, k)
    v_slots.index_copy_(0, write, v)
    if step.fresh is not None:
        return over_tokens(step.fresh, q, (k, v))[None]
    o = None
    if step.paged is not None:
        some_q = q if step.chosen is None else q[step.chosen]
        plan = attention(allocator.tokens_per_page, -1)
        o, _ = plan.over_pages(step.paged, some_q, *_pages_of(allocator, layer), sinks)
        if step.chosen is None:
            return o[None]
    all_rows = torch.zeros_like(q)
    if o is not None:
        all_rows[step.chosen] = o
    for own, part in parts:
        all_rows[own] = part
    return all_rows[None]


def _plan(offsets: Any, lengths: Any, read: Tensor, page_size: int, window: int | None) -> _Step:
    """The rows of a step: `offsets` `[B + 1]` of q, `lengths` `[B]` of K and V, and what the allocator has to read."""
    offsets, lengths = offsets.astype(np.int32), lengths.astype(np.int32)
    counts = np.diff(offsets)
    if not len(read):
        return _Step(RaggedBatch(offsets, Table.of_tokens(offsets, ("cu_seq_lens_q",))).rows, None, None, [])
    single = counts == 1 if window is not None else np.ones(len(counts), bool)
    num_pages = -(-lengths // np.int32(page_size))
    begins = offsets_of(np.where(single, num_pages, lengths - counts))  # of each request's in `read`
    longer = []
    for b in np.flatnonzero(~single & (counts > 0)).tolist():
        rows = RaggedBatch(np.array([0, counts[b]], np.int32), Table.of_one(int(lengths[b]))).rows
        longer.append(_Longer(int(offsets[b]), int(offsets[b + 1]), read[begins[b] : begins[b + 1]].clone(), rows))
    if not single.any():
        return _Step(None, None, None, longer)
    pages = read.numpy()[np.repeat(single, np.diff(begins))]
    indptr, held = offsets_of(np.where(single, num_pages, 0)), np.where(single, lengths, 0)
    rows = RaggedBatch(offsets, Table.of_lengths(indptr, pages, held, page_size, _NAMES)).rows
    if not longer:
        return _Step(None, rows, None, [])
    chosen = np.flatnonzero(single[rows.batch])
    some = Rows(rows.table, rows.batch[chosen], rows.lengths[chosen])
    return _Step(None, some, torch.from_numpy(chosen), longer)


def _pages_of(allocator: Any, layer: int) -> tuple[Tensor, Tensor]:
    """K and V of a layer, `[blocks, page, Hk, S]`: views of the tensor that all layers of its kind share."""
    tokens, _, heads, head_dim = allocator.cache_tensor.shape
    pages = allocator.cache_tensor.view(
        tokens // allocator.tokens_per_block, allocator.pages_per_block, 2, allocator.tokens_per_page, heads, head_dim
    )
    at = allocator.layer_indices.index(layer)
    return pages[:, at, 0], pages[:, at, 1]


def _dtype_of(kv_format: KVFormat | None, dtype: Any) -> Any:
    """Return the dtype of the pages, where the model's is `dtype`."""
    return dtype if kv_format is None else getattr(torch, stored_dtype(kv_format))
