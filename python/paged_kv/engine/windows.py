"""The pages of layers with windows, where these have their own: a sample has those that its window reaches.

They are in a pool of their own, with the same page size: page i of a sample has K and V of the same tokens as its
page i of the other layers. A sample gets them step by step, not for its whole prompt at once, and those that no window
reaches any more go back, cached or not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from paged_kv.engine.requests import Sample
from paged_kv.engine.resources import Batch, Resource, StepMemory
from paged_kv.errors import RequestError
from paged_kv.options import NO_PAGE
from paged_kv.pool import WindowPages


class Windows(Resource):
    """The pages of windows that samples have.

    Args:
        windows: The pool, and how far a window reaches.
        copy_page: Copies one of its pages.
    """

    def __init__(self, windows: WindowPages, copy_page: Callable[[int, int], None]) -> None:
        self.windows, self.pool = windows, windows.pool
        self._copy_page = copy_page

    def begin(self, sample: Sample) -> None:
        with suppress(RequestError):  # the prefix cache has started it here too
            self.pool.start(sample.key)

    def settle(self, sample: Sample) -> None:
        if (rejected := self.pool.length(sample.key) - len(sample.tokens)) > 0:
            self.pool.shrink(sample.key, rejected)

    def hold(self, sample: Sample) -> None:
        """Gives a sample a slot for the first token that it brings."""
        held = self.pool.length(sample.key)
        if held <= sample.cached:
            self.pool.reserve(sample.key, sample.cached + 1 - held, self._copy_page)

    def reserve(self, sample: Sample, count: int) -> int:
        held = self.pool.length(sample.key)
        missing = sample.cached + count - held
        if missing > 0:
            free = self.pool.num_free + self.pool.num_cached
            slots = free * self.pool.page_size + -held % self.pool.page_size
            self.pool.reserve(sample.key, min(missing, slots), self._copy_page)
        return min(count, self.pool.length(sample.key) - sample.cached)

    def bring(self, batch: Batch, memory: StepMemory) -> None:
        """Pages in token order, `NO_PAGE` for those that no window reaches."""
        memory.window_pages = [self.pool.pages(sample.key) for sample, _ in batch]

    def computed(self, sample: Sample) -> None:
        if sample.cached > self.windows.window_left:
            self.pool.drop(sample.key, sample.cached - self.windows.window_left)

    def fork(self, sample: Sample, child: Sample) -> None:
        self.pool.fork(sample.key, child.key)

    def leave(self, sample: Sample) -> None:
        with suppress(RequestError):
            self.pool.free(sample.key)

    def restart(self, sample: Sample, count: int) -> dict[int, int]:
        """Gives a sample the pages that the token after its first `count` pages sees, in place of those that it has;
        those of them that it has, all cached, stay as they are. Returns the others, by their places.

        Raises:
            PoolExhausted: there are too few; it has none then.
        """
        old, key, seen = self.pool.pages(sample.key), sample.key, self.windows.seen(count)
        prefix = [NO_PAGE] * seen.start + list(old[seen.start :])
        self.pool.free(key)
        new = self.pool.start(key, count * self.pool.page_size, lambda _: prefix)
        return {at: new[at] for at in range(len(prefix), count)}
