"""The pages of layers with windows, where these have their own: a sample has those that its window reaches.

They are in a pool of their own, with the same page size: page i of a sample has K and V of the same tokens as its
page i of the other layers. A sample gets them step by step, not for its whole prompt at once, and those that no window
reaches any more go back, known or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from paged_kv.engine.requests import Sample
from paged_kv.errors import RequestError
from paged_kv.options import NO_PAGE
from paged_kv.pool import WindowPages


class SampleWindows:
    """The pages of windows that samples have.

    Args:
        windows: The pool, and how far a window reaches.
        copy_page: Copies one of its pages.
    """

    def __init__(self, windows: WindowPages, copy_page: Callable[[int, int], None]) -> None:
        self.windows, self.pool = windows, windows.pool
        self._copy_page = copy_page

    def hold(self, sample: Sample) -> None:
        """Gives a sample that brings tokens to the next step a slot for the first of them, and none for drafts that
        were wrong.

        Raises:
            PoolExhausted: there is none.
        """
        key, held = sample.key, self.pool.length(sample.key)
        if held > len(sample.tokens):
            self.pool.shrink(key, held - len(sample.tokens))
        elif held <= sample.cached:
            self.pool.reserve(key, sample.cached + 1 - held, self._copy_page)

    def plan(self, sample: Sample, count: int) -> int:
        """Gives a sample slots for `count` tokens after those in the cache, or as many as there are; returns how many
        tokens it has slots for. One is there already (`hold`).
        """
        held = self.pool.length(sample.key)
        missing = sample.cached + count - held
        if missing > 0:
            free = self.pool.num_free + self.pool.num_cached
            slots = free * self.pool.page_size + -held % self.pool.page_size
            self.pool.reserve(sample.key, min(missing, slots), self._copy_page)
        return min(count, self.pool.length(sample.key) - sample.cached)

    def restart(self, sample: Sample, count: int) -> dict[int, int]:
        """Gives a sample the pages that the token after its first `count` pages sees, in place of those that it has;
        those of them that it has, all known, stay as they are. Returns the others, by their places.

        Raises:
            PoolExhausted: there are too few; it has none then.
        """
        old, key, seen = self.pool.pages(sample.key), sample.key, self.windows.seen(count)
        kept = [NO_PAGE] * seen.start + list(old[seen.start :])
        self.pool.free(key)
        new = self.pool.start(key, count * self.pool.page_size, lambda _: kept)
        return {at: new[at] for at in range(len(kept), count)}

    def pages(self, samples: Sequence[Sample]) -> list[tuple[int, ...]]:
        """The pages of each sample, `NO_PAGE` for those that no window reaches."""
        return [self.pool.pages(sample.key) for sample in samples]

    def leave(self, sample: Sample) -> None:
        """Takes a sample's pages, if it has any."""
        with suppress(RequestError):
            self.pool.free(sample.key)
