"""The server survives faults: it answers in the API's error shape, goes on, and its pages come back."""

import asyncio
import json
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from paged_kv.engine import load
from paged_kv.engine.demo_model import FOLDER
from paged_kv.errors import ContractError
from paged_kv.serve.profiling import Profiling
from support.program_faults import between_kernels, refusing
from support.served import served

CLIENTS = 32


def text(server, prompt, **overrides):
    options = {"max_tokens": 16, "temperature": 0} | overrides
    return server.client.completions.create(model="demo", prompt=prompt, **options).choices[0].text


def wait_until(fits, seconds=60):
    end = time.monotonic() + seconds
    while not fits() and time.monotonic() < end:
        time.sleep(0.005)
    assert fits()


class Held:
    """An engine whose steps wait until they may go on, or raise."""

    def __init__(self, engine):
        self.may_go, self.began, self.raises = threading.Event(), threading.Event(), None
        self.engine, step = engine, engine.model.step

        def held(tokens, *others):
            self.began.set()
            assert self.may_go.wait(60)
            if self.raises is not None and any(self.raises in new for new in tokens):
                raise MemoryError("a secret of the server")
            return step(tokens, *others)

        engine.model.step = held


@pytest.fixture
def held():
    return Held(load(FOLDER, num_pages=64, page_size=16, dtype="float32", max_step_tokens=64))


async def call(server, body, leave, parts=None):
    """The answer of the application to a client that leaves when `leave` is set, or once it has so many parts."""
    given, sent = [json.dumps(body).encode()], []

    async def receive():
        if given:
            return {"type": "http.request", "body": given.pop()}
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message.get("body", b""))
        if sum(map(bool, sent)) == parts:
            leave.set()

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    await server.http.app(scope | {"root_path": ""}, receive, send)
    return b"".join(sent)


def test_clients_that_leave_give_their_pages_back(server):
    """Whole answers and streams that are left in the middle, beside some that stay to the end.

    A stream is left after some of its events, a whole answer after some of the engine's steps.
    """
    alone, end = text(server, "client 0", max_tokens=24), {"finished_reason": "abort"}
    assert alone
    statistics = server.engine.statistics
    tokens_before = statistics.decode_tokens

    async def leave_at(step, leave):
        while statistics.steps < step:
            await asyncio.sleep(0.001)
        leave.set()

    async def one(index):
        leave, count = asyncio.Event(), random.Random(index).randint(1, 20)
        if index % 4 == 0:
            return await call(server, {"prompt": "client 0", "temperature": 0, "max_tokens": 24}, leave)
        body = {"prompt": f"client {index}", "temperature": 0, "max_tokens": 400, "ignore_eos": True}
        if index % 2 == 1:
            return await call(server, body | {"stream": True}, leave, count)
        return (await asyncio.gather(call(server, body, leave), leave_at(statistics.steps + count, leave)))[0]

    async def every():
        return await asyncio.gather(*map(one, range(CLIENTS)))

    answers = server.http.portal.call(every)
    for answer in answers[::4]:
        assert json.loads(answer)["choices"][0]["text"] == alone
    wait_until(lambda: server.engine.is_idle)
    assert server.engine.pool.num_used == server.backend.status().running == 0
    assert server.metric("vllm:request_success_total", **end) > CLIENTS // 4
    assert statistics.decode_tokens - tokens_before < CLIENTS * 400 // 4  # all that were asked for: three times as many


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages_within_a_step(held, stream):
    body, leave = {"prompt": "x", "max_tokens": 400, "stream": stream}, asyncio.Event()
    with served(held.engine) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.http.portal.call, call, server, body, leave)
        assert held.began.wait(60)
        server.http.portal.call(leave.set)
        asked.result(60)
        held.may_go.set()
        wait_until(lambda: held.engine.is_idle)
        assert held.engine.pool.num_used == 0
        assert held.engine.statistics.steps <= 2


def test_a_step_that_raises_ends_its_own_requests(held):
    """Those that wait for their turn go on; what was raised is no client's business."""
    engine = load(FOLDER, num_pages=64, page_size=16, dtype="float32", max_running=2)
    held = Held(engine)
    guilty = engine.encode("guilty")[-1]
    with served(engine) as server, ThreadPoolExecutor(4) as pool:
        held.may_go.set()
        alone = text(server, "innocent", max_tokens=20)
        held.may_go.clear()
        held.raises = guilty
        first = pool.submit(text, server, "beside it", max_tokens=20)
        assert held.began.wait(60)
        wait_until(lambda: engine.num_running == 1)
        second = pool.submit(text, server, [guilty], max_tokens=20)
        wait_until(lambda: engine.num_waiting == 1)
        third = pool.submit(text, server, "innocent", max_tokens=20)
        wait_until(lambda: engine.num_waiting == 2)
        held.may_go.set()
        for ended in (first, second):
            with pytest.raises(openai.InternalServerError) as refused:
                ended.result(60)
            assert refused.value.body["type"] == "api_error"
            assert "secret" not in refused.value.body["message"]
            assert refused.value.response.headers["x-should-retry"] == "false"
        assert third.result(60) == alone
        stream = server.client.completions.create(model="demo", prompt="x", max_tokens=20, stream=True)
        next(iter(stream))
        with pytest.raises(openai.APIError, match="MemoryError"):  # noqa: PT012
            held.raises = engine.encode("x")[-1]
            engine.model.step = lambda *_: (_ for _ in ()).throw(MemoryError)
            list(stream)
        wait_until(lambda: engine.pool.num_used == 0)


def test_a_kernel_that_refuses_in_the_middle_of_a_step_ends_its_requests(held):
    held.may_go.set()
    with served(held.engine) as server:
        alone = text(server, "x")
        with refusing(held.engine.model._program), pytest.raises(openai.InternalServerError) as refused:
            text(server, "x")
        assert refused.value.body["message"] == "a step raised ContractError"
        assert text(server, "x") == alone
        assert held.engine.pool.num_used == 0


def test_an_engine_that_is_gone_is_unhealthy(held, monkeypatch):
    held.may_go.set()
    with served(held.engine) as server:
        assert server.http.get("/health").status_code == 200
        held.raises = held.engine.encode("x")[-1]
        for _ in range(3):
            assert server.http.get("/health").status_code == 200
            assert server.post("/v1/completions", {"prompt": "x"})[0] == 500
        answer = server.http.get("/health")
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "3 steps in a row raised")
        held.raises = None
        assert text(server, "x")
        assert server.http.get("/health").status_code == 200
        held.may_go.clear()
        monkeypatch.setattr(server.backend, "_stall", 0.05)
        with ThreadPoolExecutor(1) as pool:
            hanging = pool.submit(text, server, "x")
            wait_until(lambda: server.http.get("/health").status_code == 503)
            assert "a step has not ended" in server.http.get("/health").json()["error"]["message"]
            held.may_go.set()
            hanging.result(60)


def test_a_full_queue_is_said_and_not_waited_for(held):
    with served(held.engine, most_samples=5) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.post, "/v1/completions", {"prompt": "x", "n": 4, "max_tokens": 2})
        assert held.began.wait(60)
        for body in ({"prompt": "x", "n": 2}, {"prompt": ["x"] * 2}):
            answer = server.http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["type"] == "rate_limit_error"
        held.may_go.set()
        assert waiting.result(60)[0] == 200
        wait_until(lambda: held.engine.is_idle)
        assert server.post("/v1/completions", {"prompt": "x", "n": 5, "max_tokens": 1})[0] == 200


def test_a_request_that_no_pool_holds_is_refused():
    with served(num_pages=4) as server:
        status, answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 100})
        assert status == 400
        assert "the pool has 4" in answer["error"]["message"]


def test_metrics_count(server):
    names = {
        "prompt_tokens_total": 2,
        "generation_tokens_total": 6,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 4,
        "e2e_request_latency_seconds_count": 1,
        "request_prompt_tokens_sum": 2,
        "request_generation_tokens_sum": 6,
    }
    assert text(server, "x", max_tokens=1)
    before = {name: server.metric(f"vllm:{name}") for name in names}
    ended = server.metric("vllm:request_success_total", finished_reason="length")
    server.client.completions.create(model="demo", prompt=[5, 6], max_tokens=3, n=2)
    assert {name: server.metric(f"vllm:{name}") - before[name] for name in names} == names
    assert server.metric("vllm:request_success_total", finished_reason="length") == ended + 1
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert server.metric(f"vllm:{name}") == 0
    assert sum(server.metric("paged_kv:pages", state=state) for state in ("free", "cached", "used")) == 512


def test_an_operator_sees_where_the_time_of_steps_goes(held):
    """The steps between a start and a stop, by two requests; a stop waits for the step that runs."""
    held.may_go.set()
    with served(held.engine, profile=True) as server, ThreadPoolExecutor(1) as pool:

        def ask(what):
            return server.http.post(f"/{what}_profile", json={})

        assert ask("stop").status_code == 400
        text(server, "x", max_tokens=9)
        assert ask("start").status_code == 200
        for prompt in ("And God", "In the end"):
            text(server, prompt, max_tokens=9, extra_body={"ignore_eos": True})
        stopped = ask("stop")
        assert stopped.headers["content-type"] == "text/plain; charset=utf-8"
        assert re.search(r"^steps of one token a request: 16, \d+\.\d{3} ms each$", stopped.text, re.MULTILINE)
        assert re.search(r"^other steps: 2, ", stopped.text, re.MULTILINE)
        assert re.search(r"^  attention +4 +\d+\.\d{3} +\d+\.\d %$", stopped.text, re.MULTILINE)
        assert ask("stop").json()["error"]["message"].startswith("no profile has been started")
        assert ask("start").status_code == 200
        program = held.engine.model._program
        with between_kernels(program, "usleep", 300_000):
            running = pool.submit(text, server, "z", max_tokens=1)
            wait_until(program._lock.locked)
            stopped = ask("stop")
            assert "steps: 1, " in stopped.text or "request: 1, " in stopped.text
            running.result(60)
    held.engine.model._program = None
    with pytest.raises(ContractError, match="compiled by MAX"):
        Profiling(held.engine.model)


@pytest.mark.slow
def test_prompts_keep_others_waiting_no_longer_than_they_may():
    """A step that is too long is followed by shorter ones; alone, a prompt takes all of a step."""
    engine = load(FOLDER, num_pages=512, page_size=16, dtype="float32", max_step_tokens=256, max_gap=0.05)
    sizes, step = [], engine.model.step

    def slow(tokens, *others):
        sizes.append(sum(map(len, tokens)))
        time.sleep(0.001 * sizes[-1])
        return step(tokens, *others)

    engine.model.step = slow
    with served(engine) as server:
        stream = server.client.completions.create(
            model="demo", prompt="x", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        for count in range(3):
            text(server, f"{count} and the word of the Lord came unto " * 40, max_tokens=1)
        list(stream)
        assert max(sizes[1:]) <= 65
        assert max(sizes[6:12]) < 60
        del sizes[:]
        text(server, "5 and the word of the Lord came unto " * 40, max_tokens=1)
        assert sizes[0] == 256
