"""The allocator: which pages and slots of state are free, cached and owned, by which requests.

The table says it all: `requests`, of which each owns the pages that its length needs, but for those it dropped, and its
slots; and the contents of pages and slots. Free ones, numbers of owners and the order of eviction are kept beside it
for speed alone. Where an exception ends a change, KeyboardInterrupt for one, the next operation computes them again
from the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from paged_kv.arguments import shown
from paged_kv.errors import ContractError, ContractTypeError, RequestError
from paged_kv.options import NO_PAGE
from paged_kv.pool.units import Units

Contents = Sequence[tuple[int, Any]]
"""Pages, each with the prefix cache's record of its content."""
Stored = tuple[int, Any] | None
"""The number of a request's pages that the prefix cache has recorded, and the record of the last one."""


class Remembered(NamedTuple):
    """The pages and states of a request that a prefix cache caches."""

    contents: Contents
    stored: Stored
    checkpoints: Mapping[int, int] = MappingProxyType({})
    """Slots of the request's states, by the cached pages at whose ends they are."""
    passed: Sequence[int] = ()
    """Known pages whose checkpoints are given up, where no request has them."""


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
    state: int | None = None
    """The slot of its state, of a hybrid model; None before its first token."""
    saves: list[int] = field(default_factory=list)
    """The slots that its state is saved in by the step under way; its own slot may be among them."""

    def owned_states(self) -> set[int]:
        """Its slots of state."""
        return {*self.saves, *(() if self.state is None else (self.state,))}

    def owned(self) -> list[int]:
        """Its pages without holes."""
        return self.pages[self.dropped :]


class PoolState:
    """The pages and the slots of state of a pool. Not safe for threads: `PagePool` locks. It is changed inside
    `with state:`.
    """

    def __init__(self, num_pages: int, page_size: int, num_states: int = 0) -> None:
        self.page_size = page_size
        self.requests: dict[Hashable, RequestPages] = {}
        self.pages = Units(num_pages)  # their contents: the prefix cache's records of tokens
        self.states = Units(num_states)  # their contents: the pages at whose ends they are the state
        self.checkpoints: dict[int, int] = {}  # the slot of the state at the end of a cached page
        self._is_whole = True  # whether all but the requests and the contents follows from these

    def __enter__(self) -> None:
        self._is_whole = False

    def __exit__(self, kind: object, *_: object) -> None:
        self._is_whole = kind is None

    def settle(self) -> None:
        """Computes again what follows from the table, where an exception ended a change."""
        if self._is_whole:
            return
        owners: Counter[int] = Counter()
        slots: Counter[int] = Counter()
        for request in self.requests.values():
            del request.pages[-(-request.length // self.page_size) :]
            request.pages[: request.dropped] = [NO_PAGE] * request.dropped
            owners.update(request.owned())
            slots.update(request.owned_states())
        self.pages.settle(owners)
        self.checkpoints = {page: slot for slot, page in self.states.contents.items() if page in self.pages.contents}
        self.states.contents = {slot: page for page, slot in self.checkpoints.items()}
        self.states.settle(slots)
        self._is_whole = True

    def look_up(self, request_id: Hashable) -> RequestPages | None:
        """The request's record; None where it is unknown."""
        try:
            return self.requests.get(request_id)
        except Exception as error:  # its __hash__ or __eq__ may raise anything
            raise ContractTypeError(
                f"request_id: expected a hashable, comparable value, got {shown(request_id)} of type"
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
            equals_itself = bool(request_id == request_id)
        except Exception:
            equals_itself = False
        if not equals_itself:
            raise ContractError(f"request_id must equal itself, {shown(request_id)} does not")
        return RequestPages()

    def forget(self, pages: Sequence[int]) -> None:
        """Forgets the contents of pages, and the states at their ends; those that are cached become free."""
        self.forget_states([self.checkpoints[page] for page in pages if page in self.checkpoints])
        self.pages.forget(pages)

    def forget_states(self, slots: Sequence[int]) -> None:
        """Forgets checkpoints; those that are cached become free."""
        for slot in slots:
            del self.checkpoints[self.states.contents[slot]]
        self.states.forget(slots)


def name_of(request_id: Hashable) -> str:
    """Return how messages name a request."""
    return f"request {shown(request_id)}"
