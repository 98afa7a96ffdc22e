"""Drafts of the tokens that come next: one step of the model judges several of them.

A draft is appended like any token, and the step gives the logits after it too. Each token is then chosen as it always
is: by the logits of its place, by what its request asks there (structure, penalties) and by the random number of its
position. Where it is the token that was drafted, the logits after it are there already. So a draft decides how soon a
token comes, never which one: texts are those without drafts, and drawn tokens have the model's distribution. To draw a
token and compare it with the draft is rejection sampling of a draft that was certain: it is taken as often as the model
would have drawn it.

Drafts come from the text itself (`look_up`), from a smaller model (`DraftModel`), or from a layer that takes the
model's own hidden states (`own_draft.OwnDraft`). How many are made follows from what
steps cost and from how often drafts were right (`Speculation`).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import printable
from paged_kv.engine.interfaces import EngineModel
from paged_kv.engine.requests import Sample
from paged_kv.engine.sampling import Choice, History, choose
from paged_kv.errors import PoolExhausted, RequestError
from paged_kv.pool import PagePool, PrefixCache

logger = logging.getLogger("paged_kv.engine")

PANEL = 8
"""Rows that linear layers and attention take at a time: a step of 9 takes 1.75 times one of 8 (docs/engine.md)."""
SHORTEST_MATCH, LONGEST_MATCH = 2, 16
"""Tokens at the end of a text that must have come before; a longer match decides for no other place."""
ROW_COST = 0.06
"""The cost of another row, in steps, as long as little is known."""
DRAFT_COST = 0.1
"""The cost of a draft's step, in steps."""
_FORGET = 0.99
"""The weight of a step after the next one."""


def look_up(tokens: npt.NDArray[np.int64], most: int) -> list[int]:
    """Up to `most` tokens that followed the last ones of a text `[T]` where as many of them as can be came before.

    Of several such places the last one counts. Where it is near the end, the text in between is repeated.
    """
    places = np.flatnonzero(tokens[:-1] == tokens[-1])
    matched = 1
    while places.size and matched < LONGEST_MATCH:
        longer = places[places >= matched]
        longer = longer[tokens[longer - matched] == tokens[-1 - matched]]
        if not longer.size:
            break
        places, matched = longer, matched + 1
    if not places.size or matched < SHORTEST_MATCH:
        return []
    follows = tokens[places[-1] + 1 :]
    return [int(follows[at % follows.size]) for at in range(most)]


@dataclass
class _Text:
    """A sample's tokens in a draft's cache."""

    tokens: list[int]
    """The last ones may be drafts that were wrong."""
    stored: int
    """The number of them that its prefix cache knows."""


class Draft(ABC):
    """Drafts of logits.

    A draft is drawn with the random number that will draw the token itself: where both models expect about the same,
    they draw the same. Structures do not count in a draft.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        """The seconds that drafting a token for each of some samples took lately."""

    @abstractmethod
    def propose(self, samples: Sequence[Sample], counts: Sequence[int], running: Sequence[Sample]) -> list[list[int]]:
        """Up to `counts[i]` drafts for each sample. Samples that are not among `running` lose what it has of them."""

    @abstractmethod
    def _logits(self, texts: Mapping[tuple[int, int], Sequence[int]]) -> tuple[npt.NDArray[np.float32], bool]:
        """The logits after the texts of some samples, `[n, vocab]`; whether it computed one token of each alone."""

    def _drawn(
        self, samples: Sequence[Sample], counts: Sequence[int], histories: dict[int, History], vocab_size: int
    ) -> list[list[int]]:
        """Up to `counts[i]` drafts for each sample that has one of the histories, which grow by them; no token from
        `vocab_size` on.
        """
        drafts: list[list[int]] = [[] for _ in samples]
        for turn in range(max(counts, default=0)):
            histories = {at: history for at, history in histories.items() if turn < counts[at]}
            if not histories:
                break
            began = perf_counter()
            logits, is_one_each = self._logits({samples[at].key: history.tokens for at, history in histories.items()})
            choices = choose(logits, range(len(histories)), list(histories.values()))
            if is_one_each:
                self.seconds = _mean(self.seconds, perf_counter() - began)
            for at, choice in zip(list(histories), choices, strict=True):
                if isinstance(choice, Choice) and choice.token < vocab_size:
                    drafts[at].append(choice.token)
                    histories[at].tokens.append(choice.token)
                else:  # or its logits are no numbers
                    del histories[at]
        return drafts


class DraftModel(Draft):
    """Drafts of a smaller model with the same tokens.

    It keeps the texts of samples in pages of its own, of which it alone decides; prompts that begin alike share them.

    Args:
        model: Used by nothing else.
        vocab_size: The vocab_size of the model that judges; no larger token is drafted.
        max_step_tokens: Tokens that it computes in a step of the engine at most, but for drafts after the first.
        share_prefixes: Whether prompts that begin alike share pages.
    """

    def __init__(self, model: EngineModel, vocab_size: int, max_step_tokens: int, share_prefixes: bool) -> None:
        super().__init__()
        self.model, self._vocab_size, self._most, self._shares = model, vocab_size, max_step_tokens, share_prefixes
        self._pool = PagePool(model.num_pages, model.page_size)
        self._prefixes = PrefixCache(self._pool)
        self._texts: dict[tuple[int, int], _Text] = {}

    def propose(self, samples: Sequence[Sample], counts: Sequence[int], running: Sequence[Sample]) -> list[list[int]]:
        for key in self._texts.keys() - {sample.key for sample in running}:
            self._leave(key)
        self._room = self._most
        histories = {
            at: sample.history.ahead(self.model.config.vocab_size)
            for at, (sample, count) in enumerate(zip(samples, counts, strict=True))
            if count and self._begin(sample, count)
        }
        return self._drawn(samples, counts, histories, self._vocab_size)

    def _begin(self, sample: Sample, count: int) -> bool:
        """Gives a sample slots for its tokens and all drafts but the last, and computes all but its last tokens.

        Returns:
            Whether it can draft: there were enough slots, and tokens left to this step. A prompt goes on in the next.
        """
        key, tokens = sample.key, sample.tokens
        space = sample.request.namespace if self._shares else key
        length, config = len(tokens) + count - 1, self.model.config
        try:
            if key not in self._texts:
                self._leave(key)  # where an exception came right after its start
                cached = self._prefixes.start(key, tokens, space)
                self._texts[key] = _Text(tokens[:cached], cached)
            self._pool.reserve(key, max(0, length - self._pool.length(key)))
        except PoolExhausted:
            return False
        text = self._texts[key]
        right = max(0, len(text.tokens) - PANEL)
        while right < min(len(text.tokens), len(tokens) - 1) and text.tokens[right] == tokens[right]:
            right += 1
        del text.tokens[right:]
        if right // self._pool.page_size > text.stored // self._pool.page_size:
            self._prefixes.store(key, text.tokens, space)
            text.stored = right
        # A larger vocabulary may have tokens that the draft does not know.
        if length > config.max_position_embeddings or max(tokens[right:]) >= config.vocab_size:
            return False
        missing = len(tokens) - len(text.tokens)
        if missing > min(PANEL, self._room):  # a prompt
            if count := min(self._room, missing - 1):
                self._logits({key: tokens[: len(text.tokens) + count]})
            self._room -= count
            missing -= count
        if missing > min(PANEL, self._room):
            return False
        self._room -= missing
        return True

    def _leave(self, key: tuple[int, int]) -> None:
        with suppress(RequestError):
            self._pool.free(key)
        self._texts.pop(key, None)

    def _logits(self, texts: Mapping[tuple[int, int], Sequence[int]]) -> tuple[npt.NDArray[np.float32], bool]:
        cached = [self._texts[key].tokens for key in texts]
        new = [list(tokens[len(each) :]) for each, tokens in zip(cached, texts.values(), strict=True)]
        logits = self.model.step(new, list(map(len, cached)), [self._pool.pages(key) for key in texts])
        for each, more in zip(cached, new, strict=True):
            each.extend(more)
        return logits, all(len(more) == 1 for more in new)


class Speculation:
    """The tokens that are drafted for each sample of a step.

    The seconds of a step are taken for a line over its rows, which is fitted to the steps so far, the later ones
    counting more. A draft is made where it is expected to give more tokens a second: draft j of a sample is right with
    its share of right drafts to the power of j. No draft begins another panel of rows. A sample whose drafts are not
    worth their rows is tried again later, each time after twice as many steps.

    Args:
        draft: What drafts; the text itself where None.
    """

    def __init__(self, draft: Draft | None = None) -> None:
        self._draft = draft
        self.speedup = 1.0
        """Tokens a second of the last step over those without drafts, as the costs and shares so far predict."""
        self._share = 0.5  # of right drafts, in all samples
        self._sums = np.zeros(5, np.float64)  # over steps: 1, rows, rows^2, seconds, rows * seconds

    def propose(
        self, samples: Sequence[Sample], most: Sequence[int], rows: int, running: Sequence[Sample], /
    ) -> list[list[int]]:
        """Drafts for samples that bring their last token to a step.

        Args:
            samples: At least one.
            most: Drafts of each at most.
            rows: Tokens of the step without drafts.
            running: All samples that have pages.
        """
        if self._draft is not None:
            counts = self._counts(samples, most, rows)
            try:
                return self._draft.propose(samples, counts, running)
            except Exception as error:  # it may end no request; as drafts that were wrong, it is tried less and less
                logger.warning(
                    "the draft model failed, nothing is drafted: %s: %s", type(error).__name__, printable(error)
                )
                for sample, count in zip(samples, counts, strict=True):
                    if count:
                        self.learn(sample, 0, count)
                return [[] for _ in samples]
        proposals = [look_up(sample.history.array(), count) for sample, count in zip(samples, most, strict=True)]
        counts = self._counts(samples, list(map(len, proposals)), rows)
        return [drafts[:count] for drafts, count in zip(proposals, counts, strict=True)]

    def learn(self, sample: Sample, right: int, drafted: int) -> None:
        """Says how many of a sample's drafts were right, up to the first that was wrong."""
        tried = min(right + 1, drafted)
        sample.luck.add(tried, right)
        self._share += (right / tried - self._share) / 64

    def timed(self, rows: int, seconds: float, /) -> None:
        """Says what a step without prompts took."""
        if self._sums[0]:
            seconds = min(seconds, 3 * self._sums[3] / self._sums[0])  # other programs ran
        self._sums = _FORGET * self._sums + [1, rows, rows * rows, seconds, rows * seconds]

    def _counts(self, samples: Sequence[Sample], most: Sequence[int], rows: int) -> list[int]:
        """Return how many drafts each sample makes.

        A turn of the draft, which gives a token to each of some samples, takes its time once, however many they are.
        """
        base, row = self._line()
        step, free = base + row * rows, -rows % PANEL
        turn = 0.0 if self._draft is None else self._draft.seconds or DRAFT_COST * step
        shares = [sample.luck.share(self._share) for sample in samples]
        places = [(share**at, at, i) for i, share in enumerate(shares) for at in range(1, min(most[i], free) + 1)]
        places.sort(key=lambda place: -place[0])
        counts, speed = [0] * len(samples), 0.0
        for turns in range(free + 1):
            plan = [0] * len(samples)
            tokens, seconds, rows_left = float(len(samples)), step + turns * turn, free
            for gain, at, i in places:
                if not rows_left or gain * seconds <= row * tokens:
                    break
                if at <= turns:
                    plan[i] = at
                    tokens, seconds, rows_left = tokens + gain, seconds + row, rows_left - 1
            if tokens / seconds > speed:
                counts, speed = plan, tokens / seconds
        rows_left, self.speedup = free - sum(counts), speed * step / len(samples)
        for i, sample in enumerate(samples):
            if rows_left and not counts[i] and most[i] and sample.luck.is_due():
                counts[i], rows_left = 1, rows_left - 1
        return counts

    def _line(self) -> tuple[float, float]:
        """The seconds of a step without rows, and those of each row."""
        count, rows, squares, seconds, products = self._sums
        if not count:
            return 1.0, ROW_COST
        rows, seconds = rows / count, seconds / count
        variance, covariance = squares / count - rows**2, products / count - rows * seconds
        # As if a step of one row more than the mean had been seen.
        row = (count * covariance + ROW_COST * seconds) / (count * variance + 1)
        row = min(max(row, 0.005 * seconds), seconds / rows)
        return seconds - row * rows, row


class NoSpeculation(Speculation):
    """Drafts nothing."""

    def propose(self, samples: Sequence[Sample], *_: object) -> list[list[int]]:
        """No draft of each."""
        return [[] for _ in samples]

    def timed(self, *_: float) -> None:
        """Learns nothing."""


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + (min(new, 3 * old) - old) / 8
