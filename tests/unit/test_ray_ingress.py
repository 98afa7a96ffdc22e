"""The ingress without Ray: what a body asks for, what is answered, and streams whose replicas die."""

import asyncio
import json
import threading
import time
from dataclasses import dataclass, replace

import pytest

from paged_kv.engine import Engine, Sampling
from paged_kv.engine.demo_model import FOLDER
from paged_kv.errors import ContractError, ContractTypeError, ToolchainError
from paged_kv.ray.ingress import Application, Replicas
from paged_kv.ray.protocol import Reader
from paged_kv.ray.replica import Model, Replica
from paged_kv.ray.streams import (
    BEGAN,
    FAILED,
    REFUSED,
    Clock,
    Diverged,
    Lost,
    Stalled,
    Suspects,
    resumed,
)
from paged_kv.serve.backend import Job, Piece
from support.fake_model import FakeModel, alone


class Died(Exception):
    pass


class Full(Exception):
    pass


class Down(Exception):
    pass


JOB = Job((1, 2, 3), Sampling(6, seed=1), 2)


def pieces_of(job: Job) -> list[Piece]:
    """Of all samples in turns, each token another letter."""
    count = job.sampling.max_tokens
    letter = lambda sample, at: chr(97 + (sum(job.tokens) + 7 * sample + at) % 26)  # noqa: E731
    return [
        Piece(sample, (at,), letter(sample, at), "length" if at == count - 1 else None, None)
        for at in range(count)
        for sample in range(job.n)
    ]


class Fleet:
    """Replicas by what happens to them: each start takes the next one, an exception after so many pieces."""

    def __init__(self, *ends: tuple[int, BaseException] | None) -> None:
        self.ends, self.started, self.closed = list(ends), 0, 0

    async def start(self, job: Job):
        end = self.ends[self.started] if self.started < len(self.ends) else None
        self.started += 1
        try:
            pieces = pieces_of(job)
            for at, piece in enumerate(pieces if self.started % 2 else pieces[:1]):
                if end is not None and at == end[0]:
                    raise end[1]
                yield [piece]
            if self.started % 2 == 0:  # another rhythm: several at once
                if end is not None:
                    yield pieces[1 : end[0]]
                    raise end[1]
                yield pieces[1:]
        finally:
            self.closed += 1


async def one(fleet: Fleet, retries=2, clock=None, job=JOB, suspects=None) -> list[Piece]:
    stream = resumed(
        lambda avoid: fleet.start(replace(job, avoid=avoid)),
        job.n,
        lost=(Died,),
        full=(Full,),
        retries=retries,
        clock=clock or Clock(5.0),
        suspects=suspects or Suspects(),
    )
    return [piece async for batch in stream for piece in batch]


class Instant(asyncio.SelectorEventLoop):
    """Waits take no time: its clock is set to what comes next."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__()
        select = self._selector.select
        self._selector.select = lambda timeout=None: self.pass_by(timeout or 0) or select(0)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def time(self) -> float:
        return self.now


def instantly(work):
    with asyncio.Runner(loop_factory=Instant) as runner:
        return runner.run(work)


def collected(fleet: Fleet, **options) -> list[Piece]:
    return instantly(one(fleet, **options))


@pytest.mark.parametrize("first", range(12))
@pytest.mark.parametrize("second", [1, 5, 11])
def test_a_stream_whose_replicas_die_gives_each_piece_once(first, second):
    fleet = Fleet((first, Died()), (second, Died()))
    assert collected(fleet) == pieces_of(JOB)
    assert (fleet.started, fleet.closed) == (3, 3)


def test_a_request_ends_no_more_replicas_than_it_may():
    fleet = Fleet(*[(0, Died())] * 9)
    with pytest.raises(Lost, match="3 replicas were lost"):
        collected(fleet)
    assert fleet.started == 3
    with pytest.raises(Lost, match="1 replicas"):
        collected(Fleet((4, Died())), retries=0)


def test_a_stream_that_ends_too_early_is_a_replica_lost():
    class Short(Fleet):
        async def start(self, job):
            self.started += 1
            for piece in pieces_of(job)[: 5 if self.started == 1 else None]:
                yield [piece]

    assert collected(Short()) == pieces_of(JOB)


def test_another_text_is_never_sent():
    class Liar(Fleet):
        async def start(self, job):
            self.started += 1
            for at, piece in enumerate(pieces_of(job)):
                if self.started == 1 and at == 5:
                    raise Died
                yield [piece._replace(tokens=(99,)) if self.started == 2 and at == 3 else piece]

    with pytest.raises(Diverged, match="token 1 of sample 1"):
        collected(Liar())


class Running(Fleet):
    """Replicas that run all their requests at once, and die of token 666 with all of them; another one comes then."""

    def __init__(self, replicas: int, dies_at: int) -> None:
        super().__init__()
        self.running, self.made, self.dies_at = {f"r{number}": 0 for number in range(replicas)}, replicas, dies_at

    async def start(self, job):
        name = min(self.running, key=lambda name: (name in job.avoid, self.running[name]))
        self.running[name] += 1
        try:
            yield [Piece(BEGAN, (), name, None, None)]
            for at, piece in enumerate(pieces_of(job)):
                await asyncio.sleep(0.01)
                if job.tokens == (666,) and at == self.dies_at and self.running.pop(name, None) is not None:
                    self.running[f"r{self.made}"] = 0
                    self.made += 1
                if name not in self.running:
                    raise Died
                yield [piece]
        finally:
            if name in self.running:
                self.running[name] -= 1


@pytest.mark.parametrize(("dies_at", "tokens", "poisons"), [(0, 6, 1), (5, 6, 1), (0, 200, 2), (5, 200, 2)])
def test_a_poisoned_request_takes_no_others_with_it_and_ends_no_more_replicas_than_it_may(dies_at, tokens, poisons):
    """Nor those that had their turn and still run on when it comes to its own."""
    fleet, suspects = Running(2, dies_at), Suspects()
    jobs = [
        replace(JOB, tokens=(number,), sampling=Sampling(tokens, seed=1))
        for number in (*range(20), *[666] * poisons, *range(20, 40))
    ]

    async def run():
        clock = Clock(1000)
        tasks = (one(fleet, job=job, suspects=suspects, clock=clock) for job in jobs)
        return await asyncio.gather(*tasks, return_exceptions=True)

    for job, found in zip(jobs, instantly(run()), strict=True):
        if job.tokens == (666,):
            assert "3 replicas were lost" in str(found)
        else:
            assert found == pieces_of(job)
    assert fleet.made - 2 == 3 * poisons


def test_a_request_that_gets_further_each_time_ends_one_replica_more_and_no_others():
    class Later(Fleet):
        async def start(self, job):
            self.started += 1
            for piece in pieces_of(job)[: 100 * self.started]:
                yield [piece]
            raise Died

    fleet = Later()
    with pytest.raises(Lost, match="4 replicas were lost"):
        collected(fleet, job=replace(JOB, sampling=Sampling(1000, seed=1)))
    assert fleet.started == 4


def test_a_step_that_raises_is_tried_on_another_replica():
    class Failing(Fleet):
        async def start(self, job):
            self.ends.append(job.avoid)
            yield [Piece(BEGAN, (), f"r{len(self.ends)}", None, None)]
            failed = Piece(FAILED, (), "", "error", "a step raised ValueError")
            yield [*pieces_of(job)[: 2 * len(self.ends)], *([failed] if len(self.ends) < 3 else [])]
            yield pieces_of(job)[6:]

    fleet = Failing()
    assert collected(fleet) == pieces_of(JOB)
    assert fleet.ends == [set(), {"r1"}, {"r1", "r2"}]
    with pytest.raises(Lost, match=r"1 replicas were lost .* a step raised ValueError"):
        collected(Failing(), retries=0)


def test_a_request_that_was_taken_waits_where_the_queue_is_full():
    fleet = Fleet((3, Died()), (0, Full()), (0, Full()), None)
    assert collected(fleet) == pieces_of(JOB)
    with pytest.raises(Full):
        collected(Fleet((0, Full())))
    with pytest.raises(Stalled, match="the queue was full"):
        collected(Fleet((3, Died()), *[(0, Full())] * 99))


def test_a_queue_is_told_from_a_replica_that_hangs():
    """Who waits in Ray's queue or in an engine's waits as long as these go on."""

    class Queue(Fleet):
        async def start(self, job):
            if job.tokens == (2,):  # no replica has room for it
                await asyncio.sleep(60)
            yield [Piece(BEGAN, (), "r", None, None)]
            if job.tokens == (3,):  # the step of this one hangs
                await asyncio.sleep(3600)
            for _ in range(12):
                await asyncio.sleep(5)
                yield []
            yield pieces_of(job)

    jobs = [replace(JOB, tokens=(number,)) for number in (1, 2, 3)]

    async def run():
        clock = Clock(10)
        first, second, third = (asyncio.create_task(one(Queue(), job=job, clock=clock)) for job in jobs)
        with pytest.raises(Stalled, match="nothing came for 10 s"):
            await third
        assert asyncio.get_running_loop().time() == pytest.approx(10)
        return [await first, await second]

    assert instantly(run()) == [pieces_of(job) for job in jobs[:2]]
    with pytest.raises(Stalled, match="nothing came"):
        instantly(one(Queue(), job=jobs[1], clock=Clock(10)))


def test_other_errors_go_through():
    with pytest.raises(ZeroDivisionError):
        collected(Fleet((3, ZeroDivisionError())))


# The reader and the answers, with the tokenizer of the demo's model.


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(FOLDER, "demo", 512)


def read(reader, is_chat=False, **body):
    body = {"prompt": "In the beginning"} | body if not is_chat else body
    return reader.read(json.dumps(body).encode(), is_chat=is_chat)


def test_fields_become_sampling(reader):
    asked = read(
        reader, max_tokens=5, temperature=0.5, top_k=3, stop=["x"], seed=4, n=2, stream=True, logit_bias={"7": 1}
    )
    expected = Sampling(5, 0.5, seed=4, stop=["x"], top_k=3, logit_bias={7: 1})
    assert (asked.job.sampling, asked.job.n, asked.stream) == (expected, 2, True)
    assert read(reader, ignore_eos=True, stop_token_ids=[3], seed=1).job.sampling == Sampling(
        16, 1.0, seed=1, stop_tokens=[3], ignore_end=True
    )
    assert read(reader).job.sampling.seed != read(reader).job.sampling.seed is not None
    assert read(reader, user="me", metadata={"a": "b"}, store=False, tools=[], suffix=None).job.n == 1
    assert read(reader, prompt=["In the beginning"]).job.tokens == read(reader).job.tokens
    assert read(reader, prompt=[[5, 6]]).job.tokens == read(reader, prompt=[5, 6]).job.tokens == (5, 6)


def test_a_chat_is_its_template(reader):
    messages = [{"role": "user", "content": "In the"}, {"role": "user", "content": [{"type": "text", "text": "sea"}]}]
    asked = read(reader, is_chat=True, messages=messages)
    assert asked.job.tokens == read(reader, prompt="In the\nsea\n").job.tokens  # one <s>, not two
    assert asked.job.sampling.max_tokens == 512 - len(asked.job.tokens)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [10**6]}, "vocabulary"),
        ({"prompt": "a " * 9000}, "characters"),
        ({"prompt": "a " * 3000}, "tokens"),
        ({"max_tokens": 600}, "fit"),
        ({"model": "other"}, "not served"),
        ({"temperature": -1}, "temperature"),
        ({"n": 99}, "n must"),
        ({"logprobs": 1}, "logprobs is not supported"),
        ({"tools": [{}]}, "tools is not supported"),
        ({"guided_regex": "a+"}, "guided_regex is no field"),
        ({"messages": []}, "messages is no field"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"user_namespace": 3}, "user_namespace"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(reader, body, reason):
    with pytest.raises((ContractError, ContractTypeError), match=reason):
        read(reader, **body)


@pytest.mark.parametrize(
    "messages", [None, [], [3], [{"role": "user"}], [{"role": "user", "content": [{"type": "x"}]}]]
)
def test_messages_that_are_none_are_refused(reader, messages):
    with pytest.raises(ContractTypeError, match="messages"):
        read(reader, is_chat=True, messages=messages)


def ask(reader, fleet, body, path="/v1/completions"):
    """Status, headers and body of a request to the ingress behind its door."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": body if isinstance(body, bytes) else json.dumps(body).encode()}

    async def send(message):
        sent.append(message)

    replicas = Replicas(fleet.start, (Died,), (Full,), (Down,))
    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    asyncio.run(Application(reader, replicas)(scope, receive, send))
    headers = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    assert not sent[-1].get("more_body", False)
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:])


def events(body: bytes) -> list:
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def text_of(job: Job, sample: int) -> str:
    return "".join(piece.text for piece in pieces_of(job) if piece.sample == sample)


BODY = {"prompt": [1, 2, 3], "max_tokens": 6, "seed": 1, "n": 2}


def test_a_stream_has_the_text_of_each_sample_though_a_replica_dies(reader):
    status, headers, body = ask(
        reader, Fleet((7, Died())), BODY | {"stream": True, "stream_options": {"include_usage": True}}
    )
    *found, last, done = events(body)
    assert (status, headers["content-type"], done) == (200, "text/event-stream", "[DONE]")
    for sample in range(2):
        mine = [event["choices"][0] for event in found if event["choices"][0]["index"] == sample]
        assert "".join(choice["text"] for choice in mine) == text_of(JOB, sample)
        assert [choice["finish_reason"] for choice in mine][-1] == "length"
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}


def test_an_answer_in_one(reader):
    status, _, body = ask(reader, Fleet((7, Died())), BODY)
    choices = json.loads(body)["choices"]
    assert status == 200
    assert [choice["text"] for choice in choices] == [text_of(JOB, 0), text_of(JOB, 1)]


def test_a_chat_answers_as_openai_does(reader):
    messages = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "seed": 2}
    job = replace(read(reader, is_chat=True, **messages).job)
    _, _, body = ask(reader, Fleet(), messages, "/v1/chat/completions")
    assert json.loads(body)["choices"][0]["message"] == {"role": "assistant", "content": text_of(job, 0)}
    _, _, body = ask(reader, Fleet(), messages | {"stream": True}, "/v1/chat/completions")
    deltas = [event["choices"][0]["delta"] for event in events(body)[:-1]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta["content"] for delta in deltas) == text_of(job, 0)


def test_errors_have_openais_shape_and_say_whether_to_ask_again(reader):
    status, headers, body = ask(reader, Fleet((0, Full())), BODY)
    assert (status, headers["retry-after"]) == (429, "1")
    assert json.loads(body)["error"]["type"] == "rate_limit_error"
    status, _, body = ask(reader, Fleet((0, Down())), BODY)
    assert (status, "No engine could start" in body.decode()) == (503, True)
    status, headers, body = ask(reader, Fleet(*[(0, Died())] * 3), BODY)
    assert (status, headers["x-should-retry"]) == (500, "false")
    status, headers, body = ask(reader, Fleet((0, ZeroDivisionError("secret"))), BODY)
    assert (status, "secret" in body.decode()) == (500, False)
    for path, wrong, expected in (("/v1/completions", b"{", 400), ("/v1/else", BODY, 404)):
        assert ask(reader, Fleet(), wrong, path)[0] == expected


def test_an_error_in_the_middle_of_a_stream_is_its_last_event(reader):
    _, _, body = ask(reader, Fleet(*[(3, Died())] * 3), BODY | {"stream": True})
    *_, last = events(body)
    assert "replicas were lost" in last["error"]["message"]


def test_what_an_engine_refuses_is_400_and_what_fails_in_it_is_said(reader):
    class Refusing(Fleet):
        async def start(self, _):
            yield [Piece(REFUSED, (), "", "error", "needs 9 pages")]

    class Failing(Fleet):
        async def start(self, job):
            yield [pieces_of(job)[0], Piece(1, (), "", "error", "logits hold NaN")]

    status, _, body = ask(reader, Refusing(), BODY)
    assert (status, json.loads(body)["error"]["message"]) == (400, "needs 9 pages")
    status, _, body = ask(reader, Failing(), BODY)
    assert (status, json.loads(body)["error"]["message"]) == (500, "logits hold NaN")


# A replica, whose model needs no compiler.


class Held(FakeModel):
    """Its steps wait until they may go on; where token 22 is in one, it raises."""

    def __init__(self) -> None:
        super().__init__(40, 4)
        self.may_go = threading.Event()
        self.may_go.set()

    def step(self, tokens, *rest):
        assert self.may_go.wait(60)
        if any(22 in new for new in tokens):
            raise ValueError("22")
        return super().step(tokens, *rest)


@dataclass(frozen=True)
class Faked(Model):
    inner: FakeModel | None = None

    def engine(self):
        return Engine(self.inner, max_running=1)


def test_a_replica_says_what_became_of_a_request_and_whether_it_is_well():
    model = Held()
    replica = Replica(Faked("fake", inner=model), "here", 0.8)
    quick = Sampling(3, logit_bias={22: -100})

    async def ask(*tokens: int) -> list:
        return [piece async for batch in replica.generate(Job(tokens, quick)) for piece in batch or [None]]

    async def main() -> None:
        began, *pieces = await ask(1)
        assert began == Piece(BEGAN, (), "here", None, None)
        assert [piece.tokens for piece in pieces if piece] == [(token,) for token in alone([1], quick)]
        _, *_, failed = await ask(22)
        assert (failed.sample, failed.error) == (FAILED, "a step raised ValueError")
        assert (await ask())[-1].sample == REFUSED
        await replica.check_health()
        for _ in range(2):
            await ask(22)
        with pytest.raises(ToolchainError, match="3 steps in a row raised"):
            await replica.check_health()
        await ask(1)
        await replica.check_health()
        model.may_go.clear()
        stuck = asyncio.create_task(ask(1))
        await replica.check_health()
        await asyncio.sleep(0.5)
        with pytest.raises(ToolchainError, match="a step has not ended"):
            await replica.check_health()
        assert (await stuck)[-1][4].startswith("a step has not ended")
        model.may_go.set()

    asyncio.run(main())


def test_a_replica_that_is_busy_with_others_says_so():
    class Slow(FakeModel):
        def step(self, *rest):
            time.sleep(0.002)
            return super().step(*rest)

    replica = Replica(Faked("fake", inner=Slow(40, 4)), "here", 0.08)

    async def ask(first: int) -> list:
        return [batch async for batch in replica.generate(Job((first,), Sampling(100)))]

    async def main() -> list:
        return await asyncio.gather(*(ask(first) for first in range(2)))

    _, waiting = asyncio.run(main())
    assert waiting[:2] == [[Piece(BEGAN, (), "here", None, None)], []]
