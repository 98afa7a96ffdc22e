"""The page pool: which requests own which pages, in which order. Pure Python: it handles page ids, never data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from paged_kv.arguments import LARGEST_INDEX, integer
from paged_kv.errors import ContractError, PoolExhausted
from paged_kv.options import NO_PAGE
from paged_kv.pool.events import Events, Listener, PageEvent
from paged_kv.pool.integrity import check_state
from paged_kv.pool.state import Contents, PoolState, RequestPages, Stored, name_of

__all__ = ["Copy", "Counts", "PageEvent", "PagePool", "pages_needed"]

_LARGEST_INT64 = 2**63 - 1
_Pool = TypeVar("_Pool", bound="PagePool")
_P = ParamSpec("_P")
_T = TypeVar("_T")

Copy = Callable[[int, int], Any]
"""Copies page `source` to page `target`: K, V and every layer."""
Write = Callable[[int, tuple[int, ...]], Any]
"""Stores new tokens, from a slot of the first of some pages on."""


class Counts(NamedTuple):
    """The pages of a pool: `free + cached + used` are all."""

    free: int
    """No request owns them, and their content is not known."""
    cached: int
    """No request owns them, and their tokens are known; they are taken where no page is free."""
    used: int
    """Requests own them."""


def pages_needed(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens fill, the last one perhaps partly: `ceil(num_tokens / page_size)`.

    Raises:
        ContractTypeError: an argument is not an integer.
        ContractError: `num_tokens` is negative or `page_size` is below 1.
    """
    return -(-integer("num_tokens", num_tokens, 0) // integer("page_size", page_size, 1))


def operation(method: Callable[Concatenate[_Pool, _P], _T]) -> Callable[Concatenate[_Pool, _P], _T]:
    """Runs a method of the pool alone, after what an exception left is settled; listeners are told afterwards."""

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


class PagePool:
    """`num_pages` pages of `page_size` token slots each, handed to requests and taken back.

    A request's length counts the tokens it has slots for: token j lives in page `pages(request_id)[j // page_size]`,
    slot `j % page_size`. Several requests own one page after `fork`, and where a prompt begins as a known one does
    (`prefix.PrefixCache`). Free pages are taken before cached ones, and of these the one used least recently.

    Every operation does all it says, or raises and changes no request; cached pages that it needed may be free then.
    That holds for an exception that comes from outside, KeyboardInterrupt for one: each request is as before the
    operation or as after it, or has its own copy of a shared page already. The next operation, which computes again
    which pages are free, costs O(pages). Else taking or returning a page is O(1), the page returned last first.

    Request ids are any hashable values that equal themselves. Threads may share a pool: an operation waits for the one
    in progress. A pool that is copied or pickled is a pool of its own, without listeners.

    Raises:
        ContractTypeError: an argument is not an integer.
        ContractError: `num_pages` is negative, `page_size` is below 1, or either is above 2^31 - 1. From any method:
            the thread is inside another operation of this pool, in a signal handler or a request id's `__eq__`.

    Examples:
        >>> pool = PagePool(num_pages=8, page_size=4)
        >>> pool.start("a", 6)
        (0, 1)
        >>> pool.fork("a", "b")
        >>> pool.pages("b"), pool.count()
        ((0, 1), Counts(free=6, cached=0, used=2))
        >>> pool.reserve("b", 1, copy=lambda source, target: None)  # it takes no page, but copies one
        ()
        >>> pool.pages("a")[1] == pool.pages("b")[1], pool.count().used
        (False, 3)
    """

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
        """Return how many pages are free, cached and used, at one moment."""
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
        return tuple(self._state.find(request_id).pages)

    @operation
    def length(self, request_id: Hashable) -> int:
        """The tokens the request has slots for, dropped ones included.

        Raises: as `free`.
        """
        return self._state.find(request_id).length

    @operation
    def start(
        self,
        request_id: Hashable,
        num_tokens: int | None = 0,
        find_prefix: Callable[[Mapping[int, Any]], Sequence[int]] | None = None,
    ) -> tuple[int, ...]:
        """Adds a request with a prompt of `num_tokens` tokens and returns its pages, in token order.

        Args:
            request_id: The request.
            num_tokens: Its tokens; with `find_prefix`, None for those of the pages that it begins with.
            find_prefix: For `PrefixCache`: chooses the pages that the request begins with, from the known pages and the
                records of their content. It must not call the pool.

        Raises:
            RequestError: the request has been started and not freed.
            PoolExhausted: the prompt needs more pages than are free or cached.
            ContractTypeError: `num_tokens` is not an integer, or `request_id` is not hashable.
            ContractError: `num_tokens` is negative, or `request_id` does not equal itself.
        """
        request = self._state.new(request_id)
        prefix = find_prefix(self._state.known) if find_prefix else ()
        if find_prefix and num_tokens is None:
            count = len(prefix) * self._state.page_size
        else:
            count = _token_count(request_id, num_tokens)
        return (*prefix, *self._grow(request_id, request, count, prefix))

    @operation
    def reserve(self, request_id: Hashable, num_tokens: int = 1, copy: Copy | None = None) -> tuple[int, ...]:
        """Lengthens a request by `num_tokens` tokens and returns the pages this added, in token order; often none.

        Args:
            request_id: The request.
            num_tokens: The new tokens.
            copy: Called as `copy(source, target)` where the first new token goes to a page that other requests own
                too: the request gets `target` in its place. It must not call the pool.

        Raises:
            RequestError: the request is unknown.
            PoolExhausted: the tokens need more new pages than are free or cached.
            ContractTypeError, ContractError: `num_tokens` is not an integer, or negative; or a page must be copied, and
                there is no `copy`.
        """
        request, count = self._state.find(request_id), _token_count(request_id, num_tokens)
        return tuple(self._grow(request_id, request, count, copy=copy))

    @operation
    def extend(self, request_id: Hashable, num_tokens: int, write: Write, copy: Copy | None = None) -> None:
        """Lengthens a request, started where it is unknown, by tokens that `write` stores before they count.

        Where `write` or `copy` raises, the pool stays as it was, but cached pages that it needed may be free instead.
        Neither must call the pool.

        Args:
            request_id: The request.
            num_tokens: The new tokens.
            write: Called as `write(slot, pages)`: token j of the new ones goes to slot `(slot + j) % page_size` of page
                `pages[(slot + j) // page_size]`.
            copy: As of `reserve`; called before `write`.

        Raises: as `start` and `reserve`, and what `write` raises.
        """
        request = self._state.look_up(request_id) or self._state.new(request_id)
        self._grow(request_id, request, _token_count(request_id, num_tokens), copy=copy, write=write)

    @operation
    def fork(self, request_id: Hashable, new_id: Hashable) -> None:
        """Starts request `new_id` with all tokens and pages of `request_id`; both own them.

        Where the last page is not full, the first of them that lengthens gets a copy of it (`reserve`).

        Raises:
            RequestError: `request_id` is unknown, or `new_id` has been started.
            ContractTypeError, ContractError: `new_id` is no request id.
        """
        state = self._state
        parent, child = state.find(request_id), state.new(new_id)
        child.length, child.pages = parent.length, list(parent.pages)
        child.dropped, child.stored = parent.dropped, parent.stored
        with state:
            state.requests[new_id] = child
            state.own(child.owned())
        self._events.add("shared", new_id, child.owned())

    @operation
    def shrink(self, request_id: Hashable, num_tokens: int) -> None:
        """Takes a request's last `num_tokens` tokens back, and their pages: proposals that a model refused, say.

        Raises:
            RequestError: the request is unknown.
            ContractTypeError, ContractError: `num_tokens` is not an integer, negative, or more than the request has in
                pages that it still owns.
        """
        request = self._state.find(request_id)
        length, page_size = request.length, self._state.page_size
        most = max(length - request.dropped * page_size, 0)
        length -= integer(f"{name_of(request_id)}: num_tokens", num_tokens, 0, most)
        held = -(-length // page_size)
        leaving = request.pages[held:]
        with self._state:
            if request.stored is not None and request.stored[0] * page_size > length:
                request.stored = None  # what is stored of it is found again where it is needed
            request.length = length
            del request.pages[held:]
            self._state.release(leaving)
        self._events.add("released", request_id, leaving)

    @operation
    def drop(self, request_id: Hashable, num_tokens: int) -> int:
        """Gives back the pages whose tokens are all among the first `num_tokens`: no layer's window reaches them.

        The table keeps its holes: `pages` has `NO_PAGE`, 2^32 - 1, in their place, and tokens keep their positions.

        Returns the number of pages that the request gave back.

        Raises:
            RequestError: the request is unknown.
            ContractTypeError, ContractError: `num_tokens` is not an integer, negative, or more than the request has.
        """
        request = self._state.find(request_id)
        tokens = integer(f"{name_of(request_id)}: num_tokens", num_tokens, 0, request.length)
        end = max(tokens // self._state.page_size, request.dropped)
        leaving = request.pages[request.dropped : end]
        with self._state:
            begin, request.dropped = request.dropped, end
            request.pages[begin:end] = [NO_PAGE] * len(leaving)
            self._state.release(leaving)
        self._events.add("released", request_id, leaving)
        return len(leaving)

    @operation
    def free(self, request_id: Hashable) -> None:
        """Forgets a request. Pages that it alone owned return to the pool, its first page on top of the free list.

        Raises:
            RequestError: the request is unknown, or was freed before.
            ContractTypeError: `request_id` is not hashable.
        """
        leaving = self._state.find(request_id).owned()
        with self._state:
            del self._state.requests[request_id]
            self._state.release(leaving)
        self._events.add("released", request_id, leaving)

    @operation
    def remember(
        self, request_id: Hashable, choose: Callable[[RequestPages, Mapping[int, Any]], tuple[Contents, Stored]]
    ) -> int:
        """Makes the content of some of a request's pages known. For `PrefixCache`.

        Args:
            request_id: The request.
            choose: From the request and the known pages with their records: what is to be known, and how many of the
                request's pages are known then. It must not call the pool.

        Returns:
            That number. Raises as `free`, and what `choose` raises.
        """
        request = self._state.find(request_id)
        contents, stored = choose(request, self._state.known)
        self._state.known.update(contents)
        request.stored = stored
        self._events.add("stored", request_id, (page for page, _ in contents))
        return 0 if stored is None else stored[0]

    @operation
    def owners(self) -> dict[Hashable, tuple[int, ...]]:
        """The pages of each request that has any, in token order, without those that were dropped."""
        return {key: tuple(pages) for key, request in self._state.requests.items() if (pages := request.owned())}

    @operation
    def look(self, function: Callable[[Mapping[int, Any]], _T]) -> _T:
        """`function` of the known pages with their records. For `PrefixCache`."""
        return function(self._state.known)

    @operation
    def forget(self) -> int:
        """Forgets what is in the pages, where the weights have changed for one; cached pages become free.

        Returns the number of pages whose content was known.
        """
        known = tuple(self._state.known)
        with self._state:
            self._forget(known)
        return len(known)

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

    def _grow(
        self,
        request_id: Hashable,
        request: RequestPages,
        num_tokens: int,
        prefix: Sequence[int] = (),
        *,
        copy: Copy | None = None,
        write: Write | None = None,
    ) -> list[int]:
        """Lengthens a request by `num_tokens` tokens; a new one begins with the known pages `prefix`, all full.

        Returns its new pages, without the copy of its last one. Raises as `start` and `extend`.
        """
        state, size, length = self._state, self._state.page_size, request.length + num_tokens
        held = len(request.pages)  # of its pages those that stay
        last = request.pages[-1] if num_tokens and request.length % size else None  # is written to
        source = last if last in state.shared else None
        if source is not None:
            held -= 1
        needed = -(-length // size) - held - len(prefix)
        missing = self._missing(request_id, num_tokens, needed, prefix)
        if source is not None and copy is None:
            raise ContractError(
                f"{name_of(request_id)}: the new tokens go to page {source}, which other requests own too: give"
                f" copy, which copies it"
            )
        with state:
            state.own(prefix)
            if missing:
                self._forget(state.cached.first(missing))
            new = state.take(needed)
            if source is not None and copy is not None:
                copy(source, new[0])
            elif last in state.known:
                self._forget([last])
            if write is not None:
                first, slot = divmod(request.length, size)
                write(slot, (*request.pages[first:held], *new))
            request.pages[held:] = [*prefix, *new]
            request.length = length  # from here on they count
            if source is not None:
                state.release([source])
            state.requests[request_id] = request
        self._events.add("hit", request_id, prefix)
        if source is not None:
            self._events.add("copied", request_id, (source, new.pop(0)))
        self._events.add("allocated", request_id, new)
        return new

    def _missing(self, request_id: Hashable, num_tokens: int, needed: int, prefix: Sequence[int]) -> int:
        """The number of cached pages, but for those of `prefix`, that `needed` pages take besides the free ones.

        Raises:
            PoolExhausted: there are not so many.
        """
        state, free = self._state, self._state.num_free()
        if needed <= free:
            return 0
        spare = len(state.cached) - sum(page in state.cached for page in prefix)
        if needed - free > spare:
            cached = f" and {spare} cached" if state.cached else ""
            raise PoolExhausted(
                f"{name_of(request_id)}: num_tokens={num_tokens} needs {needed} more pages,"
                f" {free} of {state.num_pages} are free{cached}"
            )
        return needed - free

    def _forget(self, pages: Sequence[int]) -> None:
        self._state.forget(pages)
        self._events.add("evicted", None, pages)


def _token_count(request_id: Hashable, num_tokens: int | None) -> int:
    if type(num_tokens) is int and 0 <= num_tokens <= _LARGEST_INT64:
        return num_tokens
    return integer(f"{name_of(request_id)}: num_tokens", num_tokens, 0, _LARGEST_INT64)
