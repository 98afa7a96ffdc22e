"""The engine around a model that needs no compiler: what is in a batch, preempted, forked or found changes no token."""

import asyncio
import threading
from collections import defaultdict

import numpy as np
import pytest

from paged_kv.engine.async_engine import AsyncEngine
from paged_kv.engine.engine import Engine
from paged_kv.engine.requests import Output, Sampling
from paged_kv.errors import ContractError, RequestError
from paged_kv.structured_output import Regex
from support.engine_runs import Letters, guess_often, run
from support.fake_model import VOCAB, FakeDraft, FakeModel, alone


@pytest.mark.parametrize(
    ("page_size", "temperature", "speculate", "num_states", "num_window_pages"),
    [
        *((1, 1.0, None, 0, 0), (5, 0.0, None, 0, 0), (16, 1.0, None, 0, 0)),
        *((5, 0.1, "lookup", 0, 0), (16, 0.0, "lookup", 0, 0)),
        *((1, 0.0, "draft", 0, 0), (5, 1.0, "draft", 0, 0)),
        *((1, 1.0, None, 30, 0), (5, 0.0, None, 9, 0), (5, 1.0, "draft", 24, 0), (16, 0.0, "draft", 40, 0)),
        *((1, 1.0, None, 0, 40), (5, 0.0, "draft", 0, 12), (5, 1.0, None, 0, 5), (16, 0.0, "draft", 0, 8)),
    ],
)
def test_200_requests_in_a_small_pool_get_the_tokens_that_each_gets_alone(
    page_size, temperature, speculate, num_states, num_window_pages
):
    """Shared prefixes, samples that fork, aborts, chunks and preemptions; each against its own run without a cache.

    Drafts of the text are right where the model sees two tokens, of the draft where it sees all.
    """
    rng = np.random.default_rng(page_size)
    window = 1 if speculate == "lookup" else -1
    sizes = {"num_states": num_states, "num_window_pages": num_window_pages}
    model = FakeModel(-(-170 // page_size), page_size, window=11 if num_window_pages else window, **sizes)
    draft = FakeDraft(-(-150 // page_size), page_size) if speculate == "draft" else speculate
    engine = Engine(model, max_step_tokens=40, max_running=12, speculate=draft)
    if speculate:
        guess_often(engine)
    prefixes = [rng.integers(0, VOCAB, 40).tolist() for _ in range(4)]
    asked, aborted, found = {}, set(), defaultdict(list)
    for turn in range(200):
        shared = prefixes[rng.integers(4)][: rng.integers(1, 41)]
        prompt = [*shared, *rng.integers(0, VOCAB, rng.integers(0, 30)).tolist()]
        sampling = Sampling(int(rng.integers(1, 40)), temperature, seed=int(rng.integers(100)), stop_tokens=(3,))
        n = int(rng.choice([1, 1, 2, 3]))
        asked[engine.add_request(prompt, sampling, n)] = prompt, sampling, n
        for _ in range(rng.integers(0, 3)):
            for output in engine.step():
                found[output.request, output.sample] += output.tokens
            engine.pool.check_integrity()
            if engine.window_pool is not None:
                engine.window_pool.check_integrity()
        if turn % 17 == 5:
            try:
                engine.abort(turn - 3)
                aborted.add(turn - 3)
            except RequestError:
                assert turn - 3 in asked  # it has ended
    for key, tokens in run(engine).items():
        found[key] += tokens
    assert window >= 0 or engine.preemptions > 10
    assert engine.tokens_found > 300
    if speculate:
        assert engine.statistics.draft_tokens > engine.statistics.accepted_tokens > 100
    assert model.largest <= 40
    assert len(aborted) > 3
    assert engine.window_pool is None or engine.window_pool.num_used == 0
    for number, (prompt, sampling, n) in asked.items():
        for sample in range(n):
            expected = alone(prompt, sampling, sample, window)
            if number in aborted:
                assert found[number, sample] == expected[: len(found[number, sample])]
            else:
                assert found[number, sample] == expected, (number, sample)


def test_prefixes_are_not_shared_where_that_is_not_wanted():
    model = FakeModel(400, 16)
    engine = Engine(model, share_prefixes=False)
    for _ in range(2):
        engine.add_request([1] * 100, Sampling(2))
        run(engine)
    assert model.computed == 2 * 101


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_the_first_request_goes_on_whatever_comes_after_it(share_prefixes):
    """The others are preempted, and what was computed of them is computed again."""
    engine = Engine(FakeModel(4, 4), share_prefixes=share_prefixes)  # one request needs all of it
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    for prompt in prompts:
        engine.add_request(prompt, Sampling(14))
    outputs = []
    while not engine.is_idle:
        outputs += engine.step()
    assert [output.request for output in outputs if output.finish] == [0, 1, 2]
    assert engine.preemptions > 0
    for number, prompt in enumerate(prompts):
        tokens = [token for output in outputs if output.request == number for token in output.tokens]
        assert tokens == alone(prompt, Sampling(14))


def test_a_sample_that_decodes_does_not_wait_for_a_prompt_that_came_before_it():
    """Its prompt was known but for the last token; the long one, which came first, takes several steps."""
    engine = Engine(FakeModel(40, 4), max_step_tokens=4)
    engine.add_request([1, 2, 3, 4, 5], Sampling(1))
    run(engine)
    engine.add_request([7] * 30, Sampling(1))
    quick = engine.add_request([1, 2, 3, 4, 5], Sampling(3))
    order = [output.request for _ in range(3) for output in engine.step()]
    assert order == [quick] * 3


@pytest.mark.parametrize("window", [0, 5, 16])
def test_pages_outside_every_window_go_back_to_the_pool(window):
    model = FakeModel(60, 4, window=window)
    engine = Engine(model)
    number = engine.add_request([1, 2, 3, 4, 5], Sampling(80))
    tokens, most = [], 0
    while not engine.is_idle:
        for output in engine.step():
            tokens += output.tokens
        most = max(most, engine.pool.num_used)
    assert tokens == alone([1, 2, 3, 4, 5], Sampling(80), window=window)
    assert most <= window // 4 + 3
    assert number == 0


def texts(outputs: list[Output]) -> tuple[str, str | None]:
    return "".join(output.text for output in outputs), outputs[-1].finish


def test_texts_end_before_a_stop_text_and_nothing_of_it_was_shown():
    engine = Engine(FakeModel(40, 4), Letters())
    whole, finish = texts(list(engine.stream("hello", Sampling(30))))
    assert (len(whole), finish) == (30, "length")
    for first, last in ((3, 5), (10, 14), (29, 30), (0, 1)):
        stop = whole[first:last]
        at = whole.index(stop)
        shown = list(engine.stream("hello", Sampling(30, stop=[stop, "never"])))
        assert texts(shown) == (whole[:at], "stop")
    almost = whole[5:8] + ("z" if whole[8] != "z" else "y")
    assert texts(list(engine.stream("hello", Sampling(30, stop=almost)))) == (whole, "length")
    for least, shown in ((6, (whole[:5], "stop")), (7, (whole, "length"))):  # letter 5 comes with token 7
        assert texts(list(engine.stream("hello", Sampling(30, stop=whole[5:7], min_tokens=least)))) == shown
    assert engine.pool.num_used == 0


def test_end_tokens_of_the_model_end_a_sample_unless_they_are_ignored():
    tokens = alone([1, 2], Sampling(20))
    end = tokens[5]
    model = FakeModel(40, 4)
    object.__setattr__(model.config, "eos_token_ids", (end,))
    engine = Engine(model)
    (ended,) = [output for output in engine.stream([1, 2], Sampling(20)) if output.finish]
    assert (ended.finish, ended.tokens) == ("stop", (end,))
    assert len(list(engine.stream([1, 2], Sampling(20, ignore_end=True)))) == 20


def test_samples_of_one_request_differ_and_share_the_pages_of_its_prompt():
    model = FakeModel(100, 4)
    engine = Engine(model)
    engine.add_request(list(range(20)), Sampling(10, temperature=1.0, seed=5), n=4)
    engine.step()
    assert engine.pool.num_used == 5
    assert model.computed == 20
    tokens = run(engine)
    engine.step()
    assert [engine.num_running, engine.num_waiting] == [0, 0]
    assert len({tuple(sample) for sample in tokens.values()}) == 4


def test_streams_of_several_requests_share_their_steps():
    model = FakeModel(100, 4)
    engine = Engine(model)
    streams = [engine.stream([i, i + 1], Sampling(8)) for i in range(3)]
    collected = [[], [], []]
    for turns in range(8):
        for stream, tokens in zip(streams, collected, strict=True):
            tokens += next(stream).tokens
        assert engine.statistics.steps == turns + 1
    assert collected == [alone([i, i + 1], Sampling(8)) for i in range(3)]
    assert all(list(stream) == [] for stream in streams)
    assert engine.is_idle


def test_unknown_requests_cannot_be_aborted():
    engine = Engine(FakeModel(40, 4))
    number = engine.add_request([1], Sampling(2))
    run(engine)
    for wrong in (number, 99, None):
        with pytest.raises(RequestError, match="unknown, or has ended"):
            engine.abort(wrong)


def test_a_request_that_is_aborted_before_it_began_is_not_computed():
    engine = Engine(FakeModel(40, 4))
    engine.abort(engine.add_request([1], Sampling(2)))
    assert engine.step() == []
    assert engine.model.computed == 0
    assert engine.is_idle


def test_asyncio_tasks_share_an_engine_and_cancel_what_they_asked_for():
    engine = Engine(FakeModel(1000, 4))
    server = AsyncEngine(engine)

    async def ask(first: int, count: int) -> list[int]:
        return [token async for output in server.generate([first], Sampling(count)) for token in output.tokens]

    async def main() -> list[list[int]]:
        slow = asyncio.create_task(ask(1, 3000))
        quick = await asyncio.gather(*(ask(first, 20) for first in range(8)))
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        with pytest.raises(ContractError, match="prompt is empty"):
            await anext(server.generate([]))
        while not engine.is_idle:
            await asyncio.sleep(0.01)
        return quick

    assert asyncio.run(main()) == [alone([first], Sampling(20)) for first in range(8)]
    assert engine.pool.num_used == 0


def test_an_error_of_the_model_reaches_those_that_had_pages_and_gives_these_back():
    all_there = threading.Event()

    class Failing(FakeModel):
        def step(self, tokens, *rest):
            assert all_there.wait(60)
            if any(22 in new for new in tokens):
                raise MemoryError("no memory")
            return super().step(tokens, *rest)

    engine = Engine(Failing(40, 4), max_running=3)
    server = AsyncEngine(engine)

    async def ask(first: int) -> list[int]:
        sampling = Sampling(9, logit_bias={22: -100})
        return [token async for output in server.generate([first], sampling) for token in output.tokens]

    async def main() -> list:
        waiting = [asyncio.create_task(ask(first)) for first in (1, 2, 22, 3, 4)]
        await asyncio.sleep(0)  # all are added; the first step has the first one
        all_there.set()
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert engine.pool.num_used == 0
        assert server.failures == 0
        with pytest.raises(MemoryError, match="no memory"):
            await ask(22)
        async with asyncio.timeout(60):
            while engine.pool.num_used:  # nobody asks for anything any more
                await asyncio.sleep(0.001)
        assert server.failures == 1
        return done

    *failed, third, fourth = asyncio.run(main())
    assert [str(error) for error in failed] == ["no memory"] * 3
    assert [third, fourth] == [alone([first], Sampling(9, logit_bias={22: -100})) for first in (3, 4)]


def test_structures_are_compiled_beside_the_steps():
    """Two that take long to compile, and a request without a structure meanwhile; what is refused is refused."""
    compiling, may_go = threading.Event(), threading.Event()

    class Slow(Letters):
        @property
        def structure_compiler(self):
            compiling.set()
            assert may_go.wait(60)
            raise ContractError("structured_output: it cannot be compiled")

    server = AsyncEngine(Engine(FakeModel(40, 4), Slow()))

    async def ask(sampling: Sampling) -> int:
        return len([output async for output in server.generate([1], sampling)])

    async def main() -> None:
        slow = [asyncio.create_task(ask(Sampling(3, structured_output=Regex("a")))) for _ in range(2)]
        await asyncio.to_thread(compiling.wait, 60)
        assert await ask(Sampling(3)) == 3
        may_go.set()
        for task in slow:
            with pytest.raises(ContractError, match="cannot be compiled"):
                await task

    asyncio.run(main())
