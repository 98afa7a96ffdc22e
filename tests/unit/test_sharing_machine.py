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

    @initialize(
        num_pages=st.integers(3, 20), page_size=st.integers(1, 5), collide=st.sampled_from([False] * 4 + [True])
    )
    def create(self, num_pages, page_size, collide):
        self.shared = SharedPages(num_pages, page_size, (lambda *_: 3) if collide else None)

    def running(self, data) -> Any:
        return data.draw(st.sampled_from(sorted(self.shared.tokens)))

    def attempt(self, grow, needed, found=0) -> None:
        """A growth by `needed` pages, or PoolExhausted where so many are missing, but for `found` ones that are cached
        perhaps; then nothing has changed.
        """
        pool = self.shared.pool
        count, before = pool.count(), [pool.pages(request) for request in sorted(self.shared.tokens)]
        try:
            grow()
            assert needed <= count.free + count.cached
        except PoolExhausted:
            assert needed > count.free + count.cached - found
            assert [pool.pages(request) for request in sorted(self.shared.tokens)] == before

    @rule(request=REQUESTS, tokens=TOKENS, namespace=st.sampled_from([None, "x"]))
    def start(self, request, tokens, namespace):
        if request in self.shared.tokens:
            with pytest.raises(RequestError, match=str(request)):
                self.shared.prefixes.start(request, tokens, namespace)
            return
        size = self.shared.pool.page_size
        found = self.shared.prefixes.match(tokens, namespace) // size
        needed = pages_needed(len(tokens), size) - found
        self.attempt(lambda: self.shared.start(request, tokens, namespace), needed, found)

    @precondition(lambda self: self.shared.tokens)
    @rule(data=st.data(), namespace=st.sampled_from([None, "x"]))
    def start_alike(self, data, namespace):
        """Prompts that begin alike, the second as the first ends: of those that `start` draws, hardly any is found."""
        tokens = [*self.shared.tokens[self.running(data)], *data.draw(TOKENS), 0, 1, 2]
        for request in sorted({*range(6)} - {*self.shared.tokens})[:2]:
            self.start(request, [*tokens, request], namespace)
            if request in self.shared.tokens and data.draw(st.booleans()):
                self.shared.free(request)

    @precondition(lambda self: self.shared.tokens)
    @rule(data=st.data(), tokens=TOKENS, store=st.booleans())
    def append(self, data, tokens, store):
        request, pool = self.running(data), self.shared.pool
        size, length = pool.page_size, pool.length(request)
        needed = pages_needed(length + len(tokens), size) - pages_needed(length, size)
        if tokens and length % size:  # a last page that others own too is copied
            needed += sum(pool.pages(request)[-1] in pool.pages(other) for other in self.shared.tokens) > 1
        self.attempt(lambda: self.shared.append(request, tokens, store=store), needed)

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
            with pytest.raises(RequestError, match=str(request)):
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
