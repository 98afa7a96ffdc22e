"""The allocator: which pages are free, cached and owned, by which requests.

The table says it all: `requests`, of which each owns the pages that its length needs, but for those it dropped, and
`known`. Free pages, numbers of owners and the order of eviction are kept beside it for speed alone. Where an exception
ends a change, KeyboardInterrupt for one, the next operation computes them again from the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paged_kv.arguments import shown
from paged_kv.errors import ContractError, ContractTypeError, RequestError
from paged_kv.options import NO_PAGE
from paged_kv.pool.eviction import EvictionOrder

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


class PoolState:
    """The pages of a pool. Not safe for threads: `PagePool` locks. It is changed inside `with state:`."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.requests: dict[Hashable, RequestPages] = {}
        self.known: dict[int, Any] = {}  # the prefix cache's record of each page whose tokens are known
        self.returned: list[int] = []  # pages that were owned and are free; the last is taken first, then fresh ones
        self.fresh = 0  # this page and those above were never owned
        self.cached: EvictionOrder[int] = EvictionOrder()  # known, without an owner
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
        self.cached.forget([page for page in self.cached if page not in self.known])
        self.cached.hold(owners)
        self.cached.use([page for page in self.known if page not in owners and page not in self.cached])
        self.fresh = 1 + max((*owners, *self.known), default=-1)
        self.returned = [page for page in reversed(range(self.fresh)) if page not in owners and page not in self.known]
        self._is_whole = True

    def look_up(self, request_id: Hashable) -> RequestPages | None:
        """The request's record; None where it is unknown."""
        try:
            return self.requests.get(request_id)
        except Exception as error:  # its __hash__ or __eq__ may raise anything
            raise ContractTypeError(
                f"request_id must be hashable and comparable, not {shown(request_id)} of type"
                f" {type(request_id).__name__}"
            ) from error

    def find(self, request_id: Hashable) -> RequestPages:
        """The request's record, or RequestError."""
        request = self.look_up(request_id)
        if request is None:
            raise RequestError(f"{name_of(request_id)} is unknown: never started, or freed")
        return request

    def new(self, request_id: Hashable) -> RequestPages:
        """The record of a request that is not there yet.

        Raises:
            RequestError: the request has been started and not freed.
            ContractTypeError, ContractError: the id is not hashable, or could not be found again.
        """
        if self.look_up(request_id) is not None:
            raise RequestError(f"{name_of(request_id)} has already been started")
        try:
            found = bool(request_id == request_id)
        except Exception:
            found = False
        if not found:
            raise ContractError(f"request_id must equal itself, {shown(request_id)} does not")
        return RequestPages()

    def num_free(self) -> int:
        """Pages that no request owns and whose tokens are not known."""
        return self.num_pages - self.fresh + len(self.returned)

    def take(self, count: int) -> list[int]:
        """Takes free pages, of which there are enough: the one that was returned last first."""
        kept = max(len(self.returned) - count, 0)
        taken = self.returned[kept:][::-1]
        begin, self.fresh = self.fresh, self.fresh + count - len(taken)
        del self.returned[kept:]
        return [*taken, *range(begin, self.fresh)]

    def own(self, pages: Iterable[int]) -> None:
        """Counts one more owner of pages that are owned or cached."""
        for page in self.cached.hold(pages):
            self.shared[page] = self.shared.get(page, 1) + 1

    def release(self, pages: Iterable[int]) -> None:
        """Counts one owner less of some pages, given in token order."""
        shared, known = self.shared, self.known
        free: list[int] = []
        cached: list[int] = []
        for page in pages:
            count = shared.get(page)
            if count is None:
                (cached if page in known else free).append(page)
            elif count > 2:
                shared[page] = count - 1
            else:
                del shared[page]
        self.returned += reversed(free)
        self.cached.use(cached)

    def forget(self, pages: Sequence[int]) -> None:
        """Forgets the content of known pages; those that are cached become free, the first on top."""
        for page in pages:
            del self.known[page]
        self.returned += reversed(self.cached.forget(pages))


def name_of(request_id: Hashable) -> str:
    """Return how messages name a request."""
    return f"request {shown(request_id)}"
