"""The states of recurrent layers in a step: where each sample's is read, and after which tokens it is saved.

A step reads a sample's state once and saves it after some of its tokens, in a slot for each: after its last one; after
each draft, so that the state after the last right one is there; and at the ends of pages where later prompts may begin
as this one did, which become checkpoints of the prefix cache:

- every so many pages, so many that a text that fills all pages takes half of the slots;
- the last two ends of pages of what a sample begins with, for the next turn of a chat and for the same prompt again;
- where the known pages of a prompt end, but no checkpoint was: two texts part there;
- the last end of a page of a text that is being written, in place of the one before.

A slot for the last token is needed, those of checkpoints are taken where there are some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paged_kv.engine.requests import Sample
from paged_kv.pool import PagePool, PrefixCache


@dataclass(frozen=True)
class StepStates:
    """The slots that a step reads and saves states in (`graphs.inputs.StateInputs`), for each request."""

    sources: Sequence[int]
    """Slots; -1 where no token came before."""
    saves: Sequence[Sequence[tuple[int, int]]]
    """After how many of its tokens its state is saved in which slots; at last after all of them."""


class SampleStates:
    """The slots that the samples of a step have. The pool has slots.

    Args:
        pool: The pages and slots.
        prefixes: What knows checkpoints; None where prompts share nothing.
    """

    def __init__(self, pool: PagePool, prefixes: PrefixCache | None) -> None:
        self._pool, self._prefixes = pool, prefixes
        self.every = -(-2 * pool.num_pages // pool.num_states) * pool.page_size
        """Tokens between two checkpoints of a long text."""

    def begin(self, sample: Sample) -> None:
        """Says that a sample has got its first pages and, where they were known, their checkpoint; it gets a slot.

        Raises:
            PoolExhausted: there is none.
        """
        size, tokens = self._pool.page_size, sample.tokens
        sample.edges = {len(tokens) // size * size, (len(tokens) - 1) // size * size}
        if self._prefixes is not None:
            sample.edges.add(self._prefixes.reach(tokens, sample.request.namespace))
        self.hold(sample)

    def hold(self, sample: Sample) -> None:
        """Gives a sample that brings tokens to the next step a slot for its state after them.

        Raises:
            PoolExhausted: there is none.
        """
        self.settle(sample)
        self._pool.take_states(sample.key, 1)

    def hold_drafts(self, sample: Sample, count: int) -> None:
        """Gives it one for its state after each of `count` drafts, too. Raises as `hold`."""
        self._pool.take_states(sample.key, 1 + count, 1 + count)

    def plan(self, sample: Sample, count: int, drafts: int) -> None:
        """Says that a step computes `count` tokens of a sample, of which the last `drafts` are drafted."""
        begin, end = sample.cached, sample.cached + count
        after = range(end - drafts, end + 1)
        edges = [] if self._prefixes is None else self._checkpoints(sample, begin, end - drafts)
        slots = self._pool.take_states(sample.key, len(edges) + len(after), len(after))
        edges = edges[len(edges) + len(after) - len(slots) :]
        sample.saves = dict(zip((*edges, *after), slots, strict=True))

    def of_step(self, samples: Sequence[Sample]) -> StepStates:
        """The slots of a step that was planned."""
        sources = [self._pool.state(sample.key) for sample in samples]
        return StepStates(
            [-1 if source is None else source for source in sources],
            [[(at - sample.cached, slot) for at, slot in sample.saves.items()] for sample in samples],
        )

    def store(self, sample: Sample, count: int) -> dict[int, int]:
        """Makes the first `count` tokens of a sample known, with the states at ends of their pages as checkpoints.

        Returns the slots of those that stay, by the number of tokens.
        """
        assert self._prefixes is not None
        size, tokens, space = self._pool.page_size, sample.tokens[:count], sample.request.namespace
        found = {at: slot for at, slot in sample.saves.items() if at <= count and at % size == 0}
        last = max(found, default=0)
        is_passing = last > max(sample.edges) and last % self.every != 0
        before = sample.passing if last else None
        self._prefixes.store(sample.key, tokens, space, states=found, instead_of=before if before != last else None)
        if last:
            sample.passing = last if is_passing else None
        return {at: slot for at, slot in found.items() if at != sample.passing}

    def settle(self, sample: Sample) -> None:
        """Keeps the state after the tokens that a sample has in the cache, and none that was saved beside it."""
        if sample.saves:
            self._pool.keep_state(sample.key, sample.saves[sample.cached])
            sample.saves = {}

    def _checkpoints(self, sample: Sample, begin: int, end: int) -> list[int]:
        """The ends of pages inside a step at which a sample's state is saved, but for the end of the step."""
        size = self._pool.page_size
        edges = {at for at in sample.edges if begin < at < end}
        edges.update(range(begin // self.every * self.every + self.every, end, self.every))
        if end > max(sample.edges) and begin < end // size * size < end:
            edges.add(end // size * size)
        return sorted(edges)
