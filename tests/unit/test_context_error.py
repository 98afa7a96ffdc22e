"""The error of a prompt that is too long, as clients know it."""

import re

import pytest

from support.served import served
from support.tool_chats import HERMES, scripted_without_compiler

LENGTH = 64
LITELLM = ("this model's maximum context length is", "prompt is too long")
"""Texts that litellm 1.110 (`ExceptionCheckers.is_error_str_context_window_exceeded`) looks for in the lower case of an
error of OpenAI's routes, and of Anthropic's."""
SAID = [{"role": "user", "content": "word " * LENGTH}]
LONG = [{"role": "user", "content": "word " * 16 * LENGTH}]


@pytest.fixture(scope="module")
def server():
    with served(scripted_without_compiler(), template=HERMES, length=LENGTH) as started:
        yield started


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": SAID}, "messages"),
        ("/v1/chat/completions", {"messages": LONG, "stream": True}, "messages"),
        ("/v1/responses", {"input": SAID}, "input"),
        ("/v1/completions", {"prompt": ["x", [5] * LENGTH]}, "prompt[1]"),
        ("/v1/completions", {"prompt": [5] * 99999}, "prompt"),
    ],
)
def test_openai_s_shape(server, path, body, param):
    status, answer = server.post(path, body)
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"This model's maximum context length is {LENGTH} tokens. However, your {param}")
    assert LITELLM[0] in error["message"].lower()


@pytest.mark.parametrize("messages", [SAID, LONG])
def test_anthropic_s_shape(server, messages):
    status, answer = server.post("/v1/messages", {"messages": messages, "max_tokens": 9})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    tokens, most = re.fullmatch(
        r"prompt is too long: (\d+) tokens > (\d+) maximum", answer["error"]["message"]
    ).groups()
    assert int(tokens) > int(most) == LENGTH - 1
    assert LITELLM[1] in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [({"prompt": 5}, 400, None), ({"prompt": "x", "model": "other"}, 404, "model_not_found")],
)
def test_a_code_is_a_word_or_null(server, body, status, code):
    found, answer = server.post("/v1/completions", body)
    assert (found, answer["error"]["code"]) == (status, code)
