"""Requests that the engine takes or refuses, where samples end, what it counts: with a model without a compiler."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.engine import engine as engine_module
from paged_kv.engine.engine import Engine
from paged_kv.engine.model import DecoderModel
from paged_kv.engine.requests import Output, Sampling
from paged_kv.errors import ContractError, ContractTypeError, PoolExhausted
from paged_kv.pool import pages_needed
from support.engine_runs import run
from support.fake_model import EMPTY, VOCAB, FakeModel, alone


class Played:
    """All prompts at once: tokens and finish of each, and what the steps were."""

    def __init__(self, prompts, sampling, num_pages=99, page_size=4, max_positions=4096, **options):
        self.steps = []
        model = FakeModel(num_pages, page_size, max_positions)
        step = model.step

        def recorded(tokens, cache_lengths, *rest):
            self.steps.append([(cached, len(new)) for new, cached in zip(tokens, cache_lengths, strict=True)])
            return step(tokens, cache_lengths, *rest)

        model.step = recorded
        self.engine = Engine(model, share_prefixes=False, **options)
        for prompt in prompts:
            self.engine.add_request(prompt, sampling)
        self.tokens, self.finishes = [[] for _ in prompts], [None] * len(prompts)
        self.outputs = []
        while not self.engine.is_idle:
            for output in self.engine.step():
                self.outputs.append(output)
                self.tokens[output.request] += output.tokens
                self.finishes[output.request] = output.finish
        self.statistics = self.engine.statistics


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 9), st.integers(1, 60))
def test_the_pages_that_a_request_needs_are_just_enough(length, max_tokens, page_size, max_positions):
    prompt = [1] * min(length, max_positions)
    needed = pages_needed(min(len(prompt) + max_tokens - 1, max_positions), page_size)
    options = {"page_size": page_size, "max_positions": max_positions}
    played = Played([prompt], Sampling(max_tokens), num_pages=needed, **options)
    assert played.statistics.peak_pages == needed
    with pytest.raises(PoolExhausted, match=rf"needs {needed} pages of {page_size}, the pool has {needed - 1}"):
        Played([prompt], Sampling(max_tokens), num_pages=needed - 1, **options)


NO_TOKENS = (None, 5, [1.0], ["1"], [True], [[1]], [[1], [1, 2]], [None], [10**400], [1j])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        *(((prompt,), ContractTypeError, "prompt: expected a list of token ids") for prompt in NO_TOKENS),
        (([],), ContractError, "prompt is empty"),
        (("text",), ContractTypeError, "a text needs a tokenizer"),
        (([0, VOCAB],), ContractError, f"prompt has token id {VOCAB} at position 1; the vocabulary is 0 to"),
        (([-1],), ContractError, "token id -1"),
        (([1] * 4097,), ContractError, "max_position_embeddings is 4096"),
        (([1], Sampling(1), 0), ContractError, "n: expected at least 1"),
        (([1], Sampling(1), 257), ContractError, "n: expected at most 256"),
        (([1], 5), ContractTypeError, "sampling: expected a Sampling"),
        (([1], Sampling(stop="x")), ContractError, "stop: texts that end a sample need a tokenizer"),
        (([1], Sampling(400)), PoolExhausted, r"needs 100 pages of 4, the pool has 40"),
        (([1], Sampling(logit_bias={VOCAB: 1})), ContractError, f"token id {VOCAB}; the vocabulary is 0 to"),
    ],
    ids=range(len(NO_TOKENS) + 11),
)
def test_bad_requests_are_refused_and_the_others_go_on(arguments, error, message):
    engine = Engine(FakeModel(40, 4))
    engine.add_request([1, 2], Sampling(3))
    with pytest.raises(error, match=message):
        engine.add_request(*arguments)
    assert (engine.model.storage == EMPTY).all()
    assert run(engine) == {(0, 0): alone([1, 2], Sampling(3))}


@pytest.mark.parametrize("name", ["max_step_tokens", "max_running"])
@pytest.mark.parametrize(("value", "error"), [(None, ContractTypeError), (1.5, ContractTypeError), (0, ContractError)])
def test_sizes_of_a_step_that_are_no_positive_integers_are_refused(name, value, error):
    with pytest.raises(error, match=f"{name}: expected"):
        Engine(FakeModel(99, 4, 10), **{name: value})


@pytest.mark.parametrize("token", [-1, 99, 2**40])
def test_a_step_over_tokens_past_the_vocabulary_is_refused(token):
    """The model that runs, without its graph: this comes before."""
    model = DecoderModel.__new__(DecoderModel)
    model.config = SimpleNamespace(vocab_size=99)
    with pytest.raises(ContractError, match=f"tokens: request 1 has {token}, expected an id from 0 to 98"):
        model.step([[98], [0, token]], [0, 0], [[0], [1]])


def test_a_full_context_still_gives_one_token():
    for most, counts in ((5, [1, 2, 5]), (10**400, [1, 2, 9])):
        played = Played([[3] * 10, [3] * 9, [3] * 2], Sampling(most), max_positions=10)
        assert [len(tokens) for tokens in played.tokens] == counts
        assert played.finishes == ["length"] * 3


def test_an_end_token_at_the_limit_is_a_stop():
    tokens = alone([1, 2], Sampling(3))
    played = Played([[1, 2]], Sampling(1 + tokens.index(tokens[2]), stop_tokens=[tokens[2]]))
    assert played.finishes == ["stop"]


def test_prompts_come_in_chunks_beside_samples_that_decode():
    """Five tokens a step: samples that decode first, then prompts in the order of arrival."""
    played = Played([[1] * 9, [2] * 2, [3] * 4], Sampling(3), max_step_tokens=5)
    assert played.steps == [
        [(0, 5)],
        [(5, 4), (0, 1)],
        [(9, 1), (1, 1), (0, 3)],
        [(10, 1), (2, 1), (3, 1)],
        [(3, 1), (4, 1)],
        [(5, 1)],
    ]


def test_outputs_come_as_soon_as_tokens_are_sampled():
    played = Played([[1, 2], [3, 4]], Sampling(2))
    first, second = alone([1, 2], Sampling(2)), alone([3, 4], Sampling(2))
    assert played.outputs == [
        Output(0, 0, (first[0],), ""),
        Output(1, 0, (second[0],), ""),
        Output(0, 0, (first[1],), "", "length"),
        Output(1, 0, (second[1],), "", "length"),
    ]


def test_pages_freed_early_are_not_counted_again():
    """Two prompts of two pages each; the first ends at once, the second grows by one page."""
    prompts = [[1] * 8, [3] * 8]
    end = alone(prompts[0], Sampling(1))[0]
    assert end not in alone(prompts[1], Sampling(5))
    played = Played(prompts, Sampling(5, stop_tokens=[end]))
    assert played.finishes == ["stop", "length"]
    assert played.statistics.peak_pages == 4


def test_time_is_shared_between_prompts_and_decoding(monkeypatch):
    seconds, step = [0], FakeModel.step

    def timed(*arguments):
        seconds[0] += 1
        return step(*arguments)

    monkeypatch.setattr(FakeModel, "step", timed)
    monkeypatch.setattr(engine_module.time, "perf_counter", lambda: seconds[0])
    statistics = Played([[1] * 9, [2] * 2, [3] * 4], Sampling(3), max_step_tokens=5).statistics
    # Steps of 5, 5, 5, 3, 2 and 1 tokens, one second each, with 5, 5, 4, 1, 0 and 0 of them from prompts.
    assert statistics.prefill_seconds == pytest.approx(1 + 1 + 0.8 + 1 / 3)
    assert statistics.decode_seconds == pytest.approx(0.2 + 2 / 3 + 1 + 1)
    assert (statistics.prompt_tokens, statistics.decode_tokens) == (15, 6)
