"""One request of a client, whatever its API: the jobs that it becomes, and what is answered as their pieces come."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from paged_kv.serve.backend import Job, Piece
from paged_kv.serve.fields import BodyFields
from paged_kv.serve.served_model import ServedModel

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
    """True if each event has the name that its `type` says; else the stream ends with `[DONE]`, as OpenAI's does."""

    LONG_ANSWER: ClassVar[bool] = False
    """True if the whole answer is written in a thread: it may have millions of numbers."""

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


@dataclass(frozen=True)
class Wishes:
    """Options of the answer that every request to one of OpenAI's older routes may have."""

    stream: bool
    usage_at_end: bool = False
    usage_always: bool = False
    tokens: bool = False
    """True if the answer has the ids of its tokens."""

    @staticmethod
    def read(body: BodyFields) -> Wishes:
        """By `stream`, `stream_options`, which only a stream has, and `return_token_ids`. Raises FieldError."""
        stream, tokens = body.flag("stream", False), body.flag("return_token_ids", False)
        if "stream_options" not in body:
            return Wishes(stream, tokens=tokens)
        options = body.object("stream_options")
        if not stream:
            raise body.error("stream_options", "requires stream: true")
        at_end, always = options.flag("include_usage", False), options.flag("continuous_usage_stats", False)
        options.ignore(("include_obfuscation",))
        options.end()
        return Wishes(stream, at_end, always, tokens)


class ChoicesExchange(Exchange):
    """An answer in choices, as OpenAI's older routes have it.

    Args:
        jobs: At least one.
        model: Whose answer it is.
        wishes: What the request asks of its answer.
        prefix: The start of the answer's id.
        kind: The answer's `object`.
    """

    def __init__(self, jobs: Sequence[Job], model: ServedModel, wishes: Wishes, prefix: str, kind: str) -> None:
        super().__init__(jobs, stream=wishes.stream)
        self.model, self.wishes = model, wishes
        self.end_tokens = self.jobs[0].sampling.end_tokens(model.config.eos_token_ids)
        """They end a sample and are no part of its text, so they have no log-probabilities in the answer."""
        about = {"object": kind, "created": int(time.time()), "model": model.name}
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", **about, "system_fingerprint": model.fingerprint}

    def answer(self, choices: Sequence[Mapping[str, Any]], *, usage: bool) -> Event:
        """An event, or the whole answer, with some choices."""
        event = {**self._head, "choices": choices}
        if usage or self.wishes.usage_always:
            return event | {"usage": self.usage.openai()}
        return event | ({"usage": None} if self.wishes.usage_at_end else {})

    def end(self) -> list[Event]:
        return [self.answer([], usage=True)] if self.wishes.usage_at_end else []
