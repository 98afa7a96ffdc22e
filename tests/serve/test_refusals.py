"""Fields that a body may not have: each is 400 in OpenAI's shape and names its field, and the server goes on."""

import pytest

from support.served import LENGTH, served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def said(*content):
    return {"messages": [{"role": "user", "content": list(content)}]}


def user(**fields):
    return {"messages": [{"role": "user", "content": "x"}]} | fields


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ROWS = [
    # path, the body's other fields or the whole body, a part of the message
    (COMPLETIONS, b"{", "the body: invalid JSON"),
    (COMPLETIONS, b"", "the body: invalid JSON"),
    (COMPLETIONS, b'{"model": "\xff"}', "the body: invalid JSON"),
    (COMPLETIONS, b"[]", "the body: expected an object"),
    (COMPLETIONS, b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "the body: invalid JSON"),
    (COMPLETIONS, b"{}", "prompt: missing"),
    (COMPLETIONS, {"suffix": "y"}, "suffix: not supported"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt is empty"),
    (COMPLETIONS, {"prompt": {}}, "prompt: expected a text"),
    (COMPLETIONS, {"prompt": ["x", 5]}, "prompt: expected a list of token ids"),
    (COMPLETIONS, {"prompt": ["x"] * 200}, "prompt: expected at most 128 prompts, got 200"),
    (COMPLETIONS, {"prompt": [1, 99999]}, "token id 99999"),
    (COMPLETIONS, {"prompt": [-1]}, "token id -1"),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', "is not valid text"),
    (COMPLETIONS, {"prompt": "x " * LENGTH}, f"maximum context length is {LENGTH} tokens. However, your prompt"),
    (COMPLETIONS, {"prompt": "x" * 17 * LENGTH}, "8704 characters"),
    (COMPLETIONS, {"max_tokens": "five"}, "max_tokens: expected an integer"),
    (COMPLETIONS, {"max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": True}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 2**70}, "max_tokens"),
    (COMPLETIONS, {"min_tokens": 9}, "min_tokens is 9"),
    (COMPLETIONS, {"temperature": -1}, "temperature"),
    (COMPLETIONS, {"temperature": "1"}, "temperature: expected a number"),
    (COMPLETIONS, b'{"prompt": "x", "temperature": NaN}', "temperature"),
    (COMPLETIONS, {"top_p": 2}, "top_p"),
    (COMPLETIONS, {"top_k": -5}, "top_k"),
    (COMPLETIONS, {"repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETIONS, {"frequency_penalty": 99}, "frequency_penalty"),
    (COMPLETIONS, {"seed": 1.5}, "seed: expected an integer"),
    (COMPLETIONS, {"stop": [""]}, "stop: an empty text"),
    (COMPLETIONS, {"stop": 5}, "stop: expected a string"),
    (COMPLETIONS, {"stop_token_ids": [-1]}, "stop_token_ids: expected a list of token ids"),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"99999": 1}}, "logit_bias has token id 99999"),
    (COMPLETIONS, {"ignore_eos": "yes"}, "ignore_eos: expected true or false"),
    (COMPLETIONS, {"logprobs": 99}, "logprobs: expected an integer from 0 to 20"),
    (COMPLETIONS, {"logprobs": True}, "logprobs"),
    (COMPLETIONS, {"n": 0}, "n: expected an integer from 1 to 16"),
    (COMPLETIONS, {"n": 3, "best_of": 2}, "best_of: expected at least n = 3"),
    (COMPLETIONS, {"best_of": 2, "stream": True}, "no more in a stream, got 2"),
    (COMPLETIONS, {"echo": "no"}, "echo: expected true or false"),
    (COMPLETIONS, {"stream": "yes"}, "stream: expected true or false"),
    (COMPLETIONS, {"stream_options": 5, "stream": True}, "stream_options: expected an object"),
    (COMPLETIONS, {"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage: expected"),
    (COMPLETIONS, {"stream_options": {}}, "stream_options: requires"),
    (COMPLETIONS, {"cache_salt": 5}, "cache_salt: expected a string"),
    (COMPLETIONS, {"response_format": {"type": "xml"}}, "response_format.type: expected one of"),
    (COMPLETIONS, {"response_format": {"type": "json_schema"}}, "response_format.json_schema: missing"),
    (COMPLETIONS, {"structured_outputs": {"regex": 5}}, "structured_outputs.regex: expected a string"),
    (COMPLETIONS, {"structured_outputs": {"regex": "("}}, "regular expression cannot be compiled"),
    (COMPLETIONS, {"structured_outputs": {"choice": []}}, "structured_outputs.choice: expected a list"),
    (COMPLETIONS, {"structured_outputs": {"regex": "a", "grammar": "b"}}, ": expected one structure, got 2"),
    (COMPLETIONS, {"guided_regex": "a", "response_format": {"type": "json_object"}}, ": expected one structure, got 2"),
    (CHAT, b"{}", "messages: expected at least one"),
    (CHAT, {"messages": 5}, "messages: expected a list"),
    (CHAT, {"messages": [5]}, "messages[0]: expected an object"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role: expected one of"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content: missing"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content: expected a string"),
    (CHAT, said({"type": "text"}), "messages[0].content[0].text: missing"),
    (CHAT, said({"type": "text", "text": 5}), "messages[0].content[0].text: expected a string"),
    (CHAT, said({"text": "x"}), "messages[0].content[0].type: missing"),
    (CHAT, said({"type": "image_url", "image_url": {"url": "x"}}), "messages[0].content[0].type: expected one of text"),
    (CHAT, user(stream="yes"), "stream: expected true or false"),
    (CHAT, user(stream_options=5, stream=True), "stream_options: expected an object"),
    (CHAT, user(logprobs=5), "logprobs: expected true or false"),
    (CHAT, user(top_logprobs=2), "top_logprobs: requires"),
    (CHAT, user(functions=[TOOL]), "functions: not supported"),
    (CHAT, user(modalities=["text", "audio"]), "modalities: not supported"),
    (CHAT, user(continue_final_message=True, add_generation_prompt=True), "continue_final_message: requires"),
    (CHAT, user(messages=[{"role": "user", "content": " "}], continue_final_message=True), "[0]: expected content and"),
    (CHAT, user(echo=True), "echo: not supported"),
    (CHAT, user(tool_choice="required"), "tool_choice: required requires tools"),
    (CHAT, user(tool_choice=5, tools=[TOOL]), "tool_choice: expected"),
    (CHAT, user(tools=[{"type": "function"}]), "tools[0]"),
    (CHAT, user(max_completion_tokens=0), "max_completion_tokens: expected an integer from 1"),
    ("/tokenize", {"add_special_tokens": 1}, "add_special_tokens: expected true or false"),
    ("/detokenize", b'{"tokens": "x"}', "tokens: expected a list"),
    ("/detokenize", b'{"tokens": [99999]}', "token id 99999"),
]


@pytest.mark.parametrize(("path", "given", "message"), ROWS, ids=range(len(ROWS)))
def test_a_bad_request_is_refused_by_name(server, path, given, message):
    body = (
        given if isinstance(given, bytes) or path == CHAT else {"model": "demo", "prompt": "x", "max_tokens": 2} | given
    )
    status, answer = server.post(path, body)
    assert status == 400, answer
    error = answer["error"]
    assert set(error) == {"code", "message", "param", "type"}
    assert message in error["message"]
    assert error["param"] is None or error["param"] in error["message"]
    assert error["code"] in (None, "context_length_exceeded")
    assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})[0] == 200


def test_what_changes_no_answer_is_taken(server):
    harmless = {"user": "me", "metadata": {}, "store": True, "service_tier": "auto", "prediction": {}, "suffix": None}
    plain = {"prompt": "the quick", "max_tokens": 8, "temperature": 0, "seed": None}
    first, second = (server.post(COMPLETIONS, plain | more)[1]["choices"] for more in ({}, harmless))
    assert first == second


def test_another_model_and_another_route_are_not_found(server):
    for method, path, body in (
        ("POST", COMPLETIONS, {"model": "other", "prompt": "x"}),
        ("POST", CHAT, user(model="other")),
        ("GET", "/v1/models/other", None),
        ("GET", "/v1/files", None),
    ):
        answer = server.http.request(method, path, json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    answer = server.http.get(COMPLETIONS)
    assert (answer.status_code, set(answer.json()["error"])) == (405, {"code", "message", "param", "type"})


def test_a_model_without_a_template_has_no_chats(monkeypatch):
    from paged_kv.serve.chat import ChatFormat

    monkeypatch.setattr(ChatFormat, "read", lambda *_: None)
    with served() as server:
        status, answer = server.post(CHAT, user())
        assert status == 400
        assert "no chat template" in answer["error"]["message"]
        assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})[0] == 200
