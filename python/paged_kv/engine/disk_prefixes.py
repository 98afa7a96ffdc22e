"""The disk tier as a resource of samples: what a sample reads from it when it begins, and offers to it as it grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paged_kv.engine.disk_tier import DiskPages
from paged_kv.engine.requests import Sample
from paged_kv.engine.resources import Resource, SharedPages
from paged_kv.engine.states import saved_at_pages
from paged_kv.engine.windows import Windows
from paged_kv.options import NO_PAGE


class DiskPrefixes(Resource):
    """Files of full pages. It comes after the resources whose memory it reads into and writes from.

    Args:
        disk: The files.
        pages: The pages of samples.
    """

    def __init__(self, disk: DiskPages, pages: SharedPages) -> None:
        self._disk, self._prefixes, self._pool = disk, pages.prefixes, pages.pool

    def begin(self, sample: Sample) -> None:
        """Reads pages that follow those that a sample begins with, but for the one of its last token."""
        if not sample.chain or sample.request.wants_prompt:
            return
        tokens, size = sample.tokens, self._pool.page_size
        first, count = sample.cached // size, (len(tokens) - 1) // size
        self._disk.grow(sample.chain, tokens, count)
        restored, states = self._read(sample, first, self._pool.pages(sample.key)[first:count])
        if restored:
            sample.cached += restored * size
            self._prefixes.store(sample.key, tokens[: sample.cached], sample.request.namespace, states=states)
            self.tokens_restored += restored * size
            for slot in states.values():
                self._pool.keep_state(sample.key, slot)

    def store(self, sample: Sample) -> None:
        """Offers the full pages of a sample, but for those offered before and those dropped."""
        if sample.chain:
            count = sample.cached // self._pool.page_size
            self._disk.grow(sample.chain, sample.tokens, count)
            pages = self._pool.pages(sample.key)[:count]
            first = max(sample.offered, pages.count(NO_PAGE))
            sample.offered = self._disk.offer(sample.chain, sample.tokens, first, pages[first:])

    def fork(self, sample: Sample, child: Sample) -> None:
        child.chain, child.offered = list(sample.chain), sample.offered

    def leave(self, sample: Sample) -> None:
        if sample.cached:
            self._disk.used(sample.chain)
        sample.offered = 0

    def _read(self, sample: Sample, first: int, pages: Sequence[int]) -> tuple[int, Mapping[int, int]]:
        """Reads pages `first` on of a sample; returns how many it read, and slots of states by tokens before them."""
        return self._disk.restore(sample.chain, sample.tokens, first, pages), {}


class DiskStates(DiskPrefixes):
    """Files of full pages, and of the states at the ends of some: of hybrid models."""

    def store(self, sample: Sample) -> None:
        states = saved_at_pages(sample, self._pool.page_size)
        self._offer_states(sample, {at: slot for at, slot in states.items() if at != sample.passing})
        super().store(sample)

    def end(self, sample: Sample) -> None:
        """Offers the last state of its text that the prefix cache has."""
        if sample.passing is not None:
            slot = self._prefixes.checkpoint(sample.key, sample.passing)
            self._offer_states(sample, {} if slot is None else {sample.passing: slot})

    def _read(self, sample: Sample, first: int, pages: Sequence[int]) -> tuple[int, Mapping[int, int]]:
        """Raises `PoolExhausted` where there is no slot for the state."""
        (slot,) = self._pool.take_states(sample.key, 1)
        restored = self._disk.restore_with_state(sample.chain, sample.tokens, first, pages, slot)
        return restored, {(first + restored) * self._pool.page_size: slot}

    def _offer_states(self, sample: Sample, states: Mapping[int, int]) -> None:
        if sample.chain:
            for count, slot in states.items():
                page = count // self._pool.page_size
                self._disk.grow(sample.chain, sample.tokens, page)
                self._disk.offer_state(sample.chain, sample.tokens, page, slot)


class DiskWindows(DiskPrefixes):
    """Files of full pages, and of the pages of windows beside them. Arguments as of `DiskPrefixes`, and `windows`."""

    def __init__(self, disk: DiskPages, pages: SharedPages, windows: Windows) -> None:
        super().__init__(disk, pages)
        self._windows = windows

    def store(self, sample: Sample) -> None:
        first = sample.offered
        super().store(sample)
        pages = self._windows.pool.pages(sample.key)[first : sample.offered]
        sample.offered = self._disk.offer(sample.chain, sample.tokens, first, pages, windows=True)

    def _read(self, sample: Sample, first: int, pages: Sequence[int]) -> tuple[int, Mapping[int, int]]:
        """Raises `PoolExhausted` where there are no pages for windows."""
        windows = self._windows

        def take(count: int) -> Mapping[int, int]:
            return windows.restart(sample, count)

        seen = windows.windows.seen
        return self._disk.restore_with_windows(sample.chain, sample.tokens, first, pages, seen, take), {}
