"""The page pool: unit tests, corrupted allocator states, and a Hypothesis state machine against a plain model."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_kv.errors import ContractError, ContractTypeError, IntegrityError, PoolExhausted, RequestError
from paged_kv.pool import PagePool, pages_needed
from support.properties import examples


@pytest.mark.parametrize(
    ("num_tokens", "page_size", "pages"),
    [(0, 16, 0), (1, 16, 1), (15, 16, 1), (16, 16, 1), (17, 16, 2), (7, 1, 7), (2**62 + 1, 2, 2**61 + 1)],
)
def test_pages_needed(num_tokens, page_size, pages):
    assert pages_needed(num_tokens, page_size) == pages


@pytest.mark.parametrize(("num_tokens", "page_size", "argument"), [(-1, 16, "num_tokens"), (1, 0, "page_size")])
def test_pages_needed_names_the_refused_argument(num_tokens, page_size, argument):
    with pytest.raises(ContractError, match=argument):
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


def test_all_pages_can_be_taken_and_returned():
    pool = PagePool(num_pages=3, page_size=4)
    assert pool.start("a", 12) == (0, 1, 2)
    pool.free("a")
    assert pool.start("b", 9) == (0, 1, 2)


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


def test_pages_is_a_snapshot():
    pool = PagePool(num_pages=2, page_size=1)
    pool.start("a", 1)
    before = pool.pages("a")
    pool.reserve("a")
    assert before == (0,)


@pytest.mark.parametrize("call", ["reserve", "free", "pages", "length"])
def test_unknown_requests_are_refused(call):
    pool = PagePool(num_pages=2, page_size=1)
    pool.start("gone", 1)
    pool.free("gone")
    for request_id in ("never", "gone"):
        with pytest.raises(RequestError, match=repr(request_id)):
            getattr(pool, call)(request_id)
    assert pool.num_free == 2


def test_a_request_cannot_be_started_twice():
    pool = PagePool(num_pages=2, page_size=1)
    pool.start(7, 1)
    with pytest.raises(RequestError, match="7"):
        pool.start(7, 1)
    assert (pool.pages(7), pool.num_free) == ((0,), 1)


@pytest.mark.parametrize(
    ("num_pages", "page_size", "error"),
    [
        (-1, 16, ContractError),
        (1, 0, ContractError),
        (1, -16, ContractError),
        (True, 16, ContractTypeError),
        (1, True, ContractTypeError),
        (1.0, 16, ContractTypeError),
        (1, "16", ContractTypeError),
        (None, 16, ContractTypeError),
    ],
)
def test_bad_pools_are_refused(num_pages, page_size, error):
    with pytest.raises(error, match=r"^(num_pages|page_size) must be"):
        PagePool(num_pages, page_size)


@pytest.mark.parametrize(
    ("num_tokens", "error"), [(-1, ContractError), (True, ContractTypeError), (1.0, ContractTypeError)]
)
def test_bad_token_counts_are_refused_and_change_nothing(num_tokens, error):
    pool = PagePool(num_pages=2, page_size=1)
    pool.start("a", 1)
    with pytest.raises(error, match="request 'a': num_tokens must be"):
        pool.reserve("a", num_tokens)
    with pytest.raises(error, match="request 'b': num_tokens must be"):
        pool.start("b", num_tokens)
    assert (pool.pages("a"), pool.length("a"), pool.num_free) == ((0,), 1, 1)


def test_numpy_counts_are_taken_as_ints():
    pool = PagePool(np.int64(2), np.uint32(4))
    pool.start("a", np.int32(5))
    assert type(pool.length("a")) is int
    assert pool.pages("a") == (0, 1)


def _free_page_twice(pool):
    pool._state.returned.append(pool._state.returned[0])


def _free_fresh_page(pool):
    pool._state.returned.append(4)


def _own_page_twice(pool):
    pages = pool._state.requests["a"].pages
    pages[1] = pages[0]


def _share_page(pool):
    pool._state.requests["b"].pages[0] = pool._state.requests["a"].pages[0]


def _own_free_page(pool):
    pool._state.requests["b"].pages[0] = pool._state.returned[0]


def _own_fresh_page(pool):
    pool._state.requests["b"].pages[0] = 4


def _leak_page(pool):
    pool._state.returned.pop()


def _leak_request(pool):
    del pool._state.requests["a"]


def _invent_free_page(pool):
    pool._state.returned.append(pool.num_pages)


def _invent_owned_page(pool):
    pool._state.requests["a"].pages[0] = -1


def _forget_tokens(pool):
    pool._state.requests["a"].length = 2


def _invent_tokens(pool):
    pool._state.requests["a"].length = 5


def _negative_length(pool):
    pool._state.requests["empty"].length = -1


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (_free_page_twice, r"page 3 is held twice: by the free list and by the free list"),
        (_free_fresh_page, r"page 4 is held twice: by the free list and by the free list"),
        (_own_page_twice, r"page 0 is held twice: by request 'a' and by request 'a'"),
        (_share_page, r"page 0 is held twice: by request 'a' and by request 'b'"),
        (_own_free_page, r"page 3 is held twice: by the free list and by request 'b'"),
        (_own_fresh_page, r"page 4 is held twice: by the free list and by request 'b'"),
        (_leak_page, r"page 3 is leaked"),
        (_leak_request, r"page 0 is leaked"),
        (_invent_free_page, r"the free list holds page 5"),
        (_invent_owned_page, r"request 'a' holds page -1"),
        (_forget_tokens, r"request 'a' of length 2 holds 2 pages, not 1"),
        (_invent_tokens, r"request 'a' of length 5 holds 2 pages, not 3"),
        (_negative_length, r"request 'empty' has length -1"),
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
    corrupt(pool)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity()


REQUEST_IDS = st.integers(0, 5)
TOKENS = st.integers(0, 20)


class PoolMachine(RuleBasedStateMachine):
    """Random starts, reservations and frees against a model that knows only lengths and the pages it was told of."""

    @initialize(num_pages=st.integers(0, 12), page_size=st.integers(1, 5))
    def create(self, num_pages, page_size):
        self.pool = PagePool(num_pages, page_size)
        self.num_pages, self.page_size = num_pages, page_size
        self.lengths: dict[int, int] = {}
        self.pages: dict[int, tuple[int, ...]] = {}

    @rule(request_id=REQUEST_IDS, num_tokens=TOKENS)
    def start(self, request_id, num_tokens):
        if request_id in self.lengths:
            with pytest.raises(RequestError):
                self.pool.start(request_id, num_tokens)
        else:
            self._lengthen(self.pool.start, request_id, num_tokens)

    @rule(request_id=REQUEST_IDS, num_tokens=TOKENS)
    def reserve(self, request_id, num_tokens):
        if request_id in self.lengths:
            self._lengthen(self.pool.reserve, request_id, num_tokens)
        else:
            with pytest.raises(RequestError):
                self.pool.reserve(request_id, num_tokens)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def free(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.lengths)))
        self.pool.free(request_id)
        del self.lengths[request_id], self.pages[request_id]

    def _lengthen(self, call, request_id, num_tokens):
        length = self.lengths.get(request_id, 0) + num_tokens
        lengths = self.lengths | {request_id: length}
        if sum(_ceil_div(n, self.page_size) for n in lengths.values()) > self.num_pages:
            with pytest.raises(PoolExhausted):
                call(request_id, num_tokens)
            return
        added = call(request_id, num_tokens)
        self.lengths = lengths
        self.pages[request_id] = self.pages.get(request_id, ()) + added

    @invariant()
    def books_balance(self):
        self.pool.check_integrity()

    @invariant()
    def agrees_with_the_model(self):
        assert self.pool.num_used == sum(_ceil_div(n, self.page_size) for n in self.lengths.values())
        assert self.pool.num_free == self.num_pages - self.pool.num_used
        for request_id in range(6):
            if request_id in self.lengths:
                assert self.pool.length(request_id) == self.lengths[request_id]
                assert self.pool.pages(request_id) == self.pages[request_id]
            else:
                with pytest.raises(RequestError):
                    self.pool.length(request_id)

    @invariant()
    def no_page_has_two_owners(self):
        owned = [page for pages in self.pages.values() for page in pages]
        assert len(owned) == len(set(owned))
        assert set(owned) <= set(range(self.num_pages))


def _ceil_div(a, b):
    return (a + b - 1) // b


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
