"""The proof that the page pool's allocator state is consistent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from paged_kv.arguments import shown
from paged_kv.errors import IntegrityError
from paged_kv.pool.state import PoolState, RequestPages
from paged_kv.pool.units import Units


def check_state(state: PoolState) -> None:
    """Checks that each page and each slot of state is free, cached or owned, and that requests have the pages that they
    need.

    Raises:
        IntegrityError: names the first violation found.
    """
    _check_units("page", "pages", state, state.pages, RequestPages.owned)
    _check_units("slot", "slots of state", state, state.states, RequestPages.owned_states)
    for page, slot in state.checkpoints.items():
        if page not in state.pages.contents:
            raise IntegrityError(f"page {page} has the checkpoint {slot} and no content")
    if {page: slot for slot, page in state.states.contents.items()} != state.checkpoints:
        raise IntegrityError("the checkpoints of pages are not the slots with contents")
    for request_id, request in state.requests.items():
        length = request.length
        if length < 0:
            raise IntegrityError(f"request {shown(request_id)} has length {length}")
        needed = -(-length // state.page_size)
        if len(request.pages) != needed:
            raise IntegrityError(
                f"request {shown(request_id)} of length {length} holds {len(request.pages)} pages, not {needed}"
            )


def _check_units(
    one: str, many: str, state: PoolState, units: Units, owned: Callable[[RequestPages], Collection[int]]
) -> None:
    """Checks that each number of one kind is in one place."""
    holder_of: dict[int, str] = {}

    def check(holder: str, unit: Any) -> None:
        if type(unit) is not int or not 0 <= unit < units.count:
            raise IntegrityError(f"{holder} holds {one} {unit!r}, not one of the pool's {units.count} {many}")
        if unit >= units.fresh:
            raise _held_twice(one, unit, "the free list", holder)

    for holder, held in (("the free list", units.returned), (f"the list of cached {many}", units.cached)):
        for unit in held:
            check(holder, unit)
            if unit in holder_of:
                raise _held_twice(one, unit, holder_of[unit], holder)
            holder_of[unit] = holder
    owners: Counter[int] = Counter()
    for request_id, request in state.requests.items():
        holder, mine = f"request {shown(request_id)}", owned(request)
        for unit in mine:
            check(holder, unit)
            if unit in holder_of and owners[unit] >= (units.shared.get(unit, 1) if owners[unit] else 0):
                raise _held_twice(one, unit, holder_of[unit], holder)
            owners[unit] += 1
            holder_of[unit] = holder
        if len(set(mine)) != len(mine):
            raise IntegrityError(f"{holder} holds a {one} twice")
    for unit, count in units.shared.items():
        if count < 2 or owners[unit] != count:
            raise IntegrityError(f"{one} {unit} counts {count} owners and has {owners[unit]}")
    for unit in range(units.fresh):
        if unit not in holder_of:
            raise IntegrityError(f"{one} {unit} is leaked: neither free nor held by a request")
    for unit in units.cached:
        if unit not in units.contents:
            raise IntegrityError(f"{one} {unit} is cached and has no content")
    for unit in units.contents:
        if holder_of.get(unit, "the free list") == "the free list":
            raise IntegrityError(f"{one} {unit} has a content, and it is free")


def _held_twice(one: str, unit: int, here: str, there: str) -> IntegrityError:
    return IntegrityError(f"{one} {unit} is held twice: by {here} and by {there}")
