"""Every operation on shared pages in any order, over a memory that shows whose K and V a request would read."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_kv.errors import PagedKVError, PoolExhausted, RequestError
from paged_kv.pool import pages_needed
from support.properties import examples
from support.shared_pages import SharedPages

REQUESTS = st.integers(0, 5)
TOKENS = st.lists(st.integers(0, 2), max_size=14)


class SharingMachine(RuleBasedStateMachine):
    """Every operation on shared pages, over a memory that shows whose K and V a request would read."""

    @initialize(num_pages=st.integers(0, 14), page_size=st.integers(1, 5), collide=st.booleans())
    def create(self, num_pages, page_size, collide):
        self.shared = SharedPages(num_pages, page_size, (lambda *_: 3) if collide else None)

    def running(self, data) -> Any:
        return data.draw(st.sampled_from(sorted(self.shared.tokens)))

    def attempt(self, grow) -> None:
        """A growth, or PoolExhausted where pages are missing; then nothing has changed."""
        pool = self.shared.pool
        before = [pool.pages(request) for request in sorted(self.shared.tokens)]
        try:
            grow()
        except PoolExhausted:
            assert [pool.pages(request) for request in sorted(self.shared.tokens)] == before

    @rule(request=REQUESTS, tokens=TOKENS, namespace=st.sampled_from([None, "x"]))
    def start(self, request, tokens, namespace):
        if request in self.shared.tokens:
            with pytest.raises(RequestError):
                self.shared.prefixes.start(request, tokens, namespace)
            return
        count, needed = self.shared.pool.count(), pages_needed(len(tokens), self.shared.pool.page_size)
        if needed <= count.free:
            self.shared.start(request, tokens, namespace)
        else:
            self.attempt(lambda: self.shared.start(request, tokens, namespace))

    @precondition(lambda self: self.shared.tokens)
    @rule(data=st.data(), tokens=TOKENS, store=st.booleans())
    def append(self, data, tokens, store):
        request = self.running(data)
        self.attempt(lambda: self.shared.append(request, tokens, store=store))

    @precondition(lambda self: self.shared.tokens)
    @rule(data=st.data(), child=REQUESTS)
    def fork(self, data, child):
        request = self.running(data)
        if child in self.shared.tokens:
            with pytest.raises(RequestError):
                self.shared.pool.fork(request, child)
        else:
            self.shared.fork(request, child)

    @precondition(lambda self: self.shared.tokens)
    @rule(data=st.data())
    def shrink(self, data):
        request = self.running(data)
        most = len(self.shared.tokens[request]) - self.shared.dropped[request]
        self.shared.shrink(request, data.draw(st.integers(0, most)))

    @precondition(lambda self: self.shared.tokens)
    @rule(data=st.data())
    def drop(self, data):
        request = self.running(data)
        self.shared.drop(request, data.draw(st.integers(0, len(self.shared.tokens[request]))))

    @precondition(lambda self: self.shared.tokens)
    @rule(data=st.data())
    def free(self, data):
        self.shared.free(self.running(data))

    @rule(request=REQUESTS, call=st.sampled_from(["free", "reserve", "pages", "length"]))
    def misuse(self, request, call):
        if request not in self.shared.tokens:
            with pytest.raises(RequestError):
                getattr(self.shared.pool, call)(request)
        with pytest.raises(PagedKVError):
            self.shared.pool.reserve(request, -1)

    @rule()
    def clear(self):
        self.shared.prefixes.clear()

    @invariant()
    def every_request_reads_its_own_tokens(self):
        if hasattr(self, "shared"):
            self.shared.check_all()


TestSharingMachine = SharingMachine.TestCase
TestSharingMachine.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)
