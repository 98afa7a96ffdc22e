"""`paged-kv serve` in its own process: hostile requests get no token and OpenAI's errors, and cost others little."""

import asyncio
import json
import random
import signal
import threading
import time
import urllib.error
import urllib.request

import openai
import psutil
import pytest

from paged_kv.serve.routes import ROUTES
from support import guarded_server
from support.guarded_server import KEY, STOP_SECONDS
from support.rude_clients import SHAPE, Seen, answer_of, be_large, head, post, rude_request
from support.soaking import ask, soak

LARGE_REQUESTS = 1000
BEARER = f"Authorization: Bearer {KEY}"
LONG = {"ignore_eos": True}
GROWTH = 50 << 20
"""The memory of the server's process, in bytes."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with guarded_server.guarded(tmp_path_factory.mktemp("middleware"), "--drain-seconds", "1") as started:
        yield started


def client(server, key=KEY):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0, timeout=600)


def answer(server, sent):
    """The status and the decoded error of one request."""
    status, body = asyncio.run(answer_of(server.port, sent))
    return status, json.loads(body)["error"] if status != 200 else None


def running(server):
    """Return how many requests have pages."""
    url = f"http://127.0.0.1:{server.port}/pool"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"x-api-key": KEY}), timeout=60) as pool:
        return len(json.load(pool)["requests"])


@pytest.mark.slow
def test_the_key_opens_and_no_other_does(server):
    answered = client(server).completions.create(model="demo", prompt="x", max_tokens=2)
    assert answered.usage.completion_tokens == 2
    for key in ("none", KEY[:-1], KEY + "x"):
        with pytest.raises(openai.AuthenticationError):
            client(server, key).completions.create(model="demo", prompt="x", max_tokens=2)
        with pytest.raises(openai.AuthenticationError):
            client(server, key).models.list()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=60) as probe:
        assert probe.status == 200


@pytest.mark.parametrize("key", [KEY, "none"])
def test_anthropic_s_header_has_the_key_too(server, key):
    url, body = (
        f"http://127.0.0.1:{server.port}/v1/messages/count_tokens",
        {"messages": [{"role": "user", "content": "x"}]},
    )
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01", "Content-Type": "application/json"}
    asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
    if key == KEY:
        assert json.load(urllib.request.urlopen(asked, timeout=60))["input_tokens"]
        return
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        urllib.request.urlopen(asked, timeout=60)
    assert json.load(refused.value)["error"]["type"] == "authentication_error"


def test_the_page_needs_no_key_and_the_pool_does(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", timeout=60) as page:
        assert KEY.encode() not in page.read()
        assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'sha256-")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/pool", timeout=60)


def test_the_key_is_in_no_environment_and_no_command_line(server):
    """Nor in that of the server itself, once it has read it."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    for process in (server.process.pid, *(child.pid for child in children)):
        with open(f"/proc/{process}/cmdline", "rb") as read:
            assert KEY.encode() not in read.read()


OPERATORS = [route.path for route in ROUTES if route.access in ("metrics", "profile", "adapters")]


@pytest.mark.parametrize("path", [*OPERATORS, "/docs", "/openapi.json", "/reset_prefix_cache"])
def test_an_operators_route_is_off(server, path):
    for method in ("GET", "POST"):
        status, said = answer(server, head(path, 2, BEARER, method=method) + b"{}")
        assert (status, said["type"]) == (404, "not_found_error")


def test_no_hostile_request_gets_a_token(server):
    """400 of them, sixteen at a time; each is answered, and then the server answers as before."""
    before = server.complete("as before", max_tokens=16)["choices"]
    seen, dice = Seen(), random.Random(25)

    async def one(crowd):
        async with crowd:
            sent, leaves = rude_request(dice, KEY)
            seen.note("rude", *await answer_of(server.port, sent, leaves))

    async def every():
        crowd = asyncio.Semaphore(16)
        await asyncio.gather(*(one(crowd) for _ in range(400)))

    asyncio.run(every())
    assert not seen.wrong
    assert {f"rude {status}" for status in (400, 401, 403, 404, 415)} <= set(seen.statuses)
    assert server.complete("as before", max_tokens=16)["choices"] == before


def hostile_value(dice, depth=0):
    kinds = [
        None,
        True,
        -1,
        0,
        2**31,
        2**63,
        10**400,
        1e308,
        float("nan"),
        float("-inf"),
        "",
        "\0",
        "\ud800",
        "x" * 999,
    ]
    kinds += [[], {}, [[]], [None], ["x", 1], {"": {}}, [2**70], [-1], "stop", 0.5]
    value = dice.choice(kinds)
    if depth < 3 and dice.random() < 0.3:
        return [hostile_value(dice, depth + 1) for _ in range(dice.randrange(4))]
    return value


FIELDS = """model prompt messages max_tokens temperature top_p top_k min_p seed stop stop_token_ids ignore_eos logprobs
top_logprobs echo n best_of stream stream_options frequency_penalty presence_penalty logit_bias response_format tools
tool_choice user suffix unknown structured_outputs guided_json guided_choice min_tokens cache_salt chat_template_kwargs
max_completion_tokens reasoning_effort return_token_ids parallel_tool_calls typical_p""".split()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_wrong_values_in_right_requests(server, path):
    """A refusal is in OpenAI's shape; none ends the server. With the key: some may be answered."""
    dice, refused = random.Random(path), 0
    for _ in range(150):
        asked = {"model": "demo", "prompt": "x", "max_tokens": 2}
        if path.endswith("chat/completions"):
            asked = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        for name in dice.sample(FIELDS, dice.randrange(1, 4)):
            asked[name] = hostile_value(dice)
        if asked.get("max_tokens") is None or not isinstance(asked["max_tokens"], int) or asked["max_tokens"] > 9:
            asked["max_tokens"] = dice.choice([2, "2", [], -1])  # a long answer is no fault, but takes long
        body = json.dumps(asked).encode()
        status, said = asyncio.run(answer_of(server.port, post(body, BEARER, "Connection: close", path=path)))
        if status != 200:
            assert set(json.loads(said)["error"]) == SHAPE, (body, said)
            assert status in (400, 404), (body, said)
            refused += 1
    assert refused > 50
    assert server.complete("x", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.slow
def test_memory_after_large_requests_that_were_refused(server):
    """A tenth sends all of its 30 MB, a tenth a body that only its prompt makes too long; the others send no more once
    they have their answer.
    """
    process = psutil.Process(server.process.pid)
    server.complete("x", max_tokens=2)
    before = process.memory_info().rss
    within = post(json.dumps({"model": "demo", "prompt": "y" * 250_000}).encode(), BEARER)
    started = head("/v1/completions", 30_000_000, BEARER) + b'{"prompt": "' + b"x" * 500_000

    async def every():
        seen, crowd = Seen(), asyncio.Semaphore(8)

        async def one(index):
            async with crowd:
                if index % 10 == 0:
                    await be_large(server.port, KEY, seen, random.Random(index), pause=0)
                else:
                    seen.note("large", *await answer_of(server.port, within if index % 10 == 1 else started))

        await asyncio.gather(*map(one, range(LARGE_REQUESTS)))
        return seen

    seen = asyncio.run(every())
    assert not seen.wrong
    assert seen.statuses == {"large 413": LARGE_REQUESTS * 9 // 10, "large 400": LARGE_REQUESTS // 10}
    assert process.memory_info().rss - before < GROWTH


@pytest.mark.slow
def test_half_a_minute_among_rude_clients(server):
    """All others get their tokens, and no rude one does. How long they wait is held by tests/serve/soak.py alone."""
    soaked = soak(server, 25)
    assert not soaked.failures
    assert not soaked.seen.wrong
    assert {"slow 408", "large 413", "rude 401"} <= set(soaked.seen.statuses)
    assert ask(server, 1, 0.1)


@pytest.mark.slow
def test_what_sigterm_cuts_is_told_so(server):
    """The last test of its server: a plain request gets 503, a stream an event."""
    cut = {}

    def plain():
        with pytest.raises(openai.InternalServerError) as raised:
            client(server).completions.create(model="demo", prompt="a long answer", max_tokens=4000, extra_body=LONG)
        cut["plain"] = raised.value

    def stream():
        pieces = client(server).completions.create(
            model="demo", prompt="a long stream", max_tokens=4000, stream=True, extra_body=LONG
        )
        try:
            for _ in pieces:
                cut["begun"] = True
        except openai.APIError as error:
            cut["stream"] = error

    threads = [threading.Thread(target=plain), threading.Thread(target=stream)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60
    while ("begun" not in cut or running(server) < 2) and time.monotonic() < end:  # both are computed
        time.sleep(0.05)
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(STOP_SECONDS)
    assert cut["plain"].status_code == 503
    assert cut["plain"].body["type"] == "api_error"
    assert "stopped" in cut["stream"].message
    assert server.process.wait(STOP_SECONDS) == -signal.SIGTERM
