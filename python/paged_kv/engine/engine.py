"""The loop: schedule, step, sample. Prompts prefill in chunks beside requests that already decode."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from paged_kv.engine.model import DecoderModel
from paged_kv.engine.sampling import Sampler
from paged_kv.engine.scheduler import MAX_STEP_TOKENS, Scheduler, Step

FinishReason = Literal["stop", "length"]


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
    """All prompts as one batch: iterate it for the tokens in the order in which they are sampled.

    Raises:
        ContractError, PoolExhausted: as `Scheduler`, before anything runs.
    """

    model: DecoderModel
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    sampler: Sampler
    end_tokens: frozenset[int] = frozenset()
    max_step_tokens: int = MAX_STEP_TOKENS
    statistics: Statistics = field(default_factory=Statistics)

    def __post_init__(self) -> None:
        self._new_scheduler()

    def __iter__(self) -> Iterator[Emitted]:
        scheduler = self._new_scheduler()
        while scheduler.running:
            step = scheduler.next_step()
            logits = self._execute(scheduler, step)
            done = [i for i, (request, _) in enumerate(step) if request.cached == len(request.tokens)]
            sampled = self.sampler(logits[done], [step[i][0].index for i in done])
            for i, token in zip(done, sampled, strict=True):
                request = step[i][0]
                finish: FinishReason | None = None
                if token in self.end_tokens:
                    finish = "stop"
                elif len(request.tokens) + 1 == request.limit:
                    finish = "length"
                scheduler.append(request, token, ends=finish is not None)
                yield Emitted(request.index, token, finish)

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            self.model.config,
            self.prompts,
            self.max_new_tokens,
            num_pages=self.model.num_pages,
            page_size=self.model.page_size,
            max_step_tokens=self.max_step_tokens,
        )

    def _execute(self, scheduler: Scheduler, step: Step) -> np.ndarray:
        """Logits `[len(step), vocab]`; the new tokens are in the cache afterwards."""
        began = time.perf_counter()
        logits = self.model.step(
            [new for _, new in step],
            [request.cached for request, _ in step],
            [scheduler.pages(request) for request, _ in step],
        )
        seconds = time.perf_counter() - began
        statistics = self.statistics
        statistics.peak_pages = max(statistics.peak_pages, scheduler.pages_used)
        count = sum(len(new) for _, new in step)
        prompt = sum(len(new) for request, new in step if request.is_prefilling)
        statistics.prompt_tokens += prompt
        statistics.decode_tokens += count - prompt
        statistics.prefill_seconds += seconds * prompt / count
        statistics.decode_seconds += seconds * (count - prompt) / count
        for request, new in step:
            request.cached += len(new)
        return logits
