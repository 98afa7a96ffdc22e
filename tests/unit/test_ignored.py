"""Parts of requests that are not known: ignored and named to the client, or refused by a strict server."""

import logging
from functools import cache

import pytest

from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo_model import FOLDER
from paged_kv.serve.fields import BodyFields, FieldError
from paged_kv.serve.ignored import Ignored, UnknownParts
from paged_kv.serve.routes import route_at
from paged_kv.serve.served_model import ServedModel
from support.served import served
from support.tool_chats import HERMES, WEATHER, scripted_without_compiler

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT, TOKENIZE = "/v1/messages/count_tokens", "/tokenize"
ASKED = [{"role": "user", "content": "x"}]
BODIES = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": ASKED},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": ASKED, "max_tokens": 9},
    COUNT: {"messages": ASKED},
    TOKENIZE: {"messages": ASKED},
}
FUNCTION = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}


def results(*content):
    """A conversation of chats with a tool's result."""
    last = {"role": "tool", "tool_call_id": "c", "content": list(content)}
    return {"messages": [*ASKED, {"role": "assistant", "tool_calls": [CALL]}, last]}


def blocks(role, *content):
    return {"messages": [*ASKED, {"role": role, "content": list(content)}]}


def answered(*items):
    return {"input": [{"role": "user", "content": "x"}, *items]}


SEARCHED = (
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
    {"type": "text", "text": "It is."},
)
RESULT = {"type": "tool_result", "tool_use_id": "c"}
FILE = {"type": "input_file", "file_id": "f"}
OUTPUT = {"type": "function_call_output", "call_id": "c"}
ROWS = [
    # path, further fields, the paths that are named
    (COMPLETIONS, {"wat": 1}, ["wat"]),
    (COMPLETIONS, {"stream": True, "stream_options": {"x": 1}}, ["stream_options.x"]),
    (COMPLETIONS, {"response_format": {"type": "text", "x": 1}}, ["response_format.x"]),
    (CHAT, {"suffix": "x", "thread": {}, "a\r\nb": 1}, ["'a\\r\\nb'", "suffix", "thread"]),
    (CHAT, {"messages": [ASKED[0] | {"wat": 1}]}, ["messages[0].wat"]),
    (CHAT, blocks("user", {"type": "text", "text": "x", "y": 1}), ["messages[1].content[0].y"]),
    (CHAT, {"tools": [FUNCTION, {"type": "web_search"}]}, ["tools[1]"]),
    (CHAT, results(IMAGE), ["messages[2].content[0]"]),
    (CHAT, blocks("assistant", {"type": "audio"}, {"type": "refusal", "refusal": "no"}), ["messages[1].content[0]"]),
    (RESPONSES, {"tools": [{"type": kind} for kind in ("web_search", "mcp")]}, ["tools[0]", "tools[1]"]),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, ["tools[0].defer_loading"]),
    (RESPONSES, answered({"type": "web_search_call"}, {"type": "local_shell_call"}), ["input[1]", "input[2]"]),
    (RESPONSES, answered(OUTPUT | {"output": [{"type": "input_image", "image_url": "x"}]}), ["input[1].output[0]"]),
    (RESPONSES, {"reasoning": {"context": "all"}}, ["reasoning.context"]),
    (MESSAGES, {"thread": {"id": "t"}, "output_config": {"effort": "high"}}, ["output_config.effort", "thread"]),
    (MESSAGES, {"tools": [SEARCH], "tool_choice": {"type": "auto"}}, ["tools[0]"]),
    (MESSAGES, blocks("assistant", *SEARCHED), ["messages[1].content[0]"]),
    (MESSAGES, blocks("user", RESULT | {"content": [PICTURE]}), ["messages[1].content[0].content[0]"]),
    (COUNT, {"thread": {}}, ["thread"]),
    (TOKENIZE, {"thread": {}}, ["thread"]),
]  # fmt: skip


@cache
def model():
    return ServedModel(open_source(FOLDER), "demo", 2048, HERMES)


def read(path, fields, ignored):
    return route_at(path).reader(BodyFields(BODIES[path] | fields, ignored=ignored), model())


def prompt(path, fields):
    (job,) = read(path, fields, Ignored(UnknownParts())).jobs
    return model().text(job.tokens)


@pytest.mark.parametrize(("path", "fields", "paths"), ROWS, ids=range(len(ROWS)))
def test_what_is_not_known_is_ignored_and_named_or_refused_where_the_server_is_strict(path, fields, paths):
    ignored = Ignored(UnknownParts())
    read(path, fields, ignored)
    assert sorted(ignored.paths) == paths
    with pytest.raises(FieldError) as error:
        read(path, fields, Ignored(UnknownParts(strict=True)))
    assert any(error.value.param.startswith(path) for path in paths)


WEB = {"type": "web_search"}
REFUSED = [
    # path, further fields, the field that is wrong: clients rely on it
    (CHAT, {"functions": [{}]}, "functions"),
    (CHAT, {"json_schema": {"type": "object"}}, "json_schema"),
    (COMPLETIONS, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    (CHAT, blocks("user", IMAGE), "messages[1].content[0].type"),
    (CHAT, {"tools": [WEB], "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    (RESPONSES, answered({"role": "user", "content": [FILE]}), "input[1].content[0].type"),
    (RESPONSES, answered({"type": "item_reference", "id": "i"}), "input[1].type"),
    (RESPONSES, {"previous_response_id": "r"}, "previous_response_id"),
    (RESPONSES, {"response_format": {"type": "json_object"}}, "response_format"),
    (MESSAGES, {"grammar": "root ::= [a-z]"}, "grammar"),
    (RESPONSES, {"tools": [WEB], "tool_choice": WEB}, "tool_choice.type"),
    (RESPONSES, {"tools": [{"type": "custom", "name": "f", "format": {"type": "xml"}}]}, "tools[0].format.type"),
    (MESSAGES, blocks("user", PICTURE), "messages[1].content[0].type"),
    (MESSAGES, {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.type"),
    (MESSAGES, {"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    (MESSAGES, {"thinking": {"type": "perhaps"}}, "thinking.type"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED, ids=range(len(REFUSED)))
def test_what_a_client_relies_on_is_refused_by_name(path, fields, param):
    with pytest.raises(FieldError) as error:
        read(path, fields, Ignored(UnknownParts()))
    assert error.value.param == param


def test_what_is_left_out_of_a_result_is_named_to_the_model():
    omitted = "[image omitted: this model reads text only]"
    said = [{"type": "text", "text": "A page."}]
    items = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]
    items.append(OUTPUT | {"output": [{"type": "input_text", "text": "A page."}, {"type": "input_image"}]})
    for path, fields in (
        (CHAT, results(*said, IMAGE)),
        (RESPONSES, answered(*items)),
        (MESSAGES, blocks("user", RESULT | {"content": [*said, PICTURE]})),
    ):
        assert f"A page.\n{omitted}" in prompt(path, fields)
    assert "assistant: It is." in prompt(MESSAGES, blocks("assistant", *SEARCHED))


@pytest.mark.parametrize("holder", [{"output_format": "it"}, {"output_config": {"effort": "low", "format": "it"}}])
def test_a_format_of_anthropic_s_is_enforced(holder):
    asked = {"type": "json_schema", "schema": WEATHER}
    ((name, value),) = holder.items()
    fields = {name: asked if value == "it" else value | {"format": asked}}
    (job,) = read(MESSAGES, fields, Ignored(UnknownParts())).jobs
    assert '"maxLength": 12' in job.sampling.structured_output.schema
    read(COUNT, fields, Ignored(UnknownParts()))


def test_a_model_that_is_not_there_is_told_in_the_words_of_the_api_that_is_asked():
    with served(scripted_without_compiler(), template=HERMES) as server:
        for headers, shape in (({"anthropic-version": "2023-06-01"}, {"type", "error"}), ({}, {"error"})):
            answer = server.http.get("/v1/models/other", headers=headers)
            assert (answer.status_code, set(answer.json())) == (404, shape)
            assert answer.json()["error"]["type"] == "not_found_error"


def test_answers_of_every_kind_have_the_header_and_the_log_has_it_once(caplog):
    odd = {"thread": 1, "a, b\r\nx": 1, "ü" * 300: 1} | {f"field_{number}" * 9: 1 for number in range(100)}
    with served(scripted_without_compiler("Yes.", "Yes."), template=HERMES, length=2048) as server:
        for path, more in ((CHAT, {}), (CHAT, {"stream": True}), (COUNT, {}), (TOKENIZE, {})):
            assert "x-ignored" not in server.http.post(COUNT, json=BODIES[COUNT]).headers
            answer = server.http.post(path, json=BODIES[path] | more | {"thread": 1})
            assert (answer.status_code, answer.headers["x-ignored"]) == (200, "thread")
        assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
            "ignored: thread: unknown field (logged once; --strict refuses it)"
        ]
        (named,) = server.http.post(COUNT, json=BODIES[COUNT] | odd).headers.get_list("x-ignored")
        assert named.isascii()
        assert named.isprintable()
        assert len(named) < 1100
        assert named.startswith("?a??b?r?nx?, field_0")
        for more, status in (({"messages": ASKED * 2000}, 400), ({}, 500)):  # of reading, and of a script at its end
            answer = server.http.post(CHAT, json=BODIES[CHAT] | {"tools": [{"type": "web"}]} | more)
            assert (answer.status_code, answer.headers["x-ignored"]) == (status, "tools[0]")
    with served(scripted_without_compiler(), template=HERMES, strict=True) as server:
        status, answer = server.post(CHAT, BODIES[CHAT] | {"thread": 1})
        assert (status, answer["error"]["param"]) == (400, "thread")
