"""The loop around a model that needs no compiler: its next token depends on every token that it finds in its pages."""

from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.engine import engine, scheduler
from paged_kv.engine.engine import Emitted, Generation, Statistics
from paged_kv.engine.model import DecoderModel
from paged_kv.engine.sampling import Sampler
from paged_kv.engine.scheduler import pages_for
from paged_kv.errors import ContractError, ContractTypeError, PoolExhausted
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.rope import Rope
from paged_kv.pool import PagePool

VOCAB = 11
EMPTY = -1  # a slot that nothing was written to


def config(max_positions=4096):
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"), 8)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 1)
    return DecoderConfig(
        **sizes,
        **heads,
        vocab_size=VOCAB,
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-5,
        rope=Rope(8),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_ids=(),
        dtype=None,
    )


def next_token(history):
    """Depends on every token and its position."""
    state = 7
    for token in history:
        state = (state * 31 + token + 1) % 10007
    return state % VOCAB


def expected(prompt, max_new_tokens, end_tokens=(), max_positions=4096):
    """The tokens after a prompt, one at a time and without any cache; and why they end."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        if tokens[-1] in end_tokens:
            return tokens[len(prompt) :], "stop"
        if len(tokens) == len(prompt) + max_new_tokens or len(tokens) > max_positions:
            return tokens[len(prompt) :], "length"


class FakeModel:
    """Keeps the tokens themselves in its pages, and reads a request's past from there alone."""

    def __init__(self, num_pages, page_size, max_positions):
        self.config = config(max_positions)
        self.num_pages, self.page_size = num_pages, page_size
        self.storage = np.full((num_pages, page_size), EMPTY)

    def step(self, tokens, cache_lengths, pages):
        owned = [page for row in pages for page in row]
        assert len(set(owned)) == len(owned)
        logits = np.zeros((len(tokens), VOCAB), np.float32)
        for row, new, cached, mine in zip(logits, tokens, cache_lengths, pages, strict=True):
            assert len(new) > 0
            for position, token in enumerate(new, cached):
                self.storage[mine[position // self.page_size], position % self.page_size] = token
            past = self.storage[list(mine)].reshape(-1)[: cached + len(new)]
            assert len(past) == cached + len(new) <= self.config.max_position_embeddings
            assert EMPTY not in past
            row[next_token(past.tolist())] = 1
        return logits


class AuditedPool(PagePool):
    """Checks its allocator state after every operation."""

    def __init__(self, *args):
        super().__init__(*args)
        self.made.append(self)

    def start(self, *args):
        return self._audited(super().start(*args))

    def reserve(self, *args):
        return self._audited(super().reserve(*args))

    def _audited(self, added):
        self.check_integrity()
        return added

    def free(self, *args):
        super().free(*args)
        self.check_integrity()


class Recorder(Sampler):
    """Which token it chose for which request."""

    def __init__(self):
        super().__init__()
        self.chosen = defaultdict(list)

    def __call__(self, logits, requests):
        tokens = super().__call__(logits, requests)
        for request, token in zip(requests, tokens, strict=True):
            self.chosen[request].append(token)
        return tokens


@dataclass
class Watched(Generation):
    """Checks each step as it is made, and adds up what entered the cache."""

    entered: dict = field(default_factory=lambda: defaultdict(list))
    steps: list = field(default_factory=list)
    most_pages: int = 0

    def _execute(self, scheduler, step):
        running = scheduler.running
        assert step
        count = sum(len(new) for _, new in step)
        waiting = sum(len(request.tokens) - request.cached for request in running)
        assert count == min(waiting, self.max_step_tokens)
        decoding = [request for request in running if request.cached >= request.prompt_length]
        scheduled = [request for request, _ in step if request in decoding]
        assert len(scheduled) == min(len(decoding), self.max_step_tokens)  # prompts never keep a decoding one waiting
        for request, new in step:
            assert request.cached == len(self.entered[request.index])
            self.entered[request.index] += new
        self.steps.append([(request.index, len(new)) for request, new in step])
        self.most_pages = max(self.most_pages, scheduler.pages_used)
        return super()._execute(scheduler, step)


@dataclass
class Played:
    texts: list
    finishes: list
    steps: list
    statistics: Statistics


def play(prompts, max_new_tokens, *, page_size=4, num_pages=None, max_positions=4096, end_tokens=(), **options):
    """Runs a batch, to the end, and checks all that holds for every batch."""
    needed = pages_for(config(max_positions), prompts, max_new_tokens, page_size)
    model = FakeModel(needed if num_pages is None else num_pages, page_size, max_positions)
    sampler, texts, finishes = Recorder(), [[] for _ in prompts], [None] * len(prompts)
    run = Watched(model, prompts, max_new_tokens, sampler, frozenset(end_tokens), **options)
    with pytest.MonkeyPatch.context() as patch:
        made = []
        patch.setattr(AuditedPool, "made", made, raising=False)
        patch.setattr(scheduler, "PagePool", AuditedPool)
        for emitted in run:
            assert finishes[emitted.request] is None
            texts[emitted.request].append(emitted.token)
            finishes[emitted.request] = emitted.finish
    (pool,) = made
    assert pool.num_free == pool.num_pages
    assert texts == [sampler.chosen[index] for index in range(len(prompts))]
    for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        assert run.entered[index] == [*prompt, *text[:-1]]  # every token once, in order; the last one never
    statistics = run.statistics
    assert statistics.prompt_tokens == sum(map(len, prompts))
    assert statistics.decode_tokens == sum(map(len, texts)) - len(prompts)
    assert statistics.peak_pages == run.most_pages <= needed
    return Played(texts, finishes, run.steps, statistics)


@st.composite
def batches(draw):
    max_positions = draw(st.integers(1, 40))
    prompt = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=max_positions)
    return {
        "prompts": draw(st.lists(prompt, min_size=1, max_size=6)),
        "max_new_tokens": draw(st.integers(1, 20)),
        "page_size": draw(st.sampled_from([1, 2, 3, 5, 16])),
        "max_positions": max_positions,
        "end_tokens": draw(st.sets(st.integers(0, VOCAB - 1), max_size=2)),
        "max_step_tokens": draw(st.sampled_from([1, 2, 3, 7, 64, 2048])),
    }


@given(batches())
def test_any_batch_gives_what_each_prompt_gives_alone(batch):
    played = play(**batch)
    limits = {key: batch[key] for key in ("max_new_tokens", "end_tokens", "max_positions")}
    alone = [expected(prompt, **limits) for prompt in batch["prompts"]]
    assert list(zip(played.texts, played.finishes, strict=True)) == alone


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 9), st.integers(1, 60))
def test_the_pages_asked_for_are_just_enough(length, max_new_tokens, page_size, max_positions):
    prompts = [[1] * min(length, max_positions)]
    needed = pages_for(config(max_positions), prompts, max_new_tokens, page_size)
    options = {"page_size": page_size, "max_positions": max_positions}
    assert play(prompts, max_new_tokens, num_pages=needed, **options).statistics.peak_pages == needed
    with pytest.raises(PoolExhausted, match=rf"need {needed} pages of {page_size}, the pool has {needed - 1}"):
        play(prompts, max_new_tokens, num_pages=needed - 1, **options)


def test_nothing_runs_where_the_pool_is_too_small():
    model = FakeModel(3, 4, 100)
    with pytest.raises(PoolExhausted):
        Generation(model, [[1] * 8, [2] * 5], 1, Sampler())
    assert (model.storage == EMPTY).all()


@pytest.mark.parametrize(
    ("prompts", "max_new_tokens", "message"),
    [
        ([[1]], 0, "max_new_tokens must be at least 1, not 0"),
        ([[1]], -3, "max_new_tokens must be at least 1, not -3"),
        ([[1], []], 1, "prompt 1 is empty"),
        ([[1] * 10, [1] * 11], 1, "prompt 1 has 11 tokens, max_position_embeddings is 10"),
        ([[1], [0, VOCAB]], 1, "prompt 1 has token id 11 at position 1; the vocabulary is 0 to 10"),
        ([[0, -1]], 1, "prompt 0 has token id -1 at position 1"),
        ([[2**40]], 1, f"prompt 0 has token id {2**40} at position 0"),
    ],
)
def test_what_cannot_run_is_refused(prompts, max_new_tokens, message):
    with pytest.raises(ContractError, match=message):
        pages_for(config(10), prompts, max_new_tokens, 4)
    with pytest.raises(ContractError, match=message):
        Generation(FakeModel(99, 4, 10), prompts, max_new_tokens, Sampler())


@pytest.mark.parametrize(
    "prompt", [None, 5, "text", [1.0], ["1"], [True], [[1]], [[1], [1, 2]], [None], [10**400], [1j]]
)
def test_a_prompt_that_is_no_list_of_integers_is_refused(prompt):
    with pytest.raises(ContractTypeError, match="prompt 1 must be a list of token ids"):
        Generation(FakeModel(99, 4, 10), [[1], prompt], 1, Sampler())


@pytest.mark.parametrize("value", [None, 1.5, "1", True])
@pytest.mark.parametrize("name", ["max_new_tokens", "max_step_tokens"])
def test_a_number_of_tokens_that_is_no_integer_is_refused(name, value):
    with pytest.raises(ContractTypeError, match=f"{name} must be an integer"):
        Generation(FakeModel(99, 4, 10), [[1]], **{"max_new_tokens": 1, "sampler": Sampler(), name: value})


def test_any_number_of_new_tokens_ends_with_the_context():
    assert [len(text) for text in play([[3] * 8], 10**400, max_positions=10).texts] == [3]


def test_a_step_of_no_tokens_is_refused():
    with pytest.raises(ContractError, match="max_step_tokens must be at least 1, not 0"):
        Generation(FakeModel(99, 4, 10), [[1]], 1, Sampler(), max_step_tokens=0)


@pytest.mark.parametrize("token", [-1, 99, 2**40])
def test_a_step_over_tokens_past_the_vocabulary_is_refused(token):
    """The model that runs, without its graph: this comes before."""
    model = DecoderModel.__new__(DecoderModel)
    model.config = SimpleNamespace(vocab_size=99)
    with pytest.raises(ContractError, match=f"tokens: request 1 has {token}, expected an id from 0 to 98"):
        model.step([[98], [0, token]], [0, 0], [[0], [1]])


def test_a_full_context_still_gives_one_token():
    played = play([[3] * 10, [3] * 9, [3] * 2], 5, max_positions=10)
    assert [len(text) for text in played.texts] == [1, 2, 5]
    assert played.finishes == ["length"] * 3


def test_an_end_token_ends_its_request_alone():
    prompts = [[1, 2], [5, 5, 5], [9]]
    free = play(prompts, 30)
    end = free.texts[1][4]
    played = play(prompts, 30, end_tokens=[end])
    assert played.texts[1] == free.texts[1][: free.texts[1].index(end) + 1]
    assert played.finishes[1] == "stop"
    for prompt, text, finish in zip(prompts, played.texts, played.finishes, strict=True):
        assert (text, finish) == expected(prompt, 30, [end])


def test_an_end_token_at_the_limit_is_a_stop():
    (text,) = play([[1, 2]], 3).texts
    assert play([[1, 2]], 1 + text.index(text[2]), end_tokens=[text[2]]).finishes == ["stop"]


def test_prompts_come_in_chunks_beside_those_that_decode():
    """Five tokens a step: the shortest prompts first, a decoding request always, the long one in what is left."""
    played = play([[1] * 9, [2] * 2, [3] * 4], 3, max_step_tokens=5)
    assert played.steps == [
        [(1, 2), (2, 3)],
        [(1, 1), (2, 1), (0, 3)],
        [(1, 1), (2, 1), (0, 3)],
        [(2, 1), (0, 3)],
        [(0, 1)],
        [(0, 1)],
    ]


def test_tokens_come_as_soon_as_they_are_sampled():
    run = iter(Generation(FakeModel(9, 4, 99), [[1, 2], [3]], 2, Sampler()))
    assert next(run) == Emitted(1, next_token([3]), None)
    assert next(run) == Emitted(0, next_token([1, 2]), None)
    assert [(emitted.request, emitted.finish) for emitted in run] == [(0, "length"), (1, "length")]


def test_pages_freed_early_are_not_counted_again():
    """Two prompts of two pages each; the first ends at once, the second grows by one page."""
    end = next_token([1] * 8)
    prompts = [[1] * 8, [3] * 8]
    assert end not in expected(prompts[1], 5)[0]
    played = play(prompts, 5, end_tokens=[end])
    assert played.finishes == ["stop", "length"]
    assert played.statistics.peak_pages == 4
    assert pages_for(config(), prompts, 5, 4) == 6


def test_time_is_shared_between_prompts_and_decoding(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(engine.time, "perf_counter", lambda: next(ticks))
    statistics = play([[1] * 9, [2] * 2, [3] * 4], 3, max_step_tokens=5).statistics
    # Steps of 5, 5, 5, 4, 1 and 1 tokens, one second each, with 5, 4, 3, 3, 0 and 0 of them from prompts.
    assert statistics.prefill_seconds == pytest.approx(1 + 0.8 + 0.6 + 0.75)
    assert statistics.decode_seconds == pytest.approx(0.2 + 0.4 + 0.25 + 1 + 1)
