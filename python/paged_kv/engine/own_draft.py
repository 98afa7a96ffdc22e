"""Drafts of a model's own draft layer: what it needs to know of each sample between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paged_kv.engine.draft_layer import DraftLayer, Floats
from paged_kv.engine.requests import Sample
from paged_kv.engine.resources import Batch, Resource
from paged_kv.engine.sampling import History
from paged_kv.engine.speculation import PANEL, Draft
from paged_kv.errors import PoolExhausted
from paged_kv.pool import PagePool


class OwnDraft(Draft, Resource):
    """Drafts of the layer that takes its model's hidden states.

    Its K and V are of the model's pages and slots: after each step the layer appends those of the same tokens. So pages
    are shared, preempted and kept on disk with them. To draft it takes the hidden state of a sample's last token in the
    cache, which is kept of each sample that runs, and of each full page.

    Args:
        layer: The model's.
        pool: The model's pages. Slots for drafts are taken from it while it drafts.
        copy_page: As of `resources.RequestPages`.
        vocab_size: The model's.
    """

    def __init__(self, layer: DraftLayer, pool: PagePool, copy_page: Any, vocab_size: int) -> None:
        super().__init__()
        self._layer, self._pool, self._copy_page, self._vocab_size = layer, pool, copy_page, vocab_size
        self._states: dict[tuple[int, int], tuple[int, Floats]] = {}
        """Of each sample the last hidden states, and the position of the first of them."""
        self._drafting: dict[tuple[int, int], tuple[int, Floats]] = {}
        """Of each sample that drafts the tokens in its cache, drafts included, and the hidden state of the last."""

    def stepped(self, batch: Batch, pages: Sequence[Sequence[int]], hidden: Floats) -> None:
        """Appends the layer's K and V of the tokens of a step that was computed.

        Args:
            batch: The step's; samples have not noted yet that its tokens are in the cache.
            pages: Those of each sample.
            hidden: The hidden states `[T, hidden]` of all tokens.
        """
        before, first = np.empty_like(hidden), 0
        size = self._pool.page_size
        for (sample, new), mine in zip(batch, pages, strict=True):
            rows = hidden[first : first + len(new)]
            last = self._before(sample)
            before[first] = rows[0] if last is None else last
            before[first + 1 : first + len(new)] = rows[:-1]
            for end in range(-(-(sample.cached + 1) // size) * size - 1, sample.cached + len(new), size):
                self._layer.ends[mine[end // size]] = rows[end - sample.cached]
            first += len(new)
        first = 0
        for sample, new in batch:  # after all have read theirs
            count = min(len(new), PANEL)
            first += len(new)
            self._states[sample.key] = sample.cached + len(new) - count, hidden[first - count : first].copy()
        self._layer.append([new for _, new in batch], [sample.cached for sample, _ in batch], pages, before)

    def propose(self, samples: Sequence[Sample], counts: Sequence[int], running: Sequence[Sample]) -> list[list[int]]:  # noqa: ARG002
        """Up to `counts[i]` drafts for each sample, whose tokens but the last are in the cache."""
        histories: dict[int, History] = {}
        taken: dict[tuple[int, int], int] = {}
        self._drafting = {}
        try:
            for at, (sample, count) in enumerate(zip(samples, counts, strict=True)):
                state = self._before(sample)
                if count and state is not None and self._reserve(sample.key, count - 1):
                    taken[sample.key] = count - 1
                    self._drafting[sample.key] = sample.cached, state
                    histories[at] = sample.history.ahead(self._vocab_size)
            return self._drawn(samples, counts, histories, self._vocab_size)
        finally:
            for key, slots in taken.items():
                if slots:
                    self._pool.shrink(key, slots)

    def fork(self, sample: Sample, child: Sample) -> None:
        if sample.key in self._states:
            self._states[child.key] = self._states[sample.key]

    def leave(self, sample: Sample) -> None:
        self._states.pop(sample.key, None)

    def _before(self, sample: Sample) -> Floats | None:
        """The hidden state of the last token of a sample in the cache; None where it has none there."""
        last = sample.cached - 1
        first, rows = self._states.get(sample.key, (0, ()))
        if first <= last < first + len(rows):
            return rows[last - first]
        if last < 0 or sample.cached % self._pool.page_size:
            return None
        state: Floats = self._layer.ends[self._pool.pages(sample.key)[last // self._pool.page_size]]
        return state

    def _reserve(self, key: tuple[int, int], slots: int) -> bool:
        """Takes slots for drafts, all or none."""
        try:
            self._pool.reserve(key, slots, self._copy_page)
        except PoolExhausted:
            return False
        return True

    def _logits(self, texts: Mapping[tuple[int, int], Sequence[int]]) -> tuple[Floats, bool]:
        lengths, states = zip(*(self._drafting[key] for key in texts), strict=True)
        tokens = [text[-1] for text in texts.values()]
        logits, hidden = self._layer.step(tokens, lengths, [self._pool.pages(key) for key in texts], np.stack(states))
        for key, length, state in zip(texts, lengths, hidden, strict=True):
            self._drafting[key] = length + 1, state
        return logits, True
