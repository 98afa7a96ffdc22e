"""The proof that the page pool's allocator state is consistent."""

from __future__ import annotations

from collections import Counter
from typing import Any

from paged_kv.arguments import shown
from paged_kv.errors import IntegrityError
from paged_kv.pool.state import PoolState


def check_state(state: PoolState) -> None:
    """Checks that each page is free, cached or owned, and that requests have the pages that they need.

    Raises:
        IntegrityError: names the first violation found.
    """
    holder_of: dict[int, str] = {}
    for holder, pages in (("the free list", state.returned), ("the list of cached pages", state.cached)):
        for page in pages:
            _check_page(state, holder, page)
            if page in holder_of:
                raise _held_twice(page, holder_of[page], holder)
            holder_of[page] = holder
    _check_owners(state, holder_of)
    for page in range(state.fresh):
        if page not in holder_of:
            raise IntegrityError(f"page {page} is leaked: neither free nor held by a request")
    for page in state.cached:
        if page not in state.known:
            raise IntegrityError(f"page {page} is cached, and its content is not known")
    for page in state.known:
        if holder_of.get(page, "the free list") == "the free list":
            raise IntegrityError(f"the content of page {page} is known, and it is free")


def _check_owners(state: PoolState, holder_of: dict[int, str]) -> None:
    """Checks the requests and how many own each page; adds their pages to `holder_of`."""
    owners: Counter[int] = Counter()
    for request_id, request in state.requests.items():
        holder = f"request {shown(request_id)}"
        for page in request.owned():
            _check_page(state, holder, page)
            if page in holder_of and owners[page] >= (state.shared.get(page, 1) if owners[page] else 0):
                raise _held_twice(page, holder_of[page], holder)
            owners[page] += 1
            holder_of[page] = holder
        if len(set(request.owned())) != len(request.owned()):
            raise IntegrityError(f"{holder} holds a page twice")
    for page, count in state.shared.items():
        if count < 2 or owners[page] != count:
            raise IntegrityError(f"page {page} counts {count} owners and has {owners[page]}")
    for request_id, request in state.requests.items():
        length = request.length
        if length < 0:
            raise IntegrityError(f"request {shown(request_id)} has length {length}")
        needed = -(-length // state.page_size)
        if len(request.pages) != needed:
            raise IntegrityError(
                f"request {shown(request_id)} of length {length} holds {len(request.pages)} pages, not {needed}"
            )


def _check_page(state: PoolState, holder: str, page: Any) -> None:
    if type(page) is not int or not 0 <= page < state.num_pages:
        raise IntegrityError(f"{holder} holds page {page!r}, not one of the pool's {state.num_pages} pages")
    if page >= state.fresh:
        raise _held_twice(page, "the free list", holder)


def _held_twice(page: int, one: str, other: str) -> IntegrityError:
    return IntegrityError(f"page {page} is held twice: by {one} and by {other}")
