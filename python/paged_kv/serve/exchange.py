"""One request of a client, whatever its API: the jobs that it becomes, and what is answered as their pieces come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from paged_kv.serve.backend import Job, Piece

Event = dict[str, Any]
"""The data of one server-sent event."""


@dataclass
class Usage:
    """The tokens of a request."""

    prompt: int
    completion: int = 0
    cached: int = 0

    def openai(self) -> dict[str, Any]:
        """In OpenAI's words."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Exchange(ABC):
    """Jobs, and the answer that grows with their pieces.

    Args:
        jobs: At least one.
        stream: Whether the answer is a stream of events.
    """

    NAMED_EVENTS: ClassVar[bool] = False
    """Whether each event has the name that its `type` says; else the stream ends with `[DONE]`, as OpenAI's does."""

    def __init__(self, jobs: Sequence[Job], *, stream: bool) -> None:
        self.jobs, self.stream = tuple(jobs), stream
        self.usage = Usage(sum(len(job.tokens) for job in self.jobs))
        self._cached = [0] * len(self.jobs)

    def begin(self) -> list[Event]:
        """The events before the first piece."""
        return []

    def add(self, job: int, pieces: Sequence[Piece]) -> list[Event]:
        """The events of some pieces of a job."""
        by_sample: dict[int, list[Piece]] = {}
        for piece in pieces:
            self.usage.completion += len(piece.tokens)
            by_sample.setdefault(piece.sample, []).append(piece)
        self._cached[job] = pieces[-1].cached_tokens if pieces else self._cached[job]
        self.usage.cached = sum(self._cached)
        return [event for sample, its in by_sample.items() for event in self.take(job, sample, its)]

    @abstractmethod
    def take(self, job: int, sample: int, pieces: Sequence[Piece]) -> list[Event]:
        """Notes pieces of one sample; the events that they give."""

    def end(self) -> list[Event]:
        """The events after the last piece."""
        return []

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream."""
