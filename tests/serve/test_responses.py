"""/v1/responses, asked with OpenAI's own client."""

import json

import jsonschema
import pytest

from support.served import served
from support.tool_chats import CALL, SCHEMAS, THINKING, TOOLS, WEATHER, scripted

OURS = [{"type": "function", **each["function"]} for each in TOOLS]


def ask(server, given, stream=False, **options):
    options = {"model": "demo", "max_output_tokens": 200, "temperature": 0, "input": given} | options
    if not stream:
        return server.client.responses.create(**options)
    texts, events = {}, list(server.client.responses.create(stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
    answer = events[-1].response
    assert events[-1].type == f"response.{answer.status}"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == answer.output
    for item in done:
        assert texts[item.id] == (item.arguments if item.type == "function_call" else item.content[0].text)
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools(tools, stream):
    said = [{"role": "user", "content": "What is the weather?"}]
    for _ in range(2):
        options = {"tools": OURS, "tool_choice": "required", "parallel_tool_calls": False, "extra_body": {"seed": 3}}
        answer = ask(tools, said, stream, instructions="Be brief.", **options)
        (call,) = answer.output
        assert (answer.status, call.type) == ("completed", "function_call")
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        said += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}]
    assert answer.usage.input_tokens_details.cached_tokens > 0
    cut = ask(tools, said, stream, tools=OURS, tool_choice="none", max_output_tokens=4)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_texts_and_calls_are_items(stream):
    with served(scripted(f"<think>Which days?</think>Let me see. {CALL}"), template=THINKING, length=2048) as server:
        answer = ask(server, "x", stream, tools=OURS)
        thought, _, call = answer.output
        assert (thought.content[0].text, answer.output_text.strip()) == ("Which days?", "Let me see.")
        assert (call.name, json.loads(call.arguments)) == ("weather", {"place": "Ur", "days": 2})


def test_a_text_has_its_format(server):
    given = {"type": "json_schema", "name": "w", "schema": WEATHER, "strict": True}
    answer = ask(server, "x", text={"format": given}, temperature=1.5)
    jsonschema.validate(json.loads(answer.output_text), WEATHER)


@pytest.mark.parametrize("wrong", [{"store": True}, {"previous_response_id": "resp_1"}, {"background": True}])
def test_what_would_need_state_is_refused_by_name(server, wrong):
    status, answer = server.post("/v1/responses", {"input": "x"} | wrong)
    assert status == 400
    assert answer["error"]["param"].startswith(next(iter(wrong)))
