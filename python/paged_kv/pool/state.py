"""The allocator state of the page pool, and its changes: each is one record that counts by one store.

So an exception from outside, KeyboardInterrupt for one, finds a change either not made or made: what is left of it is
carried out by the next operation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from paged_kv.errors import PoolExhausted
from paged_kv.options import NO_PAGE

Contents = Sequence[tuple[int, Any]]
"""Pages, each with the prefix cache's record of its content."""
Stored = tuple[int, Any] | None
"""How many of a request's pages the prefix cache has recorded, and the record of the last one."""


@dataclass(slots=True)
class RequestPages:
    """What the pool knows of one request."""

    length: int | None = None
    """In tokens; None where the request is not started, or freed."""
    pages: list[int] = field(default_factory=list)
    """In token order; `NO_PAGE` for the first `dropped` ones."""
    dropped: int = 0
    """Leading pages that were given back."""
    stored: Stored = None

    def owned(self) -> list[int]:
        """Its pages without holes."""
        return self.pages[self.dropped :]


class Change(NamedTuple):
    """One operation's effect in absolute terms, so that carrying it out twice is as carrying it out once."""

    request: RequestPages
    held: int
    """The request's pages below this index stay."""
    added: Sequence[int]
    """What follows them."""
    length: int | None
    """The request's length; None: it is freed."""
    dropped: int
    """Leading pages of the request that were given back."""
    kept: int
    """The returned pages below this index stay."""
    returned: Sequence[int]
    """What follows them."""
    fresh: int
    """The lowest page that was never owned."""
    owners: Sequence[tuple[int, int]] = ()
    """Pages with their number of owners, where it changes from or to more than one."""
    uncached: Sequence[int] = ()
    """Pages that are cached no more: a request owns them again, or they are evicted."""
    cached: Sequence[int] = ()
    """Pages that no request owns any more and whose content is known, the one to be evicted first in front."""
    forgotten: Sequence[int] = ()
    """Pages whose content is known no more."""
    contents: Contents = ()
    """Pages whose content is known from now on."""
    stored: Stored = None
    """Of the request."""
    source: int | None = None
    """The page whose place the first added page takes, as a copy."""


class PoolState:
    """Which pages are free, cached and owned. Not safe for threads: `PagePool` locks."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.returned: list[int] = []  # pages that were owned and are free; the last is taken first, then fresh ones
        self.fresh = 0  # this page and those above were never owned
        self.cached: OrderedDict[int, None] = OrderedDict()  # pages without an owner; the first is evicted first
        self.known: dict[int, Any] = {}  # the prefix cache's record of each page whose tokens are known
        self.shared: dict[int, int] = {}  # pages with more than one owner, and how many
        self.requests: dict[Hashable, RequestPages] = {}  # some may be inactive: started and not committed, or freed
        self.change: Change | None = None

    def num_free(self) -> int:
        """Pages that no request owns and whose tokens are not known."""
        return self.num_pages - self.fresh + len(self.returned)

    def active(self) -> Iterator[tuple[Hashable, RequestPages]]:
        """The requests that are started and not freed."""
        for request_id, request in self.requests.items():
            if request.length is not None:
                yield request_id, request

    def change_of(self, request: RequestPages, **effects: Any) -> Change:
        """A change that has these effects alone."""
        change = Change(
            request,
            held=len(request.pages),
            added=(),
            length=request.length,
            dropped=request.dropped,
            kept=len(self.returned),
            returned=(),
            fresh=self.fresh,
            stored=request.stored,
        )
        return change._replace(**effects)

    def growth(self, name: str, request: RequestPages, num_tokens: int, prefix: Sequence[int] = ()) -> Change:
        """What lengthens `request`; where it is new, it begins with the pages `prefix`, which are full.

        Raises:
            PoolExhausted: too few pages are free or cached; the message calls the request `name`.
        """
        old = request.length or 0
        held, length = len(request.pages), old + num_tokens
        needed = -(-length // self.page_size) - held - len(prefix)
        source: int | None = None
        forgotten: tuple[int, ...] = ()
        if num_tokens and old % self.page_size and (self.shared or self.known):
            last = request.pages[-1]
            if last in self.shared:
                source = last
                needed += 1
                held -= 1
            elif last in self.known:
                forgotten = (last,)
        if not needed and not prefix:
            return self.change_of(request, length=length, forgotten=forgotten)
        revived = [page for page in prefix if page in self.cached]
        free = self.num_free()
        evicted = max(needed - free, 0)
        if evicted > len(self.cached) - len(revived):
            cached = f" and {len(self.cached) - len(revived)} cached" if self.cached else ""
            raise PoolExhausted(
                f"{name}: num_tokens={num_tokens} needs {needed} more pages,"
                f" {free} of {self.num_pages} are free{cached}"
            )
        kept = max(len(self.returned) - needed, 0)
        taken = len(self.returned) - kept
        fresh = min(self.fresh + needed - taken, self.num_pages)
        victims: tuple[int, ...] = ()
        if evicted:
            protected = set(revived)
            victims = tuple(islice((page for page in self.cached if page not in protected), evicted))
        owners = [(page, self.shared.get(page, 1) + 1) for page in prefix if page not in self.cached]
        if source is not None:
            owners.append((source, self.shared[source] - 1))
        return self.change_of(
            request,
            held=held,
            added=(*prefix, *reversed(self.returned[kept:]), *range(self.fresh, fresh), *victims),
            length=length,
            kept=kept,
            fresh=fresh,
            owners=owners,
            uncached=(*revived, *victims),
            forgotten=(*forgotten, *victims),
            source=source,
        )

    def release(self, request: RequestPages, pages: Sequence[int], **effects: Any) -> Change:
        """What makes `request` no owner of some of its pages, given in token order."""
        owners: list[tuple[int, int]] = []
        cached: list[int] = []
        returned: Sequence[int] = pages[::-1]
        if self.shared or self.known:
            free = []
            # The last page first: it is to be evicted before the pages whose tokens it continues.
            for page in returned:
                count = self.shared.get(page)
                if count is not None:
                    owners.append((page, count - 1))
                elif page in self.known:
                    cached.append(page)
                else:
                    free.append(page)
            returned = free
        return self.change_of(request, returned=returned, owners=owners, cached=cached, **effects)

    def eviction(self, pages: Sequence[int]) -> Change:
        """What makes the content of known pages forgotten; those that are cached become free, the first on top."""
        cached = [page for page in pages if page in self.cached]
        return self.change_of(RequestPages(), returned=cached[::-1], uncached=cached, forgotten=pages)

    def commit(self, change: Change) -> None:
        """Makes a change true: from the first statement on it counts, whatever interrupts the rest."""
        self.change = change
        self.settle()

    def settle(self) -> None:
        """Carries the last change out where that was interrupted. Each step may be repeated."""
        change = self.change
        if change is None:
            return
        self.returned[change.kept :] = change.returned
        self.fresh = change.fresh
        for page, count in change.owners:
            if count > 1:
                self.shared[page] = count
            else:
                self.shared.pop(page, None)
        for page in change.uncached:
            self.cached.pop(page, None)
        for page in change.cached:
            self.cached[page] = None
        for page in change.forgotten:
            self.known.pop(page, None)
        for page, record in change.contents:
            self.known[page] = record
        request = change.request
        request.pages[change.held :] = change.added
        request.pages[: change.dropped] = [NO_PAGE] * change.dropped
        request.dropped = change.dropped
        request.length = change.length
        request.stored = change.stored
        self.change = None
