"""Routes and fields that clients expect, asked by OpenAI's and Anthropic's own over a backend that says one text."""

import json

import anthropic
import openai
import pytest
from starlette.testclient import TestClient

from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo_model import FOLDER
from paged_kv.serve.application import application
from paged_kv.serve.backend import Piece, Status
from paged_kv.serve.fields import BodyFields
from paged_kv.serve.metrics import Metrics
from paged_kv.serve.openai_completions import read_completion
from paged_kv.serve.routes import route_at
from paged_kv.serve.served_model import ServedModel
from support.tool_chats import HERMES, TOOLS

MOST = 40
MODEL = ServedModel(open_source(FOLDER), "demo", 2048, HERMES, aliases=("small", "org/other"), most_samples=MOST)
ASKED = [{"role": "user", "content": "x"}]


class Says:
    """A backend whose answers are "ab", a letter a piece."""

    def status(self):
        return Status()

    async def start(self, job):
        for sample in range(job.n):
            for letter, finish in (("a", None), ("b", "stop")):
                yield [Piece(sample, (5,), letter, finish, None)]


@pytest.fixture(scope="module")
def http():
    backend = Says()
    with TestClient(application(MODEL, backend, Metrics("demo", backend)), base_url="http://localhost") as client:
        yield client


@pytest.fixture
def client(http):
    return openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)


@pytest.fixture
def other(http):
    return anthropic.Anthropic(base_url="http://localhost", api_key="none", http_client=http, max_retries=0)


@pytest.mark.parametrize("name", MODEL.names)
def test_any_name_of_the_model_is_taken_and_repeated(client, other, name):
    chat = {"model": name, "messages": ASKED}
    assert client.completions.create(model=name, prompt="x").model == name
    assert client.chat.completions.create(**chat).model == name
    assert {event.model for event in client.chat.completions.create(**chat, stream=True)} == {name}
    assert client.responses.create(model=name, input="x", store=False).model == name
    assert other.messages.create(**chat, max_tokens=4).model == name
    assert other.messages.count_tokens(**chat).input_tokens > 0
    assert client.models.retrieve(name).id == other.models.retrieve(name).id == name


def test_models_are_listed_as_each_client_has_them(client, other):
    assert [card.id for card in client.models.list()] == list(MODEL.names)
    listed = other.models.list()
    assert [(card.id, card.type, card.display_name) for card in listed] == [
        (name, "model", name) for name in MODEL.names
    ]
    assert (listed.first_id, listed.last_id, listed.has_more) == ("demo", "org/other", False)
    assert int(listed.data[0].created_at.timestamp()) == MODEL.created
    with pytest.raises(openai.NotFoundError, match="'demo' or 'small' or 'org/other', got 'none'"):
        client.models.retrieve("none")


def test_chunks_say_that_their_usage_is_yet_to_come(client):
    for create, asked in (
        (client.completions.create, {"prompt": "x"}),
        (client.chat.completions.create, {"messages": ASKED}),
    ):
        *chunks, last = create(model="demo", **asked, stream=True, stream_options={"include_usage": True})
        assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks)
        assert last.usage.completion_tokens == 2
        prints = {chunk.system_fingerprint for chunk in (*chunks, last, create(model="demo", **asked))}
        assert prints == {MODEL.fingerprint}
        assert all("usage" not in chunk.model_fields_set for chunk in create(model="demo", **asked, stream=True))
    assert MODEL.fingerprint.startswith("fp_")


def test_tokens_of_a_response_are_counted(client):
    tools = [{"type": "function", **each["function"]} for each in TOOLS]
    asked = {"model": "small", "input": "x", "instructions": "Be brief.", "tools": tools}
    counted = client.responses.input_tokens.count(**asked)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == client.responses.create(**asked, store=False).usage.input_tokens
    assert route_at("/v1/responses/input_tokens").access == "client"


def test_tokenize_takes_vllm_s_fields(http):
    def tokens(**fields):
        answer = http.post("/tokenize", json={"model": "demo"} | fields).json()
        assert set(answer) == {"count", "max_model_len", "tokens", "token_strs"}
        assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 2048)
        return answer

    def text(**fields):
        return MODEL.tokenizer.decode(tokens(**fields)["tokens"], skip_special_tokens=False)

    begun = [*ASKED, {"role": "assistant", "content": "It is"}]
    assert text(messages=ASKED) == "user: xassistant: "
    assert text(messages=ASKED, add_generation_prompt=False, mm_processor_kwargs={}) == "user: x"
    assert text(messages=begun, continue_final_message=True, add_generation_prompt=False) == "user: xassistant: It is"
    assert text(messages=ASKED, add_special_tokens=True) == "<s>user: xassistant: "
    assert text(messages=ASKED, tools=TOOLS).startswith("Tools: ")
    said = tokens(prompt="in é", return_token_strs=True)
    assert said["token_strs"] == [MODEL.tokenizer.token_name(token) for token in said["tokens"]]
    assert tokens(prompt="x")["token_strs"] is None
    assert (
        http.post("/tokenize", json={"messages": ASKED, "chat_template": "x"}).json()["error"]["param"]
        == "chat_template"
    )


TOO_MANY = [
    # route, fields, the field that is named, what it may be
    ("completions", {"prompt": ["x"] * 128, "n": 16}, "prompt", f"at most {MOST} prompts"),
    ("completions", {"prompt": ["x"] * 10, "n": 5}, "n", "at most 4 for 10 prompts, got 5"),
    ("completions", {"prompt": ["x"] * 10, "best_of": 16}, "best_of", "at most 4 for 10 prompts, got 16"),
]


@pytest.mark.parametrize(("route", "fields", "param", "words"), TOO_MANY)
def test_what_can_never_fit_is_the_clients_mistake(http, route, fields, param, words):
    answer = http.post(f"/v1/{route}", json={"model": "demo"} | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]
    assert f"queues {MOST} samples" in answer.json()["error"]["message"]


def test_what_may_fit_is_taken(http, monkeypatch):
    assert http.post("/v1/completions", json={"prompt": ["x"] * 10, "n": 4}).status_code == 200
    monkeypatch.setattr(MODEL, "most_samples", 3)
    answer = http.post("/v1/chat/completions", json={"messages": ASKED, "n": 4})
    assert (answer.status_code, json.loads(answer.text)["error"]["param"]) == (400, "n")


@pytest.mark.parametrize("seed", [-1, -(2**63)])
def test_a_seed_below_0_is_a_random_one(seed):
    seeds = {read_completion(BodyFields({"prompt": "x", "seed": seed}), MODEL).jobs[0].sampling.seed for _ in range(2)}
    assert len(seeds) == 2
    assert min(seeds) >= 0
    assert read_completion(BodyFields({"prompt": "x", "seed": 0}), MODEL).jobs[0].sampling.seed == 0
