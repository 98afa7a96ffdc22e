"""What a page pool is beside its operations: one at a time, events, counts, and the proof of its state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from paged_kv.arguments import LARGEST_INDEX, integer
from paged_kv.errors import ContractError
from paged_kv.pool import requests
from paged_kv.pool.integrity import check_state
from paged_kv.pool.requests import Events, Listener
from paged_kv.pool.state import PoolState

_Pool = TypeVar("_Pool", bound="PoolBase")
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Counts(NamedTuple):
    """The pages of a pool: `free + cached + used` are all."""

    free: int
    """No request owns them, and their content is not known."""
    cached: int
    """No request owns them, and their tokens are known; they are taken where no page is free."""
    used: int
    """Requests own them."""


def operation(method: Callable[Concatenate[_Pool, _P], _T]) -> Callable[Concatenate[_Pool, _P], _T]:
    """Runs a method of the pool alone, after the one before it is carried out; listeners are told afterwards."""

    @wraps(method)
    def run(self: _Pool, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise ContractError(
                "this thread is inside another operation of the pool: signal handlers, and __eq__ of request ids, may"
                " not call it"
            )
        with self._lock:
            self._state.settle()
            result = method(self, *args, **kwargs)
        if self._events.listeners:
            self._events.tell()
        return result

    return run


class PoolBase:
    """The state of a pool, its lock and its listeners."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        pages = integer("num_pages", num_pages, 0, LARGEST_INDEX)
        self._state = PoolState(pages, integer("page_size", page_size, 1, LARGEST_INDEX))
        self._events = Events()
        self._lock = threading.RLock()

    @property
    def num_pages(self) -> int:
        """Pages in the pool: free, cached and used."""
        return self._state.num_pages

    @property
    def page_size(self) -> int:
        """Token slots in a page."""
        return self._state.page_size

    @property
    def num_free(self) -> int:
        """`count().free`."""
        return self.count().free

    @property
    def num_cached(self) -> int:
        """`count().cached`."""
        return self.count().cached

    @property
    def num_used(self) -> int:
        """`count().used`."""
        return self.count().used

    @operation
    def count(self) -> Counts:
        """How many pages are free, cached and used, at one moment."""
        free, cached = self._state.num_free(), len(self._state.cached)
        return Counts(free, cached, self._state.num_pages - free - cached)

    @operation
    def listen(self, listener: Listener) -> None:
        """Calls `listener` with what happens to pages, after each operation; what it raises is printed, not raised."""
        self._events.listeners.append(listener)

    @operation
    def unlisten(self, listener: Listener) -> None:
        """Calls `listener` no more."""
        self._events.listeners.remove(listener)

    @operation
    def pages(self, request_id: Hashable) -> tuple[int, ...]:
        """The request's pages in token order: `ceil(length / page_size)` page ids, `NO_PAGE` for those dropped.

        Raises: as `free`.
        """
        return tuple(requests.find(self._state, request_id).pages)

    @operation
    def length(self, request_id: Hashable) -> int:
        """The tokens the request has slots for, dropped ones included.

        Raises: as `free`.
        """
        return requests.find(self._state, request_id).length or 0

    @operation
    def check_integrity(self) -> None:
        """Checks the allocator state: each page is free, cached or owned, by as many requests as it counts, and each
        request has the pages it needs. It costs O(pages that were ever owned).

        Raises:
            IntegrityError: names the first violation found.
        """
        check_state(self._state)

    def __getstate__(self) -> dict[str, Any]:
        return {"_state": self._snapshot()}

    @operation
    def _snapshot(self) -> PoolState:
        return self._state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._events, self._lock = Events(), threading.RLock()
