"""The loop: schedule, step, sample. Prompts prefill in chunks beside requests that already decode."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from paged_kv.engine.config import LlamaConfig
from paged_kv.engine.model import LlamaModel
from paged_kv.engine.sampling import Sampler
from paged_kv.errors import ContractError, PoolExhausted
from paged_kv.pool import PagePool, pages_needed

MAX_STEP_TOKENS = 2048
"""Tokens of one step at most: bounds the memory of a step's activations."""

FinishReason = Literal["stop", "length"]


def pages_for(config: LlamaConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int, page_size: int) -> int:
    """The pages that `prompts` can come to need together, each with up to `max_new_tokens` more.

    Raises:
        ContractError: `max_new_tokens` is not positive, or a prompt is empty or longer than the model's positions.
    """
    if max_new_tokens < 1:
        raise ContractError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    pages = 0
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ContractError(f"prompt {index} is empty")
        if len(prompt) > config.max_position_embeddings:
            raise ContractError(
                f"prompt {index} has {len(prompt)} tokens, max_position_embeddings is {config.max_position_embeddings}"
            )
        # The last token is sampled but never enters the cache.
        pages += pages_needed(_limit(config, prompt, max_new_tokens) - 1, page_size)
    return pages


def _limit(config: LlamaConfig, prompt: Sequence[int], max_new_tokens: int) -> int:
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


@dataclass(frozen=True)
class Emitted:
    """One sampled token."""

    request: int
    token: int
    finish: FinishReason | None
    """Why the request ends with this token: "stop" for an end-of-sequence token, "length" for its limit."""


@dataclass
class Statistics:
    """What a run did; times in seconds. A step that mixes prompts and decoding is shared by their tokens."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    peak_pages: int = 0


@dataclass
class Generation:
    """All prompts as one batch: iterate it for the tokens in the order in which they are sampled."""

    model: LlamaModel
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    sampler: Sampler
    end_tokens: frozenset[int] = frozenset()
    max_step_tokens: int = MAX_STEP_TOKENS
    statistics: Statistics = field(default_factory=Statistics)

    def __post_init__(self) -> None:
        """Refuses, before anything runs, what could not be carried through."""
        if self.max_step_tokens < 1:
            raise ContractError(f"max_step_tokens must be at least 1, not {self.max_step_tokens}")
        model = self.model
        needed = pages_for(model.config, self.prompts, self.max_new_tokens, model.page_size)
        if needed > model.num_pages:
            raise PoolExhausted(
                f"{len(self.prompts)} prompts with up to {self.max_new_tokens} new tokens each need {needed} pages of "
                f"{model.page_size}, the pool has {model.num_pages}"
            )

    def __iter__(self) -> Iterator[Emitted]:
        pool = PagePool(self.model.num_pages, self.model.page_size)
        running = [
            Request(i, list(prompt), len(prompt), _limit(self.model.config, prompt, self.max_new_tokens))
            for i, prompt in enumerate(self.prompts)
        ]
        for request in running:
            pool.start(request.index, len(request.tokens))
        while running:
            step = self._schedule(running)
            logits = self._execute(step, pool)
            done = [i for i, (request, _) in enumerate(step) if request.cached == len(request.tokens)]
            sampled = self.sampler(logits[done], [step[i][0].index for i in done])
            for i, token in zip(done, sampled, strict=True):
                request = step[i][0]
                request.tokens.append(token)
                finish: FinishReason | None = None
                if token in self.end_tokens:
                    finish = "stop"
                elif len(request.tokens) == request.limit:
                    finish = "length"
                if finish:
                    pool.free(request.index)
                    running.remove(request)
                else:
                    pool.reserve(request.index, 1)
                yield Emitted(request.index, token, finish)

    def _schedule(self, running: Sequence[Request]) -> list[tuple[Request, list[int]]]:
        """The next step: decoding requests first, for each is one token, then prompts, the shortest rest first."""
        room = self.max_step_tokens
        step = []
        for request in sorted(running, key=lambda r: (r.cached < r.prompt_length, len(r.tokens) - r.cached)):
            new = request.tokens[request.cached : request.cached + max(room, 0)]
            room -= len(new)
            if new:
                step.append((request, new))
        return step

    def _execute(self, step: Sequence[tuple[Request, list[int]]], pool: PagePool) -> np.ndarray:
        """Logits `[len(step), vocab]`; the new tokens are in the cache afterwards."""
        began = time.perf_counter()
        logits = self.model.step(
            [new for _, new in step],
            [request.cached for request, _ in step],
            [pool.pages(request.index) for request, _ in step],
        )
        seconds = time.perf_counter() - began
        statistics = self.statistics
        statistics.peak_pages = max(statistics.peak_pages, pool.num_used)
        count = sum(len(new) for _, new in step)
        prompt = sum(len(new) for request, new in step if request.cached < request.prompt_length)
        statistics.prompt_tokens += prompt
        statistics.decode_tokens += count - prompt
        statistics.prefill_seconds += seconds * prompt / count
        statistics.decode_seconds += seconds * (count - prompt) / count
        for request, new in step:
            request.cached += len(new)
        return logits
