"""Which samples run in a step, with how many tokens, and on which pages.

First come, first served: a sample waits until those before it have pages. Where running samples need more pages than
there are, the one that came last gives its own back and is computed again later, so the first one always goes on.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from paged_kv.engine.requests import Sample
from paged_kv.errors import PoolExhausted
from paged_kv.pool import PagePool, PrefixCache

Plan = list[tuple[Sample, list[int]]]
"""The samples of one step, each with the tokens that it brings."""


class Batching:
    """The samples that wait and run, in the order of arrival.

    Args:
        pool: The pages.
        copy_page: Copies a page's K and V, of all layers.
        max_step_tokens: Tokens of a step at most.
        max_running: Samples of a step at most.
        share_prefixes: Whether prompts that begin alike share pages.
    """

    def __init__(
        self,
        pool: PagePool,
        copy_page: Callable[[int, int], None],
        *,
        max_step_tokens: int,
        max_running: int,
        share_prefixes: bool,
    ) -> None:
        self.pool = pool
        self.prefixes = PrefixCache(pool) if share_prefixes else None
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        self.preemptions = 0
        """How often a sample gave its pages back before its end."""
        self.tokens_found = 0
        """Prompt tokens whose K and V were in the cache already."""
        self._copy_page = copy_page
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running

    def add(self, sample: Sample) -> None:
        """Puts a sample among those that wait."""
        insort(self.waiting, sample, key=lambda each: each.key)

    def plan(self) -> Plan:
        """The next step: samples that decode first, one token each, then prompts in the order of arrival."""
        self._give_slots()
        self._admit()
        room = self._max_step_tokens
        plan: Plan = []
        for sample in sorted(self.running, key=lambda each: (each.is_prefilling, each.key)):
            new = sample.tokens[sample.cached : sample.cached + room]
            room -= len(new)
            if new:
                plan.append((sample, new))
        return plan

    def computed(self, sample: Sample, count: int) -> None:
        """Says that K and V of the sample's next `count` tokens are in its pages."""
        sample.cached += count
        size = self.pool.page_size
        if self.prefixes is not None and sample.cached // size > sample.stored // size:
            self.prefixes.store(sample.key, sample.tokens[: sample.cached], sample.request.namespace)
            sample.stored = sample.cached

    def fork(self, sample: Sample, child: Sample) -> None:
        """Starts another sample with all that `sample` has in the cache."""
        self.pool.fork(sample.key, child.key)
        child.cached, child.stored = sample.cached, sample.stored
        insort(self.running, child, key=lambda each: each.key)

    def drop(self, sample: Sample, num_tokens: int) -> None:
        """Gives back the pages of the first `num_tokens` tokens, which no layer sees any more."""
        self.pool.drop(sample.key, num_tokens)

    def end(self, sample: Sample) -> None:
        """Forgets a sample, wherever it is."""
        if sample in self.running:
            self.running.remove(sample)
            self.pool.free(sample.key)
        else:
            self.waiting.remove(sample)

    def _give_slots(self) -> None:
        """Gives each running sample a slot for each of its tokens; the last ones wait again where pages run out."""
        for sample in list(self.running):
            while sample in self.running:
                missing = len(sample.tokens) - self.pool.length(sample.key)
                try:
                    self.pool.reserve(sample.key, missing, self._copy_page)
                    break
                except PoolExhausted:
                    self._preempt(self.running[-1])

    def _preempt(self, sample: Sample) -> None:
        self.running.remove(sample)
        self.pool.free(sample.key)
        sample.cached = sample.stored = 0
        self.preemptions += 1
        self.add(sample)

    def _admit(self) -> None:
        while self.waiting:
            sample = self.waiting[0]
            if len(self.running) + (sample.request.samples if sample.forks else 1) > self._max_running:
                return
            try:
                if self.prefixes is None:
                    self.pool.start(sample.key, len(sample.tokens))
                else:
                    sample.cached = self.prefixes.start(sample.key, sample.tokens, sample.request.namespace)
            except PoolExhausted:
                return
            sample.stored = sample.cached
            self.tokens_found += sample.cached
            del self.waiting[0]
            insort(self.running, sample, key=lambda each: each.key)
