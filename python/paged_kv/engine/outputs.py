"""Queues that carry a request's outputs from the engine's steps to its readers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

from paged_kv.engine.requests import Output, Request
from paged_kv.errors import RequestError


class Stepping(Protocol):
    """The part of an engine that a stream needs."""

    def advance(self) -> None: ...

    def has_ended(self, request: int) -> bool: ...

    def abort(self, request: int) -> None: ...


class OutputStream(Iterator[Output]):
    """The outputs of one request; where none has come yet, the next one computes steps, for all requests.

    A stream that is closed or dropped before its end, its first output included, aborts the request. What a step raises
    ends nothing: the stream may be asked again. One thread at a time may read it.
    """

    def __init__(self, engine: Stepping, request: Request) -> None:
        self._engine = engine
        self._request = request
        self._read = request.outbox.last

    def __next__(self) -> Output:
        while True:
            ended = self._engine.has_ended(self._request.number)  # asked first: another thread may step
            link = self._read.next
            if link is not None and not self._request.aborted:
                self._read = link
                return link.output
            if ended:
                raise StopIteration
            self._engine.advance()

    def close(self) -> None:
        """Aborts the request, where it has not ended, and reads nothing more."""
        with suppress(RequestError):
            self._engine.abort(self._request.number)
        self._request.aborted = True

    def __del__(self) -> None:
        self.close()
