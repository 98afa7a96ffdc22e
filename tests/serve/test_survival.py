"""What the server survives: it answers in the API's error shape, goes on, and its pages come back."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paged_kv.engine.demo import VOCAB_SIZE
from support import serving
from support.limits import has_ended
from support.numpy_llama import NumpyLlama

serving.require()  # before what may be missing is imported

import openai  # noqa: E402

from support.faulty_architecture import FAULT_CHARACTER, FAULT_POSITION  # noqa: E402

CLIENTS = 64
LENGTH = serving.MAX_LENGTH
TERMINATED = 128 + 15
"""What a shell says of a process that SIGTERM ended; MAX exits with it."""


def complete(server, prompt, **overrides):
    options = {"max_tokens": 16, "temperature": 0} | overrides
    return server.client().completions.create(model="demo", prompt=prompt, **options)


def text(server, prompt, **overrides):
    return complete(server, prompt, **overrides).choices[0].text


def body(**overrides):
    return {"model": "demo", "prompt": "x", "max_tokens": 2} | overrides


REFUSED = {
    "malformed JSON": (b"{", 400),
    "no body": (b"", 400),
    "not UTF-8": (b'{"model": "\xff"}', 400),
    "a list": (b"[]", 400),
    "no prompt": ({"model": "demo"}, 400),
    "an unknown field": (body(wat=1), 400),
    "an unknown model": (body(model="other"), 400),
    "max_tokens as text": (body(max_tokens="five"), 400),
    "max_tokens -1": (body(max_tokens=-1), 400),
    "max_tokens 2^70": (body(max_tokens=2**70), 500),
    "min_tokens above max_tokens": (body(min_tokens=9), 400),
    "temperature -1": (body(temperature=-1), 400),
    "temperature 99": (body(temperature=99), 400),
    "temperature NaN": (body(temperature=float("nan")), 400),
    "top_p 2": (body(top_p=2), 400),
    "top_k -5": (body(top_k=-5), 400),
    "repetition_penalty 0": (body(repetition_penalty=0), 400),
    "frequency_penalty 99": (body(frequency_penalty=99), 400),
    "seed 2^64": (body(seed=2**64), 500),
    "8 log-probabilities": (body(logprobs=8), 400),
    "log-probabilities of the prompt": (body(logprobs=1, echo=True), 400),
    "a prompt past the length": (body(prompt="x" * LENGTH), 400),
    "no tokens": (body(prompt=[]), 500),
    "a token out of the vocabulary": (body(prompt=[256, 5000]), 400),
    "a negative token": (body(prompt=[-1]), 400),
}


@pytest.mark.parametrize(("request_body", "status"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_request_is_refused(server, request_body, status):
    answer = server.post("/v1/completions", request_body)
    assert answer[0] == status
    assert set(answer[1]["error"]) == {"code", "message", "param", "type"}
    assert server.post("/v1/completions", body())[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_past_the_length_is_refused_in_words(server, stream):
    with pytest.raises(openai.BadRequestError, match=f"{LENGTH + 9} tokens exceeds .* of {LENGTH} tokens"):
        complete(server, "x" * (LENGTH + 8), stream=stream)


@pytest.mark.parametrize(("prompt", "max_tokens", "count"), [("", 4, 4), ("x", 0, 1), ("x" * 500, 10**9, 11)])
def test_the_edges_of_a_length(server, prompt, max_tokens, count):
    answer = complete(server, prompt, max_tokens=max_tokens)
    assert answer.usage.completion_tokens == count
    assert answer.choices[0].finish_reason == "length"


def test_a_huge_top_k_is_every_token(server):
    options = {"temperature": 1.0, "seed": 5, "max_tokens": 4}
    every, huge = (text(server, "x", **options, extra_body={"top_k": k}) for k in (VOCAB_SIZE, 2**62))
    assert every == huge


def test_disconnects_give_their_pages_back(server):
    """Streams that are closed in the middle, clients that give up waiting, and some that stay to the end."""
    alone = text(server, "client 3", max_tokens=24)

    def call(index):
        dice = random.Random(index)
        match index % 3:
            case 0:
                return text(server, f"client {index}", max_tokens=24)
            case 1:
                stream = complete(server, f"client {index} " + "y" * dice.randrange(200), max_tokens=100, stream=True)
                for _, _piece in zip(range(dice.randrange(1, 20)), stream, strict=False):
                    pass
                return stream.close()
            case _:
                with pytest.raises(openai.APITimeoutError):
                    server.client().with_options(timeout=dice.uniform(0.01, 0.2)).completions.create(
                        model="demo", prompt=f"client {index} " + "z" * dice.randrange(200), max_tokens=300
                    )
                return None

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(call, range(CLIENTS)))
    assert answers[3] == alone
    assert server.used_pages() == 0


def test_a_step_that_raises_ends_its_own_request(strained_server):
    alone = text(strained_server, "innocent", max_tokens=100)
    with ThreadPoolExecutor(2) as pool:
        innocent = pool.submit(text, strained_server, "innocent", max_tokens=100)
        for _ in range(3):
            with pytest.raises(openai.InternalServerError) as refused:
                text(strained_server, f"guilty {FAULT_CHARACTER}")
            assert refused.value.body["type"] == "api_error"
        assert innocent.result(300) == alone
    assert strained_server.used_pages() == 0


def test_a_batch_whose_step_raises_is_run_one_at_a_time(strained_server):
    """Prompts of one HTTP request come to the scheduler one after the other: soon, two of them share a step."""
    prompts = [f"innocent {index}" for index in range(3)]
    alone = [text(strained_server, prompt, max_tokens=30) for prompt in prompts]
    for _ in range(30):
        with ThreadPoolExecutor(4) as pool:
            guilty = pool.submit(complete, strained_server, ["accomplice", f"guilty {FAULT_CHARACTER}", "accomplice"])
            innocent = pool.map(lambda prompt: text(strained_server, prompt, max_tokens=30), prompts)
            with pytest.raises(openai.InternalServerError):
                guilty.result(300)
            assert list(innocent) == alone
        if "run one at a time" in strained_server.log_text():
            break
    assert "run one at a time" in strained_server.log_text()
    assert strained_server.used_pages() == 0


def test_a_stream_whose_step_raises_ends_with_an_error(strained_server):
    """In the decode of a batch: the other stream of the batch goes on to its end."""
    alone = text(strained_server, "innocent", max_tokens=100)
    with ThreadPoolExecutor(1) as pool:
        innocent = pool.submit(text, strained_server, "innocent", max_tokens=100)
        stream = complete(strained_server, "x" * (FAULT_POSITION - 9), max_tokens=100, stream=True)
        pieces = []
        with pytest.raises(openai.APIError):
            pieces.extend(piece.choices[0].text for piece in stream)
        assert innocent.result(300) == alone
    assert 0 < len("".join(pieces)) <= 9
    assert strained_server.used_pages() == 0


def test_too_few_pages_preempt_and_every_request_is_answered(strained_server, checkpoint):
    """Sixteen requests of two pages each, in a pool of about sixteen: some are computed twice, none is lost."""
    before = strained_server.metric("maxserve_cache_preemption_count_total")

    def call(index):
        return (
            strained_server.client()
            .with_options(max_retries=20)
            .completions.create(
                model="demo",
                prompt=f"request {index} " + "x" * 100,
                max_tokens=60,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
        )

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(call, range(16)))
    model = NumpyLlama(checkpoint)
    for answer in answers:
        assert answer.usage.completion_tokens == 60
        model.assert_greedy(answer.choices[0])
    assert strained_server.metric("maxserve_cache_preemption_count_total") > before
    assert strained_server.used_pages() == 0


def test_a_full_queue_is_said_and_not_waited_for(strained_server):
    """The prompts of one HTTP request come at once, and are more than the batch, the scheduler and the queue hold.

    The flag says 8, and some 100 were taken: sockets hold some too.
    """
    with pytest.raises(openai.RateLimitError) as refused:
        complete(strained_server, [f"queued {index}" for index in range(400)], max_tokens=50)
    assert refused.value.response.headers["Retry-After"] == "1"
    assert refused.value.body["type"] == "rate_limit_error"
    assert strained_server.used_pages() == 0


def test_sigterm_under_load_ends_every_process(strained_server):
    """The last test of its server."""
    workers = _descendants(strained_server.process.pid)
    assert workers

    given_up = threading.Event()

    def call_on(index):
        while not given_up.is_set():
            text(strained_server, f"late {index}", max_tokens=100)

    def call(index):
        with pytest.raises(openai.APIError):
            call_on(index)

    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(call, index) for index in range(8)]
        time.sleep(1)
        try:
            assert strained_server.stop() == TERMINATED
            for ended in calls:
                ended.result(300)
        except BaseException:  # else the callers go on, and the pool waits for them
            given_up.set()
            raise
    assert all(map(has_ended, workers))  # Python's own helper process notices later that the others are gone


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *_descendants(child)]
    return found
