"""Sampling in the engine: one call of the sampler a step, and tokens that depend on a sample alone."""

from unittest.mock import patch

import numpy as np
import pytest

from paged_kv.engine import Logprobs, Sampling
from paged_kv.engine.engine import Engine
from paged_kv.engine.sampling import choose
from support.engine_runs import KINDS, run
from support.fake_model import VOCAB, FakeModel, alone, logits_after


@pytest.mark.slow
def test_every_kind_of_sampling_gets_its_own_tokens_beside_the_others_and_after_preemptions():
    rng = np.random.default_rng(6)
    for num_pages in (400, 24):
        engine, expected = Engine(FakeModel(num_pages, 4), max_step_tokens=16), {}
        for number in range(25):
            prompt = rng.integers(VOCAB, size=int(rng.integers(1, 20))).tolist()
            sampling, n = KINDS[number % 5], int(rng.integers(1, 4))
            assert engine.add_request(prompt, sampling, n) == number
            expected |= {(number, sample): alone(prompt, sampling, sample) for sample in range(n)}
        assert run(engine) == expected
        assert (engine.preemptions > 10) == (num_pages == 24)


def test_a_step_calls_the_sampler_once_for_all_its_samples():
    engine, calls = Engine(FakeModel(100, 4)), []

    def counted(logits, rows, histories):
        calls.append(list(rows))
        return choose(logits, rows, histories)

    for prompt in ([1], [2, 3], [4]):
        engine.add_request(prompt, Sampling(3), 2)
    with patch("paged_kv.engine.engine.choose", counted):
        engine.step()
        engine.step()
    assert calls == [[0, 0, 1, 1, 2, 2], [0, 1, 2, 3, 4, 5]]


def logprobs_after(tokens):
    """By the model's own logits, computed without a cache."""
    logits = logits_after(tokens).astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def test_log_probabilities_come_with_the_tokens():
    engine = Engine(FakeModel(40, 4))
    sampling = Sampling(6, temperature=1.0, seed=2, logprobs=2, presence_penalty=1.0)
    past = [5, 6]
    for output in engine.stream(past, sampling):
        exact = logprobs_after(past)
        ((token,), (each,)) = output.tokens, output.logprobs
        assert isinstance(each, Logprobs)
        assert each.token == pytest.approx(exact[token], abs=1e-6)
        assert list(each.top) == np.argsort(-exact)[:2].tolist()
        past = [*past, token]
    assert all(output.logprobs == () for output in engine.stream([5, 6], Sampling(3)))


def test_without_a_seed_each_request_draws_anew():
    engine = Engine(FakeModel(100, 4))
    for _ in range(3):
        engine.add_request([1, 2], Sampling(30, temperature=2.0))
    assert len({tuple(tokens) for tokens in run(engine).values()}) == 3


def test_logits_that_are_no_numbers_name_their_request():
    class Broken(FakeModel):
        def step(self, tokens, cache_lengths, pages, *rest):
            logits = super().step(tokens, cache_lengths, pages, *rest)
            logits[-1, 3] = np.inf
            return logits

    engine = Engine(Broken(40, 4))
    engine.add_request([1], Sampling(1))
    engine.add_request([2], Sampling(1), 2)
    good, *bad = engine.step()
    assert list(good.tokens) == alone([1], Sampling(1))
    assert [(each.request, each.sample, each.finish) for each in bad] == [(1, 0, "error"), (1, 1, "error")]
    assert {each.error for each in bad} == {"request 1: its logits hold NaN or +inf, or are all -inf"}
    assert engine.is_idle
    assert engine.pool.num_used == 0
    engine.add_request([3] * 9, Sampling(1))
    (failed,) = engine.step()
    assert failed.error is not None
    assert engine.pool.num_cached == 0  # nothing that such a step computed is known


@pytest.mark.parametrize("speculate", [None, "lookup"])
@pytest.mark.parametrize("num_pages", [400, 40])
def test_log_probabilities_of_prompts_are_the_models_own(num_pages, speculate):
    """Known prefixes, chunks, preemptions, several samples and drafts; once, with the first output of sample 0."""
    rng = np.random.default_rng(3)
    engine = Engine(FakeModel(num_pages, 4), max_step_tokens=16, speculate=speculate)
    begin = rng.integers(VOCAB, size=30).tolist()
    prompts = [begin + rng.integers(VOCAB, size=int(rng.integers(0, 12))).tolist() for _ in range(12)]
    for index, prompt in enumerate(prompts):
        engine.add_request(prompt, Sampling(12, prompt_logprobs=index % 3, seed=1), 1 + index % 2)
    found = {}
    while not engine.is_idle:
        for output in engine.step():
            if output.prompt_logprobs:
                assert output.sample == 0
                assert output.request not in found
                found[output.request] = output.prompt_logprobs
    assert (engine.preemptions > 0) == (num_pages == 40)
    for index, prompt in enumerate(prompts):
        for at, logprobs in zip(range(1, len(prompt)), found[index], strict=True):
            exact = logprobs_after(prompt[:at])
            order = np.argsort(-exact, kind="stable")[: index % 3].tolist()
            assert logprobs.token == pytest.approx(exact[prompt[at]], abs=1e-5)
            assert list(logprobs.top) == order
            assert list(logprobs.top.values()) == pytest.approx(exact[order], abs=1e-5)


def test_outputs_say_how_much_of_the_prompt_was_cached():
    engine = Engine(FakeModel(100, 4))
    prompt = list(range(13))
    for cached in (0, 12, 12):
        outputs = list(engine.stream(prompt, Sampling(3), 2))
        assert {output.cached_tokens for output in outputs} == {cached}
    engine = Engine(FakeModel(8, 4))  # the second request is preempted, and finds pages of its own tokens again
    for first in (1, 4):
        engine.add_request([first] * 3, Sampling(17))
    assert {output.cached_tokens for _ in iter(lambda: engine.is_idle, True) for output in engine.step()} == {0}
    assert engine.preemptions == 1
    assert engine.tokens_found == 12


def test_no_end_token_comes_before_min_tokens():
    free = alone([1], Sampling(12))
    ends = free[3:5]
    for count in range(8):
        sampling = Sampling(12, stop_tokens=ends, min_tokens=count)
        tokens = run_one(Engine(FakeModel(100, 4)), sampling)
        assert not set(tokens[:count]) & set(ends)
        assert tokens[: min(3, len(tokens))] == free[:3]
        assert (tokens == free[:4]) == (count <= 3)


def run_one(engine, sampling):
    engine.add_request([1], sampling)
    (tokens,) = run(engine).values()
    return tokens


def test_steps_in_which_samples_decode_take_about_as_long_as_they_may(monkeypatch):
    """The clock is the model's: a millisecond a token, a hundredth of that later."""
    clock, sizes, cost = [0.0], [], [1e-3]

    class Timed(FakeModel):
        def step(self, tokens, *others):
            sizes.append(sum(map(len, tokens)))
            clock[0] += sizes[-1] * cost[0]
            return super().step(tokens, *others)

    monkeypatch.setattr("paged_kv.engine.engine.time.perf_counter", lambda: clock[0])
    engine = Engine(Timed(1000, 4), max_step_tokens=256, max_gap=0.04)
    engine.add_request([1], Sampling(60))
    engine.step()
    for first in range(4):
        engine.add_request([first, *range(20)] * 24, Sampling(1))
    for _ in range(40):
        engine.step()
    assert sizes[1] == 65
    assert all(30 <= size <= 50 for size in sizes[2:20])
    cost[0] /= 100
    engine.add_request([7] * 600, Sampling(1))
    del sizes[:]
    for _ in range(3):
        engine.step()
    assert sizes[0] < sizes[1] <= 2 * sizes[0] < sizes[2] <= 2 * sizes[1]
    run(engine)
    engine.add_request(list(range(20)) * 30, Sampling(1))
    del sizes[:]
    engine.step()
    assert sizes == [256]
