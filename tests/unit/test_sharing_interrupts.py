"""Shared pages under exceptions from outside: after one at any bytecode a pool is as before the operation or after."""

from collections.abc import Callable
from typing import Any

import pytest

from support.interrupts import interrupted
from support.shared_pages import SharedPages

PROMPT = [1, 2, 3, 4, 5, 6, 7]


def filled() -> SharedPages:
    """A request, its fork, a known prefix that nobody owns, and few free pages."""
    shared = SharedPages(num_pages=12, page_size=2)
    shared.start("gone", [9, 9, 8, 8, 7])
    shared.free("gone")
    shared.start("a", PROMPT)
    shared.fork("a", "b")
    shared.start("c", [5, 5, 5])
    return shared


def state(shared: SharedPages) -> Any:
    """All that a pool tells."""
    pool = shared.pool
    pool.check_integrity()
    inside = pool._state
    requests = {name: (request.length, tuple(request.pages)) for name, request in inside.active()}
    known = {page: record.tokens for page, record in inside.known.items()}
    return requests, tuple(inside.cached), tuple(inside.returned), inside.fresh, known, dict(inside.shared)


def ignore(*_: Any) -> None:
    pass


OPERATIONS: dict[str, Callable[[SharedPages], Any]] = {
    "start with a prefix in use": lambda shared: shared.prefixes.start("new", [*PROMPT, 0, 0]),
    "start with a cached prefix": lambda shared: shared.prefixes.start("new", [9, 9, 8, 8, 1, 1]),
    "start that evicts": lambda shared: shared.prefixes.start("new", [0] * 11),
    "reserve that copies": lambda shared: shared.pool.reserve("b", 3, ignore),
    "extend that copies": lambda shared: shared.pool.extend("a", 3, ignore, ignore),
    "fork": lambda shared: shared.pool.fork("c", "new"),
    "shrink": lambda shared: shared.pool.shrink("a", 4),
    "drop": lambda shared: shared.pool.drop("a", 5),
    "free of shared pages": lambda shared: shared.pool.free("b"),
    "free of known pages": lambda shared: shared.pool.free("c"),
    "clear": lambda shared: shared.prefixes.clear(),
}


def store(shared: SharedPages) -> None:
    shared.prefixes.store("d", [4, 4, 4, 4, 4])


@pytest.mark.parametrize("name", [*OPERATIONS, "store"])
def test_an_interrupt_at_any_bytecode_leaves_the_pool_before_or_after(name):
    def made() -> SharedPages:
        shared = filled()
        if name == "store":
            shared.pool.start("d", 5)
        return shared

    operation, before = OPERATIONS.get(name, store), state(made())
    done = made()
    operation(done)
    after, seen, count = state(done), set(), 1
    assert before != after
    reached = True
    while reached:
        shared = made()
        reached = interrupted(lambda shared=shared: operation(shared), count)
        found = state(shared)
        assert found in (before, after), count
        seen.add(found == after)
        if found == before:
            operation(shared)
            assert state(shared) == after, count
        count += 1
    assert seen == {False, True}
