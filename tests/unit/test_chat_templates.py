"""Chat templates: the text that transformers renders, the same refusals, wherever a model keeps them."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from paged_kv.checkpoint.config import load_config
from paged_kv.checkpoint.gguf import GgufCheckpoint
from paged_kv.checkpoint.source import open_source
from paged_kv.engine import Sampling
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.engine import Engine
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.errors import CheckpointError, ContractError, ContractTypeError
from paged_kv.serve.chat import ChatFormat
from paged_kv.serve.chat.template_files import read_names, read_templates
from support.chats import CHATS, NAMES, TEMPLATES, TOOLS, ours, theirs
from support.engine_runs import Letters
from support.fake_model import FakeModel

CONSTRUCTS = {
    "tojson": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ messages | tojson(ensure_ascii=True) }}",
    "separators": "{{ messages | tojson(separators=(',', ':'), sort_keys=True) }}",
    "break": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "continue": "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}\n  {{ m.content }}\n{% endgeneration %}\n{% endfor %}",
    "blocks": "  {% if true %}\n  {{ messages[0].role }}\n  {% endif %}\n{# none #}\nend",
    "namespace": "{% set n = namespace(a=1) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}{{ n.a }}",
    "strftime": "{{ strftime_now('%Y-%m-%d') }}",
    "names": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ image_token }}{{ sep_token }}",
    "macro": "{% macro one(m) %}<{{ m.role }}>{% endmacro %}{% for m in messages %}{{ one(m) }}{% endfor %}",
    "dict": "{{ dict(a=1) }}{{ dict([('b', 2)]) }}{{ dict.fromkeys(['c']) }}",
    "type of dict": "{{ dict.get({'a': 1}, 'a') }}",
    "thoughts": "{% for m in messages %}{{ m.thinking }}{{ m.reasoning_content }}{{ m.reasoning }}{% endfor %}",
    "undefined": "{{ documents }}{{ tools }}{{ nothing }}{{ add_generation_prompt }}{{ nothing is defined }}",
    "refusal": "{{ raise_exception('no') }}",
    "attribute": "{{ nothing.at_all }}",
    "unsafe": "{{ ''.__class__.__mro__ }}",
    "mutation": "{{ messages.append(1) }}",
    "hidden name": "{% set n = namespace(_a=1) %}",
    "division": "{{ 1 // 0 }}",
    "html": "{{ messages[0].content }}{{ messages[0].content | e }}",
    "call block": "{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}x{% endcall %}",
}
SPECIAL = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "image_token": "<img>", "add_bos_token": True}


@pytest.mark.parametrize("text", [*CONSTRUCTS.values(), *TEMPLATES.values()], ids=[*CONSTRUCTS, *TEMPLATES])
def test_a_template_renders_and_refuses_as_in_transformers(text):
    for messages, tools in CHATS.values():
        for prompts in (True, False):
            expected = theirs(text, messages, tools, add_generation_prompt=prompts)
            assert ours(text, messages, tools, add_generation_prompt=prompts) == expected


def test_a_template_that_cannot_be_read_is_refused():
    with pytest.raises(CheckpointError, match="the chat template cannot be read"):
        ChatFormat({"default": "{% for %}"}, {})
    with pytest.raises(CheckpointError, match="expected one named 'default'"):
        ChatFormat({"rag": "", "tool_use": ""}, {})


@pytest.fixture
def source(tmp_path):
    return replace(open_source(FOLDER), folder=tmp_path)


def test_templates_come_from_every_place_that_transformers_looks_at(source):
    folder = source.folder
    assert ChatFormat.read(source, Tokenizer(FOLDER, source.config)) is None
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(SPECIAL | {"chat_template": "a"}))
    assert read_templates(source) == {"default": "a"}
    each = [{"name": "default", "template": "b"}, {"name": "tool_use", "template": "c"}]
    config.write_text(json.dumps(SPECIAL | {"chat_template": each}))
    assert read_templates(source) == {"default": "b", "tool_use": "c"}
    (folder / "chat_template.jinja").write_text("dü{{ bos_token }}{{ eos_token }}{{ image_token }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("e")
    assert read_templates(source).keys() == {"default", "tool_use"}
    chat = ChatFormat.read(source, Tokenizer(FOLDER, source.config))
    asked = [{"role": "user", "content": "x"}]
    assert chat.render(asked) == "dü<s></s><img>"
    assert chat.render(asked, TOOLS) == "e"
    given = ChatFormat.read(source, Tokenizer(FOLDER, source.config), "given")
    assert given.render(asked, TOOLS) == "given"
    config.write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        read_names(source)


def test_a_gguf_file_brings_templates_and_names(source):
    def strings(*texts):
        from paged_kv.checkpoint.gguf_header import Strings

        data = b"".join(len(text).to_bytes(8, "little") + text for text in texts)
        return Strings(len(texts), memoryview(data))

    metadata = {
        "tokenizer.chat_template": "a",
        "tokenizer.chat_template.tool_use": "b",
        "tokenizer.ggml.tokens": strings(b"x", b"<s>", b"</s>"),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 9,
    }
    checkpoint = GgufCheckpoint.__new__(GgufCheckpoint)
    object.__setattr__(checkpoint, "header", SimpleNamespace(metadata=metadata, file=Path("m.gguf")))
    source = replace(source, checkpoint=checkpoint)
    assert read_templates(source) == {"default": "a", "tool_use": "b"}
    assert read_names(source) == {"bos_token": "<s>", "eos_token": "</s>"}


def call(arguments):
    return {"id": "abcdefghi", "type": "function", "function": {"name": "now", "arguments": arguments}}


def test_a_conversation_becomes_what_the_template_takes():
    chat = ChatFormat({"default": TEMPLATES["hermes"]}, NAMES)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    written = chat.render([{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [call('{"b":1}')]}])
    assert (
        written == '[user]a\nb[assistant]<tool_call>\n{"name": "now", "arguments": {"b": 1}}\n</tool_call>[assistant]'
    )
    # Arguments as a string, for a template that joins texts.
    joined = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}"
    chat = ChatFormat({"default": joined + "{% endfor %}{{ m.role }}{% endfor %}"}, NAMES)
    assert chat.render(
        [{"role": "developer", "content": ""}, {"role": "assistant", "tool_calls": [call({"b": 1})]}]
    ) == ('systemnow{"b": 1}assistant')
    # Calls as text, and tools in the system message, for one that knows neither.
    chat = ChatFormat({"default": TEMPLATES["phi"]}, NAMES)
    written = chat.render([{"role": "assistant", "content": None, "tool_calls": [call({})]}], TOOLS)
    assert written.startswith('[{"name": "get_weather"')
    assert '[assistant]<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>' in written


def test_several_calls_become_a_message_each_where_a_template_writes_one():
    chat = ChatFormat({"default": TEMPLATES["harmony"]}, NAMES)
    two = [call({"a": 1}), call({"a": 2}) | {"id": "second"}]
    results = [{"role": "tool", "tool_call_id": each["id"], "content": each["id"]} for each in two]
    written = chat.render([{"role": "assistant", "content": "", "tool_calls": two}, *results])
    places = [written.index(text) for text in ('{"a": 1}', ">abcdefghi<", '{"a": 2}', ">second<")]
    assert places == sorted(places)


REFUSED = [
    ([], ContractTypeError, "messages: expected a list"),
    ("text", ContractTypeError, "messages: expected a list"),
    ([{"content": "x"}], ContractTypeError, r"messages\[0\]: expected a role"),
    ([{"role": "user"}], ContractError, r"messages\[0\].content: missing"),
    ([{"role": "user", "content": 5}], ContractTypeError, r"content: expected a text or a list"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], ContractError, "only text parts are supported"),
    ([{"role": "user", "content": [{"type": "text", "text": None}]}], ContractTypeError, "text: expected a string"),
    ([{"role": "assistant", "tool_calls": 5}], ContractTypeError, "tool_calls: expected a list"),
    ([{"role": "assistant", "tool_calls": [5]}], ContractTypeError, r"tool_calls\[0\]: expected a function"),
    ([{"role": "assistant", "tool_calls": [call("{")]}], ContractError, "arguments: invalid JSON"),
    ([{"role": "assistant", "tool_calls": [call("[]")]}], ContractTypeError, "arguments: expected an object"),
]


@pytest.mark.parametrize(("messages", "error", "words"), REFUSED)
def test_what_is_no_conversation_is_refused_by_name(messages, error, words):
    with pytest.raises(error, match=words):
        ChatFormat({"default": TEMPLATES["hermes"]}, NAMES).render(messages)


def test_special_tokens_are_shown_where_they_are_asked_for_but_not_those_that_end_a_text():
    tokenizer = Tokenizer(FOLDER, load_config(FOLDER))
    special = sorted(tokenizer.special_tokens)[0]
    token = tokenizer._tokenizer.token_to_id(special)
    texts = []
    for skips in (True, False):
        decoder = tokenizer.stream(skip_special_tokens=skips)
        texts.append(decoder.push(token) + decoder.flush())
    assert texts == ["", special]
    engine, written = Engine(FakeModel(99, 4, 4096), tokenizer=Letters()), []
    for _ in range(2):
        ends = [ord(text[-1]) - ord("a") for text in written]
        engine.add_request([1, 2], Sampling(9, skip_special_tokens=False, stop_tokens=ends))
        outputs = []
        while not engine.is_idle:
            outputs += engine.step()
        written.append("".join(output.text for output in outputs))
    assert written[1] == written[0][: written[0].index(written[0][-1])]
    assert Sampling().skip_special_tokens
    with pytest.raises(ContractTypeError, match="skip_special_tokens: expected true or false"):
        Sampling(skip_special_tokens=1)
