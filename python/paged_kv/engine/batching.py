"""Batching: the samples of a step, their tokens and their pages.

First come, first served: a sample waits until those before it have pages. Where running samples need more pages than
there are, the one that came last gives its own back and is computed again later, so the first one always goes on.

A sample that moves from one list to the other is in both meanwhile, so an exception in between loses none. After one
`restart` lets all of them wait, without pages, and they are computed again from their tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from paged_kv.engine.requests import Sample
from paged_kv.engine.resources import Batch, Resource, StepMemory
from paged_kv.engine.speculation import PANEL, Speculation
from paged_kv.errors import PoolExhausted

PROMPT_ROWS = 128
"""Rows of a step that a prompt takes whose log-probabilities are wanted: each gives the logits of the vocabulary."""
LEAST_CHUNK, FIRST_CHUNK = 16, 64
"""Tokens of prompts that a step takes beside samples that decode, however long it takes; and before times are known."""


class Batching:
    """The samples that wait and run, in the order of arrival.

    Args:
        resources: The memory of samples (`resources`).
        speculation: Drafts what comes after the last tokens of samples.
        page_size: Tokens in a page.
        max_step_tokens: Tokens of a step at most.
        max_running: Samples of a step at most; a prompt counts for all samples that will begin with it.
        max_gap: Seconds that a step should take at most in which samples decode.
    """

    def __init__(
        self,
        resources: Sequence[Resource],
        speculation: Speculation,
        *,
        page_size: int,
        max_step_tokens: int,
        max_running: int,
        max_gap: float | None = None,
    ) -> None:
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        self.preemptions = 0
        """The number of times that a sample gave its pages back before its end."""
        self.tokens_found = 0
        """Prompt tokens whose K and V were in the cache already."""
        self._resources = resources
        self._speculation = speculation
        self._page_size = page_size
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
        for sample in samples.values():
            for resource in self._resources:
                resource.leave(sample)
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
        self._hold()
        self._admit()
        room = self._max_step_tokens
        prompts = self._chunk if any(not sample.is_prefilling for sample in self.running) else room
        batch: Batch = []
        for sample in sorted(self.running, key=lambda each: (each.is_prefilling, each.key)):
            most = min(room, prompts) if sample.is_prefilling else room
            if sample.request.wants_prompt:
                most = min(most, PROMPT_ROWS)
            new = sample.tokens[sample.cached : sample.cached + most]
            new = new[: self._reserve(sample, len(new))]
            room -= len(new)
            prompts -= len(new) if sample.is_prefilling else 0
            if new:
                batch.append((sample, new))
        self._draft(batch, room)
        return batch

    def memory(self, batch: Batch) -> StepMemory:
        """The memory of the samples of a batch."""
        memory = StepMemory()
        for resource in self._resources:
            resource.bring(batch, memory)
        return memory

    def timed(self, batch: Batch, seconds: float) -> None:
        """Says how long a step took: the next one with prompts beside samples that decode takes about `max_gap`."""
        prompts = sum(len(new) for sample, new in batch if sample.is_prefilling)
        if self._max_gap is None or prompts == 0 or all(sample.is_prefilling for sample, _ in batch):
            return
        if seconds > self._max_gap or prompts >= self._chunk:
            chunk = prompts * min(max(self._max_gap / seconds, 0.25), 2)
            self._chunk = min(max(int(chunk), LEAST_CHUNK), self._max_step_tokens)

    def computed(self, sample: Sample, cached: int) -> None:
        """Says that K and V of the sample's first `cached` tokens are in its pages."""
        sample.cached = cached
        self._store(sample)
        for resource in self._resources:
            resource.computed(sample)

    def fork(self, sample: Sample) -> list[Sample]:
        """Lets the request's other samples run, which begin with all that `sample` has in the cache."""
        request = sample.request
        sample.cached = len(sample.tokens)
        self._store(sample)  # once, not for each child
        for resource in self._resources:
            resource.settle(sample)
        children = [Sample(request, index, list(request.prompt)) for index in range(1, request.samples)]
        for child in children:
            _insert(self.running, child)
            for resource in self._resources:
                resource.fork(sample, child)
        return children

    def end(self, sample: Sample) -> None:
        """Forgets a sample, wherever it is."""
        for resource in self._resources:
            resource.end(sample)
        self._leave(sample)
        _remove(self.waiting, sample)

    def _hold(self) -> None:
        """Gives each running sample what it needs for the next step; the last ones wait again where that runs out.

        What was taken for rejected drafts is taken back first.
        """
        for sample in self.running:
            for resource in self._resources:
                resource.settle(sample)
        for sample in list(self.running):
            while sample in self.running:
                try:
                    for resource in self._resources:
                        resource.hold(sample)
                    break
                except PoolExhausted:
                    self._preempt(self.running[-1])

    def _reserve(self, sample: Sample, count: int) -> int:
        """Gives a sample memory for its next `count` tokens; returns for how many there is some."""
        for resource in self._resources:
            count = resource.reserve(sample, count)
        return count

    def _draft(self, batch: Batch, room: int) -> None:
        """Adds drafted tokens to samples that decode: at most `room`, the tokens that the step may still take,
        and as many as free pages hold.
        """
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
        for at, drafts in zip(places, self._speculation.propose(samples, most, rows, self.running), strict=True):
            sample, new = batch[at]
            drafts = drafts[:room]
            try:
                if drafts:
                    drafts = drafts[: self._reserve(sample, 1 + len(drafts)) - 1]
            except PoolExhausted:  # no page is taken from a sample for a draft
                for resource in self._resources:
                    resource.settle(sample)
                continue
            batch[at] = sample, new + drafts
            room -= len(drafts)

    def _preempt(self, sample: Sample) -> None:
        self.add(sample)
        self._leave(sample)
        self.preemptions += 1

    def _leave(self, sample: Sample) -> None:
        """Takes what a sample has, if it has anything."""
        for resource in self._resources:
            resource.leave(sample)
        sample.cached = sample.stored = 0
        _remove(self.running, sample)

    def _store(self, sample: Sample) -> None:
        """Lets later prompts find the pages of a sample, where another one is full."""
        if sample.cached // self._page_size > sample.stored // self._page_size:
            for resource in self._resources:
                resource.store(sample)
            sample.stored = sample.cached

    def _admit(self) -> None:
        rows = sum(sample.rows for sample in self.running)
        while self.waiting:
            sample = self.waiting[0]
            rows += sample.rows
            if rows > self._max_running:
                return
            try:
                for resource in self._resources:
                    resource.begin(sample)
                for resource in self._resources:
                    resource.hold(sample)
            except PoolExhausted:
                self._leave(sample)
                return
            self.tokens_found += sample.stored  # the others of those cached were restored
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
