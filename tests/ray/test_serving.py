"""Replicas of the demo's model, one core each, on two raylets: the engine's own texts, whatever happens to replicas."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from ray import serve

from benchmarks.routing_sim import Conversations, simulate
from paged_kv.engine import Sampling
from support.ray_load import SECONDS, Killer, right_texts

PROMPTS = [f"And the king {number} sent messengers unto" for number in range(64)]


def test_64_streams_of_openais_client_have_the_engines_texts(start, engine):
    app = start(replicas=2)
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
    assert [state["pages"]["used"] for state in states.values()] == [0, 0]
    assert all(state["decode_tokens"] > 0 for state in states.values())
    first, second = (set(state["cpus"]) for state in states.values())
    assert (len(first), len(second), first & second) == (1, 1, set())


def test_a_chat_and_what_is_refused_at_the_door(start):
    app = start(replicas=1)
    with openai.OpenAI(base_url=app.url, api_key="none", timeout=SECONDS, max_retries=0) as client:
        messages = [{"role": "user", "content": "In the beginning"}]
        answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=8, seed=1)
        again = client.chat.completions.create(model="demo", messages=messages, max_tokens=8, seed=1)
        assert answer.choices[0].message.content == again.choices[0].message.content
        assert answer.usage.completion_tokens == 8
        assert [model.id for model in client.models.list()] == ["demo"]
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model="demo", prompt="x", temperature=-1)
    root = app.url.removesuffix("/v1")
    assert httpx.get(root + "/health", timeout=60).status_code == 200
    body = {"prompt": "x", "max_tokens": 1}
    assert httpx.post(app.url + "/completions", json=body, headers={"Host": "evil"}, timeout=60).status_code == 403
    assert httpx.post(app.url + "/completions", content=b"{}", timeout=60).status_code == 415


def test_a_client_that_leaves_gives_its_pages_back(start):
    app = start(replicas=1)
    body = {"prompt": "In", "max_tokens": 4000, "temperature": 0, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", app.url + "/completions", json=body, timeout=SECONDS) as first:
        next(first.iter_lines())
    (state,) = app.idle().values()
    assert state["pages"]["used"] == 0
    assert state["decode_tokens"] < 3900


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


def test_prefixes_raise_the_hit_rate_by_what_the_simulation_says(start):
    found = {}
    for router in ("round_robin", "prefix"):
        app = start(replicas=2, router=router, num_pages=400)
        rounds = Conversations(20, 4, seed=1).rounds()
        prompts = 0
        for prompts_of_round in rounds:
            replies = app.ask_all(prompts_of_round, 4, max_tokens=1)
            assert all(reply.whole for reply in replies)
            prompts += sum(map(len, prompts_of_round))
        found[router] = sum(state["tokens_found"] for state in app.idle().values()) / prompts
        serve.delete("app")
    said = {
        router: simulate(Conversations(20, 4, seed=1), router, replicas=2, pages=400, at_once=4).hit_rate
        for router in found
    }
    print(f"found {found}, simulated {said}")
    assert found["prefix"] > found["round_robin"]
    assert abs((found["prefix"] - found["round_robin"]) - (said["prefix"] - said["round_robin"])) < 0.1


def test_replicas_that_are_killed_change_no_text_and_come_back(start, engine, kills):
    """Each client gets its text or an error; none waits for ever; afterwards all replicas serve."""
    app = start(replicas=2)
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
    assert killer.done == kills
    print(f"{kills} kills: {ended}, the slowest took {slowest:.1f} s")
    assert ended["whole"] > ended["error"]
    assert len(app.idle()) == 2
    assert [reply.text for reply in app.ask_all(prompts, 24, max_tokens=64)] == greedy
    assert [state["pages"]["used"] for state in app.idle().values()] == [0, 0]


def test_a_stream_is_drained_when_the_application_ends(start, engine):
    app = start(replicas=1)
    (expected,) = right_texts(engine, PROMPTS[:1], Sampling(600, ignore_end=True))
    body = {"prompt": PROMPTS[0], "max_tokens": 600, "temperature": 0, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", app.url + "/completions", json=body, timeout=SECONDS) as stream:
        lines = stream.iter_lines()
        got = [next(lines)]
        ending = threading.Thread(target=serve.delete, args=("app",))
        ending.start()
        got += [line for line in lines if line]
    ending.join(SECONDS)
    assert got[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in got[:-1] if line]
    assert "".join(event["choices"][0]["text"] for event in events) == expected
