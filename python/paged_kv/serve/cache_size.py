"""The number of pages of the server's cache, and so the longest request: decided before weights are read."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from max.dtype import DType

from paged_kv.engine.engine import MAX_STEP_TOKENS
from paged_kv.engine.model import LEAST_STATES, default_states, least_window_pages
from paged_kv.errors import ContractError
from paged_kv.graphs.encodings import row_bytes
from paged_kv.graphs.models import decoder
from paged_kv.graphs.models.config import DecoderConfig, with_separate_windows
from paged_kv.graphs.models.tensors import stored_tensors
from paged_kv.graphs.ops import cache_dtype
from paged_kv.kv_formats import KVFormat

SHARE = 0.5
"""The part of the memory left by the weights that the cache takes, unless it is told otherwise."""
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class CacheSize:
    """The pages of a server."""

    num_pages: int
    page_size: int
    page_bytes: int
    weight_bytes: int
    max_length: int
    """Tokens of the longest request, prompt and answer."""
    state_bytes: int = 0
    """Bytes of a slot of state, of a hybrid model; there are `default_states`."""
    num_window_pages: int = 0
    """Pages of the layers with windows, where these have their own."""
    window_page_bytes: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all pages."""
        return self.num_pages * self.page_size

    @property
    def bytes(self) -> int:
        """Bytes of all pages and of the states beside them."""
        states = default_states(self.num_pages, self.page_bytes, self.state_bytes) if self.state_bytes else 0
        windows = self.num_window_pages * self.window_page_bytes
        return self.num_pages * self.page_bytes + windows + states * self.state_bytes


def cache_size_of(
    config: DecoderConfig,
    dtype: DType,
    kv_format: KVFormat | None,
    *,
    page_size: int,
    pages: int | None = None,
    memory: int | None = None,
    max_length: int | None = None,
    requests: int,
    free: int,
    draft: DecoderConfig | None = None,
) -> CacheSize:
    """The cache of a model.

    Args:
        config: The configuration of the model.
        dtype: The dtype of weights and cache.
        kv_format: The format of a cache of codes.
        page_size: Tokens in a page.
        pages: How many; by `memory` where None.
        memory: Bytes of the cache; `SHARE` of what the weights leave of `free` where None, and no more than `requests`
            of the longest length need.
        max_length: Tokens of the longest request; what the model knows and the pages hold where None.
        requests: Those that are computed at once.
        free: Bytes of memory that this process may take.
        draft: The configuration of its draft layer.

    Raises:
        ContractError: not a page fits, or the longest request is longer than the model knows or the pages hold; the
            model has latents, of which there are no codes.
    """
    config = with_separate_windows(config)

    def bytes_of_page(config: DecoderConfig = config, **which: bool) -> int:
        shape = [int(size) for size in decoder.cache_shape(config, 1, page_size, kv_format, **which)]
        return math.prod(shape) * cache_dtype(dtype, kv_format).size_in_bytes

    page_bytes, window_bytes, most_windows = bytes_of_page(), 0, 0
    if config.separate_windows:
        window_bytes = bytes_of_page(windows=True)
        # All requests go on at once, and the step of one of them is a part of its prompt.
        most_windows = requests * least_window_pages(config.longest_window, page_size) + MAX_STEP_TOKENS // page_size
    weights, state_bytes = weight_bytes(config, dtype), decoder.state_bytes(config)
    if draft is not None:
        page_bytes += bytes_of_page(draft) + draft.hidden_size * DType.float32.size_in_bytes
        weights += weight_bytes(draft, dtype)
    positions = config.max_position_embeddings
    if max_length is not None and max_length > positions:
        raise ContractError(f"--max-length: expected at most {positions}, the model's positions, got {max_length}")
    longest = positions if max_length is None else max_length
    if pages is None:
        most = memory if memory is not None else int(SHARE * (free - weights))
        # There are as many pages for windows as others, where that is no more than all requests need.
        pages = max(most // (page_bytes + window_bytes), (most - most_windows * window_bytes) // page_bytes)
        # States take as much as pages, or what the least number of them takes.
        if state_bytes:
            pages = min(pages // 2, (most - LEAST_STATES * state_bytes) // page_bytes)
        if memory is None:
            pages = min(pages, requests * -(-longest // page_size))
    of_states = f", the least {LEAST_STATES} states {LEAST_STATES * state_bytes}" if state_bytes else ""
    if pages < 1:
        raise ContractError(
            f"the cache: no page fits; the weights take {weights} of {free} free bytes of memory,"
            f" a page of {page_size} tokens {page_bytes}{of_states}"
        )
    if max_length is not None and max_length > pages * page_size:
        raise ContractError(
            f"--max-length: expected at most {pages * page_size}, the tokens of {pages} pages, got {max_length}"
        )
    longest, num_windows = min(longest, pages * page_size), min(pages, most_windows)
    return CacheSize(pages, page_size, page_bytes, weights, longest, state_bytes, num_windows, window_bytes)


def weight_bytes(config: DecoderConfig, dtype: DType) -> int:
    """Bytes of a model's weights in memory."""
    encodings, each = dict(config.encodings), config.computed_in(dtype).size_in_bytes
    total = 0
    for name, shape in stored_tensors(config).items():
        row = row_bytes(encodings[name], shape[-1]) if name in encodings else shape[-1] * each
        total += math.prod(shape[:-1]) * row
    return total


def free_memory() -> int:
    """Bytes that this process may still take: what the system has available, or less where a control group says so."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:  # not Linux
        return free
    try:
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # "max": no limit
        return free
    return min(free, limit - used)
