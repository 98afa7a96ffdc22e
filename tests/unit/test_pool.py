"""The page pool: what it gives and refuses, and corrupted states. test_sharing_machine.py tries any order of calls."""

import pytest

from paged_kv.errors import ContractError, ContractTypeError, IntegrityError, PoolExhausted
from paged_kv.pool import PagePool, pages_needed


@pytest.mark.parametrize(
    ("num_tokens", "page_size", "pages"),
    [(0, 16, 0), (1, 16, 1), (15, 16, 1), (16, 16, 1), (17, 16, 2), (7, 1, 7), (2**62 + 1, 2, 2**61 + 1)],
)
def test_pages_needed(num_tokens, page_size, pages):
    assert pages_needed(num_tokens, page_size) == pages


@pytest.mark.parametrize(
    ("num_tokens", "page_size", "said"),
    [(-1, 16, "num_tokens"), (1, 0, "page_size"), (1, -(10**5000), "page_size: expected at least 1, got -")],
    ids=range(3),
)
def test_pages_needed_names_the_refused_argument(num_tokens, page_size, said):
    with pytest.raises(ContractError, match=said):
        pages_needed(num_tokens, page_size)


def test_a_request_grows_page_by_page():
    pool = PagePool(num_pages=4, page_size=2)
    assert pool.start("a", 3) == (0, 1)
    assert pool.reserve("a") == ()  # fills the second page
    assert pool.reserve("a") == (2,)
    assert pool.pages("a") == (0, 1, 2)
    assert pool.length("a") == 5
    assert (pool.num_pages, pool.page_size, pool.num_free, pool.num_used) == (4, 2, 1, 3)


def test_the_page_returned_last_is_taken_first():
    pool = PagePool(num_pages=5, page_size=1)
    for request_id in ("a", "b", "c"):
        pool.start(request_id, 1)
    pool.free("a")
    pool.free("b")
    assert pool.start("d", 3) == (1, 0, 3)
    pool.free("d")  # of its own pages the first is on top
    assert pool.start("e", 2) == (1, 0)


def test_empty_requests_and_an_empty_pool():
    pool = PagePool(num_pages=0, page_size=16)
    assert pool.start("a") == ()
    assert (pool.pages("a"), pool.length("a")) == ((), 0)
    with pytest.raises(PoolExhausted):
        pool.reserve("a", 1)
    pool.free("a")
    pool.check_integrity()


def test_exhaustion_names_the_request_and_changes_nothing():
    pool = PagePool(num_pages=3, page_size=2)
    pool.start("a", 3)
    with pytest.raises(PoolExhausted, match=r"request 'a': num_tokens=4 needs 2 more pages, 1 of 3 are free"):
        pool.reserve("a", 4)
    with pytest.raises(PoolExhausted, match="'b'"):
        pool.start("b", 3)
    assert (pool.pages("a"), pool.length("a"), pool.num_free) == ((0, 1), 3, 1)
    assert pool.start("b", 2) == (2,)  # the failed start did not register the request


HUGE = (2**31, 2**62, 10**400, 10**5000)
BAD_SIZES = [
    *((value, ContractTypeError, "expected an integer") for value in (True, 1.0, "16", None)),
    *((value, ContractError, "expected at most 2147483647, got") for value in HUGE),
    (-1, ContractError, "expected at least [01], got -1"),
]


@pytest.mark.parametrize(("size", "error", "said"), BAD_SIZES, ids=range(len(BAD_SIZES)))
def test_bad_pools_are_refused(size, error, said):
    with pytest.raises(error, match=f"^num_pages: {said}"):
        PagePool(size, 16)
    with pytest.raises(error, match=f"^page_size: {said}"):
        PagePool(1, size)
    with pytest.raises(ContractError, match="page_size: expected at least 1, got 0"):
        PagePool(1, 0)


def test_large_pools_cost_nothing():
    pool = PagePool(2**31 - 1, 2**31 - 1)
    assert pool.start("a", 2**40) == tuple(range(513))
    assert pool.num_free == 2**31 - 1 - 513
    pool.check_integrity()


@pytest.mark.parametrize(
    ("count", "error"),
    [*((value, ContractTypeError) for value in (True, 1.0)), *((n, ContractError) for n in (-1, 2**63, 10**5000))],
    ids=range(5),
)
def test_bad_token_counts_are_refused_and_change_nothing(count, error):
    pool = PagePool(num_pages=2, page_size=1)
    pool.start("a", 1)
    for call, name in ((pool.reserve, "a"), (pool.start, "b")):
        with pytest.raises(error, match=f"^request '{name}': num_tokens: expected") as caught:
            call(name, count)
        assert len(str(caught.value)) < 300
    assert (pool.pages("a"), pool.length("a"), pool.num_free) == ((0,), 1, 1)


def pages_of(state, request):
    return state.requests[request].pages


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda s: s.pages.returned.append(3), "page 3 is held twice: by the free list and by the free list"),
        (lambda s: s.pages.returned.append(4), "page 4 is held twice: by the free list and by the free list"),
        (lambda s: pages_of(s, "a").__setitem__(1, 0), "page 0 is held twice: by request 'a' and by request 'a'"),
        (lambda s: pages_of(s, "b").__setitem__(0, 0), "page 0 is held twice: by request 'a' and by request 'b'"),
        (lambda s: pages_of(s, "b").__setitem__(0, 3), "page 3 is held twice: by the free list and by request 'b'"),
        (lambda s: pages_of(s, "b").__setitem__(0, 4), "page 4 is held twice: by the free list and by request 'b'"),
        (lambda s: s.pages.returned.pop(), "page 3 is leaked"),
        (lambda s: s.requests.pop("a"), "page 0 is leaked"),
        (lambda s: s.pages.returned.append(5), "the free list holds page 5"),
        (lambda s: pages_of(s, "a").__setitem__(0, -1), "request 'a' holds page -1"),
        (lambda s: setattr(s.requests["a"], "length", 2), "request 'a' of length 2 holds 2 pages, not 1"),
        (lambda s: setattr(s.requests["a"], "length", 5), "request 'a' of length 5 holds 2 pages, not 3"),
        (lambda s: setattr(s.requests["empty"], "length", -1), "request 'empty' has length -1"),
    ],
)
def test_check_integrity_names_the_corruption(corrupt, message):
    pool = PagePool(num_pages=5, page_size=2)
    pool.start("a", 4)
    pool.start("b", 1)
    pool.start("empty")
    pool.start("ended", 1)
    pool.free("ended")  # page 3 is free and was owned, page 4 never was
    pool.check_integrity()
    corrupt(pool._state)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity()
