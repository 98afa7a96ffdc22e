"""A call of `generate` on pages, which transformers' own code takes over if it fails before its first token.

Nothing has been handed out by then but the prompt, to a streamer. The random state, and a cache that the caller gave,
are as they were when transformers' code begins.
"""

from __future__ import annotations

from typing import Any

import torch

from paged_kv.transformers.cache import CACHE_ARGUMENT, PagedCache, cache_of

_PROMPTS = ("inputs", "input_ids", "inputs_embeds")


class Attempt:
    """The arguments of a call on pages, and those of the call by transformers' own code that may follow.

    Args:
        arguments: The caller's.
        cache: The cache of pages of the call, the caller's own or a new one.
    """

    def __init__(self, arguments: dict[str, Any], cache: PagedCache) -> None:
        self._arguments, self._cache = arguments, cache
        self._begin = cache.get_seq_length()
        self._random = torch.default_generator.get_state()
        self._streamer = None if arguments.get("streamer") is None else _Streamer(arguments["streamer"])

    def arguments(self) -> dict[str, Any]:
        """The arguments of `generate` on pages."""
        return self._arguments | {CACHE_ARGUMENT: self._cache} | self._streaming()

    def arguments_afterwards(self) -> dict[str, Any]:
        """The arguments for transformers' own code, and all else as before the call."""
        torch.default_generator.set_state(self._random)
        if self._streamer is not None:
            self._streamer.skipped = self._streamer.count
        if cache_of(self._arguments) is not None:
            self._cache.take_back(self._begin)
        return self._arguments | self._streaming()

    def may_be_repeated(self) -> bool:
        """Return whether transformers' own code may take over: there is no token yet, as no prompt went through all
        layers, and what a caller's cache did not store is not needed.
        """
        prompts = [self._arguments.get(name) for name in _PROMPTS]
        lengths = [prompt.shape[1] for prompt in prompts if prompt is not None and len(prompt.shape) > 1]
        stored = self._cache.layers[-1].get_seq_length()
        has_lost_padding = self._begin > 0 and self._cache.table.padding.any()
        return stored < max(self._begin + 1, min(lengths, default=1)) and not has_lost_padding

    def _streaming(self) -> dict[str, Any]:
        return {} if self._streamer is None else {"streamer": self._streamer}


class _Streamer:
    """Hands on to a caller's streamer what it has not had yet."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self.count = 0
        """Calls of `put` so far."""
        self.skipped = 0
        """Calls of `put` to come that repeat those of a failed attempt."""

    def put(self, value: Any) -> None:
        """One token of each sequence, or the prompt."""
        if self.skipped:
            self.skipped -= 1
            return
        self.count += 1
        self._streamer.put(value)

    def end(self) -> None:
        """No token follows."""
        self._streamer.end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streamer, name)
