"""LoRA adapters behind the API: each is a model of its name, and vLLM's routes load and unload them."""

import openai
import pytest

from paged_kv.checkpoint.config import load_config
from paged_kv.engine.demo_model import FOLDER
from paged_kv.graphs.models.adapters import adaptable_layers
from support.adapters import noise, write_peft
from support.served import served

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MESSAGES = [{"role": "user", "content": "In the beginning"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    layers = noise(adaptable_layers(load_config(FOLDER)), 4, 0)
    return write_peft(tmp_path_factory.mktemp("served") / "adapter", layers, 4, 8.0)


@pytest.fixture
def server(folder):
    with served(strict=True) as server:
        assert server.post(LOAD, {"lora_name": "tuned", "lora_path": str(folder)}) == (200, {"loaded": "tuned"})
        yield server


def texts(server, model):
    """What the same conversation gives by each of the APIs."""
    client = server.client
    chat = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=12, temperature=0)
    completion = client.completions.create(model=model, prompt="In the beginning", max_tokens=12, temperature=0)
    response = client.responses.create(model=model, input="In the beginning", max_output_tokens=12, temperature=0)
    status, message = server.post("/v1/messages", {"model": model, "messages": MESSAGES, "max_tokens": 12})
    assert status == 200
    assert {each.model for each in (chat, completion, response)} == {message["model"]} == {model}
    return chat.choices[0].message.content, completion.choices[0].text, response.output_text


def test_an_adapter_is_a_model_of_its_name(server):
    client = server.client
    assert [(each.id, getattr(each, "parent", None)) for each in client.models.list()] == [
        ("demo", None),
        ("tuned", "demo"),
    ]
    assert client.models.retrieve("tuned").parent == "demo"
    base, tuned = texts(server, "demo"), texts(server, "tuned")
    assert all(one != other for one, other in zip(base, tuned, strict=True))
    assert server.post(UNLOAD, {"lora_name": "tuned", "lora_int_id": 1}) == (200, {"unloaded": "tuned"})
    with pytest.raises(openai.NotFoundError, match="expected 'demo', got 'tuned'"):
        texts(server, "tuned")
    assert texts(server, "demo") == base


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (LOAD, {"lora_name": "a"}, 400, "lora_path: missing"),
        (
            LOAD,
            {"lora_name": "a", "lora_path": "/nothing"},
            400,
            "/nothing: expected a folder with adapter_config.json",
        ),
        (LOAD, {"lora_name": "tuned", "lora_path": "DIR"}, 400, "name: expected one that no adapter has, got 'tuned'"),
        (
            LOAD,
            {"lora_name": "demo", "lora_path": "DIR"},
            400,
            "lora_name: expected a name that the model does not have",
        ),
        (UNLOAD, {"lora_name": "demo"}, 404, "lora_name: expected one of tuned, got 'demo'"),
        (UNLOAD, {}, 400, "lora_name: missing"),
        (LOAD, {"lora_name": "a", "lora_path": "DIR", "rank": 4}, 400, "rank: "),
        (UNLOAD, {"lora_name": "tuned", "rank": 4}, 400, "rank: "),
    ],
)
def test_what_cannot_be_loaded_or_unloaded_is_refused(server, folder, path, body, status, message):
    body = body | ({"lora_path": str(folder)} if body.get("lora_path") == "DIR" else {})
    got, answer = server.post(path, body)
    assert (got, answer["error"]["message"][: len(message)]) == (status, message)
    assert server.engine.adapters == ("tuned",)
