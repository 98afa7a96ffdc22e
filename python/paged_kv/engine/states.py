"""The states of recurrent layers in a step: where each sample's is read, and after which tokens it is saved.

A step reads a sample's state once and saves it after some of its tokens, in a slot for each: after its last one; after
each draft, so that the state after the last right one is there; and at the ends of pages where later prompts may begin
as this one did, which become checkpoints of the prefix cache:

- every so many pages, so many that a text that fills all pages takes half of the slots;
- the last two ends of pages of what a sample begins with, for the next turn of a chat and for the same prompt again;
- where the cached pages of a prompt end, but no checkpoint was: two texts part there;
- the last end of a page of a text that is being written, in place of the one before.

A slot for the last token is needed, those of checkpoints are taken where there are some.
"""

from __future__ import annotations

from paged_kv.engine.interfaces import StepStates
from paged_kv.engine.requests import Sample
from paged_kv.engine.resources import Batch, Resource, StepMemory
from paged_kv.pool import PagePool, PrefixCache


class RequestStates(Resource):
    """The slots of samples whose prompts share nothing. `pool` has pages and slots."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool

    def settle(self, sample: Sample) -> None:
        """Keeps the state after the tokens that a sample has in the cache; slots of other states go back."""
        if sample.saves:
            self._pool.keep_state(sample.key, sample.saves[sample.cached])
            sample.saves = {}

    def hold(self, sample: Sample) -> None:
        self._pool.take_states(sample.key, 1)

    def reserve(self, sample: Sample, count: int) -> int:
        """Takes a slot after each draft too, as one step saves all of them."""
        if (drafts := sample.cached + count - len(sample.tokens)) > 0:
            self._pool.take_states(sample.key, 1 + drafts, 1 + drafts)
        return count

    def bring(self, batch: Batch, memory: StepMemory) -> None:
        for sample, new in batch:
            self._plan(sample, sample.cached + len(new))
        sources = [self._pool.state(sample.key) for sample, _ in batch]
        memory.states = StepStates(
            [-1 if source is None else source for source in sources],
            [[(at - sample.cached, slot) for at, slot in sample.saves.items()] for sample, _ in batch],
        )

    def leave(self, sample: Sample) -> None:
        sample.saves = {}

    def _plan(self, sample: Sample, end: int) -> None:
        """Takes the slots of a step that computes the tokens of a sample up to `end`."""
        last = min(end, len(sample.tokens))  # what comes after it is drafted
        after = range(last, end + 1)
        edges = self._checkpoints(sample, sample.cached, last)
        slots = self._pool.take_states(sample.key, len(edges) + len(after), len(after))
        edges = edges[len(edges) + len(after) - len(slots) :]
        sample.saves = dict(zip((*edges, *after), slots, strict=True))

    def _checkpoints(self, sample: Sample, begin: int, end: int) -> list[int]:  # noqa: ARG002
        """The ends of pages inside a step at which a sample's state is saved, but for the end of the step."""
        return []


class SharedStates(RequestStates):
    """The slots of samples whose prompts share pages up to checkpoints of the prefix cache."""

    def __init__(self, prefixes: PrefixCache) -> None:
        super().__init__(prefixes.pool)
        self._prefixes = prefixes
        self.every = -(-2 * prefixes.pool.num_pages // prefixes.pool.num_states) * prefixes.pool.page_size
        """Tokens between two checkpoints of a long text."""

    def begin(self, sample: Sample) -> None:
        """Chooses the ends of pages of what a sample begins with that get a checkpoint."""
        size, tokens = self._pool.page_size, sample.tokens
        reach = self._prefixes.reach(tokens, sample.request.namespace)
        sample.edges = {len(tokens) // size * size, (len(tokens) - 1) // size * size, reach}

    def store(self, sample: Sample) -> None:
        """Stores pages, with the states at their ends as checkpoints; one in a text that is written replaces the one
        before.
        """
        tokens, space = sample.tokens[: sample.cached], sample.request.namespace
        states = saved_at_pages(sample, self._pool.page_size)
        last = max(states, default=0)
        is_passing = last > max(sample.edges) and last % self.every != 0
        before = sample.passing if last else None
        self._prefixes.store(sample.key, tokens, space, states=states, instead_of=before if before != last else None)
        if last:
            sample.passing = last if is_passing else None

    def fork(self, sample: Sample, child: Sample) -> None:
        child.edges = set(sample.edges)

    def leave(self, sample: Sample) -> None:
        sample.saves, sample.edges, sample.passing = {}, set(), None

    def _checkpoints(self, sample: Sample, begin: int, end: int) -> list[int]:
        size = self._pool.page_size
        edges = {at for at in sample.edges if begin < at < end}
        edges.update(range(begin // self.every * self.every + self.every, end, self.every))
        if end > max(sample.edges) and begin < end // size * size < end:
            edges.add(end // size * size)
        return sorted(edges)


def saved_at_pages(sample: Sample, page_size: int) -> dict[int, int]:
    """The slots of states that the last step saved at ends of cached pages, by the number of tokens before them."""
    return {at: slot for at, slot in sample.saves.items() if at <= sample.cached and at % page_size == 0}
