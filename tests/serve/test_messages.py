"""/v1/messages, asked with Anthropic's own client."""

import anthropic
import jsonschema
import pytest

from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo_model import FOLDER
from paged_kv.serve.anthropic_messages import read_messages_request
from paged_kv.serve.fields import BodyFields
from paged_kv.serve.served_model import ServedModel
from support.served import served
from support.tool_chats import CALL, HERMES, SCHEMAS, THINKING, TOOLS, scripted

OURS = [{"name": each["function"]["name"], "input_schema": each["function"]["parameters"]} for each in TOOLS]


def client(server):
    return anthropic.Anthropic(base_url="http://localhost", api_key="none", http_client=server.http, max_retries=0)


def ask(server, messages, stream=False, **options):
    extra = {"temperature": 0.0} | options.pop("extra_body", {})  # the client knows no temperature any more
    options = {"model": "demo", "max_tokens": 200, "messages": messages, "extra_body": extra} | options
    if not stream:
        return client(server).messages.create(**options)
    with client(server).messages.stream(**options) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools(tools, stream):
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is the weather?"}]}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    for _ in range(2):
        options = {"tools": OURS, "tool_choice": choice, "system": "Be brief.", "extra_body": {"seed": 3}}
        answer = ask(tools, messages, stream, **options)
        (call,) = answer.content
        assert (answer.stop_reason, call.type) == ("tool_use", "tool_use")
        jsonschema.validate(call.input, SCHEMAS[call.name])
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "warm"}]}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    usage = answer.usage
    counted = client(tools).messages.count_tokens(model="demo", messages=messages[:3], tools=OURS, system="Be brief.")
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    assert usage.cache_read_input_tokens > 0
    assert ask(tools, messages, stream, tools=OURS, tool_choice={"type": "none"}, max_tokens=4).stop_reason


def test_results_come_before_the_text_beside_them():
    model = ServedModel(open_source(FOLDER), "demo", 2048, HERMES)
    result = {"type": "tool_result", "tool_use_id": "1", "content": "cold", "is_error": True}
    messages = [{"role": "user", "content": [{"type": "text", "text": "And now?"}, result]}]
    (job,) = read_messages_request(BodyFields({"max_tokens": 1, "messages": messages}), model).jobs
    assert model.text(job.tokens) == "tool: Error: colduser: And now?assistant: "


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_texts_and_calls_are_blocks(stream):
    with served(scripted(f"<think>Which days?</think>Let me see. {CALL}"), template=THINKING, length=2048) as server:
        thought, text, call = ask(server, [{"role": "user", "content": "x"}], stream, tools=OURS).content
        assert (thought.thinking, text.text.strip()) == ("Which days?", "Let me see.")
        assert (call.name, call.input) == ("weather", {"place": "Ur", "days": 2})


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_and_a_limit_are_told(stream):
    for stops, found in (([" see", "!"], ("stop_sequence", " see")), (["!"], ("end_turn", None))):
        with served(scripted("Let me see."), template=HERMES, length=2048) as server:
            answer = ask(server, [{"role": "user", "content": "x"}], stream, stop_sequences=stops)
            assert (answer.stop_reason, answer.stop_sequence) == found
    with served(scripted("Let me see."), template=HERMES, length=2048) as server:
        assert ask(server, [{"role": "user", "content": "x"}], stream, max_tokens=2).stop_reason == "max_tokens"


@pytest.mark.parametrize("wrong", [{"top_k": "x"}, {"tools": [{"name": "search"}]}, {"max_tokens": None}])
def test_errors_have_anthropic_s_shape(server, wrong):
    body = {"model": "demo", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]} | wrong
    status, answer = server.post("/v1/messages", body)
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert next(iter(wrong)) in answer["error"]["message"]
