"""A model that needs no compiler: its next token depends on every token that it finds in the pages of a request."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paged_kv.checkpoint.config import load_config
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.interfaces import StepStates
from paged_kv.engine.sampling import History, Sampling, choose
from paged_kv.graphs.models.config import DecoderConfig, with_separate_windows
from paged_kv.graphs.rope import Rope
from paged_kv.options import NO_PAGE
from paged_kv.structured_output import CompiledStructure

VOCAB = 23
EMPTY = -1  # a slot that nothing was written to
FIRST_STATE = 7  # before the first token


def fake_config(max_positions: int = 4096, window: int = -1) -> DecoderConfig:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"), 8)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 1)
    config = DecoderConfig(
        **sizes,
        **heads,
        vocab_size=VOCAB,
        max_position_embeddings=max_positions,
        norm_eps=1e-5,
        rope=Rope(8),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_ids=(),
        dtype=None,
    )
    return config if window < 0 else replace(config, windows=(window,) * 8)


def logits_after(history: Sequence[int]) -> np.ndarray:
    """Logits `[VOCAB]` that depend on every token and its position."""
    return np.random.default_rng(state_after(FIRST_STATE, history)).standard_normal(VOCAB).astype(np.float32)


def state_after(state: int, tokens: Sequence[int]) -> int:
    """Return what a state becomes by tokens: it depends on each and on their order."""
    for token in tokens:
        state = (state * 31 + int(token) + 1) % 1000003
    return state


def alone(
    prompt: Sequence[int],
    sampling: Sampling,
    sample: int = 0,
    window: int = -1,
    structure: CompiledStructure | None = None,
) -> list[int]:
    """The tokens of one sample, without any cache; it ends at its limit, at a stop token, or with its structure."""
    tokens = list(prompt)
    state = None if structure is None else structure.begin()
    history = History(sampling, sampling.seed or 0, sample, tokens, len(tokens), state)
    while len(tokens) < len(prompt) + sampling.max_tokens:
        seen = tokens if window < 0 else tokens[max(0, len(tokens) - 1 - window) :]
        (choice,) = choose(logits_after(seen)[None], [0], [history])
        tokens.append(choice.token)
        if tokens[-1] in sampling.stop_tokens or (state is not None and state.push(choice.token)):
            break
    return tokens[len(prompt) :]


class FakeModel:
    """Keeps the tokens themselves in its pages, and reads a request's past from there alone.

    With slots of state it is a hybrid model: the state that is read must be that of the tokens before. With pages of
    windows it has a layer with a window beside one without: what the window sees must be there in its own pages.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_positions: int = 4096,
        window: int = -1,
        num_states: int = 0,
        num_window_pages: int = 0,
    ) -> None:
        self.config = fake_config(max_positions, window)
        if num_window_pages:
            self.config = with_separate_windows(replace(self.config, windows=(window, -1) * 4))
        self.num_pages, self.page_size, self.window = num_pages, page_size, -1 if num_window_pages else window
        self.storage = np.full((num_pages, page_size), EMPTY, np.int32)
        self.num_window_pages = num_window_pages
        self.window_storage = np.full((num_window_pages, page_size), EMPTY, np.int32)
        self.num_states, self.states = num_states, np.full(num_states, EMPTY, np.int32)
        self.digest = self.kernels = "fake"
        self.computed = 0
        """Tokens of all steps."""
        self.largest = 0
        """Tokens of the largest step."""

    def step(
        self,
        tokens: Sequence[Sequence[int]],
        cache_lengths: Sequence[int],
        pages: Sequence[Any],
        counts: Sequence[int] | None = None,
        states: StepStates | None = None,
        window_pages: Sequence[Any] | None = None,
    ) -> np.ndarray:
        assert (states is None) == (self.num_states == 0)
        if self.num_window_pages:
            self.see_windows(tokens, cache_lengths, pages, pages if window_pages is None else window_pages)
        self.computed += sum(map(len, tokens))
        self.largest = max(self.largest, sum(map(len, tokens)))
        written = set()
        for new, cached, mine in zip(tokens, cache_lengths, pages, strict=True):
            assert len(new) > 0
            for position, token in enumerate(new, cached):
                at = mine[position // self.page_size], position % self.page_size
                assert at not in written, "two requests write one slot"
                written.add(at)
                self.storage[at] = token
        if states is not None:
            self.advance(states, tokens, cache_lengths, pages)
        rows = []
        ends = [
            (cached + len(new) - back, mine)
            for new, cached, mine, count in zip(tokens, cache_lengths, pages, counts or [1] * len(pages), strict=True)
            for back in reversed(range(count))
        ]
        for length, mine in ends:
            assert length <= self.config.max_position_embeddings
            first = 0 if self.window < 0 else max(0, length - 1 - self.window)
            at = [(mine[j // self.page_size], j % self.page_size) for j in range(first, length)]
            assert all(page != NO_PAGE for page, _ in at)
            past = [self.storage[slot] for slot in at]
            assert EMPTY not in past
            rows.append(self.logits(past))
        return np.array(rows)

    def advance(
        self,
        states: StepStates,
        tokens: Sequence[Sequence[int]],
        cache_lengths: Sequence[int],
        pages: Sequence[Sequence[int]],
    ) -> None:
        """Reads and saves the states of a step, which must be those of the tokens in the pages."""
        taken = {source for source in states.sources if source >= 0}
        for new, cached, mine, source, saves in zip(
            tokens, cache_lengths, pages, states.sources, states.saves, strict=True
        ):
            counts, slots = zip(*saves, strict=True)
            assert list(counts) == sorted(set(counts)), "saves are not in order"
            assert counts[-1] == len(new)
            assert len(set(slots)) == len(slots)
            alone = states.sources.count(source) == 1
            for slot in slots:
                assert slot not in taken or (slot == source and alone), "a state is written that another one reads"
            taken |= set(slots)
            past = [self.storage[mine[at // self.page_size], at % self.page_size] for at in range(cached)]
            state = FIRST_STATE if source < 0 else int(self.states[source])
            assert state == state_after(FIRST_STATE, past), "the state is not that of the tokens before"
            for count, slot in saves:
                self.states[slot] = state_after(state, new[:count])

    def see_windows(
        self,
        tokens: Sequence[Sequence[int]],
        cache_lengths: Sequence[int],
        pages: Sequence[Any],
        window_pages: Sequence[Any],
    ) -> None:
        """Writes a step's tokens to pages of windows, and reads the window of each token there."""
        written = set()
        for new, cached, mine in zip(tokens, cache_lengths, window_pages, strict=True):
            for position, token in enumerate(new, cached):
                at = mine[position // self.page_size], position % self.page_size
                assert at[0] != NO_PAGE
                assert at not in written, "two requests write one slot"
                written.add(at)
                self.window_storage[at] = token
        for new, cached, full, mine in zip(tokens, cache_lengths, pages, window_pages, strict=True):
            for j in range(max(0, cached - self.config.longest_window), cached + len(new)):
                page, slot = divmod(j, self.page_size)
                assert mine[page] != NO_PAGE, "a page that the window reaches was given back"
                if j < cached:
                    assert self.window_storage[mine[page], slot] == self.storage[full[page], slot] != EMPTY

    def logits(self, past: Sequence[int]) -> np.ndarray:
        """After the tokens that it sees."""
        return logits_after(past)

    @property
    def page_kind(self) -> tuple[str, tuple[int, ...]]:
        return "float32", (self.page_size,)

    @property
    def window_page_kind(self) -> tuple[str, tuple[int, ...]]:
        return self.page_kind

    def read_pages(self, pages: Sequence[int], *, windows: bool = False) -> np.ndarray:
        return (self.window_storage if windows else self.storage).view(np.uint32)[list(pages)]

    def write_pages(self, pages: Sequence[int], bits: np.ndarray, *, windows: bool = False) -> None:
        (self.window_storage if windows else self.storage).view(np.uint32)[list(pages)] = bits

    @property
    def state_size(self) -> int:
        return 1

    def read_states(self, slots: Sequence[int]) -> np.ndarray:
        return self.states.view(np.uint32)[list(slots), None]

    def write_states(self, slots: Sequence[int], bits: np.ndarray) -> None:
        self.states.view(np.uint32)[list(slots)] = bits[:, 0]

    def copy_page(self, source: int, target: int, *, windows: bool = False) -> None:
        storage = self.window_storage if windows else self.storage
        storage[target] = storage[source]


class FakeDraft(FakeModel):
    """Expects what `FakeModel` does after seven of ten texts."""

    def logits(self, past: Sequence[int]) -> np.ndarray:
        logits = super().logits(past)
        return logits if sum(past) % 10 < 7 else -logits


class Nonsense(FakeModel):
    """Any token of the demo's vocabulary is as likely as any other, by what was said before."""

    DEMO = load_config(FOLDER)
    NUM_ROWS = 1 << 16
    NOISE = np.random.default_rng(0).standard_normal(NUM_ROWS + DEMO.vocab_size, np.float32)

    def __init__(self, num_pages: int, page_size: int = 16) -> None:
        super().__init__(num_pages, page_size)
        self.config = replace(self.config, vocab_size=self.DEMO.vocab_size, eos_token_ids=self.DEMO.eos_token_ids)

    def step(
        self,
        tokens: Sequence[Sequence[int]],
        cache_lengths: Sequence[int],
        pages: Sequence[Any],
        counts: Sequence[int] | None = None,
        states: StepStates | None = None,
        window_pages: Sequence[Any] | None = None,
    ) -> np.ndarray:
        assert states is window_pages is None

        rows = []
        for new, cached, mine, count in zip(tokens, cache_lengths, pages, counts or [1] * len(pages), strict=True):
            for position, token in enumerate(new, cached):
                self.storage[mine[position // self.page_size], position % self.page_size] = token
            past = self.storage[list(mine)].ravel()
            self.computed += len(new)
            for length in range(cached + len(new) - count + 1, cached + len(new) + 1):
                at = self.place(past[:length])
                rows.append(self.NOISE[at : at + self.DEMO.vocab_size])
        return np.array(rows)

    def place(self, past: np.ndarray) -> int:
        """Return where in the noise the logits after some tokens are."""
        return zlib.crc32(past.tobytes()) % self.NUM_ROWS
