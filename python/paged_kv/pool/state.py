"""The allocator state of the page pool: one table of who owns which pages, and what follows from it.

The table is `requests`, with `known`: a request owns the pages that its length needs, but for those it dropped. Free
pages, numbers of owners and the order of eviction are kept beside it for speed alone. Where an exception from outside,
KeyboardInterrupt for one, ends a change, the next operation computes them again from the table.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from paged_kv.errors import PoolExhausted
from paged_kv.options import NO_PAGE

Contents = Sequence[tuple[int, Any]]
"""Pages, each with the prefix cache's record of its content."""
Stored = tuple[int, Any] | None
"""The number of a request's pages that the prefix cache has recorded, and the record of the last one."""


@dataclass(slots=True)
class RequestPages:
    """The pool's record of one request."""

    length: int = 0
    """In tokens."""
    pages: list[int] = field(default_factory=list)
    """In token order; `NO_PAGE` for the first `dropped` ones. What goes past the length does not count."""
    dropped: int = 0
    """Leading pages that were given back."""
    stored: Stored = None

    def owned(self) -> list[int]:
        """Its pages without holes."""
        return self.pages[self.dropped :]


class Growth(NamedTuple):
    """The growth of a request. It changes nothing yet, so that its pages can be written before they count."""

    length: int
    """The request's new length, in tokens."""
    held: int
    """The request's pages below this index stay."""
    prefix: Sequence[int] = ()
    """The known pages that a new request begins with."""
    new: Sequence[int] = ()
    """The pages that come last, free ones so far."""
    kept: int = 0
    """The returned pages below this index stay."""
    fresh: int = 0
    """The lowest page that was never owned."""
    forgotten: Sequence[int] = ()
    """Pages whose content must be forgotten before: the last one, which is written to, and cached ones."""
    source: int | None = None
    """The page whose place the first new page takes, as a copy."""


class PoolState:
    """The free, cached and owned pages of a pool. Not safe for threads: `PagePool` locks.

    It is changed inside `with state:`, the table first; `settle` repairs what an exception left of that.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.requests: dict[Hashable, RequestPages] = {}
        self.known: dict[int, Any] = {}  # the prefix cache's record of each page whose tokens are known
        self.returned: list[int] = []  # pages that were owned and are free; the last is taken first, then fresh ones
        self.fresh = 0  # this page and those above were never owned
        self.cached: OrderedDict[int, None] = OrderedDict()  # known, without an owner; the first is evicted first
        self.shared: dict[int, int] = {}  # pages with more than one owner, and how many
        self._is_whole = True  # whether the last four follow from the table

    def __enter__(self) -> None:
        self._is_whole = False

    def __exit__(self, kind: object, *_: object) -> None:
        self._is_whole = kind is None

    def settle(self) -> None:
        """Computes again what follows from the table, where an exception ended a change."""
        if self._is_whole:
            return
        owners: Counter[int] = Counter()
        for request in self.requests.values():
            del request.pages[-(-request.length // self.page_size) :]
            request.pages[: request.dropped] = [NO_PAGE] * request.dropped
            owners.update(request.owned())
        self.shared = {page: count for page, count in owners.items() if count > 1}
        # Pages that were being released go last, of a chain the last one first, as `release` has them.
        unowned = [page for page in (*self.cached, *reversed(self.known)) if page in self.known and page not in owners]
        self.cached = OrderedDict.fromkeys(unowned)
        self.fresh = 1 + max((*owners, *self.known), default=-1)
        self.returned = [page for page in reversed(range(self.fresh)) if page not in owners and page not in self.known]
        self._is_whole = True

    def num_free(self) -> int:
        """Pages that no request owns and whose tokens are not known."""
        return self.num_pages - self.fresh + len(self.returned)

    def growth(self, name: str, request: RequestPages, num_tokens: int, prefix: Sequence[int] = ()) -> Growth:
        """Plans how `request` lengthens; where it is new, it begins with the pages `prefix`, which are full.

        Raises:
            PoolExhausted: too few pages are free or cached; the message calls the request `name`.
        """
        old = request.length
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
        free = self.num_free()
        if needed > free:
            protected = self.cached.keys() & set(prefix)
            spare = len(self.cached) - len(protected)
            if needed - free > spare:
                cached = f" and {spare} cached" if self.cached else ""
                raise PoolExhausted(
                    f"{name}: num_tokens={num_tokens} needs {needed} more pages,"
                    f" {free} of {self.num_pages} are free{cached}"
                )
            victims = islice((page for page in self.cached if page not in protected), needed - free)
            return Growth(length, held, forgotten=(*forgotten, *victims))
        kept = max(len(self.returned) - needed, 0)
        fresh = self.fresh + needed - len(self.returned) + kept
        new = (*reversed(self.returned[kept:]), *range(self.fresh, fresh))
        return Growth(length, held, prefix, new, kept, fresh, forgotten, source)

    def grow(self, request: RequestPages, growth: Growth) -> None:
        """Gives a request the pages of `growth`."""
        request.pages[growth.held :] = (*growth.prefix, *growth.new)
        request.length = growth.length
        del self.returned[growth.kept :]
        self.fresh = growth.fresh
        self.own(growth.prefix)
        if growth.source is not None:
            self.release([growth.source])

    def own(self, pages: Sequence[int]) -> None:
        """Counts one more owner of pages that are owned or cached."""
        for page in pages:
            if page in self.cached:
                del self.cached[page]
            else:
                self.shared[page] = self.shared.get(page, 1) + 1

    def release(self, pages: Sequence[int]) -> None:
        """Counts one owner less of some pages, given in token order."""
        # The last page first: it is to be evicted before the pages whose tokens it continues.
        for page in reversed(pages):
            count = self.shared.get(page)
            if count is not None and count > 2:
                self.shared[page] = count - 1
            elif count is not None:
                del self.shared[page]
            elif page in self.known:
                self.cached[page] = None
            else:
                self.returned.append(page)

    def forget(self, pages: Sequence[int]) -> None:
        """Forgets the content of known pages; those that are cached become free, the first on top."""
        for page in reversed(pages):
            del self.known[page]
            if page in self.cached:
                del self.cached[page]
                self.returned.append(page)
