"""The memory that a sample has, one class for each kind, and the verbs by which the batching walks them.

The batching holds a list of `Resource`: the pages first, then what the model and the engine's options ask for (states
of recurrent layers, pages of windows, files on disk). It calls a verb of each in this order and knows no kind. A verb
does nothing unless a class overrides it; one that needs memory raises `PoolExhausted`, and the batching then lets a
sample wait. A new kind is a class here or in its own module, and a line in `engine.resources_of`.

| verb | when |
|---|---|
| `begin` | a sample that waited starts to run; later resources see what earlier ones set in it |
| `settle` | before a step, and before samples fork: what a step took for rejected drafts goes back |
| `hold` | before a step: what the sample needs at least for its next token |
| `reserve` | a step is planned: slots for its tokens, then for drafts |
| `bring` | the step is planned: what the model is to be told of it |
| `computed` | after a step |
| `store` | another page of the sample is full: later prompts may find it |
| `fork` | another sample begins with all that this one has |
| `end` | the sample has ended; `leave` follows |
| `leave` | the sample gives all back, as it also does when it is preempted or after an exception; it may have nothing |
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from paged_kv.engine.interfaces import StepStates
from paged_kv.engine.requests import Sample
from paged_kv.errors import RequestError
from paged_kv.pool import PagePool, PrefixCache

Batch = list[tuple[Sample, list[int]]]
"""The samples of one step, each with its new tokens; those past the sample's own tokens are drafts."""


@dataclass
class StepMemory:
    """The memory of a step's samples, as `EngineModel.step` takes it."""

    pages: list[tuple[int, ...]] = field(default_factory=list)
    states: StepStates | None = None
    window_pages: Sequence[Sequence[int]] | None = None


class Resource:
    """One kind of memory that samples have. The module's docstring says when each verb is called."""

    tokens_restored: int = 0
    """Tokens whose K and V it has read from the disk."""

    def begin(self, sample: Sample) -> None:
        """Gives a sample what it begins with, and sets `sample.cached`. Raises `PoolExhausted`."""

    def settle(self, sample: Sample) -> None:
        """Takes back what a step took for drafts that were rejected."""

    def hold(self, sample: Sample) -> None:
        """Gives a sample what it needs at least for the next step. Raises `PoolExhausted`."""

    def reserve(self, sample: Sample, count: int) -> int:  # noqa: ARG002
        """Gives a sample slots for `count` tokens after those in the cache, or as many as there are; returns for how
        many it has slots. Raises `PoolExhausted` where drafts, the tokens past its own, do not fit.
        """
        return count

    def bring(self, batch: Batch, memory: StepMemory) -> None:
        """Adds what the samples of a planned step have."""

    def computed(self, sample: Sample) -> None:
        """K and V of the first `sample.cached` tokens are in its pages."""

    def store(self, sample: Sample) -> None:
        """Lets later prompts find the full pages of the first `sample.cached` tokens."""

    def fork(self, sample: Sample, child: Sample) -> None:
        """Gives `child` all that `sample` has."""

    def end(self, sample: Sample) -> None:
        """Uses what a sample that has ended still has."""

    def leave(self, sample: Sample) -> None:
        """Takes all back, if the sample has any."""


class RequestPages(Resource):
    """Pages that prompts do not share.

    Args:
        pool: The pages.
        copy_page: Copies a page's K and V, of all layers.
        window_left: The tokens before its own that a token sees in every layer; None: all of them in some layer.
    """

    def __init__(self, pool: PagePool, copy_page: Callable[[int, int], None], window_left: int | None = None) -> None:
        self.pool, self._copy_page = pool, copy_page
        self._window_left = sys.maxsize if window_left is None else window_left

    def namespace(self, name: Hashable) -> Hashable:  # noqa: ARG002
        """Return what stands for a namespace in later look-ups: they call no `__hash__` of the user's, which may
        raise.
        """
        return None

    def begin(self, sample: Sample) -> None:
        self.pool.start(sample.key, len(sample.tokens))

    def settle(self, sample: Sample) -> None:
        if (rejected := self.pool.length(sample.key) - len(sample.tokens)) > 0:
            self.pool.shrink(sample.key, rejected)

    def hold(self, sample: Sample) -> None:
        missing = len(sample.tokens) - self.pool.length(sample.key)
        self.pool.reserve(sample.key, missing, self._copy_page)

    def reserve(self, sample: Sample, count: int) -> int:
        if (drafts := sample.cached + count - len(sample.tokens)) > 0:
            self.pool.reserve(sample.key, drafts, self._copy_page)
        return count

    def bring(self, batch: Batch, memory: StepMemory) -> None:
        memory.pages = [self.pool.pages(sample.key) for sample, _ in batch]

    def computed(self, sample: Sample) -> None:
        if sample.cached > self._window_left:
            self.pool.drop(sample.key, sample.cached - self._window_left)

    def fork(self, sample: Sample, child: Sample) -> None:
        self.pool.fork(sample.key, child.key)
        child.cached, child.stored = len(child.tokens), sample.stored

    def leave(self, sample: Sample) -> None:
        with suppress(RequestError):
            self.pool.free(sample.key)


class SharedPages(RequestPages):
    """Pages that prompts share which begin alike. Arguments as of `RequestPages`, and the prefix cache of its pool."""

    def __init__(
        self, prefixes: PrefixCache, copy_page: Callable[[int, int], None], window_left: int | None = None
    ) -> None:
        super().__init__(prefixes.pool, copy_page, window_left)
        self.prefixes = prefixes

    def namespace(self, name: Hashable) -> Hashable:
        return self.prefixes.namespace(name)

    def begin(self, sample: Sample) -> None:
        if sample.request.wants_prompt:  # all of it is computed
            super().begin(sample)
        else:
            sample.cached = sample.stored = self.prefixes.start(sample.key, sample.tokens, sample.request.namespace)

    def store(self, sample: Sample) -> None:
        self.prefixes.store(sample.key, sample.tokens[: sample.cached], sample.request.namespace)


class HybridPages(SharedPages):
    """Shared pages of a hybrid model: `states.SharedStates` stores them with the states at their ends."""

    def store(self, sample: Sample) -> None:
        """Left to `SharedStates`."""
