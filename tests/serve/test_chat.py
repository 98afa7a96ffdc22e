"""/v1/chat/completions, asked with OpenAI's own client: templates, tools and their results, thoughts, formats."""

import json

import jsonschema
import numpy as np
import pytest

from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo_model import FOLDER
from paged_kv.serve.fields import BodyFields
from paged_kv.serve.openai_chat import read_chat
from paged_kv.serve.served_model import ServedModel
from support.served import served
from support.tool_chats import CALL, HERMES, SCHEMAS, THINKING, TOOLS, WEATHER, scripted

TOLERANCE = 1e-3


def chat(server, content, **overrides):
    options = {"max_tokens": 16, "temperature": 0} | overrides
    extra = {"return_token_ids": True} | options.pop("extra_body", {})
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return server.client.chat.completions.create(model="demo", messages=messages, extra_body=extra, **options)


def gathered(stream):
    """The choices of a stream, each with its message as the whole answer has it."""
    found = {}
    for event in stream:
        for choice in event.choices:
            said = found.setdefault(choice.index, {"content": "", "reasoning_content": "", "tool_calls": []})
            delta = choice.delta
            said["content"] += delta.content or ""
            said["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or []:
                if call.index == len(said["tool_calls"]):
                    assert call.id
                    assert call.type == "function"
                    said["tool_calls"].append([call.function.name, ""])
                said["tool_calls"][call.index][1] += call.function.arguments or ""
            said["finish"] = choice.finish_reason
    return [found[index] for index in sorted(found)]


def test_a_chat_is_the_template_and_then_greedy(server, model):
    """The demo's template is each message and a new line."""
    messages = [
        {"role": "system", "content": "In the beginning"},
        {"role": "user", "content": [{"type": "text", "text": "God created"}]},
    ]
    answer = chat(server, messages)
    (choice,) = answer.choices
    assert answer.prompt_token_ids == list(server.engine.encode("In the beginning\nGod created\n"))
    rows = model.log_probabilities([*answer.prompt_token_ids, *choice.token_ids])[len(answer.prompt_token_ids) - 1 : -1]
    np.testing.assert_array_less(rows.max(-1) - rows[np.arange(16), choice.token_ids], 1e-4)
    assert choice.message.role == "assistant"
    tokens = server.post("/tokenize", {"messages": messages})[1]["tokens"]
    assert tokens == answer.prompt_token_ids


@pytest.mark.parametrize("name", ["developer", "assistant", "tool"])
def test_every_role_is_taken(server, name):
    said = {"role": name, "content": "x"} | ({"tool_call_id": "1"} if name == "tool" else {})
    assert chat(server, [{"role": "user", "content": "x"}, said, {"role": "user", "content": "y"}]).choices


def test_a_stream_is_the_answer_in_pieces(server):
    options = {"n": 2, "temperature": 0.7, "seed": 4, "logprobs": True, "top_logprobs": 1}
    whole = chat(server, "the quick", **options)
    events = list(chat(server, "the quick", stream=True, stream_options={"include_usage": True}, **options))
    assert events[0].choices[0].delta.role == "assistant"
    for choice, said in zip(whole.choices, gathered(events), strict=True):
        assert (said["content"], said["finish"]) == (choice.message.content, choice.finish_reason)
        logprobs = [
            each.logprob
            for event in events
            for of_event in event.choices
            if of_event.index == choice.index
            for each in of_event.logprobs.content
        ]
        assert logprobs == pytest.approx([each.logprob for each in choice.logprobs.content])
    assert (events[-1].choices, events[-1].usage.completion_tokens) == ([], 32)
    assert whole.usage.completion_tokens == 32


def test_log_probabilities(server, model):
    answer = chat(server, "the quick", max_tokens=6, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    prompt = answer.prompt_token_ids
    rows = model.log_probabilities([*prompt, *choice.token_ids])[len(prompt) - 1 : -1]
    content = choice.logprobs.content
    assert "".join(entry.token for entry in content).strip() == choice.message.content.strip()
    assert all(bytes(entry.bytes).decode() == entry.token for entry in content)
    np.testing.assert_allclose([entry.logprob for entry in content], rows.max(-1), atol=TOLERANCE)
    for row, entry in zip(rows, content, strict=True):
        np.testing.assert_allclose([top.logprob for top in entry.top_logprobs], np.sort(row)[-2:][::-1], atol=TOLERANCE)


def test_a_response_has_its_format(server):
    schema = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER, "strict": True}}
    for seed in range(5):
        choice = chat(server, "x", max_tokens=100, temperature=1.5, seed=seed, response_format=schema).choices[0]
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), WEATHER)
    assert chat(server, "x", response_format={"type": "text"}).choices


def calls_of(message):
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
@pytest.mark.parametrize("parallel", [False, True])
def test_a_call_that_is_asked_for_has_its_tools_arguments(tools, choice, parallel):
    finished = 0
    for seed in range(3):
        options = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel, "seed": seed}
        options |= {"temperature": 1.5, "max_tokens": 120, "n": 2}
        whole = chat(tools, "What is the weather?", **options).choices
        streamed = gathered(chat(tools, "What is the weather?", stream=True, **options))
        for one, said in zip(whole, streamed, strict=True):
            found = calls_of(one.message)
            assert said["tool_calls"] == list(map(list, found))
            assert said["finish"] == one.finish_reason
            assert found
            if one.finish_reason == "length":
                continue
            finished += 1
            assert one.finish_reason == "tool_calls"
            assert len({call.id for call in one.message.tool_calls}) == len(found)
            assert len(found) == 1 or parallel
            for name, arguments in found:
                assert name == "time" or choice == "required"
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert finished > 2 or parallel


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_texts_and_calls_come_apart(stream):
    text = f"<think>Which days?</think>Let me see. {CALL}"
    with served(scripted(text), template=THINKING, length=2048) as server:
        answer = chat(server, "x", tools=TOOLS, max_tokens=200, stream=stream)
        if stream:
            (said,) = gathered(answer)
        else:
            (choice,) = answer.choices
            message = choice.message
            said = {"content": message.content, "reasoning_content": message.reasoning_content}
            said |= {"tool_calls": list(map(list, calls_of(message))), "finish": choice.finish_reason}
        ((name, arguments),) = said.pop("tool_calls")
        assert (name, json.loads(arguments)) == ("weather", {"place": "Ur", "days": 2})
        assert said["content"].strip() == "Let me see."
        assert (said["reasoning_content"], said["finish"]) == ("Which days?", "tool_calls")


def test_special_tokens_are_shown_where_a_model_s_marks_are_some():
    model = ServedModel(open_source(FOLDER), "demo", 2048, HERMES)
    body = {"messages": [{"role": "user", "content": "x"}]}
    for skips in (True, False):
        model.chat.skip_special_tokens = skips
        (job,) = read_chat(BodyFields(body), model).jobs
        assert job.sampling.skip_special_tokens == skips


def test_without_tools_a_call_is_text():
    for tools in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        with served(scripted(CALL), template=HERMES, length=2048) as server:
            (choice,) = chat(server, "x", max_tokens=100, **tools).choices
            assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)


def test_a_conversation_with_calls_and_their_results(tools):
    """The server's message goes back as the client has it, with the tools' results behind it."""
    messages = [{"role": "user", "content": "What is the weather?"}]
    for _ in range(2):
        options = {
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "temperature": 1.0,
            "seed": 3,
        }
        message = chat(tools, messages, max_tokens=200, **options).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "warm"} for call in message.tool_calls]
    tokens = tools.post("/tokenize", {"messages": messages, "tools": TOOLS})[1]["tokens"]
    said = tools.post("/detokenize", {"tokens": tokens})[1]["prompt"]
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        arguments = json.dumps(json.loads(call["function"]["arguments"]), ensure_ascii=False)
        assert f'{{"name": "{call["function"]["name"]}", "arguments": {arguments}}}' in said
    assert said.count("tool: warm") == 2
    assert said.endswith("assistant: ")
    assert chat(tools, messages, tools=TOOLS, tool_choice="none").choices[0].message.content is not None


def test_a_template_gets_its_own_arguments(server):
    template = "{{ messages[-1].content }}{{ mark }}{{ reasoning_effort }}"
    with served(server.engine, template=template) as own:
        said = {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "low"}
        tokens = own.post("/tokenize", said | {"chat_template_kwargs": {"mark": "!"}})[1]["tokens"]
        assert own.post("/detokenize", {"tokens": tokens})[1]["prompt"] == "x!low"


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('only users speak here') }}", "{{ messages[0].nothing.more }}"]
)
def test_what_a_template_refuses_is_refused(server, template):
    with served(server.engine, template=template) as own:
        status, answer = own.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        assert status == 400
        assert "only users speak here" in answer["error"]["message"] or "more" in template
