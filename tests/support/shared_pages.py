"""A pool of shared pages and the memory behind it: what every slot holds says whether sharing was right.

A slot holds the namespace and all tokens up to its own, which is what K and V of a token depend on. So a request that
reads another request's page finds it out, whatever tokens they have in common.
"""

from __future__ import annotations

from typing import Any

from paged_kv.options import NO_PAGE
from paged_kv.pool import PagePool, PrefixCache


class SharedPages:
    """Requests with their tokens, over a pool; each operation writes what a model would."""

    def __init__(self, num_pages: int, page_size: int, hash_function: Any = None) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.prefixes = PrefixCache(self.pool, hash_function)
        self.memory: dict[tuple[int, int], Any] = {}
        self.tokens: dict[Any, list[int]] = {}
        self.namespaces: dict[Any, Any] = {}
        self.dropped: dict[Any, int] = {}
        """Leading tokens of a request that its pages no longer hold."""

    def start(self, request: Any, tokens: list[int], namespace: Any = None) -> int:
        """Starts a request, writes what is not found, and stores it; returns the tokens that were found."""
        found = self.prefixes.start(request, tokens, namespace)
        self.tokens[request], self.namespaces[request], self.dropped[request] = list(tokens), namespace, 0
        self.check(request, found)
        self._write(request, found)
        self.prefixes.store(request, tokens, namespace)
        return found

    def append(self, request: Any, tokens: list[int], *, store: bool = True) -> None:
        first = len(self.tokens[request])
        added = self.pool.reserve(request, len(tokens), self._copy)
        assert added == self.pool.pages(request)[len(self.pool.pages(request)) - len(added) :]
        self.tokens[request] += tokens
        self._write(request, first)
        if store:
            self.prefixes.store(request, self.tokens[request], self.namespaces[request])

    def fork(self, request: Any, child: Any) -> None:
        self.pool.fork(request, child)
        self.tokens[child] = list(self.tokens[request])
        self.namespaces[child], self.dropped[child] = self.namespaces[request], self.dropped[request]

    def shrink(self, request: Any, count: int) -> None:
        self.pool.shrink(request, count)
        del self.tokens[request][len(self.tokens[request]) - count :]

    def drop(self, request: Any, count: int) -> None:
        self.pool.drop(request, count)
        size = self.pool.page_size
        self.dropped[request] = max(self.dropped[request], count // size * size)

    def free(self, request: Any) -> None:
        self.pool.free(request)
        del self.tokens[request], self.namespaces[request], self.dropped[request]

    def check(self, request: Any, count: int | None = None) -> None:
        """The first `count` tokens of a request lie in its pages, but for those that it dropped."""
        pages = self.pool.pages(request)
        for at in range(self.dropped[request], len(self.tokens[request]) if count is None else count):
            assert self.memory[self._slot(pages, at)] == self._content(request, at), (request, at)
        assert all(page == NO_PAGE for page in pages[: self.dropped[request] // self.pool.page_size])

    def check_all(self) -> None:
        self.pool.check_integrity()
        for request in self.tokens:
            assert self.pool.length(request) == len(self.tokens[request])
            self.check(request)
        owned = {page for request in self.tokens for page in self.pool.pages(request)} - {NO_PAGE}
        count = self.pool.count()
        assert count.used == len(owned)
        assert sum(count) == self.pool.num_pages

    def _content(self, request: Any, at: int) -> Any:
        return self.namespaces[request], tuple(self.tokens[request][: at + 1])

    def _slot(self, pages: tuple[int, ...], at: int) -> tuple[int, int]:
        page, slot = divmod(at, self.pool.page_size)
        return pages[page], slot

    def _write(self, request: Any, first: int) -> None:
        pages = self.pool.pages(request)
        for at in range(first, len(self.tokens[request])):
            self.memory[self._slot(pages, at)] = self._content(request, at)

    def _copy(self, source: int, target: int) -> None:
        for slot in range(self.pool.page_size):
            if (source, slot) in self.memory:
                self.memory[target, slot] = self.memory[source, slot]
