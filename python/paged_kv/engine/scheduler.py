"""Which requests run in a step, with how many tokens, and on which pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paged_kv.arguments import integer
from paged_kv.errors import ContractError, ContractTypeError, PoolExhausted
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.pool import PagePool, pages_needed

MAX_STEP_TOKENS = 2048
"""Tokens of one step at most: bounds the memory of a step's activations."""


def pages_for(config: DecoderConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int, page_size: int) -> int:
    """The pages that `prompts` can need together, each with up to `max_new_tokens` more.

    Raises:
        ContractTypeError: a number is no integer, or a prompt no list of integers.
        ContractError: `max_new_tokens` is not positive; a prompt is empty, longer than the model's positions, or has a
            token that is not in the vocabulary.
    """
    integer("max_new_tokens", max_new_tokens, 1)
    pages = 0
    for index, prompt in enumerate(prompts):
        _check_prompt(config, index, prompt)
        # The last token is sampled but never enters the cache.
        pages += pages_needed(_limit(config, prompt, max_new_tokens) - 1, page_size)
    return pages


def _check_prompt(config: DecoderConfig, index: int, prompt: Sequence[int]) -> None:
    try:
        tokens = np.asarray(prompt)
    except (ValueError, OverflowError):  # rows of several lengths
        tokens = np.empty((0, 0))
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise ContractTypeError(f"prompt {index} must be a list of token ids, integers below 2^63")
    if tokens.size == 0:
        raise ContractError(f"prompt {index} is empty")
    if tokens.size > config.max_position_embeddings:
        raise ContractError(
            f"prompt {index} has {tokens.size} tokens, max_position_embeddings is {config.max_position_embeddings}"
        )
    outside = (tokens < 0) | (tokens >= config.vocab_size)
    if outside.any():
        at = int(outside.argmax())
        raise ContractError(
            f"prompt {index} has token id {tokens[at]} at position {at}; the vocabulary is 0 to {config.vocab_size - 1}"
        )


def _limit(config: DecoderConfig, prompt: Sequence[int], max_new_tokens: int) -> int:
    """Prompt and new tokens at most; the last one needs no position of its own."""
    return min(len(prompt) + max_new_tokens, config.max_position_embeddings + 1)


@dataclass
class Request:
    """One prompt and what has been generated after it."""

    index: int
    tokens: list[int]
    """The prompt, then the generated tokens."""
    prompt_length: int
    limit: int
    """`len(tokens)` at which the request ends."""
    cached: int = 0
    """How many of `tokens` are in the cache."""

    @property
    def is_prefilling(self) -> bool:
        """Whether some of the prompt is not in the cache yet."""
        return self.cached < self.prompt_length


Step = list[tuple[Request, list[int]]]
"""The requests of one step, each with the tokens that it brings."""


class Scheduler:
    """All prompts as one batch, admitted together: the pool has pages for each of them up to its end.

    Raises:
        ContractTypeError, ContractError: `max_step_tokens` or `max_new_tokens` is no positive integer, or a prompt
            cannot run (`pages_for`).
        PoolExhausted: `num_pages` is too few for all prompts and their new tokens.
    """

    def __init__(
        self,
        config: DecoderConfig,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        num_pages: int,
        page_size: int,
        max_step_tokens: int = MAX_STEP_TOKENS,
    ) -> None:
        integer("max_step_tokens", max_step_tokens, 1)
        needed = pages_for(config, prompts, max_new_tokens, page_size)
        if needed > num_pages:
            raise PoolExhausted(
                f"{len(prompts)} prompts with up to {max_new_tokens} new tokens each need {needed} pages of "
                f"{page_size}, the pool has {num_pages}"
            )
        self._max_step_tokens = max_step_tokens
        self._pool = PagePool(num_pages, page_size)
        self.running = [
            Request(index, list(prompt), len(prompt), _limit(config, prompt, max_new_tokens))
            for index, prompt in enumerate(prompts)
        ]
        """The requests that have not ended."""
        for request in self.running:
            self._pool.start(request.index, len(request.tokens))

    @property
    def pages_used(self) -> int:
        """Pages that the running requests own."""
        return self._pool.num_used

    def pages(self, request: Request) -> tuple[int, ...]:
        """The request's pages in token order, enough for its tokens."""
        return self._pool.pages(request.index)

    def next_step(self) -> Step:
        """Decoding requests first, one token each, then prompts, those with the fewest tokens left first."""
        room = self._max_step_tokens
        step = []
        for request in sorted(self.running, key=lambda r: (r.is_prefilling, len(r.tokens) - r.cached)):
            new = request.tokens[request.cached : request.cached + max(room, 0)]
            room -= len(new)
            if new:
                step.append((request, new))
        return step

    def append(self, request: Request, token: int, *, ends: bool) -> None:
        """Adds a sampled token: the request is freed where it ends, else it gets a slot for the token."""
        request.tokens.append(token)
        if ends:
            self._pool.free(request.index)
            self.running.remove(request)
        else:
            self._pool.reserve(request.index, 1)
