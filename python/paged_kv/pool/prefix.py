"""Prefix sharing: a request whose prompt begins as a cached one does owns the same pages, and computes only the rest.

A full page is cached by its tokens and by the page before it, so that a chain of records says all tokens from the first
on. A record is found by a hash of the chain and counts only where its tokens are those that are looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import shown
from paged_kv.errors import ContractError, ContractTypeError
from paged_kv.options import NO_PAGE
from paged_kv.pool.page_pool import Cached, PagePool
from paged_kv.pool.state import Contents, Remembered, RequestPages, Stored, name_of

_T = TypeVar("_T")
HashFunction = Callable[[int, bytes], int]
"""From the hash of the pages before, and a page's tokens as int64, to the hash of them all."""


class Namespace:
    """The root of one namespace's chains."""

    def __init__(self, name: Hashable) -> None:
        self.hash = hash(("namespace", name))


class WindowPages(NamedTuple):
    """The pages of layers with windows, where these have their own (pool/README.md)."""

    pool: PagePool
    window_left: int
    """The most tokens that a token sees before itself."""

    def seen(self, count: int) -> range:
        """The places of the pages that a token after the first `count` pages sees before its own."""
        return range(max(0, count - -(-self.window_left // self.pool.page_size)), count)


@dataclass(eq=False, slots=True)  # `frozen` would make one three times slower to create
class _Record:
    """The tokens of one cached page, and of those before it by way of `before`."""

    before: _Record | Namespace
    tokens: bytes
    hash: int
    page: int
    window: int = NO_PAGE
    """The page of the layers with windows that has these tokens, while `WindowPages.pool` holds the record for it."""


class PrefixCache:
    """Finds and shares the pages of cached prefixes of a pool.

    Nothing is shared across namespaces: an adapter's name, a tenant's. Of a prompt at least the last token is left to
    compute, because its logits are wanted. A cached page that no request owns stays until its page is needed; pages in
    use are never evicted, nor those that a request that starts has just found.

    Threads may share it, as they may the pool.

    Args:
        pool: The pages. A pool has one prefix cache.
        windows: Where layers with windows have pages of their own: a prefix then ends where those are cached that the
            next token sees. `start` starts a request there too, and `store` needs it there.
        hash_function: Python's own hash where None, which differs from process to process.

    Examples:
        >>> from paged_kv.pool import PagePool
        >>> prefixes = PrefixCache(PagePool(num_pages=8, page_size=4))
        >>> prefixes.start("a", [5, 6, 7, 8, 9])
        0
        >>> prefixes.store("a", [5, 6, 7, 8, 9])  # tokens of full pages
        4
        >>> prefixes.start("b", [5, 6, 7, 8, 1, 2])
        4
    """

    def __init__(
        self, pool: PagePool, hash_function: HashFunction | None = None, *, windows: WindowPages | None = None
    ) -> None:
        self._pool, self._windows = pool, windows
        self._hash = hash_function or _default_hash
        self._records: dict[int, _Record] = {}  # by hash; one counts while the pool holds it for its page
        self._namespaces: WeakValueDictionary[Hashable, Namespace] = WeakValueDictionary()

    @property
    def pool(self) -> PagePool:
        """The pool whose pages it knows."""
        return self._pool

    def namespace(self, name: Hashable) -> Namespace:
        """Return what may stand for a namespace in all calls: it is known by its identity, no method of the name is
        called.

        Raises:
            ContractTypeError: the name is not hashable.
        """
        if isinstance(name, Namespace):
            return name
        try:
            root = self._namespaces.get(name)
            if root is None:
                root = self._namespaces.setdefault(name, Namespace(name))
        except Exception as error:  # its __hash__ or __eq__ may raise anything
            raise ContractTypeError(f"namespace: expected a hashable value, got {shown(name)}") from error
        return root

    def match(self, tokens: Sequence[int] | npt.NDArray[Any], namespace: Hashable = None) -> int:
        """Return how many of a prompt's leading tokens are cached: whole pages, and never all tokens; where the pool
        has slots of state, up to a page with a checkpoint.

        Raises:
            ContractTypeError: `tokens` is no list of integers, or `namespace` is not hashable.
        """
        start, prompt = self.namespace(namespace), _checked_tokens(tokens)
        records = self._look(lambda cached, windows: self._find(start, prompt, cached, windows))
        return len(records) * self._pool.page_size

    def reach(self, tokens: Sequence[int] | npt.NDArray[Any], namespace: Hashable = None) -> int:
        """Return how many of a prompt's leading tokens are in cached pages, where there is a checkpoint at their end
        and where not. Raises as `match`.
        """
        start, prompt = self.namespace(namespace), _checked_tokens(tokens)
        records = self._pool.look(lambda cached: self._find(start, prompt, Cached(cached.pages, None)))
        return len(records) * self._pool.page_size

    def start(self, request_id: Hashable, tokens: Sequence[int] | npt.NDArray[Any], namespace: Hashable = None) -> int:
        """Starts a request with a prompt in the pool; it shares the pages of the longest cached prefix.

        Returns the number of leading tokens whose K and V are in the cache already: the rest is to be computed.

        Raises:
            RequestError, PoolExhausted, ContractTypeError, ContractError: as `PagePool.start`.
        """
        start, prompt = self.namespace(namespace), _checked_tokens(tokens)
        records: list[_Record] = []

        def start_with(windows: Mapping[int, Any] | None) -> None:
            def find(cached: Cached) -> list[int]:
                records.extend(self._find(start, prompt, cached, windows))
                return [record.page for record in records]

            self._pool.start(request_id, len(prompt), find)

        if self._windows is None:
            start_with(None)
        else:
            of_windows = self._windows

            def find_windows(cached: Cached) -> list[int]:
                start_with(cached.pages)
                seen = of_windows.seen(len(records))
                return [record.window if at in seen else NO_PAGE for at, record in enumerate(records)]

            # A request that is not started here is not there either.
            of_windows.pool.start(request_id, None, find_windows)
        return len(records) * self._pool.page_size

    def store(
        self,
        request_id: Hashable,
        tokens: Sequence[int] | npt.NDArray[Any],
        namespace: Hashable = None,
        *,
        states: Mapping[int, int] = MappingProxyType({}),
        instead_of: int | None = None,
    ) -> int:
        """Says that the request's first tokens are `tokens` and that their K and V are in its pages.

        Full pages are cached from then on. A request calls it again as it grows, with all its tokens; this looks at the
        new pages alone. A page whose tokens are cached in another page stays the request's own.

        Args:
            request_id: The request.
            tokens: Its tokens from the first on.
            namespace: Where they are cached.
            states: Slots of the request's states by the number of tokens before them: ends of pages. Each becomes the
                checkpoint of the cached page there, if that has none.
            instead_of: The number of tokens before a checkpoint of an earlier call, which is given up if no request has
                it.

        Returns the number of tokens in pages that are cached now, of this request or another.

        Raises:
            RequestError: the request is unknown.
            ContractError: it has fewer tokens, or other ones than were stored; `states` has a slot that it does not
                have, or a number that is no end of a page of `tokens`.
            ContractTypeError: as `match`.
        """
        start, prompt = self.namespace(namespace), _checked_tokens(tokens)
        size = self._pool.page_size
        for count in states:
            if not (isinstance(count, int) and 0 < count <= len(prompt) and count % size == 0):
                raise ContractError(
                    f"{name_of(request_id)}: states must be at ends of pages of {size} of {len(prompt)} tokens, not at"
                    f" {shown(count)}"
                )

        first = 0
        after: Stored = None

        def choose(request: RequestPages, cached: Cached) -> Remembered:
            nonlocal first, after
            if not request.owned_states() >= set(states.values()):
                raise ContractError(f"{name_of(request_id)}: states has slots {shown(states)} that are not its own")
            contents, stored = self._new_records(request_id, request, start, prompt, cached.pages)
            if request.stored is not None and cached.pages.get(request.stored[1].page) is request.stored[1]:
                first = request.stored[0]
            after = stored
            edges = [*states, *(() if instead_of is None else (instead_of,))]
            pages = _pages_at(stored, [count // size for count in edges])
            checkpoints = {pages[count // size]: slot for count, slot in states.items() if count // size in pages}
            passed = [] if instead_of is None or instead_of // size not in pages else [pages[instead_of // size]]
            return Remembered(contents, stored, checkpoints, passed)

        done = self._pool.remember(request_id, choose)
        if self._windows is not None and after is not None:
            self._store_windows(self._windows.pool, request_id, first, after)
        if len(self._records) > 2 * self._pool.num_pages + 64:
            self._sweep()
        return done * self._pool.page_size

    def checkpoint(self, request_id: Hashable, num_tokens: int) -> int | None:
        """Return the slot of the checkpoint after the first `num_tokens` tokens of a request, which it has stored; None
        where there is none. Raises `RequestError` of an unknown request.
        """
        slot: int | None = None
        at = num_tokens // self._pool.page_size

        def look(request: RequestPages, cached: Cached) -> Remembered:
            nonlocal slot
            page = _pages_at(request.stored, [at]).get(at)
            slot = None if cached.checkpoints is None or page is None else cached.checkpoints.get(page)
            return Remembered((), request.stored)

        self._pool.remember(request_id, look)
        return slot

    def clear(self) -> int:
        """Forgets all prefixes, as after a change of the weights; requests keep their pages.

        Returns the number of pages that were cached.
        """
        count = self._pool.forget()
        if self._windows is not None:
            self._windows.pool.forget()
        self._sweep()
        return count

    def _look(self, function: Callable[[Cached, Mapping[int, Any] | None], _T]) -> _T:
        """`function` of the cached pages and, where there are some, of those of windows."""
        if self._windows is None:
            return self._pool.look(lambda cached: function(cached, None))
        return self._windows.pool.look(lambda windows: self._pool.look(lambda cached: function(cached, windows.pages)))

    def _store_windows(self, pool: PagePool, request_id: Hashable, first: int, stored: tuple[int, Any]) -> None:
        """Caches the pages of windows that go with records of a request, from its `first` page on."""
        count, record = stored
        records = []
        while count > first:
            count -= 1
            records.append((count, record))
            record = record.before

        def choose(request: RequestPages, cached: Cached) -> Remembered:
            contents = []
            for at, record in records:
                page = request.pages[at] if request.dropped <= at < len(request.pages) else NO_PAGE
                if page != NO_PAGE and page not in cached.pages and cached.pages.get(record.window) is not record:
                    record.window = page  # it counts once the pool holds the record for the page
                    contents.append((page, record))
            return Remembered(contents, None)

        pool.remember(request_id, choose)

    def _find(
        self,
        start: Namespace,
        prompt: npt.NDArray[np.int64],
        cached: Cached,
        windows: Mapping[int, Any] | None = None,
    ) -> list[_Record]:
        """The records of the longest cached prefix, without that of the last token; up to a checkpoint where there are
        some, and where those of `windows` are cached that the next token sees.
        """
        records: list[_Record] = []
        last = run = 0
        before: _Record | Namespace = start
        data, width = prompt.tobytes(), 8 * self._pool.page_size
        for at in range(0, (len(prompt) - 1) // self._pool.page_size * width, width):
            record = self._record(before, data[at : at + width], cached.pages)
            if record is None:
                break
            records.append(record)
            run = run + 1 if windows is not None and windows.get(record.window) is record else 0
            if cached.checkpoints is None or record.page in cached.checkpoints:
                is_seen = windows is None or self._windows is None or run >= len(self._windows.seen(len(records)))
                last = len(records) if is_seen else last
            before = record
        return records[:last]

    def _record(self, before: _Record | Namespace, tokens: bytes, cached: Mapping[int, Any]) -> _Record | None:
        """The record of a page of these tokens after `before`, where it is cached."""
        record = self._records.get(self._hash(before.hash, tokens))
        if record is None or record.before is not before or record.tokens != tokens:
            return None
        return record if cached.get(record.page) is record else None

    def _new_records(
        self,
        request_id: Hashable,
        request: RequestPages,
        start: Namespace,
        prompt: npt.NDArray[np.int64],
        cached: Mapping[int, Any],
    ) -> tuple[Contents, Stored]:
        """The request's full pages that are to be cached, each with its record; and how many of its pages are then."""
        size, length = self._pool.page_size, request.length
        if len(prompt) > length:
            raise ContractError(f"{name_of(request_id)}: {len(prompt)} tokens to store, it has {length}")
        data, width = prompt.tobytes(), 8 * size
        done = 0
        before: Any = start
        if request.stored is not None:
            done, before = request.stored
        if done and data[(done - 1) * width : done * width] != before.tokens:
            raise ContractError(f"{name_of(request_id)}: tokens {(done - 1) * size} on are not those stored before")
        if done and cached.get(before.page) is not before:  # evicted: it was in a page of another request
            done, before = 0, start
        contents = []
        while (done + 1) * size <= len(prompt):
            tokens = data[done * width : (done + 1) * width]
            record = self._record(before, tokens, cached)
            if record is None:
                page = request.pages[done]
                if done < request.dropped or (page in cached and cached[page].tokens != tokens):
                    break
                record = _Record(before, tokens, self._hash(before.hash, tokens), page)
                contents.append((page, record))
                # It counts once the pool holds it, so it may be here before that.
                self._records[record.hash] = record
            before = record
            done += 1
        return contents, (done, before) if done else None

    def _sweep(self) -> None:
        """Drops records that the pool holds no more."""
        cached = self._pool.look(lambda cached: set(map(id, cached.pages.values())))
        for key, record in list(self._records.items()):
            if id(record) not in cached:
                self._records.pop(key, None)


def _pages_at(stored: Stored, ends: Sequence[int]) -> dict[int, int]:
    """The pages that are the `ends`-th of a chain of records, by these numbers; those beyond it are left out."""
    pages: dict[int, int] = {}
    if stored is not None and ends:
        count, record = stored
        while count and count >= min(ends):
            pages[count] = record.page
            count, record = count - 1, record.before
    return pages


def _default_hash(before: int, tokens: bytes) -> int:
    return hash((before, tokens))


def _checked_tokens(tokens: Any) -> npt.NDArray[np.int64]:
    """Token ids as an array, in int64."""
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError, TypeError):
        array = np.empty((0, 0), np.float64)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu") or array.dtype == np.uint64:
        raise ContractTypeError(f"tokens: expected a list of integers below 2^63, got {shown(tokens)}")
    return array.astype(np.int64)
