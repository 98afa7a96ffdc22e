"""The page pool under exceptions from outside, under threads, and with request ids that misbehave."""

import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pytest

from paged_kv.errors import ContractError, ContractTypeError, PagedKVError, PoolExhausted, RequestError
from paged_kv.pool import Counts, PagePool, pages_needed
from paged_kv.pool.eviction import EvictionOrder
from support.interrupts import interrupted_anywhere
from support.shared_pages import SharedPages

PROMPT = [1, 2, 3, 4, 5, 6, 7]


def filled() -> PagePool:
    """Requests a and b, pages that were returned, and pages that were never owned."""
    pool = PagePool(num_pages=40, page_size=2)
    pool.start("a", 7)
    pool.start("gone", 6)
    pool.start("b", 3)
    pool.free("gone")
    return pool


def shared() -> SharedPages:
    """A request, its fork, a known prefix that nobody owns, and few free pages."""
    pages = SharedPages(num_pages=14, page_size=2)
    pages.start("a", PROMPT)
    pages.fork("a", "b")
    pages.start("c", [5, 5, 5])
    pages.pool.start("d", 5)
    pages.start("gone", [9, 9, 8, 8, 7])
    pages.free("gone")
    return pages


class Told(NamedTuple):
    """All that a pool tells."""

    requests: dict[Any, tuple[int, tuple[int, ...]]]
    """The length and the pages of each."""
    known: dict[int, bytes]
    cached: list[int]
    """In the order of eviction."""
    count: Counts

    def follows(self, other: "Told") -> bool:
        """Return whether it is the other one, but for cached pages that were forgotten."""
        return self.requests == other.requests and [page for page in other.cached if page in self.known] == self.cached


def state(made: Any) -> Told:
    pool = getattr(made, "pool", made)
    pool.check_integrity()
    inside = pool._state
    requests = {request_id: (pool.length(request_id), pool.pages(request_id)) for request_id in inside.requests}
    known = {page: record.tokens for page, record in inside.pages.contents.items()}
    return Told(requests, known, list(inside.pages.cached), pool.count())


def is_unlocked(pool: PagePool) -> bool:
    """Return whether another thread can use the pool."""
    found = []

    def use() -> None:
        found.append(pool._lock.acquire(timeout=5))
        pool._lock.release()

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(60)
    return found == [True]


def ignore(*_: Any) -> None:
    pass


PLAIN: dict[str, Callable[[PagePool], Any]] = {
    "start": lambda pool: pool.start("new", 21),
    "start of nothing": lambda pool: pool.start("new"),
    "reserve in a page": lambda pool: pool.reserve("a", 1),
    "reserve of pages": lambda pool: pool.reserve("b", 30),
    "extend": lambda pool: pool.extend("a", 9, ignore),
    "extend of an unknown one": lambda pool: pool.extend("new", 9, ignore),
    "free": lambda pool: pool.free("a"),
}
SHARED: dict[str, Callable[[SharedPages], Any]] = {
    "start with a prefix in use": lambda pages: pages.prefixes.start("new", [*PROMPT, 0]),
    "start with a cached prefix": lambda pages: pages.prefixes.start("new", [9, 9, 8, 8]),
    "start that evicts": lambda pages: pages.prefixes.start("new", [0] * 9),
    "reserve that copies": lambda pages: pages.pool.reserve("b", 3, ignore),
    "extend that copies": lambda pages: pages.pool.extend("a", 3, ignore, ignore),
    "fork": lambda pages: pages.pool.fork("c", "new"),
    "shrink": lambda pages: pages.pool.shrink("a", 4),
    "drop": lambda pages: pages.pool.drop("a", 5),
    "free of shared pages": lambda pages: pages.pool.free("b"),
    "free of known pages": lambda pages: pages.pool.free("c"),
    "clear": lambda pages: pages.prefixes.clear(),
    "store": lambda pages: pages.prefixes.store("d", [4, 4, 4, 4, 4]),
}


@pytest.mark.parametrize("name", [*PLAIN, *SHARED])
def test_an_interrupt_anywhere_leaves_each_request_before_or_after(name):
    make, operation = (filled, PLAIN[name]) if name in PLAIN else (shared, SHARED[name])
    before, done = state(make()), make()
    operation(done)
    after, seen = state(done), set()
    assert before != after
    for made, place in interrupted_anywhere(make, operation, 150):
        pool = getattr(made, "pool", made)
        assert is_unlocked(pool), place
        found = state(made)
        for request, (length, pages) in found.requests.items() if "copies" in name else ():
            if (length, pages) == (before.requests[request][0], after.requests[request][1][: len(pages)]):
                found.requests[request] = before.requests[request]  # but that it has its copy of a page already
        assert found.follows(before) or found.follows(after), place
        assert before.known.items() & after.known.items() <= found.known.items(), place
        assert found.known.items() <= before.known.items() | after.known.items(), place
        seen.add(found.requests == after.requests and found.known == after.known)
        if not found.follows(after) or found.known != after.known:
            operation(made)
        again = state(made)
        assert {each: length for each, (length, _) in again.requests.items()} == {
            each: length for each, (length, _) in after.requests.items()
        }
        assert (sorted(again.known.values()), again.count) == (sorted(after.known.values()), after.count), place
        for request in after.requests:
            pool.free(request)
        assert state(made).count.used == 0
    assert seen == {False, True}


def test_what_is_free_shared_and_evicted_first_follows_from_the_table():
    for make in (filled, shared):
        made = make()
        pool = getattr(made, "pool", made)
        (first, *_), inside = pool.pages("a"), pool._state
        pool.drop("a", 2)
        before = state(made)
        with suppress(KeyboardInterrupt), inside:
            pages = inside.pages
            pages.returned, pages.fresh, pages.shared, pages.cached = [], 3, {}, EvictionOrder()
            inside.requests["a"].pages.append(13)  # which would have counted with the length
            inside.requests["a"].pages[0] = first  # whose place was to be a hole
            raise KeyboardInterrupt
        assert state(made) == before


def test_a_write_that_fails_leaves_the_pool_as_it_was():
    pool = filled()
    before = state(pool)
    for request_id in ("a", "new"):
        with pytest.raises(ZeroDivisionError):
            pool.extend(request_id, 5, lambda *_: 1 // 0)
        assert state(pool) == before
    with pytest.raises(PoolExhausted):
        pool.extend("new", 99, lambda *_: pytest.fail("nothing is written"))
    pool.check_integrity()


@pytest.mark.parametrize(("length", "count"), [(0, 5), (1, 1), (3, 6), (4, 1), (4, 0), (5, 0)])
def test_extend_says_where_the_new_tokens_go(length, count):
    pool, told = PagePool(10, 4), []
    pool.start("other", 3)
    pool.start("a", length)
    pool.extend(
        "a", count, lambda slot, pages: told.append([(pages[(slot + j) // 4], (slot + j) % 4) for j in range(count)])
    )
    pages = pool.pages("a")
    assert told == [[(pages[t // 4], t % 4) for t in range(length, length + count)]]
    assert pool.length("a") == length + count


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns after a few bytecodes."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("switching")
def test_threads_share_a_pool():
    pool, page_size = PagePool(60, 3), 3
    starts, barrier = [0] * 500, threading.Barrier(4)

    def work(index: int) -> None:
        rng = np.random.default_rng(index)
        barrier.wait(60)
        for turn in range(500):
            try:  # all threads start the same request: one of them does
                pool.start(("shared", turn))
                starts[turn] += 1
            except RequestError:
                pass
            try:
                length = int(rng.integers(1, 30))
                pages = pool.start(index, length)
                pages += pool.reserve(index, 4)
                assert pool.pages(index) == pages
                assert len(pages) == pages_needed(length + 4, page_size)
            except PoolExhausted:
                pass
            if turn % 7 == 0:
                pool.check_integrity()
            try:
                pool.free(index)
            except RequestError:
                assert pool.num_free < 12  # the start was refused

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4), timeout=300))
    assert starts == [1] * 500
    pool.check_integrity()
    assert pool.num_free == 60


def test_the_pool_refuses_calls_from_inside_its_own_operations():
    pool = filled()

    class Caller:
        def __hash__(self) -> int:
            return hash("a")

        def __eq__(self, _: object) -> bool:
            pool.free("b")
            return False

    before = state(pool)
    with pytest.raises(ContractTypeError, match="request_id: expected a hashable, comparable value") as caught:
        pool.length(Caller())
    assert isinstance(caught.value.__cause__, ContractError)
    assert "inside another operation of the pool" in str(caught.value.__cause__)
    with pytest.raises(ContractError, match="inside another operation of the pool"):
        pool.extend("a", 1, lambda *_: pool.num_free)
    assert state(pool) == before


class Raises:
    def __init__(self, hashes: int = 0) -> None:
        self.hashes = hashes

    def __hash__(self) -> int:
        self.hashes -= 1
        if self.hashes < 0:
            raise ZeroDivisionError
        return hash("a")

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    def __repr__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize("call", ["start", "reserve", "extend", "free", "pages", "length"])
@pytest.mark.parametrize("request_id", [[], {}, set(), np.zeros(2), bytearray(b"a"), ([],), Raises(), Raises(9)])
def test_ids_that_cannot_be_looked_up_are_refused(call, request_id):
    pool = filled()
    before = state(pool)
    arguments = (1, lambda *_: pytest.fail("nothing is written")) if call == "extend" else ()
    with pytest.raises(ContractTypeError, match=r"^request_id: expected a hashable, comparable value, got"):
        getattr(pool, call)(request_id, *arguments)
    assert state(pool) == before
    pool.check_integrity()


@pytest.mark.parametrize("call", ["start", "extend"])
@pytest.mark.parametrize("request_id", [float("nan"), np.float32("nan"), np.datetime64("NaT")])
def test_ids_that_do_not_equal_themselves_are_refused(call, request_id):
    pool = filled()
    with pytest.raises(ContractError, match="request_id must equal itself"):
        getattr(pool, call)(request_id, 1, *[lambda *_: None] * (call == "extend"))
    pool.check_integrity()
    with pytest.raises(RequestError):
        pool.length(request_id)


@pytest.mark.parametrize("hashes", [1, 2, 3])
def test_a_hash_that_raises_later_changes_nothing_by_half(hashes):
    """`start` hashes the id twice, `free` twice: a request whose id raises in between is there or not."""

    class Once(Raises):
        __eq__ = object.__eq__

    pool = filled()
    request_id: Any = Once(hashes)
    try:
        pool.start(request_id, 3)
        pool.free(request_id)
    except PagedKVError:
        pass
    pool.check_integrity()
    assert pool.num_free in (40 - 6, 40 - 8)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))])
def test_a_copy_is_a_pool_of_its_own(copied):
    pool = filled()
    other = copied(pool)
    assert state(other) == state(pool)
    other.free("a")
    assert pool.length("a") == 7
    other.check_integrity()
