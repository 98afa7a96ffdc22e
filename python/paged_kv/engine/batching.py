"""Batching: the samples of a step, their tokens and their pages.

First come, first served: a sample waits until those before it have pages. Where running samples need more pages than
there are, the one that came last gives its own back and is computed again later, so the first one always goes on.

A sample that moves from one list to the other is in both meanwhile, so an exception in between loses none. After one
`restart` lets all of them wait, without pages, and they are computed again from their tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import suppress

from paged_kv.engine.disk_tier import DiskPages
from paged_kv.engine.requests import Sample
from paged_kv.engine.speculation import PANEL, Speculation
from paged_kv.engine.states import SampleStates, StepStates
from paged_kv.engine.windows import SampleWindows
from paged_kv.errors import PoolExhausted, RequestError
from paged_kv.options import NO_PAGE
from paged_kv.pool import PagePool, PrefixCache

PROMPT_ROWS = 128
"""Rows of a step that a prompt takes whose log-probabilities are wanted: each gives the logits of the vocabulary."""
LEAST_CHUNK, FIRST_CHUNK = 16, 64
"""Tokens of prompts that a step takes beside samples that decode, however long it takes; and before times are known."""

Batch = list[tuple[Sample, list[int]]]
"""The samples of one step, each with the tokens that it brings; what goes past its own tokens is drafted."""


class Batching:
    """The samples that wait and run, in the order of arrival.

    Args:
        pool: The pages and, of a hybrid model, the slots of states.
        copy_page: Copies a page's K and V, of all layers.
        max_step_tokens: Tokens of a step at most.
        max_running: Samples of a step at most; a prompt counts for all samples that will begin with it.
        share_prefixes: Whether prompts that begin alike share pages.
        max_gap: Seconds that a step should take at most in which samples decode.
        disk: Where full pages are kept too, with `share_prefixes`.
        speculation: Drafts what comes after the last tokens of samples.
        windows: The pages of layers with windows, where these have their own.
        window_left: The tokens before its own that a token sees in these layers, or in all layers where they have no
            pages apart. None: all of them.
    """

    def __init__(
        self,
        pool: PagePool,
        copy_page: Callable[[int, int], None],
        *,
        max_step_tokens: int,
        max_running: int,
        share_prefixes: bool,
        max_gap: float | None = None,
        disk: DiskPages | None = None,
        speculation: Speculation | None = None,
        windows: SampleWindows | None = None,
        window_left: int | None = None,
    ) -> None:
        self.pool = pool
        of_windows = None if windows is None else windows.windows
        self.prefixes = PrefixCache(pool, windows=of_windows) if share_prefixes else None
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        self.preemptions = 0
        """The number of times that a sample gave its pages back before its end."""
        self.tokens_found = 0
        """Prompt tokens whose K and V were in the cache already."""
        self.tokens_restored = 0
        """Tokens whose K and V were read from the disk."""
        self._disk = disk
        self._states = SampleStates(pool, self.prefixes) if pool.num_states else None
        self._windows, self._window_left = windows, window_left
        self._speculation = speculation
        self._copy_page = copy_page
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running
        self._max_gap = max_gap
        # Tokens of prompts beside samples that decode.
        self._chunk = max_step_tokens if max_gap is None else min(FIRST_CHUNK, max_step_tokens)

    def add(self, sample: Sample) -> None:
        """Puts a sample among those that wait, where it is not there."""
        _insert(self.waiting, sample)

    @property
    def samples(self) -> dict[tuple[int, int], Sample]:
        """All samples by their keys."""
        return {sample.key: sample for sample in (*self.running, *self.waiting)}

    def restart(self) -> list[Sample]:
        """Begins again after an exception: returns the samples, which all wait, without pages, made anew from their
        tokens. Those that begin when a prompt is in the cache come again from `fork`.
        """
        samples = self.samples
        forking = {sample.request.number for sample in samples.values() if sample.forks}
        for key, sample in samples.items():
            with suppress(RequestError):
                self.pool.free(key)
            if self._windows is not None:
                self._windows.leave(sample)
        self.preemptions += len(self.running)
        self.waiting = [
            Sample(sample.request, sample.index, sample.tokens)
            for (number, index), sample in sorted(samples.items())
            if index == 0 or number not in forking
        ]
        self.running = []
        return list(self.waiting)

    def next_batch(self) -> Batch:
        """The next step: samples that decode first, one token each, then prompts in the order of arrival; drafts."""
        self._give_slots()
        self._admit()
        room = self._max_step_tokens
        prompts = self._chunk if any(not sample.is_prefilling for sample in self.running) else room
        batch: Batch = []
        for sample in sorted(self.running, key=lambda each: (each.is_prefilling, each.key)):
            most = min(room, prompts) if sample.is_prefilling else room
            if sample.request.wants_prompt:
                most = min(most, PROMPT_ROWS)
            new = sample.tokens[sample.cached : sample.cached + most]
            if self._windows is not None and new:
                new = new[: self._windows.plan(sample, len(new))]
            room -= len(new)
            prompts -= len(new) if sample.is_prefilling else 0
            if new:
                batch.append((sample, new))
        if self._speculation is not None and batch:
            self._propose(self._speculation, batch, room)
        if self._states is not None:
            for sample, new in batch:
                self._states.plan(sample, len(new), max(0, sample.cached + len(new) - len(sample.tokens)))
        return batch

    def states(self, batch: Batch) -> StepStates | None:
        """The slots that a step of a hybrid model reads and saves states in; None of other models."""
        return None if self._states is None else self._states.of_step([sample for sample, _ in batch])

    def window_pages(self, batch: Batch) -> list[tuple[int, ...]] | None:
        """The pages of layers with windows in a step; None where they have none of their own."""
        return None if self._windows is None else self._windows.pages([sample for sample, _ in batch])

    def _propose(self, speculation: Speculation, batch: Batch, room: int) -> None:
        """Adds drafts to samples that bring their last token alone, as far as `room`, rows and free pages allow."""
        places = [
            at
            for at, (sample, new) in enumerate(batch)
            if len(new) == 1 and not sample.is_prefilling and not sample.forks
        ]
        room = min(room, self._max_running - len(batch))
        if not places or room <= 0:
            return
        samples = [batch[at][0] for at in places]
        # A sample's last token needs no slot.
        most = [min(sample.request.limit - len(sample.tokens) - 1, PANEL - 1, room) for sample in samples]
        rows = sum(len(new) for _, new in batch)
        for at, drafts in zip(places, speculation.propose(samples, most, rows, self.running), strict=True):
            sample, new = batch[at]
            drafts = drafts[:room]
            try:
                if self._states is not None and drafts:
                    self._states.hold_drafts(sample, len(drafts))
                self.pool.reserve(sample.key, len(drafts), self._copy_page)
                if self._windows is not None:
                    drafts = drafts[: self._windows.plan(sample, 1 + len(drafts)) - 1]
            except PoolExhausted:  # no page is taken from a sample for a draft
                continue
            batch[at] = sample, new + drafts
            room -= len(drafts)

    def timed(self, batch: Batch, seconds: float) -> None:
        """Says how long a step took: the next one with prompts beside samples that decode takes about `max_gap`."""
        prompts = sum(len(new) for sample, new in batch if sample.is_prefilling)
        if self._max_gap is None or prompts == 0 or all(sample.is_prefilling for sample, _ in batch):
            return
        if seconds > self._max_gap or prompts >= self._chunk:
            wanted = prompts * min(max(self._max_gap / seconds, 0.25), 2)
            self._chunk = min(max(int(wanted), LEAST_CHUNK), self._max_step_tokens)

    def computed(self, sample: Sample, cached: int) -> None:
        """Says that K and V of the sample's first `cached` tokens are in its pages. Those that no window reaches any
        more go back.
        """
        sample.cached = cached
        self._store(sample, cached)
        if self._window_left is not None and cached > self._window_left:
            pool = self.pool if self._windows is None else self._windows.pool
            pool.drop(sample.key, cached - self._window_left)

    def fork(self, sample: Sample) -> list[Sample]:
        """Lets the request's other samples run, which begin with all that `sample` has in the cache."""
        request = sample.request
        self._store(sample, len(sample.tokens))  # once, not for each child
        if self._states is not None:
            sample.cached = len(sample.tokens)
            self._states.settle(sample)
        children = [Sample(request, index, list(request.prompt)) for index in range(1, request.samples)]
        for child in children:
            _insert(self.running, child)
            self.pool.fork(sample.key, child.key)
            if self._windows is not None:
                self._windows.pool.fork(sample.key, child.key)
            child.cached, child.stored = len(child.tokens), sample.stored
            child.chain, child.offered = list(sample.chain), sample.offered
            child.edges = set(sample.edges)
        return children

    def end(self, sample: Sample) -> None:
        """Forgets a sample, wherever it is."""
        if self._states is not None and self.prefixes is not None and sample.passing is not None:
            slot = self.prefixes.checkpoint(sample.key, sample.passing)
            self._offer_states(sample, {} if slot is None else {sample.passing: slot})
        self._leave(sample)
        _remove(self.waiting, sample)

    def _give_slots(self) -> None:
        """Gives each running sample a slot for each of its tokens; the last ones wait again where pages run out.

        Slots of drafts that were wrong are taken back first.
        """
        for sample in self.running if self._speculation is not None else ():
            if (wrong := self.pool.length(sample.key) - len(sample.tokens)) > 0:
                self.pool.shrink(sample.key, wrong)
        for sample in list(self.running):
            while sample in self.running:
                missing = len(sample.tokens) - self.pool.length(sample.key)
                try:
                    self.pool.reserve(sample.key, missing, self._copy_page)
                    if self._states is not None:
                        self._states.hold(sample)
                    if self._windows is not None:
                        self._windows.hold(sample)
                    break
                except PoolExhausted:
                    self._preempt(self.running[-1])

    def _preempt(self, sample: Sample) -> None:
        self.add(sample)
        self._leave(sample)
        self.preemptions += 1

    def _leave(self, sample: Sample) -> None:
        """Takes a sample's pages, if it has any."""
        with suppress(RequestError):
            self.pool.free(sample.key)
        if self._windows is not None:
            self._windows.leave(sample)
        if self._disk is not None and sample.cached:
            self._disk.used(sample.chain)
        sample.cached = sample.stored = sample.offered = 0
        sample.saves, sample.edges, sample.passing = {}, set(), None
        _remove(self.running, sample)

    def _store(self, sample: Sample, count: int) -> None:
        size = self.pool.page_size
        if self.prefixes is not None and count // size > sample.stored // size:
            if self._states is None:
                self.prefixes.store(sample.key, sample.tokens[:count], sample.request.namespace)
            else:
                self._offer_states(sample, self._states.store(sample, count))
            self._offer(sample, count // size)
            sample.stored = count

    def _offer(self, sample: Sample, count: int) -> None:
        """Offers the disk the first `count` pages of a sample, but for those that it was offered and those dropped."""
        if self._disk is not None and sample.chain:
            self._disk.grow(sample.chain, sample.tokens, count)
            pages = self.pool.pages(sample.key)[:count]
            first = max(sample.offered, pages.count(NO_PAGE))
            sample.offered = self._disk.offer(sample.chain, sample.tokens, first, pages[first:])
            if self._windows is not None:
                held = self._windows.pool.pages(sample.key)[first : sample.offered]
                sample.offered = self._disk.offer(sample.chain, sample.tokens, first, held, windows=True)

    def _offer_states(self, sample: Sample, states: Mapping[int, int]) -> None:
        """Offers the disk states by how many of a sample's tokens came before."""
        if self._disk is not None and sample.chain:
            size = self.pool.page_size
            for count, slot in states.items():
                self._disk.grow(sample.chain, sample.tokens, count // size)
                self._disk.offer_state(sample.chain, sample.tokens, count // size, slot)

    def _restore(self, sample: Sample) -> None:
        """Reads pages that follow those that a sample begins with, but for the one of its last token.

        Raises:
            PoolExhausted: there is no slot for the state after them, or no pages for windows.
        """
        tokens, size = sample.tokens, self.pool.page_size
        if self._disk is None or self.prefixes is None or not sample.chain or sample.request.wants_prompt:
            return
        first, count = sample.cached // size, (len(tokens) - 1) // size
        self._disk.grow(sample.chain, tokens, count)
        pages, states = self.pool.pages(sample.key)[first:count], {}
        if self._windows is not None:
            windows = self._windows
            found = size * self._disk.restore_with_windows(
                sample.chain, tokens, first, pages, windows.windows.seen, lambda count: windows.restart(sample, count)
            )
        elif self._states is None:
            found = self._disk.restore(sample.chain, tokens, first, pages) * size
        else:
            (slot,) = self.pool.take_states(sample.key, 1)
            found = self._disk.restore_with_state(sample.chain, tokens, first, pages, slot) * size
            states = {sample.cached + found: slot} if found else {}
        if found:
            sample.cached += found
            self.prefixes.store(sample.key, tokens[: sample.cached], sample.request.namespace, states=states)
            self.tokens_restored += found
            for slot in states.values():
                self.pool.keep_state(sample.key, slot)

    def _admit(self) -> None:
        rows = sum(sample.rows for sample in self.running)
        while self.waiting:
            sample = self.waiting[0]
            rows += sample.rows
            if rows > self._max_running:
                return
            try:
                if self.prefixes is None or sample.request.wants_prompt:
                    self.pool.start(sample.key, len(sample.tokens))
                    if self._windows is not None:
                        self._windows.pool.start(sample.key)
                else:
                    sample.cached = self.prefixes.start(sample.key, sample.tokens, sample.request.namespace)
                found = sample.cached
                self._restore(sample)
                if self._states is not None:
                    self._states.begin(sample)
                if self._windows is not None:
                    self._windows.hold(sample)
            except PoolExhausted:
                self._leave(sample)
                return
            self.tokens_found += found
            if len(sample.tokens) == len(sample.request.prompt):
                sample.request.cached = sample.cached
            sample.stored = sample.cached
            _insert(self.running, sample)
            _remove(self.waiting, sample)


def _place(samples: list[Sample], sample: Sample) -> int:
    return bisect_left(samples, sample.key, key=lambda each: each.key)


def _has(samples: list[Sample], sample: Sample) -> bool:
    at = _place(samples, sample)
    return at < len(samples) and samples[at].key == sample.key


def _insert(samples: list[Sample], sample: Sample) -> None:
    if not _has(samples, sample):
        samples.insert(_place(samples, sample), sample)


def _remove(samples: list[Sample], sample: Sample) -> None:
    if _has(samples, sample):
        del samples[_place(samples, sample)]
