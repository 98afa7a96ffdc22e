"""Replicas of the demo's model, one core each, on two raylets: the engine's own texts, whatever happens to replicas."""

import asyncio
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path

import httpx
import openai
import pytest
import ray
from ray import serve

from benchmarks.routing_sim import Conversations, simulate
from paged_kv.engine import Sampling, load
from paged_kv.engine.demo_model import FOLDER
from paged_kv.ray import application
from support.ray_load import SECONDS, Killer, right_texts
from support.served import served

TEMPLATE = (
    '{% if tools %}{{ tools | tojson }} Call them by <tool_call>{"name": ..., "arguments": ...}</tool_call>.{% endif %}'
    "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endfor %}"
)
PROMPTS = [f"And the king {number} sent messengers unto" for number in range(64)]


def test_64_streams_of_openais_client_have_the_engines_texts(shared, engine):
    app = shared(replicas=2)
    expected = right_texts(engine, PROMPTS, Sampling(40, ignore_end=True))

    async def ask(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(
            model="demo", prompt=prompt, max_tokens=40, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        return "".join([event.choices[0].text async for event in stream])

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=app.url, api_key="none", timeout=SECONDS) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS))

    assert asyncio.run(all_at_once()) == expected
    states = app.idle()
    assert [state["used_pages"] for state in states.values()] == [0, 0]
    assert all(state["decode_tokens"] > 0 for state in states.values())
    first, second = (set(state["cpus"]) for state in states.values())
    assert (len(first), len(second), first & second) == (1, 1, set())


def test_health_is_that_of_the_replica_that_is_left(shared):
    app = shared(replicas=2)
    killed, left = app.status()
    os.kill(killed, signal.SIGKILL)
    asked = []
    with ThreadPoolExecutor(1) as threads:
        back = threads.submit(app.status)
        while not back.done():
            asked.append(httpx.get(app.url + "/health", timeout=60).status_code)
    assert (set(asked), len(asked) > 3) == ({200}, True)
    assert len(back.result(60).keys() - {killed, left}) == 1


def test_replicas_that_are_killed_change_no_text_and_come_back(shared, engine, kills):
    """Each client gets its text or an error; none waits for ever; each replica is soon back, and serves."""
    app = shared(replicas=2)
    prompts = PROMPTS[:24]
    greedy = right_texts(engine, prompts, Sampling(64, ignore_end=True))
    drawn = right_texts(engine, prompts, Sampling(64, 0.9, seed=7, ignore_end=True))
    killer = Killer(app, kills, seed=3, most_seconds=2.0)
    killer.start()
    ended = {"whole": 0, "error": 0}
    slowest, end = 0.0, time.monotonic() + SECONDS + 60 * kills
    while killer.is_alive() and time.monotonic() < end:
        for expected, options in ((greedy, {}), (drawn, {"temperature": 0.9, "seed": 7})):
            for reply, text in zip(app.ask_all(prompts, 12, max_tokens=64, **options), expected, strict=True):
                assert reply.whole != (reply.error is not None), reply
                assert (reply.text == text) if reply.whole else text.startswith(reply.text), (reply, text)
                ended["whole" if reply.whole else "error"] += 1
                slowest = max(slowest, reply.seconds)
    killer.stop.set()
    killer.join(SECONDS)
    assert killer.error is None, killer.error
    assert len(killer.back) == kills
    print(f"{kills} kills: {ended}, the slowest took {slowest:.1f} s")
    print(f"started in {app.start_seconds:.1f} s, back after {sorted(round(took, 1) for took in killer.back)} s")
    assert max(killer.back) < 3 * app.start_seconds + 10  # beside the load, which has the CPUs too
    assert ended["whole"] > ended["error"]
    assert len(app.idle()) == 2
    assert [reply.text for reply in app.ask_all(prompts, 24, max_tokens=64)] == greedy
    assert [state["used_pages"] for state in app.idle().values()] == [0, 0]


def test_the_pool_of_a_replica_is_that_of_one_process(shared):
    pool = shared(replicas=1).url.removesuffix("/v1") + "/pool"
    with served() as here:
        told, alone = httpx.get(pool, timeout=60).json(), here.http.get("/pool").json()
    assert (told.keys(), told["pages"], told["used"]) == (alone.keys(), 512, 0)


def test_a_client_that_leaves_gives_its_pages_back(shared):
    app = shared(replicas=1)
    # Of 16 samples two have pages at a time, so these are half a minute's work or more.
    body = {"prompt": "In", "max_tokens": 4000, "n": 16, "temperature": 0, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", app.url + "/completions", json=body, timeout=SECONDS) as first:
        next(first.iter_lines())
    (state,) = app.idle().values()
    assert state["used_pages"] == 0
    assert state["decode_tokens"] < 16 * 3900


def test_a_stream_is_drained_when_the_application_ends(shared, engine):
    app = shared(replicas=1)
    tokens = 1500
    (expected,) = right_texts(engine, PROMPTS[:1], Sampling(tokens, ignore_end=True))
    with ThreadPoolExecutor(2) as threads:
        asked = threads.submit(app.ask, PROMPTS[0], max_tokens=tokens)
        while not any(state["running"] for state in app.status().values()):
            assert not asked.done()
        ending = threads.submit(serve.delete, "app")
        while serve.status().applications["app"].status != "DELETING":
            assert not ending.done()
        assert not asked.done()
        reply = asked.result(SECONDS)
        ending.result(SECONDS)
    assert (reply.whole, reply.text) == (True, expected)


def test_prefixes_raise_the_hit_rate_by_what_the_simulation_says(shared):
    found = {}
    for router in ("prefix", "round_robin"):
        app = shared(replicas=2, router=router, num_pages=400)
        rounds = Conversations(20, 4, seed=1).rounds()
        prompts = 0
        for prompts_of_round in rounds:
            replies = app.ask_all(prompts_of_round, 4, max_tokens=1)
            assert [reply for reply in replies if not reply.whole] == []
            prompts += sum(map(len, prompts_of_round))
        found[router] = sum(state["found_tokens"] for state in app.idle().values()) / prompts
    said = {
        router: simulate(Conversations(20, 4, seed=1), router, replicas=2, pages=400, at_once=4).hit_rate
        for router in found
    }
    print(f"found {found}, simulated {said}")
    assert found["prefix"] > found["round_robin"]
    assert abs((found["prefix"] - found["round_robin"]) - (said["prefix"] - said["round_robin"])) < 0.1


def test_the_pool_is_that_of_all_replicas(shared):
    """The metrics of two together, and each request by its replica."""
    app = shared(replicas=2, router="round_robin", num_pages=400)
    pool = app.url.removesuffix("/v1") + "/pool"
    body = {"prompt": "In", "max_tokens": 4000, "n": 16, "temperature": 0, "stream": True, "ignore_eos": True}
    with (
        httpx.stream("POST", app.url + "/completions", json=body, timeout=SECONDS) as first,
        httpx.stream("POST", app.url + "/completions", json=body, timeout=SECONDS) as second,
    ):
        lines = [first.iter_lines(), second.iter_lines()]  # a stream is closed with what reads it
        assert [next(each)[:5] for each in lines] == ["data:"] * 2
        told = httpx.get(pool, timeout=60).json()
    assert (told["pages"], len(told["owners"])) == (800, 800)
    assert [(each["pages"], each["running"] > 0) for each in told["replicas"]] == [(400, True)] * 2
    names = [each["name"] for each in told["replicas"]]
    assert {request["name"].rpartition("/")[0] for request in told["requests"]} == set(names)
    assert sum(each["used"] for each in told["replicas"]) == told["used"] > 0
    assert {state["used_pages"] for state in app.idle().values()} == {0}


def test_a_request_is_answered_as_in_one_process(start, tmp_path):
    """Several prompts with log-probabilities, cached tokens, a call, refusals: as the one application has them."""
    (tmp_path / "template").write_text(TEMPLATE)
    app = start(replicas=2, chat_template=str(tmp_path / "template"), metrics=True)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "act", "parameters": schema}}]
    chat = {"messages": [{"role": "user", "content": "In the beginning"}], "max_tokens": 24, "seed": 1}
    called = chat | {"tools": tools, "tool_choice": "required", "max_tokens": 60, "temperature": 0}
    prompts = {"prompt": ["In the beginning " * 8, [5, 6, 7]], "max_tokens": 6, "temperature": 0, "n": 2}
    asked = [
        ("/completions", prompts | {"logprobs": 2, "echo": True}),
        ("/completions", prompts),
        ("/chat/completions", chat | {"logprobs": True, "top_logprobs": 2}),
        ("/chat/completions", called),
        ("/completions", {"prompt": "x", "temperature": -1}),
        ("/completions", {"prompt": "x", "unknown": 1, "max_tokens": 4, "temperature": 0}),
        ("/tokenize", {"prompt": "x"}),
    ]
    answers = []
    with served(num_pages=512, length=8192, template=TEMPLATE) as here:
        for path, body in asked:
            path = path if path == "/tokenize" else "/v1" + path
            answer = httpx.post(app.url.removesuffix("/v1") + path, json={"model": "demo"} | body, timeout=SECONDS)
            status, expected = here.post(path, {"model": "demo"} | body)
            answers.append(answer.json())
            assert (answer.status_code, comparable(answer.json())) == (status, comparable(expected))
    (call,) = answers[3]["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a"] in (1, 2)
    root = app.url.removesuffix("/v1")
    assert "vllm:request_success_total" in httpx.get(root + "/metrics", timeout=60).text
    assert httpx.post(app.url + "/completions", json=prompts, headers={"Host": "evil"}, timeout=60).status_code == 403


def comparable(value):
    """An answer without what differs from one to the next."""
    if isinstance(value, dict):
        return {key: comparable(each) for key, each in value.items() if key not in ("id", "created", "max_model_len")}
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-3)
    return [comparable(each) for each in value] if isinstance(value, list) else value


def test_every_option_of_the_engine(start, tmp_path):
    """Codes in the cache, rotation, a draft and prefixes on disk: the engine's text; a new replica finds the prefix."""
    options = {"cache_dtype": "int8", "cache_rotation": "hadamard", "page_size": 8}
    options |= {"speculate": str(FOLDER), "kv_disk": str(tmp_path / "kv"), "kv_disk_gb": "0.5"}
    prompt = "And the LORD spake unto Moses, saying, " * 5
    engine = load(FOLDER, num_pages=512, page_size=8, dtype="float32", kv_format="int8", cache_rotation="hadamard")
    (expected,) = right_texts(engine, [prompt], Sampling(24, ignore_end=True))
    restored = []
    for _ in range(2):
        app = start(replicas=1, **options)
        assert app.ask(prompt, max_tokens=24).text == expected
        (state,) = app.idle().values()
        assert state["accepted_tokens"] > 0
        restored.append(state["restored_tokens"])
        serve.delete("app")
    assert (restored[0], restored[1] > 30) == (0, True)


def test_a_full_queue_is_429_and_says_when_to_come_again(start):
    app = start(replicas=1, max_ongoing=1, max_queued=1)
    body = {"prompt": "In", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(12) as clients:
        answers = list(
            clients.map(lambda _: httpx.post(app.url + "/completions", json=body, timeout=SECONDS), range(12))
        )
    refused = [answer for answer in answers if answer.status_code == 429]
    served = [answer.json()["choices"][0]["text"] for answer in answers if answer.status_code == 200]
    assert len(refused) + len(served) == 12
    assert refused
    assert len(set(served)) == 1
    assert all(answer.headers["retry-after"] == "1" for answer in refused)
    assert {answer.json()["error"]["type"] for answer in refused} == {"rate_limit_error"}


class Faulty(application.NamedReplica):
    """From its sixth step on a replica takes the file `raise` and raises, or `hang` and hangs; each is taken once."""

    faults: Path

    def __init__(self, arguments: application.Arguments) -> None:
        super().__init__(arguments)
        step, steps = self._backend.engine.step, count()

        def faulty() -> list:
            if next(steps) >= 5:
                with suppress(FileNotFoundError):
                    (self.faults / "raise").rename(self.faults / "raised")
                    raise ValueError
                with suppress(FileNotFoundError):
                    (self.faults / "hang").rename(self.faults / "hung")
                    time.sleep(SECONDS)
            return step()

        self._backend.engine.step = faulty


def test_the_streams_of_a_step_that_raises_or_hangs_go_on_elsewhere(start, engine, tmp_path, monkeypatch):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    Faulty.faults = tmp_path
    monkeypatch.setattr(application, "NamedReplica", Faulty)
    app = start(replicas=2, stall_seconds=16)
    first = app.status().keys()
    prompts = PROMPTS[:16]
    expected = right_texts(engine, prompts, Sampling(64, ignore_end=True))
    for fault, fate in (("raise", "raised"), ("hang", "hung")):
        (tmp_path / fault).touch()
        replies = app.ask_all(prompts, 16, max_tokens=64)
        assert (tmp_path / fate).exists()
        assert [reply.error for reply in replies] == [None] * 16
        assert [reply.text for reply in replies] == expected
    states = app.idle()
    assert len(states.keys() - first) == 1  # the one that hung was restarted, the one that raised was not
    assert [state["used_pages"] for state in states.values()] == [0, 0]
