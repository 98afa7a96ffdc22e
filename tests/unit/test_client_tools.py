"""Tools whose input is a text, and namespaces: the model sees functions, the client its own words."""

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv.checkpoint.config import load_config
from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.engine import Engine
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.serve.client_tools import TextInput
from paged_kv.serve.fields import BodyFields, FieldError
from paged_kv.serve.ignored import Ignored, UnknownParts
from paged_kv.serve.openai_chat import read_chat
from paged_kv.serve.openai_responses import read_response
from paged_kv.serve.served_model import ServedModel
from support.fake_model import Nonsense
from support.properties import examples
from support.served import served
from support.tool_chats import HERMES, scripted_without_compiler

PATCH = '*** Begin Patch\n+say("it")\\\n*** End Patch'
GRAMMAR = 'start: "*** Begin Patch" /(.|\\n)*/'
CUSTOM = {
    "name": "patch",
    "description": "Edits.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}
SEARCH = {
    "type": "function",
    "name": "search",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
}
INSIDE = [SEARCH, {"type": "custom", **CUSTOM}]
SPACES = [
    {"type": "namespace", "name": name, "description": f"All of {name}.", "tools": INSIDE} for name in ("mail", "crm")
]


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def asked(script, **options):
    with served(scripted_without_compiler(script), template=HERMES, length=4096) as server:
        yield server.client, {"model": "demo", "temperature": 0} | options


@given(text=st.text(max_size=30), cuts=st.lists(st.integers(0, 200)), ascii_only=st.booleans())
@settings(max_examples=examples(200), deadline=None)
def test_a_text_is_read_from_its_arguments_however_they_are_cut(text, cuts, ascii_only):
    whole = json.dumps({"input": text}, ensure_ascii=ascii_only)
    ends = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    reader = TextInput()
    assert "".join(reader.push(whole[start:end]) for start, end in pairwise(ends)) == text


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_s_call_is_a_text_in_responses(stream):
    script = call("patch", {"input": PATCH})
    for client, options in asked(script, input="x", tools=[{"type": "custom", **CUSTOM}]):
        if not stream:
            (item,) = client.responses.create(**options).output
        else:
            events = list(client.responses.create(stream=True, **options))
            deltas = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
            (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
            assert "".join(event.delta for event in deltas) == done.input == PATCH
            assert {event.item_id for event in deltas} == {done.item_id}
            (item,) = events[-1].response.output
        assert (item.type, item.name, item.input, item.status) == ("custom_tool_call", "patch", PATCH, "completed")
        assert item.call_id.startswith("call_")


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_s_call_is_a_text_in_chats(stream):
    script, tool = call("patch", {"input": PATCH}), {"type": "custom", "custom": CUSTOM}
    for client, options in asked(script, messages=[{"role": "user", "content": "x"}], tools=[tool]):
        if not stream:
            (choice,) = client.chat.completions.create(**options).choices
            (made,) = choice.message.tool_calls
            assert (made.type, made.custom.name, made.custom.input) == ("custom", "patch", PATCH)
            assert choice.finish_reason == "tool_calls"
        else:
            chunks = client.chat.completions.create(stream=True, **options)
            first, *rest = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
            assert (first.type, first.custom["name"]) == ("custom", "patch")
            assert "".join(each.custom["input"] for each in (first, *rest)) == PATCH


def test_calls_of_namespaces_do_not_meet():
    script = f"{call('mail.search', {'q': 'a'})}\n{call('crm.patch', {'input': PATCH})}"
    for client, options in asked(script, input="x", tools=[*SPACES, SEARCH]):
        search, patch = client.responses.create(**options).output
        assert (search.type, search.namespace, search.name) == ("function_call", "mail", "search")
        assert (patch.type, patch.namespace, patch.name, patch.input) == ("custom_tool_call", "crm", "patch", PATCH)


def prompt(read, fields):
    model = ServedModel(open_source(FOLDER), "demo", 4096, HERMES)
    (job,) = read(BodyFields(fields, ignored=Ignored(UnknownParts())), model).jobs
    return model.text(job.tokens), job.sampling.structured_output


def test_the_model_is_told_of_functions_and_sees_its_calls_again():
    said = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "namespace": "crm", "input": PATCH}
    items = [
        {"role": "user", "content": "x"},
        said,
        {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
    ]
    text, _ = prompt(read_response, {"input": items, "tools": SPACES})
    head, *told = text.partition("Call them by")[0].strip().split("\n")
    functions = [json.loads(line.removeprefix("Tools: "))["function"] for line in (head, *told)]
    names = ["mail.search", "mail.patch", "crm.search", "crm.patch"]
    assert [function["name"] for function in functions] == names
    assert functions[0]["description"] == "All of mail."
    assert functions[1]["description"].startswith("Edits.")
    assert GRAMMAR in functions[1]["description"]
    written = json.dumps({"name": "crm.patch", "arguments": {"input": PATCH}})
    assert f"{written}\n</tool_call>" in text
    assert "tool: ok" in text
    custom = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": PATCH}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [custom]}]
    text, _ = prompt(read_chat, {"messages": messages, "tools": [{"type": "custom", "custom": CUSTOM}]})
    assert f"{written.replace('crm.', '')}\n</tool_call>" in text


ALLOWED = {"mode": "required", "tools": [{"type": "function", "name": "search", "namespace": "crm"}]}
NESTED = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "patch"}}]}
CHATS = [{"type": "custom", "custom": CUSTOM}, {"type": "function", "function": {"name": "other"}}]


@pytest.mark.parametrize(
    ("read", "tools", "choice", "names"),
    [
        (read_response, SPACES, "required", ["mail.search", "mail.patch", "crm.search", "crm.patch"]),
        (read_response, SPACES, {"type": "allowed_tools", **ALLOWED}, ["crm.search"]),
        (read_response, [*SPACES, SEARCH], {"type": "function", "name": "search"}, ["search"]),
        (read_response, SPACES, {"type": "function", "name": "search"}, ["mail.search"]),
        (read_response, SPACES, {"type": "custom", "name": "patch", "namespace": "crm"}, ["crm.patch"]),
        (read_chat, CHATS, {"type": "allowed_tools", "allowed_tools": NESTED}, ["patch"]),
        (read_chat, CHATS, {"type": "custom", "custom": {"name": "patch"}}, ["patch"]),
    ],
)
def test_a_choice_of_tools_holds_the_answer_to_them(read, tools, choice, names):
    asked = {"messages": [{"role": "user", "content": "x"}]} if read is read_chat else {"input": "x"}
    _, structure = prompt(read, asked | {"tools": tools, "tool_choice": choice})
    assert re.findall(r'\{\\"name\\": \\"([^\\]+)\\"', structure.lark) == names


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [("regex", '[ab]{2}\\n"[0-9]x?'), ("lark", 'start: PAIR LF "\\"" /[0-9]x?/\nPAIR: /[ab]{2}/\n%import common.LF\n')],
)
def test_a_format_is_enforced(syntax, definition):
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    tools = [{"type": "custom", "name": "say", "format": form}]
    body = {"input": "x", "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    engine = Engine(Nonsense(4000), Tokenizer(FOLDER, load_config(FOLDER)), max_step_tokens=4096)
    with served(engine, template=HERMES, length=4096) as server:
        for seed in range(3):
            _, answer = server.post("/v1/responses", body | {"seed": seed, "temperature": 1.5})
            assert re.fullmatch('[ab]{2}\n"[0-9]x?', answer["output"][0]["input"]), answer


UNLIKE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
AT_FAULT = [
    # a function, the field at fault, and words of the error
    ({"parameters": UNLIKE, "strict": True}, "parameters", "f' is strict and cannot be enforced at #/properties/a/"),
    ({"parameters": {"type": "array"}}, "parameters", "expected the type object, got 'array'"),
    ({"parameters": {"properties": {"a": {"minimum": float("nan")}}}}, "parameters", "is no JSON"),
    ({"name": "g"}, "name", "duplicate function name '"),
]


@pytest.mark.parametrize(("function", "field", "words"), AT_FAULT)
def test_a_tool_at_fault_is_refused_by_the_client_s_path(function, field, words):
    whole = {"type": "function", "name": "f"} | function
    flat = [{"type": "web_search"}, {"type": "namespace", "name": "box", "tools": [{"type": "mcp"}, G, whole]}]
    chat = [{"type": "web"}, *({"type": "function", "function": each | {"type": None}} for each in (G, whole))]
    for read, asked, tools, holder in (
        (read_response, {"input": "x"}, flat, "tools[1].tools[2]"),
        (read_chat, {"messages": [{"role": "user", "content": "x"}]}, chat, "tools[2].function"),
    ):
        with pytest.raises(FieldError) as refused:
            prompt(read, asked | {"tools": tools})
        assert refused.value.param == f"{holder}.{field}"
        assert words in str(refused.value)


G = {"type": "function", "name": "g"}
