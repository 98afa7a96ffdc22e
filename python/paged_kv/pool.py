"""The page pool: which request owns which pages, in which order. Pure Python: it handles page ids, never data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paged_kv.arguments import LARGEST_INDEX, integer, shown
from paged_kv.errors import ContractError, ContractTypeError, IntegrityError, PoolExhausted, RequestError

_LARGEST_INT64 = 2**63 - 1


def pages_needed(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens fill, the last one perhaps partly: `ceil(num_tokens / page_size)`.

    Raises:
        ContractTypeError: an argument is not an integer.
        ContractError: `num_tokens` is negative or `page_size` is below 1.
    """
    return -(-integer("num_tokens", num_tokens, 0) // integer("page_size", page_size, 1))


class PagePool:
    """`num_pages` pages of `page_size` token slots each, handed to requests and taken back.

    A request's length counts the tokens it has slots for: token j lives in page `pages(request_id)[j // page_size]`,
    slot `j % page_size`. Every operation does all it says, or raises and changes nothing; that holds for an exception
    that comes from outside, KeyboardInterrupt for one: the pool is then as before the operation or as after it. Taking
    or returning a page is O(1), and the page returned last is taken first.

    Request ids are any hashable values that equal themselves. Threads may share a pool: an operation waits for the one
    in progress. A pool that is copied or pickled is a pool of its own.

    Raises:
        ContractTypeError: an argument is not an integer.
        ContractError: `num_pages` is negative, `page_size` is below 1, or either is above 2^31 - 1. From any method:
            the thread is inside another operation of this pool, in a signal handler or a request id's `__eq__`.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._num_pages = integer("num_pages", num_pages, 0, LARGEST_INDEX)
        self._page_size = integer("page_size", page_size, 1, LARGEST_INDEX)
        self._returned: list[int] = []  # pages that were owned and are free; the last is taken first, then fresh ones
        self._fresh = 0  # this page and those above were never owned
        self._requests: dict[Hashable, _Request] = {}  # some may be inactive: started and not committed, or freed
        self._change: _Change | None = None
        self._lock = threading.RLock()

    @property
    def num_pages(self) -> int:
        """Pages in the pool, free and used."""
        return self._num_pages

    @property
    def page_size(self) -> int:
        """Token slots in a page."""
        return self._page_size

    @property
    def num_free(self) -> int:
        """Pages no request owns."""
        self._refuse_reentry()
        with self._lock:
            self._settle()
            return self._count_free()

    @property
    def num_used(self) -> int:
        """Pages requests own."""
        return self._num_pages - self.num_free

    def start(self, request_id: Hashable, num_tokens: int = 0) -> tuple[int, ...]:
        """Adds a request with a prompt of `num_tokens` tokens and returns its pages, in token order.

        Raises:
            RequestError: the request has been started and not freed.
            PoolExhausted: the prompt needs more pages than are free.
            ContractTypeError: `num_tokens` is not an integer, or `request_id` is not hashable.
            ContractError: `num_tokens` is negative, or `request_id` does not equal itself.
        """
        self._refuse_reentry()
        with self._lock:
            self._settle()
            if self._look_up(request_id) is not None:
                raise RequestError(f"request {shown(request_id)} has already been started")
            change = self._growth(request_id, self._new(request_id), num_tokens)
            self._register(request_id, change.request)
            return self._commit(change).added

    def reserve(self, request_id: Hashable, num_tokens: int = 1) -> tuple[int, ...]:
        """Lengthens a request by `num_tokens` tokens and returns the pages this added, in token order; often none.

        Raises:
            RequestError: the request is unknown.
            PoolExhausted: the tokens need more new pages than are free.
            ContractTypeError, ContractError: `num_tokens` is not an integer, or negative.
        """
        self._refuse_reentry()
        with self._lock:
            self._settle()
            return self._commit(self._growth(request_id, self._find(request_id), num_tokens)).added

    def extend(self, request_id: Hashable, num_tokens: int, write: Callable[[int, tuple[int, ...]], Any]) -> None:
        """Lengthens a request, started where it is unknown, by tokens that `write` stores before they count.

        Where `write` raises, the pool stays as it was. It must not call the pool.

        Args:
            request_id: The request.
            num_tokens: The new tokens.
            write: Called as `write(slot, pages)`: token j of the new ones goes to slot `(slot + j) % page_size` of page
                `pages[(slot + j) // page_size]`.

        Raises: as `start`, and what `write` raises.
        """
        self._refuse_reentry()
        with self._lock:
            self._settle()
            request = self._look_up(request_id) or self._new(request_id)
            change = self._growth(request_id, request, num_tokens)
            first, slot = divmod(request.length or 0, self._page_size)
            write(slot, (*request.pages[first:], *change.added))
            self._register(request_id, request)
            self._commit(change)

    def free(self, request_id: Hashable) -> None:
        """Forgets a request and returns its pages to the pool, its first page on top of the free list.

        Raises:
            RequestError: the request is unknown, or was freed before.
            ContractTypeError: `request_id` is not hashable.
        """
        self._refuse_reentry()
        with self._lock:
            self._settle()
            request = self._find(request_id)
            returned = tuple(reversed(request.pages))
            self._commit(_Change(len(self._returned), returned, self._fresh, request, 0, (), None))
            with suppress(Exception):  # of the id's own methods: the request is inactive as it is
                self._requests.pop(request_id, None)

    def pages(self, request_id: Hashable) -> tuple[int, ...]:
        """The request's pages in token order: `ceil(length / page_size)` page ids.

        Raises: as `free`.
        """
        self._refuse_reentry()
        with self._lock:
            self._settle()
            return tuple(self._find(request_id).pages)

    def length(self, request_id: Hashable) -> int:
        """The tokens the request has slots for.

        Raises: as `free`.
        """
        self._refuse_reentry()
        with self._lock:
            self._settle()
            return self._find(request_id).length or 0

    def check_integrity(self) -> None:
        """Checks the allocator state: each page has one holder, each request has the pages it needs.

        The holders are the free list and the requests, so `num_free + num_used == num_pages` is checked as well. It
        costs O(pages that were ever owned).

        Raises:
            IntegrityError: names the first violation found.
        """
        self._refuse_reentry()
        with self._lock:
            self._settle()
            self._check_holders()
            for request_id, length, pages in self._active():
                if length < 0:
                    raise IntegrityError(f"request {shown(request_id)} has length {length}")
                needed = pages_needed(length, self._page_size)
                if len(pages) != needed:
                    raise IntegrityError(
                        f"request {shown(request_id)} of length {length} holds {len(pages)} pages, not {needed}"
                    )

    def _check_holders(self) -> None:
        holder_of: dict[int, str] = {}
        for holder, pages in self._holders():
            for page in pages:
                if type(page) is not int or not 0 <= page < self._num_pages:
                    raise IntegrityError(f"{holder} holds page {page!r}, not one of the pool's {self._num_pages} pages")
                if page >= self._fresh:
                    raise IntegrityError(f"page {page} is held twice: by the free list and by {holder}")
                if page in holder_of:
                    raise IntegrityError(f"page {page} is held twice: by {holder_of[page]} and by {holder}")
                holder_of[page] = holder
        for page in range(self._fresh):
            if page not in holder_of:
                raise IntegrityError(f"page {page} is leaked: neither free nor held by a request")

    def _holders(self) -> Iterator[tuple[str, list[int]]]:
        """What holds the pages that were ever owned, with a name for messages."""
        yield "the free list", self._returned
        for request_id, _, pages in self._active():
            yield f"request {shown(request_id)}", pages

    def _active(self) -> Iterator[tuple[Hashable, int, list[int]]]:
        """The requests, each with its length and pages."""
        for request_id, request in self._requests.items():
            if request.length is not None:
                yield request_id, request.length, request.pages

    def _count_free(self) -> int:
        return self._num_pages - self._fresh + len(self._returned)

    def _look_up(self, request_id: Hashable) -> _Request | None:
        """The request's record; None where it is unknown."""
        try:
            request = self._requests.get(request_id)
        except Exception as error:  # its __hash__ or __eq__ may raise anything
            raise _unusable(request_id) from error
        return request if request is not None and request.length is not None else None

    def _register(self, request_id: Hashable, request: _Request) -> None:
        """Makes a request known by its id; one that is inactive is unknown until a change is committed."""
        try:
            self._requests[request_id] = request
        except Exception as error:
            raise _unusable(request_id) from error

    def _find(self, request_id: Hashable) -> _Request:
        """The request's record, or RequestError."""
        request = self._look_up(request_id)
        if request is None:
            raise RequestError(f"request {shown(request_id)} is unknown: never started, or freed")
        return request

    def _new(self, request_id: Hashable) -> _Request:
        """The record of a request that is not there yet, inactive; refuses an id that could not be found again."""
        try:
            found = bool(request_id == request_id)
        except Exception:
            found = False
        if not found:
            raise ContractError(f"request_id must equal itself, {shown(request_id)} does not")
        return _Request()

    def _growth(self, request_id: Hashable, request: _Request, num_tokens: int) -> _Change:
        """What lengthens `request`; nothing is changed yet."""
        if type(num_tokens) is not int or not 0 <= num_tokens <= _LARGEST_INT64:
            num_tokens = integer(f"request {shown(request_id)}: num_tokens", num_tokens, 0, _LARGEST_INT64)
        length = (request.length or 0) + num_tokens
        needed = -(-length // self._page_size) - len(request.pages)
        if not needed:
            return _Change(len(self._returned), (), self._fresh, request, len(request.pages), (), length)
        if needed > self._count_free():
            raise PoolExhausted(
                f"request {shown(request_id)}: num_tokens={num_tokens} needs {needed} more pages,"
                f" {self._count_free()} of {self._num_pages} are free"
            )
        kept = max(len(self._returned) - needed, 0)
        fresh = self._fresh + needed - (len(self._returned) - kept)
        added = (*reversed(self._returned[kept:]), *range(self._fresh, fresh))
        return _Change(kept, (), fresh, request, len(request.pages), added, length)

    def _commit(self, change: _Change) -> _Change:
        """Makes a change true: from the first statement on it counts, whatever interrupts the rest."""
        self._change = change
        self._settle()
        return change

    def _settle(self) -> None:
        """Carries the last change out where that was interrupted. Each step may be repeated."""
        change = self._change
        if change is None:
            return
        self._returned[change.kept :] = change.returned
        self._fresh = change.fresh
        change.request.pages[change.held :] = change.added
        change.request.length = change.length
        self._change = None

    def _refuse_reentry(self) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise ContractError(
                "this thread is inside another operation of the pool: signal handlers, and __eq__ of request ids, may"
                " not call it"
            )

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_reentry()
        with self._lock:
            return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()


def _unusable(request_id: Any) -> ContractTypeError:
    kind = type(request_id).__name__
    return ContractTypeError(f"request_id must be hashable and comparable, not {shown(request_id)} of type {kind}")


@dataclass(slots=True)
class _Request:
    """The allocator state of one request."""

    length: int | None = None
    """In tokens; None where the request is not started, or freed."""
    pages: list[int] = field(default_factory=list)
    """In token order."""


class _Change(NamedTuple):
    """One operation's effect in absolute terms, so that carrying it out twice is as carrying it out once."""

    kept: int
    """The returned pages below this index stay."""
    returned: Sequence[int]
    """What follows them."""
    fresh: int
    """The lowest page that was never owned."""
    request: _Request
    held: int
    """The request's pages below this index stay."""
    added: tuple[int, ...]
    """What follows them."""
    length: int | None
    """The request's length; None: it is freed."""
