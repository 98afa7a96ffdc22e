"""The page pool: which requests own which pages, in which order. Pure Python: it handles page ids, never data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from paged_kv.arguments import LARGEST_INDEX, integer, shown
from paged_kv.errors import ContractError, PoolExhausted
from paged_kv.options import NO_PAGE
from paged_kv.pool.events import Events, Listener, PageEvent
from paged_kv.pool.integrity import check_state
from paged_kv.pool.state import PoolState, Remembered, RequestPages, name_of
from paged_kv.pool.units import Units

__all__ = ["Copy", "Counts", "PageEvent", "PagePool", "pages_needed"]

_LARGEST_INT64 = 2**63 - 1
_Pool = TypeVar("_Pool", bound="PagePool")
_P = ParamSpec("_P")
_T = TypeVar("_T")

Copy = Callable[[int, int], Any]
"""Copies page `source` to page `target`: K, V and every layer."""
Write = Callable[[int, tuple[int, ...]], Any]
"""Stores new tokens: called with the slot in the first page that they begin at, and the pages."""


class Cached(NamedTuple):
    """The pages of a pool whose tokens are cached, with an owner or without one."""

    pages: Mapping[int, Any]
    """The prefix cache's record of each page's tokens."""
    checkpoints: Mapping[int, int] | None
    """The slot of the state at the end of a page, where it is cached; None of a pool without slots."""


class Counts(NamedTuple):
    """The numbers of pages in a pool; their sum is `num_pages`."""

    free: int
    """No request owns them, and their tokens are not cached."""
    cached: int
    """No request owns them, and their tokens are cached; they are taken where no page is free."""
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
    """Runs a method under the lock, after `settle` has repaired what an exception left; then tells listeners."""

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
    slot `j % page_size`. Several requests own a page after `fork`, and where a prompt begins as a cached one does
    (`prefix.PrefixCache`). Free pages are taken before cached ones, the cached page used least recently first.

    An operation does all it says, or raises and changes no request; cached pages that it needed may then be free. After
    an exception from outside, such as KeyboardInterrupt, each request is as before the operation, as after it, or has
    its own copy of a shared page; the next operation then finds the free pages again, in O(pages). Otherwise taking or
    returning a page is O(1), and the page returned last is taken first.

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

    def __init__(self, num_pages: int, page_size: int, num_states: int = 0) -> None:
        pages = integer("num_pages", num_pages, 0, LARGEST_INDEX)
        states = integer("num_states", num_states, 0, LARGEST_INDEX)
        self._state = PoolState(pages, integer("page_size", page_size, 1, LARGEST_INDEX), states)
        self._events = Events()
        self._lock = threading.RLock()

    @property
    def num_pages(self) -> int:
        """Pages in the pool: free, cached and used."""
        return self._state.pages.count

    @property
    def page_size(self) -> int:
        """Token slots in a page."""
        return self._state.page_size

    @property
    def num_states(self) -> int:
        """Slots of state in the pool: free, cached and used."""
        return self._state.states.count

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
        return _count(self._state.pages)

    @operation
    def count_states(self) -> Counts:
        """The same of slots of state; those that are cached are checkpoints."""
        return _count(self._state.states)

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
        find_prefix: Callable[[Cached], Sequence[int]] | None = None,
    ) -> tuple[int, ...]:
        """Adds a request with a prompt of `num_tokens` tokens and returns its pages, in token order.

        Args:
            request_id: The request.
            num_tokens: Its tokens; with `find_prefix`, None for those of its pages.
            find_prefix: For `PrefixCache`: chooses the pages that the request begins with, of those cached; where
                the pool has slots of state, the last of them has a checkpoint, which becomes the request's state. The
                first ones may be `NO_PAGE`, as if they had been dropped. It must not call the pool.

        Raises:
            RequestError: the request has been started and not freed.
            PoolExhausted: the prompt needs more pages than are free or cached.
            ContractTypeError: `num_tokens` is not an integer, or `request_id` is not hashable.
            ContractError: `num_tokens` is negative, or `request_id` does not equal itself.
        """
        request = self._state.new(request_id)
        prefix = find_prefix(self._cached()) if find_prefix else ()
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
        """Starts request `new_id` with all tokens, pages and the state of `request_id`; both own them.

        Where the last page is not full, the first of them that lengthens gets a copy of it (`reserve`).

        Raises:
            RequestError: `request_id` is unknown, or `new_id` has been started.
            ContractTypeError, ContractError: `new_id` is no request id.
        """
        state = self._state
        parent, child = state.find(request_id), state.new(new_id)
        child.length, child.pages = parent.length, list(parent.pages)
        child.dropped, child.stored, child.state = parent.dropped, parent.stored, parent.state
        with state:
            state.requests[new_id] = child
            state.pages.own(child.owned())
            state.states.own(child.owned_states())
        self._events.add("shared", new_id, child.owned())

    @operation
    def shrink(self, request_id: Hashable, num_tokens: int) -> None:
        """Takes back a request's last `num_tokens` tokens and their pages, as for drafts that a model refused.

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
                request.stored = None  # `remember` finds it again
            request.length = length
            del request.pages[held:]
            self._state.pages.release(leaving)
        self._events.add("released", request_id, leaving)

    @operation
    def drop(self, request_id: Hashable, num_tokens: int) -> int:
        """Gives back the pages whose tokens are all among the first `num_tokens`: no layer's window reaches them.

        `pages` has `NO_PAGE`, 2^32 - 1, in their place, so that tokens keep their positions.

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
            self._state.pages.release(leaving)
        self._events.add("released", request_id, leaving)
        return len(leaving)

    @operation
    def free(self, request_id: Hashable) -> None:
        """Forgets a request. Pages and slots that it alone owned return to the pool, its first page on top of the free
        list.

        Raises:
            RequestError: the request is unknown, or was freed before.
            ContractTypeError: `request_id` is not hashable.
        """
        request = self._state.find(request_id)
        leaving, slots = request.owned(), request.owned_states()
        with self._state:
            del self._state.requests[request_id]
            self._state.pages.release(leaving)
            self._state.states.release(slots)
        self._events.add("released", request_id, leaving)

    @operation
    def remember(self, request_id: Hashable, choose: Callable[[RequestPages, Cached], Remembered]) -> int:
        """Caches the tokens of some of a request's pages. For `PrefixCache`.

        Args:
            request_id: The request.
            choose: Takes the request and the cached pages; returns what is cached from now on, and the number of the
                request's pages that are cached then. It must not call the pool.

        Returns:
            That number. Raises as `free`, and what `choose` raises.
        """
        state, request = self._state, self._state.find(request_id)
        contents, stored, checkpoints, passed = choose(request, self._cached())
        with state:
            state.pages.contents.update(contents)
            request.stored = stored
            passed_slots = [state.checkpoints[page] for page in passed if page in state.checkpoints]
            state.forget_states([slot for slot in passed_slots if slot in state.states.cached])
            for page, slot in checkpoints.items():
                if page not in state.checkpoints and slot not in state.states.contents:
                    state.states.contents[slot], state.checkpoints[page] = page, slot
        self._events.add("stored", request_id, (page for page, _ in contents))
        return 0 if stored is None else stored[0]

    @operation
    def owners(self) -> dict[Hashable, tuple[int, ...]]:
        """The pages of each request that has any, in token order, without those that were dropped."""
        return {key: tuple(pages) for key, request in self._state.requests.items() if (pages := request.owned())}

    @operation
    def look(self, function: Callable[[Cached], _T]) -> _T:
        """`function` of the cached pages. For `PrefixCache`."""
        return function(self._cached())

    @operation
    def state(self, request_id: Hashable) -> int | None:
        """The slot of a request's state; None where it has none. Raises as `free`."""
        return self._state.find(request_id).state

    @operation
    def take_states(self, request_id: Hashable, most: int, least: int = 1) -> tuple[int, ...]:
        """Gives a request slots for the states that its next step saves: as many as there are, up to `most`.

        The last of them is the slot of its state, if no other request and no prefix has that: it is replaced in place.
        Those that were taken for an earlier step and not kept go back first.

        Raises:
            RequestError: the request is unknown.
            PoolExhausted: there are fewer than `least`; the request has what it had.
            ContractTypeError, ContractError: a number is no integer, or negative; `most` is less than `least`.
        """
        request, slots = self._state.find(request_id), self._state.states
        least = integer(f"{name_of(request_id)}: least", least, 0, _LARGEST_INT64)
        most = integer(f"{name_of(request_id)}: most", most, least, _LARGEST_INT64)
        own = request.state
        earlier = [slot for slot in request.saves if slot != own]
        in_place = own is not None and own not in slots.shared and own not in slots.contents and most > 0
        there = slots.num_free() + len(slots.cached) + len(earlier)
        count = min(most - in_place, there)
        if count + in_place < least:
            raise PoolExhausted(
                f"{name_of(request_id)}: {least} slots of state are needed, {there + in_place} of {slots.count} are"
                f" free, cached or its own"
            )
        with self._state:
            request.saves = []
            slots.release(earlier)
            if (missing := count - slots.num_free()) > 0:
                self._state.forget_states(slots.cached.first(missing))
            taken = [*slots.take(count), *((own,) if in_place and own is not None else ())]
            request.saves = taken
        return tuple(taken)

    @operation
    def keep_state(self, request_id: Hashable, slot: int | None) -> None:
        """Says that a request's state is in one of the slots that it has, or that it has none; the others go back.

        Raises:
            RequestError: the request is unknown.
            ContractError: it does not have the slot.
        """
        request = self._state.find(request_id)
        owned = request.owned_states()
        if slot is not None and slot not in owned:
            raise ContractError(f"{name_of(request_id)}: slot: expected one of its states {owned}, got {shown(slot)}")
        with self._state:
            request.state, request.saves = slot, []
            self._state.states.release(owned - {slot})

    @operation
    def forget(self) -> int:
        """Forgets the content of all pages, as after a change of weights; cached pages become free.

        Returns the number of pages whose tokens were cached.
        """
        pages = tuple(self._state.pages.contents)
        with self._state:
            self._forget(pages)
        return len(pages)

    @operation
    def check_integrity(self) -> None:
        """Checks that each page and each slot of state is free, cached, or owned by as many requests as its count says,
        and that each request has the pages it needs. It costs O(pages that were ever owned).

        Raises:
            IntegrityError: names the first violation found.
        """
        check_state(self._state)

    def __getstate__(self) -> dict[str, Any]:
        return {"_state": self._snapshot()}

    def _cached(self) -> Cached:
        return Cached(self._state.pages.contents, self._state.checkpoints if self.num_states else None)

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
        """Lengthens a request by `num_tokens` tokens; a new one begins with the cached pages `prefix`, all full.

        Returns its new pages, without the copy of its last one. Raises as `start` and `extend`.
        """
        state, size, length = self._state, self._state.page_size, request.length + num_tokens
        held = len(request.pages)  # pages that stay
        last = request.pages[-1] if num_tokens and request.length % size else None  # a page that is written to
        source = last if last in state.pages.shared else None
        if source is not None:
            held -= 1
        needed = -(-length // size) - held - len(prefix)
        dropped = sum(page == NO_PAGE for page in prefix)
        shared = prefix[dropped:]
        missing = self._missing(request_id, num_tokens, needed, shared)
        if source is not None and copy is None:
            raise ContractError(
                f"{name_of(request_id)}: page {source} is shared by other requests: pass copy= to duplicate it before"
                f" writing"
            )
        with state:
            state.pages.own(shared)
            request.dropped += dropped
            if shared and state.states.count:
                request.state = state.checkpoints[shared[-1]]
                state.states.own([request.state])
            if missing:
                self._forget(state.pages.cached.first(missing))
            new = state.pages.take(needed)
            if source is not None and copy is not None:
                copy(source, new[0])
            elif last in state.pages.contents:
                self._forget([last])
            if write is not None:
                first, slot = divmod(request.length, size)
                write(slot, (*request.pages[first:held], *new))
            request.pages[held:] = [*prefix, *new]
            request.length = length  # from here on they count
            if source is not None:
                state.pages.release([source])
            state.requests[request_id] = request
        self._events.add("hit", request_id, shared)
        if source is not None:
            self._events.add("copied", request_id, (source, new.pop(0)))
        self._events.add("allocated", request_id, new)
        return new

    def _missing(self, request_id: Hashable, num_tokens: int, needed: int, prefix: Sequence[int]) -> int:
        """The number of cached pages that `needed` pages take beyond the free ones, without those of `prefix`.

        Raises:
            PoolExhausted: there are not so many.
        """
        pages, free = self._state.pages, self._state.pages.num_free()
        if needed <= free:
            return 0
        spare = len(pages.cached) - sum(page in pages.cached for page in prefix)
        if needed - free > spare:
            cached = f" and {spare} cached" if pages.cached else ""
            raise PoolExhausted(
                f"{name_of(request_id)}: num_tokens={num_tokens} needs {needed} more pages,"
                f" {free} of {pages.count} are free{cached}"
            )
        return needed - free

    def _forget(self, pages: Sequence[int]) -> None:
        self._state.forget(pages)
        self._events.add("evicted", None, pages)


def _count(units: Units) -> Counts:
    free, cached = units.num_free(), len(units.cached)
    return Counts(free, cached, units.count - free - cached)


def _token_count(request_id: Hashable, num_tokens: int | None) -> int:
    if type(num_tokens) is int and 0 <= num_tokens <= _LARGEST_INT64:
        return num_tokens
    return integer(f"{name_of(request_id)}: num_tokens", num_tokens, 0, _LARGEST_INT64)
