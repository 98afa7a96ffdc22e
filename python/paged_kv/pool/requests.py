"""The requests of a page pool by their ids, which are any hashable values and may misbehave; and events of pages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal, NamedTuple

from paged_kv.arguments import shown
from paged_kv.errors import ContractError, ContractTypeError, RequestError
from paged_kv.pool.state import PoolState, RequestPages

EventKind = Literal["allocated", "shared", "copied", "released", "stored", "hit", "evicted"]


class PageEvent(NamedTuple):
    """An event of some pages.

    "allocated": a request got them. "shared": a request became one more owner. "copied": a request got the second as
    its own copy of the first. "released": a request owns them no more. "stored": their tokens are known from now on.
    "hit": a request begins with them, because its prompt begins with their tokens. "evicted": their tokens are known no
    more; no request is named.
    """

    kind: EventKind
    request_id: Hashable
    pages: tuple[int, ...]


Listener = Callable[[PageEvent], Any]


class Events:
    """Events of the operation in progress, and their listeners."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self._pending: list[PageEvent] = []

    def add(self, kind: EventKind, request_id: Hashable, pages: Iterable[int]) -> None:
        """Notes an event that has pages, where somebody listens."""
        if self.listeners and (told := tuple(pages)):
            self._pending.append(PageEvent(kind, request_id, told))

    def tell(self) -> None:
        """Calls the listeners. What they raise is printed: the operation has been done."""
        pending, self._pending = self._pending, []
        for event in pending:
            for listener in self.listeners:
                try:
                    listener(event)
                except Exception:
                    sys.excepthook(*sys.exc_info())


def name_of(request_id: Hashable) -> str:
    """Return how messages name a request."""
    return f"request {shown(request_id)}"


def look_up(state: PoolState, request_id: Hashable) -> RequestPages | None:
    """The request's record; None where it is unknown."""
    try:
        return state.requests.get(request_id)
    except Exception as error:  # its __hash__ or __eq__ may raise anything
        raise _unusable(request_id) from error


def find(state: PoolState, request_id: Hashable) -> RequestPages:
    """The request's record, or RequestError."""
    request = look_up(state, request_id)
    if request is None:
        raise RequestError(f"{name_of(request_id)} is unknown: never started, or freed")
    return request


def register(state: PoolState, request_id: Hashable, request: RequestPages) -> None:
    """Makes a request known by its id."""
    try:
        state.requests[request_id] = request
    except Exception as error:
        raise _unusable(request_id) from error


def remove(state: PoolState, request_id: Hashable) -> None:
    """Makes a request unknown."""
    try:
        del state.requests[request_id]
    except Exception as error:  # a KeyError too, where its __hash__ is another one now
        raise _unusable(request_id) from error


def new(state: PoolState, request_id: Hashable) -> RequestPages:
    """The record of a request that is not there yet.

    Raises:
        RequestError: the request has been started and not freed.
        ContractTypeError, ContractError: the id is not hashable, or could not be found again.
    """
    if look_up(state, request_id) is not None:
        raise RequestError(f"{name_of(request_id)} has already been started")
    try:
        found = bool(request_id == request_id)
    except Exception:
        found = False
    if not found:
        raise ContractError(f"request_id must equal itself, {shown(request_id)} does not")
    return RequestPages()


def _unusable(request_id: Any) -> ContractTypeError:
    kind = type(request_id).__name__
    return ContractTypeError(f"request_id must be hashable and comparable, not {shown(request_id)} of type {kind}")
