"""Every operation on shared pages in any order, over a memory that shows whose K and V a request would read.

Hypothesis draws the operations and makes a failure small. A generator of random numbers draws them again: a million in
a few minutes (`--hypothesis-profile=million`), where Hypothesis needs most of its time to draw.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_kv.errors import PagedKVError, PoolExhausted, RequestError
from paged_kv.pool import pages_needed
from support.properties import examples
from support.shared_pages import SharedPages

REQUESTS, TOKENS, NAMESPACES = range(6), range(3), (None, "x")
MOST_TOKENS = 14
CALLS = ("free", "reserve", "pages", "length")
STEPS = 50


def new(num_pages: int, page_size: int, collide: bool) -> SharedPages:
    return SharedPages(num_pages, page_size, (lambda *_: 3) if collide else None)


def attempt(shared: SharedPages, grow: Callable[[], object]) -> None:
    """A growth, or PoolExhausted where pages are missing; then nothing has changed."""
    before = [shared.pool.pages(request) for request in sorted(shared.tokens)]
    try:
        grow()
    except PoolExhausted:
        assert [shared.pool.pages(request) for request in sorted(shared.tokens)] == before


def start(shared: SharedPages, request: int, tokens: list[int], namespace: str | None) -> None:
    if request in shared.tokens:
        with pytest.raises(RequestError):
            shared.prefixes.start(request, tokens, namespace)
        return
    count, needed = shared.pool.count(), pages_needed(len(tokens), shared.pool.page_size)
    if needed <= count.free:
        shared.start(request, tokens, namespace)
    else:
        attempt(shared, lambda: shared.start(request, tokens, namespace))


def fork(shared: SharedPages, request: int, child: int) -> None:
    if child in shared.tokens:
        with pytest.raises(RequestError):
            shared.pool.fork(request, child)
    else:
        shared.fork(request, child)


def misuse(shared: SharedPages, request: int, call: str) -> None:
    if request not in shared.tokens:
        with pytest.raises(RequestError):
            getattr(shared.pool, call)(request)
    with pytest.raises(PagedKVError):
        shared.pool.reserve(request, -1)


def held(shared: SharedPages, request: int) -> int:
    """The tokens of a request that its pages hold."""
    return len(shared.tokens[request]) - shared.dropped[request]


class SharingMachine(RuleBasedStateMachine):
    """The operations, drawn by Hypothesis."""

    @initialize(num_pages=st.integers(0, 14), page_size=st.integers(1, 5), collide=st.booleans())
    def create(self, num_pages, page_size, collide):
        self.shared = new(num_pages, page_size, collide)

    def running(self, data) -> Any:
        return data.draw(st.sampled_from(sorted(self.shared.tokens)))

    requests = st.sampled_from(REQUESTS)
    lists = st.lists(st.sampled_from(TOKENS), max_size=MOST_TOKENS)

    @rule(request=requests, tokens=lists, namespace=st.sampled_from(NAMESPACES))
    def start(self, request, tokens, namespace):
        start(self.shared, request, tokens, namespace)

    @precondition(lambda self: self.shared.tokens)
    @rule(data=st.data(), tokens=lists, store=st.booleans())
    def append(self, data, tokens, store):
        request = self.running(data)
        attempt(self.shared, lambda: self.shared.append(request, tokens, store=store))

    @precondition(lambda self: self.shared.tokens)
    @rule(data=st.data(), child=requests)
    def fork(self, data, child):
        fork(self.shared, self.running(data), child)

    @precondition(lambda self: self.shared.tokens)
    @rule(data=st.data())
    def shrink(self, data):
        request = self.running(data)
        self.shared.shrink(request, data.draw(st.integers(0, held(self.shared, request))))

    @precondition(lambda self: self.shared.tokens)
    @rule(data=st.data())
    def drop(self, data):
        request = self.running(data)
        self.shared.drop(request, data.draw(st.integers(0, len(self.shared.tokens[request]))))

    @precondition(lambda self: self.shared.tokens)
    @rule(data=st.data())
    def free(self, data):
        self.shared.free(self.running(data))

    @rule(request=requests, call=st.sampled_from(CALLS))
    def misuse(self, request, call):
        misuse(self.shared, request, call)

    @rule()
    def clear(self):
        self.shared.prefixes.clear()

    @invariant()
    def every_request_reads_its_own_tokens(self):
        if hasattr(self, "shared"):
            self.shared.check_all()


TestSharingMachine = SharingMachine.TestCase
TestSharingMachine.settings = settings(max_examples=examples(100), stateful_step_count=STEPS, deadline=None)


class RandomSteps:
    """The operations, drawn by a generator of random numbers. Each case prefers some of them, as Hypothesis does."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.shared = new(self.random.randrange(15), self.random.randint(1, 5), self.random.random() < 0.5)
        self.anytime = (self.start, self.misuse, self.clear)
        self.operations = (*self.anytime, self.append, self.fork, self.shrink, self.drop, self.free)
        self.weights = [self.random.random() for _ in self.operations]

    def step(self) -> None:
        """One operation; of those that need a running request, only where there is one."""
        count = len(self.operations) if self.shared.tokens else len(self.anytime)
        (operation,) = self.random.choices(self.operations[:count], self.weights[:count])
        operation()
        self.shared.check_all()

    def request(self) -> int:
        return self.random.choice(REQUESTS)

    def running(self) -> int:
        return self.random.choice(sorted(self.shared.tokens))

    def tokens(self) -> list[int]:
        return self.random.choices(TOKENS, k=self.random.randint(0, MOST_TOKENS))

    def start(self) -> None:
        start(self.shared, self.request(), self.tokens(), self.random.choice(NAMESPACES))

    def append(self) -> None:
        request, tokens, store = self.running(), self.tokens(), self.random.random() < 0.5
        attempt(self.shared, lambda: self.shared.append(request, tokens, store=store))

    def fork(self) -> None:
        fork(self.shared, self.running(), self.request())

    def shrink(self) -> None:
        request = self.running()
        self.shared.shrink(request, self.random.randint(0, held(self.shared, request)))

    def drop(self) -> None:
        request = self.running()
        self.shared.drop(request, self.random.randint(0, len(self.shared.tokens[request])))

    def free(self) -> None:
        self.shared.free(self.running())

    def misuse(self) -> None:
        misuse(self.shared, self.request(), self.random.choice(CALLS))

    def clear(self) -> None:
        self.shared.prefixes.clear()


def test_random_steps():
    for seed in range(examples(100)):
        case = RandomSteps(seed)
        for step in range(STEPS):
            try:
                case.step()
            except BaseException as error:
                error.add_note(f"RandomSteps({seed}), step {step}")
                raise
