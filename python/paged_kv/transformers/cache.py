"""The cache of plain `generate`: one page table for all layers, and a tensor of pages for K and for V of each layer.

A page is shared by several sequences after a beam search has reordered them, and copied when one of them writes to it.
Left padding is not stored: a sequence's tokens begin with its first real one.

Letters in shapes: B sequences, T new tokens of each, P tokens of a page, Hk KV heads, D head dimension, S numbers of a
head in a page: D, or what its codes and their scale take (`options.stored_head`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation.continuous_batching.utils import find_head_dim

from paged_kv.arguments import LARGEST_INDEX
from paged_kv.calls.rows import Rows
from paged_kv.calls.table import Table
from paged_kv.errors import ContractError, ShapeError
from paged_kv.kv_formats import KVFormat
from paged_kv.options import check_kv_format, stored_head
from paged_kv.pool import PagePool
from paged_kv.torch.cache import quantised, widened
from paged_kv.transformers import running

PAGE_SIZE = 32
LAYER = "_paged_kv_layer"
"""The attribute of new keys by which the attention finds their layer, or their cache of `generate_batch`."""
CACHE_ARGUMENT = "past_key_values" if transformers.__version__.startswith("5.23.") else "cache"
"""The argument by which `generate` and models take a cache, which 5.24 renamed, and the attribute of their results."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Step:
    """The new tokens of one forward pass, the same for all layers."""

    start: int
    """Tokens of each sequence before, padding included."""
    new_tokens: int
    """T."""
    padding: Ints
    """`[B]`, tokens at the begin of each sequence that are none."""
    rows: Rows
    """The B * T query rows; those of padding see nothing."""
    slots: Tensor
    """`[N]`: page * P + slot of each token that is stored."""
    stored: Tensor | None
    """`[N]`: which of the B * T tokens these are; None for all."""
    copies: list[tuple[int, int]]
    """Pages that are copied before, from and to."""


def head_dims(config: Any) -> set[int]:
    """Return the head dimensions that a config has, of which some have one for each kind of layer."""
    return {find_head_dim(layer) for layer in config.per_layer_config}


def check_codes(config: Any, kv_format: Any) -> None:
    """Refuses codes that there are not, and codes that a model's heads cannot be; None is no codes.

    Raises:
        ContractError: `kv_format` is unknown.
        ShapeError: the model's head_dim is no multiple of 8, or of int4 below 16.
    """
    check_kv_format(kv_format)
    if kv_format is not None:
        try:
            for head_dim in head_dims(config):
                stored_head(kv_format, head_dim)
        except ShapeError as error:
            raise ShapeError(f"kv_format: {error}") from None


class PagedCache(Cache):  # type: ignore[misc] # transformers has no types
    """A `Cache` of transformers whose layers are pages; `generate` makes one where none is given.

    It may be given to `generate` again, as `cache` (`past_key_values` in transformers 5.23), with the text so far.
    Beam search and assisted generation reorder and crop it.

    Args:
        config: The configuration of the model.
        kv_format: "int8" or "int4": pages hold K and V as codes with a scale a token and KV head, and all that attends
            sees what they stand for, a prompt's own tokens included. None: pages in the dtype of K and V.

    Raises:
        ContractError: `kv_format` is unknown.
        ShapeError: the model's head_dim is no multiple of 8, or of int4 below 16.
    """

    def __init__(self, config: Any, kv_format: KVFormat | None = None) -> None:
        check_codes(config, kv_format)
        self.kv_format = kv_format
        self.table = PageTables()
        self._step: Step | None = None
        super().__init__(layers=[PagedLayer(self) for _ in range(config.num_hidden_layers)])

    def step(self, start: int, new_tokens: int, batch: int, padding: Ints | None) -> Step:
        """The facts of a forward pass, made by its first layer."""
        step = self._step
        if step is None or (step.start, step.new_tokens) != (start, new_tokens):
            step = self._step = self.table.extend(start, new_tokens, batch, padding)
        return step

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence `beam_idx[i]` was."""
        self.table.select(beam_idx.cpu().numpy())
        self._step = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence becomes `repeats` ones, side by side."""
        self.table.select(np.repeat(np.arange(self.table.batch), repeats))
        self._step = None

    def batch_select_indices(self, indices: Tensor) -> None:
        """As `reorder_cache`, of any number of sequences."""
        self.reorder_cache(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens; 0 removes none."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: expected a number of at most 0, got {tokens_to_remove}")
        super().crop(tokens_to_remove)
        self.table.crop(self.get_seq_length())
        self._step = None

    def take_back(self, tokens: int) -> None:
        """Removes what follows the first `tokens` tokens, of a forward pass that ended anywhere."""
        if not tokens:
            self.reset()
        else:
            for layer in self.layers:
                layer.crop(min(tokens - layer.get_seq_length(), 0))
            self.table.crop(tokens)
            self._step = None

    def reset(self) -> None:
        """Removes all tokens."""
        super().reset()
        self.table = PageTables()
        self._step = None


class PageTables:
    """The pages of each sequence. Sequences are requests of a pool; the layers' tensors grow with the pages in use."""

    def __init__(self) -> None:
        self.pool = PagePool(LARGEST_INDEX, PAGE_SIZE)
        self.num_pages = 0
        """Pages that the layers' tensors must have."""
        self.padding: Ints = np.zeros(0, np.int64)  # [B]
        self._sequences: list[int] = []  # their requests

    @property
    def batch(self) -> int:
        """B; 0 before the first tokens."""
        return len(self._sequences)

    def extend(self, start: int, new_tokens: int, batch: int, padding: Ints | None) -> Step:
        """Makes room for T tokens of each sequence after the `start` that it has.

        `padding` is that of their mask (None: none): what follows it is stored, of those that have begun all.

        Raises:
            ShapeError: there are another number of sequences than before.
        """
        if not self.batch:
            self._sequences = list(range(batch))
            for request in self._sequences:
                self.pool.start(request)
        if batch != self.batch:
            raise ShapeError(f"{CACHE_ARGUMENT} holds {self.batch} sequences, {batch} are given")
        hidden = np.zeros(batch, np.int64) if padding is None else padding
        if not start:
            self.padding = hidden
        else:  # a prompt that comes in parts may have had nothing but padding so far
            self.padding = np.where(self.padding < start, self.padding, np.maximum(hidden, start))
        self.crop(start)
        copies: list[tuple[int, int]] = []
        for request, length in zip(self._sequences, self._lengths(start + new_tokens), strict=True):
            more = length - self.pool.length(request)
            self.pool.reserve(request, more, lambda *pages: copies.append(pages))
        table = self._table()
        positions = start + np.arange(new_tokens) - self.padding[:, None]  # [B, T]
        real = positions >= 0
        slots = torch.from_numpy(slots_of(table, positions)[real])
        stored = None if real.all() else torch.from_numpy(np.flatnonzero(real))
        lengths = np.maximum(positions + 1, 0).astype(np.int32).reshape(-1)
        requests = np.repeat(np.arange(batch, dtype=np.int32), new_tokens)
        rows = Rows(table, np.where(lengths > 0, requests, np.int32(-1)), lengths)
        return Step(start, new_tokens, self.padding, rows, slots, stored, copies)

    def select(self, indices: npt.NDArray[Any]) -> None:
        """Sequence i becomes what sequence `indices[i]` was."""
        sequences: list[int] = []
        number = max(self._sequences, default=0)
        for request in [self._sequences[index] for index in indices.tolist()]:
            if request not in sequences:
                sequences.append(request)
            else:
                number += 1
                self.pool.fork(request, number)
                sequences.append(number)
        for request in set(self._sequences) - set(sequences):
            self.pool.free(request)
        self._sequences = sequences
        self.padding = self.padding[indices]

    def crop(self, tokens: int) -> None:
        """Takes back what follows the first `tokens` tokens of each sequence, padding included."""
        for request, length in zip(self._sequences, self._lengths(tokens), strict=True):
            self.pool.shrink(request, max(self.pool.length(request) - length, 0))

    def _lengths(self, tokens: int) -> list[int]:
        """The first `tokens` tokens of each sequence without padding."""
        lengths: list[int] = np.maximum(tokens - self.padding, 0).tolist()
        return lengths

    def _table(self) -> Table:
        """The pages of all sequences, which the tensors are to have."""
        pages = [self.pool.pages(request) for request in self._sequences]
        entries = np.full((self.batch, max(map(len, pages), default=0)), -1, np.int32)
        for row, own in zip(entries, pages, strict=True):
            row[: len(own)] = own
        lengths = np.array([self.pool.length(request) for request in self._sequences], np.int32)
        table = Table.padded(entries, lengths, PAGE_SIZE, (CACHE_ARGUMENT,) * 3)
        if table.highest_page >= self.num_pages:
            self.num_pages = max(2 * self.num_pages, 8 * self.batch, table.highest_page + 1)
        return table


def slots_of(table: Table, positions: Ints) -> Ints:
    """The slots, page * P + slot in it, of tokens `[B, N]` of each sequence; 0 for padding, which is below 0."""
    at = np.maximum(positions, 0)
    if not table.entries.size:
        return np.zeros_like(positions)
    pages = np.take_along_axis(table.entries, at // PAGE_SIZE, 1)
    return np.where(positions < 0, 0, pages.astype(np.int64) * PAGE_SIZE + at % PAGE_SIZE)


class PagedLayer(CacheLayerMixin):  # type: ignore[misc] # transformers has no types
    """The pages of one layer. `update` only keeps new tokens: the attention, which knows the padding, stores them."""

    is_croppable = True
    is_sliding = False

    def __init__(self, cache: PagedCache) -> None:
        super().__init__()
        self.cache = cache
        self._seen = 0
        self.new: tuple[Tensor, Tensor] | None = None  # K and V that wait for the attention
        self.k_pages: Tensor | None = None  # [pages, P, Hk, S]
        self.v_pages: Tensor | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: pages are made as they are needed."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keeps the new K and V `[B, Hk, T, D]` for the attention, and returns them.

        Where another attention than this package's follows: stores them, and returns K and V of all tokens.
        """
        del args, kwargs
        if self.new is not None:
            raise ContractError(f"{CACHE_ARGUMENT}: a layer's keys were not attended to: is its attention replaced?")
        if key_states.shape != value_states.shape:
            widths = f"{key_states.shape[-1]} and {value_states.shape[-1]}"
            raise ShapeError(f"{CACHE_ARGUMENT}: keys and values are {widths} wide, pages hold one width")
        self.new = key_states, value_states
        if not running.on_pages():
            return self.dense(self.store(None), key_states.dtype)
        setattr(key_states, LAYER, self)
        return key_states, value_states

    def store(self, padding: Ints | None) -> Step:
        """Writes the tokens that `update` was given to their pages."""
        assert self.new is not None
        (keys, values), self.new = self.new, None
        batch, heads, new_tokens, head_dim = keys.shape
        step = self.cache.step(self._seen, new_tokens, batch, padding)
        k_rows, v_rows = (x.transpose(1, 2).reshape(batch * new_tokens, heads, head_dim) for x in (keys, values))
        if step.stored is not None:
            k_rows, v_rows = k_rows[step.stored], v_rows[step.stored]
        if self.cache.kv_format is not None:
            k_rows, v_rows = quantised(self.cache.kv_format, k_rows, v_rows)
        k_pages, v_pages = self._pages(k_rows)
        for source, target in step.copies:
            k_pages[target], v_pages[target] = k_pages[source], v_pages[source]
        for pages, rows in ((k_pages, k_rows), (v_pages, v_rows)):
            pages.view(-1, *rows.shape[1:]).index_copy_(0, step.slots, rows.to(pages.dtype))
        self._seen += new_tokens
        return step

    def dense(self, step: Step, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V of all tokens in a dtype, `[B, Hk, tokens, D]`: zeros for padding."""
        assert self.k_pages is not None
        assert self.v_pages is not None
        positions = np.arange(self._seen) - step.padding[:, None]
        slots = slots_of(step.rows.table, positions)
        real = torch.from_numpy(positions >= 0)[:, :, None, None]
        chosen = torch.from_numpy(slots.reshape(-1))
        k, v = (pages.view(-1, *pages.shape[2:])[chosen] for pages in (self.k_pages, self.v_pages))  # [N, Hk, S]
        if self.cache.kv_format is not None:
            k, v = widened(k, v)
        k, v = (x.view(*slots.shape, *x.shape[1:]).to(dtype) for x in (k, v))  # [B, tokens, Hk, D]
        k, v = (torch.where(real, x, 0).transpose(1, 2) for x in (k, v))  # unused slots may hold anything
        return k, v

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens that a mask is for, and the first of them: all."""
        return self._seen + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of each sequence, padding included."""
        return self._seen

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens, and what waits for an attention."""
        self._seen, self.new = max(self._seen + tokens_to_remove, 0), None

    def reset(self) -> None:
        """Forgets all tokens."""
        self._seen, self.new = 0, None

    def _pages(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors of pages for rows `[N, Hk, S]`, as many as the table has."""
        count = self.cache.table.num_pages
        if self.k_pages is None or self.v_pages is None or len(self.k_pages) < count:
            shape = (count, PAGE_SIZE, *rows.shape[1:])
            self.k_pages, self.v_pages = _longer(self.k_pages, shape, rows), _longer(self.v_pages, shape, rows)
        return self.k_pages, self.v_pages


def cache_of(arguments: dict[str, Any]) -> Any:
    """Return the cache among the arguments of `generate`, by its name of now or of before; None where there is none."""
    return next(
        (arguments[name] for name in (CACHE_ARGUMENT, "past_key_values") if arguments.get(name) is not None), None
    )


def _longer(pages: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    new = torch.empty(shape, dtype=like.dtype, device=like.device)
    if pages is not None:
        new[: len(pages)] = pages
    return new
