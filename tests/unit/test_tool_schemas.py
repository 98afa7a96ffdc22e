"""Schemas of tools as clients write them: what can be enforced is, the rest is checked or refused."""

import json
import logging
import time

import jsonschema
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv.errors import ContractError
from paged_kv.json_schemas import close, parts, relax
from paged_kv.serve.chat import CallArguments, CallStart, ChatFormat, Content
from paged_kv.serve.chat.argument_checks import misfit
from paged_kv.serve.chat.holding import hold
from paged_kv.serve.chat.syntaxes import Call
from paged_kv.serve.chat.tools import ToolSchemaError, read_tools
from paged_kv.serve.fields import BodyFields, FieldError
from paged_kv.serve.openai_chat import _template_values
from paged_kv.serve.sampling import read_structure
from paged_kv.structured_output import JsonSchema, Regex, StructureCompiler
from support.chats import NOW, TEMPLATES
from support.properties import examples
from support.tool_chats import GENERIC

TEXT, DATE = {"type": "string"}, {"type": "string", "format": "date"}
PAIR = {"a": {"type": "integer"}, "b": TEXT}


def of(**schema):
    """Parameters with one, `a`."""
    return {"type": "object", "properties": {"a": schema}}


def wide(count):
    return {"type": "object", "properties": {f"p{i}": TEXT for i in range(count)}}


FORMATS = ["int32", "int64", "uint64", "float", "double", "byte", "binary", "password", "regex", "iri", "idn-email"]
REPEATED = "^((((a{1,99}){1,99}){1,99}){1,99}){1,99}$"
ODD = {
    # by name: a schema, arguments that fit it, the pointer of what cannot be enforced
    **{f"format {name}": (of(type="string", format=name), {"a": "x"}, "/properties/a/format") for name in FORMATS},
    "format of a number": (of(type="integer", format="uint64"), {"a": 5}, ""),
    "propertyNames": (of(propertyNames={"pattern": "^x"}), {"a": {"x": 1}}, "/properties/a/propertyNames"),
    "uniqueItems": (of(type="array", uniqueItems=True), {"a": [1, 2]}, "/properties/a/uniqueItems"),
    "contains": (of(type="array", contains={"type": "integer"}), {"a": ["x", 1]}, "/properties/a/contains"),
    "minProperties": (
        {"type": "object", "properties": PAIR, "minProperties": 1, "additionalProperties": True},
        {"b": "x"},
        "/minProperties",
    ),
    "patternProperties": (of(type="object", patternProperties={"^x": {"type": "integer"}}), {"a": {"x1": 5}}, ""),
    "dependentRequired": (of() | {"dependentRequired": {"b": ["a"]}}, {"a": 1}, "/dependentRequired"),
    "dependencies": (of() | {"dependencies": {"b": ["a"]}}, {"a": 1}, "/dependencies"),
    "if": (of() | {"if": {"required": ["b"]}, "then": {"required": ["a"]}}, {"a": 1}, "/if"),
    "not": (of(**{"not": {"type": "null"}}), {"a": "x"}, "/properties/a/not"),
    "unevaluated": (of() | {"unevaluatedProperties": False}, {"a": 1}, "/unevaluatedProperties"),
    "recursion": (of(**{"$ref": "#"}), {"a": {"a": {}}}, ""),
    "recursion of a list": (
        {
            "type": "object",
            "properties": {"root": {"$ref": "#/$defs/n"}},
            "$defs": {"n": {"properties": {"below": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}},
        },
        {"root": {"below": [{"below": []}, {}]}},
        "",
    ),
    "a reference elsewhere": (of(**{"$ref": "https://example.com/a.json"}), {"a": 1}, "/properties/a/$ref"),
    "a reference to nothing": (of(**{"$ref": "#/$defs/none"}), {"a": 1}, "/properties/a/$ref"),
    "$schema": ({"$schema": "http://json-schema.org/draft-07/schema#", **of(type="string")}, {"a": "x"}, ""),
    "another $schema": ({"$schema": "https://example.com/schema", **of(type="string")}, {"a": "x"}, "/$schema"),
    "nullable": (of(type="string", nullable=True), {"a": "x"}, ""),
    "const": (of(const={"x": [1, None]}), {"a": {"x": [1, None]}}, ""),
    "a long enum": (of(enum=[f"word {i}" for i in range(200)]), {"a": "word 7"}, ""),
    "look-ahead": (of(type="string", pattern=r"^(?=.*\d)\w+$"), {"a": "x1"}, "/properties/a/pattern"),
    "a pattern of no language": (of(type="string", pattern="(["), {"a": "x"}, "/properties/a/pattern"),
    "repetitions": (of(type="string", pattern=REPEATED), {"a": "aaa"}, "/properties/a/pattern"),
    "nothing is required": (of(type="string") | {"required": []}, {"a": "x"}, ""),
    "required: null": (of(type="string") | {"required": None}, {"a": "x"}, "/required"),
    "required within": (of(type="string", required=True), {"a": "x"}, ""),
    "types": (of(type=["string", "null"]), {"a": None}, ""),
    "no such type": (of(type="any"), {"a": "x"}, "/properties/a/type"),
    "a text as a limit": (of(type="integer", minimum="5"), {"a": 7}, "/properties/a/minimum"),
    "a limit with a fraction": (of(type="string", maxLength=3.0), {"a": "xyz"}, "/properties/a/maxLength"),
    "true": ({"type": "object", "properties": {"a": True, "b": False}}, {"a": 1}, ""),
    "allOf": (
        {"type": "object", "allOf": [{"properties": {"a": TEXT}}, {"properties": {"b": TEXT}, "required": ["b"]}]},
        {"a": "x", "b": "y"},
        "",
    ),
    "oneOf that overlaps": (of(oneOf=[{"type": "integer"}, {"type": "number"}]), {"a": 1.5}, "/properties/a/oneOf"),
    "anyOf beside properties": (
        {"type": "object", "properties": PAIR, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"a": 1},
        "",
    ),
    "a tuple": (of(type="array", prefixItems=[TEXT, {"type": "integer"}]), {"a": ["x", 1]}, ""),
    "an object in a tuple": (of(items={"type": "object", "properties": PAIR}), {"a": [{"b": "x"}, {}]}, ""),
    "anything": (of(), {"a": {"x": [1, {"y": None}]}}, ""),
    "other properties": (
        {"type": "object", "properties": PAIR, "additionalProperties": {"type": "boolean"}},
        {"a": 1, "c": True},
        "",
    ),
    "a key that is no word": ({"type": "object", "properties": {"the key": TEXT}}, {"the key": "x"}, ""),
    "many properties": (wide(520), {"p7": "x", "p519": "y"}, ""),
    "a huge divisor": (of(type="integer", multipleOf=10**18 - 11), {"a": 0}, "/properties/a/multipleOf"),
    "notes": (of(type="string", title="t", examples=["x"], deprecated=True, **{"x-note": 1}), {"a": "x"}, ""),
    "dynamic references": ({"$dynamicAnchor": "n", **of(**{"$dynamicRef": "#n"})}, {"a": {}}, "/$dynamicAnchor"),
    "a definition": (
        of(**{"$ref": "#/$defs/b"}) | {"$defs": {"b": {"type": "string", "format": "uri-x"}}},
        {"a": "x"},
        "/$defs/b/format",
    ),
}  # fmt: skip


def tools(strict=False, names=ODD):
    functions = [
        {"name": name.replace(" ", "_").replace("$", "").replace(":", ""), "parameters": ODD[name][0]} for name in names
    ]
    return [{"type": "function", "function": each | ({"strict": True} if strict else {})} for each in functions]


STRICT_ROLES = """{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}
{%- if m.role not in ('user', 'assistant') %}{{ raise_exception('role') }}{% endif %}
{{- '<' }}{{ m.role }}>{{ m.content }}{% endfor %}"""
ALL = TEMPLATES | {"generic": GENERIC}


@pytest.fixture(scope="module")
def vocabulary():
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({each: at for at, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer, StructureCompiler(tokenizer)


def follows(vocabulary, compiled, text):
    """The length of a text's longest beginning that a structure lets come."""
    tokenizer, _ = vocabulary
    state = compiled.begin()
    for count, token in enumerate(tokenizer.encode(text).ids):
        if token not in state.allowed():
            return count
        if state.push(token):
            return count + 1
    return len(text.encode())


@pytest.mark.parametrize("name", ALL)
def test_odd_schemas_refuse_no_request_and_let_what_fits_them_through(vocabulary, name):
    chat, offered = ChatFormat({"default": ALL[name]}, {}), tools()
    compiled = vocabulary[1].compile(chat.structure(offered, "auto", True, None, "[assistant]"))
    for tool, (_, arguments, _) in zip(offered, ODD.values(), strict=True):
        text = chat.syntax.write([Call(tool["function"]["name"], arguments, "abcdefghi")])
        assert follows(vocabulary, compiled, text) == len(text.encode()), text
        parser = chat.parser([tool], "")
        deltas = parser.push(text) + parser.finish()
        assert sum(isinstance(each, CallStart) for each in deltas) == 1
        read = json.loads("".join(each.text for each in deltas if isinstance(each, CallArguments)))
        assert read == arguments


def test_what_cannot_be_enforced_is_taken_from_the_smallest_part_and_refused_by_its_pointer_where_it_is_strict():
    syntax = ChatFormat({"default": GENERIC}, {}).syntax
    for at, (name, (schema, arguments, pointer)) in enumerate(ODD.items()):
        (held,) = hold(read_tools(tools(names=[name])), syntax)
        held_parts = {f"{place}/{each}" for place, node in parts("#", held.parameters) for each in node}
        whole_parts = {f"{place}/{each}" for place, node in parts("#", schema) for each in node}
        lost = whole_parts - held_parts
        assert bool(lost) == bool(pointer), name
        assert not pointer or f"#{pointer}" in lost
        below = {each for each in lost if any(each.startswith(f"{other}/") for other in lost)}
        assert len(lost - below) <= (2 if name in ("if", "dynamic references") else 1), name
        read = read_tools(tools(strict=True))[at : at + 1]
        if not pointer:
            assert jsonschema.Draft202012Validator(held.parameters).is_valid(arguments) or name.startswith("required")
            hold(read, syntax)
            continue
        with pytest.raises(ToolSchemaError) as refused:
            hold(read, syntax)
        assert refused.value.param == f"tools[{at}].function.parameters"
        assert f"{read[0].name!r} is strict and cannot be enforced at #{pointer}: " in str(refused.value), name


KEYWORDS = [
    "minimum",
    "maxLength",
    "pattern",
    "required",
    "properties",
    "additionalProperties",
    "items",
    "anyOf",
    "type",
]
LEAF = st.sampled_from(
    [
        {},
        {"type": "integer"},
        {"minimum": 2},
        {"type": "string", "maxLength": 1},
        {"pattern": "^x"},
        {"const": 1},
        False,
        *({"enum": [1, "x", None, [1]]}, {"multipleOf": 2}, {"uniqueItems": True}, {"required": ["a"]}),
        {"type": ["null"]},
    ]
)
SCHEMAS = st.recursive(
    LEAF,
    lambda below: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(st.sampled_from("abc"), below, max_size=2),
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), below, max_size=1),
            "additionalProperties": below,
            "items": below,
            "prefixItems": st.lists(below, min_size=1, max_size=2),
            "contains": below,
            "maxContains": st.just(1),
            "allOf": st.lists(below, min_size=1, max_size=2),
            "anyOf": st.lists(below, min_size=1, max_size=2),
            "oneOf": st.lists(below, min_size=1, max_size=3),
            "not": below,
            "if": below,
            "then": below,
            "else": below,
            "propertyNames": below,
            "dependentRequired": st.just({"a": ["b"]}),
            "minProperties": st.just(1),
            "maxItems": st.just(2),
            "$ref": st.just("#/$defs/d"),
        },
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.sampled_from([None, True, 0, 1, 2, 3.0, 1.5, "", "x", "xy"]),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.sampled_from("abc"), below, max_size=3),
    max_leaves=5,
)


@settings(max_examples=examples(300))
@given(SCHEMAS, LEAF, VALUES, st.sets(st.sampled_from(KEYWORDS)))
def test_a_relaxed_schema_accepts_what_the_whole_one_does_and_a_check_finds_what_does_not_fit(
    schema, definition, value, refused
):
    whole = {"$defs": {"d": definition}, "allOf": [schema]}
    fits = jsonschema.Draft202012Validator(whole).is_valid(value)

    def problem_of(tried):
        text = json.dumps(tried)
        return next((f'Unimplemented keys: ["{name}"]' for name in sorted(refused) if f'"{name}":' in text), "")

    relaxed, _ = relax(whole, problem_of, 5)
    assert not problem_of(relaxed)
    assert not fits or jsonschema.Draft202012Validator(relaxed).is_valid(value)
    assert (misfit(value, whole) is None) == fits


def test_a_check_is_bounded_fetches_nothing_and_names_the_place_but_no_value():
    doubling = {
        "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)},
        "$ref": "#/$defs/d0",
    }
    begun = time.monotonic()
    assert misfit({}, doubling) is None
    assert misfit({}, {"$ref": "https://example.com/never"}) is None
    assert misfit("a" * 40, {"pattern": "^(a|a)*$(?=b)"}) is None  # which no automaton has: not checked
    assert misfit("a" * 5000 + "!", {"pattern": "^(a+)+$"}) == "/: pattern"
    assert time.monotonic() - begun < 20
    assert misfit({"a": ["secret", "x1"]}, of(items={"pattern": r"^(?=.*\d)(?!y).+$"})) == "/a/0: pattern"
    assert misfit({"a": ["x1"]}, of(items={"pattern": r"^(?=.*\d)(?!y).+$"})) is None
    assert misfit({"a": [1, True, 1.0]}, of(uniqueItems=True)) == "/a: uniqueItems"


def test_a_call_that_does_not_fit_is_given_back_and_marked_in_the_log(caplog):
    chat = ChatFormat({"default": GENERIC}, {})
    offered = [{"type": "function", "function": {"name": "f", "parameters": of(type="array", uniqueItems=True)}}]
    with caplog.at_level(logging.WARNING, "paged_kv.serve"):
        for arguments in ({"a": [1, 2]}, {"a": [1, 1]}):
            parser = chat.parser(offered, "")
            deltas = parser.push(chat.syntax.write([Call("f", arguments)])) + parser.finish()
            assert json.loads("".join(each.text for each in deltas if isinstance(each, CallArguments))) == arguments
        for _ in range(100):
            logged = [each for each in caplog.messages if "a call does not fit" in each]
            time.sleep(0 if logged else 0.1)
    assert logged == ["tool 'f': a call does not fit its schema at /a: uniqueItems"]


@pytest.mark.parametrize("name", ALL)
def test_a_named_tool_is_called_once(vocabulary, name):
    chat = ChatFormat({"default": ALL[name]}, {})
    compiled = vocabulary[1].compile(chat.structure([NOW], {"name": "now"}, True, None, "[assistant]"))
    once = chat.syntax.write([Call("now", {}, "abcdefghi")])
    if name != "harmony":  # which has one call a message
        twice = chat.syntax.write([Call("now", {}, "abcdefghi")] * 2)
        assert follows(vocabulary, compiled, twice) < len(twice.encode())
    state = compiled.begin(frozenset([vocabulary[0].token_to_id("<end>")]))
    is_whole = [state.push(token) for token in vocabulary[0].encode(once).ids]
    assert is_whole[-1]


@pytest.mark.slow
def test_text_that_ends_in_mid_answer_was_found_before_the_first_token(vocabulary):
    _, compiler = vocabulary
    compiler.compile(JsonSchema(wide(520)))
    for structure in (
        JsonSchema(wide(6000)),
        JsonSchema(of(pattern=REPEATED, description="any type")),
        Regex(REPEATED.strip("^$")),
    ):
        with pytest.raises(ContractError, match="cannot be compiled"):
            compiler.compile(structure)


CLOSED = [
    # a schema, a value that fits it, one that a closed schema does not accept
    (of(), {"a": 1}, {"b": 1}),
    ({"type": "object"}, {"b": 1}, None),
    (of() | {"additionalProperties": True}, {"b": 1}, None),
    (of(type="object", properties=PAIR), {"a": {"b": "x"}}, {"a": {"c": 1}}),
    (of(type="array", items=of()), {"a": [{"a": 1}]}, {"a": [{"b": 1}]}),
    ({"$ref": "#/$defs/d", "$defs": {"d": of()}}, {"a": 1}, {"b": 1}),
    ({"anyOf": [of(), {"type": "object", "properties": PAIR}]}, {"b": "x"}, {"c": 1}),
    ({"allOf": [of(), {"properties": {"b": {}}}]}, {"a": 1, "b": 2}, {"c": 1}),
    ({"allOf": [{"$ref": "#/$defs/d"}, {"properties": {"b": {}}}], "$defs": {"d": of()}}, {"a": 1, "b": 2}, {"c": 1}),
    ({"allOf": [of(), {"additionalProperties": True}]}, {"a": 1, "b": 2}, None),
    ({"properties": PAIR, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"a": 1}, {"a": 1, "c": 1}),
    (of(**{"$ref": "#"}), {"a": {"a": {}}}, {"a": {"b": {}}}),
]  # fmt: skip


def test_a_schema_without_additional_properties_is_closed_in_tools_and_response_formats():
    for schema, fitting, other in CLOSED:
        closed = jsonschema.Draft202012Validator(close(schema))
        assert closed.is_valid(fitting), schema
        assert other is None or not closed.is_valid(other), schema
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": of(type="object", properties=PAIR)}}
    for body in ({"response_format": asked}, {"guided_json": asked["json_schema"]["schema"]}):
        schema = json.loads(read_structure(BodyFields(body)).schema)
        assert (schema["additionalProperties"], schema["properties"]["a"]["additionalProperties"]) == (False, False)


def test_a_response_format_that_cannot_be_enforced_is_refused_by_its_field_and_pointer():
    path = "response_format.json_schema.schema"
    for name, (schema, _, pointer) in ODD.items():
        body = BodyFields({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})
        if not pointer:
            read_structure(body)
            continue
        with pytest.raises(FieldError) as refused:
            read_structure(body)
        assert refused.value.param == path
        assert f"cannot be compiled at #{pointer}: " in str(refused.value), name


@pytest.mark.parametrize("name", ["messages", "tools", "self", "add_generation_prompt"])
def test_names_of_the_server_s_own_are_no_values_of_a_template(name):
    with pytest.raises(FieldError, match=f"chat_template_kwargs.{name}") as refused:
        _template_values(BodyFields({name: []}, "chat_template_kwargs"))
    assert refused.value.param == f"chat_template_kwargs.{name}"
    assert _template_values(BodyFields({"enable_thinking": False})) == {"enable_thinking": False}


@pytest.mark.parametrize("template", [GENERIC, STRICT_ROLES])
def test_a_template_without_tools_sees_plain_messages(template):
    chat = ChatFormat({"default": template}, {})
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
        {"role": "tool", "tool_call_id": "1", "content": "night"},
        {"role": "user", "content": "Which?"},
    ]
    prompt = chat.render(messages, [NOW])
    assert prompt.index("Be brief.") < prompt.index('"name": "now", "description"') < prompt.index("When?")
    assert prompt.count('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>') == 2
    results = "<tool_response>\nnoon\n</tool_response>\n<tool_response>\nnight\n</tool_response>\nWhich?"
    assert results in prompt
    assert chat.render(messages[1:2]).count("When?") == 1


CUTS = {
    # by the name of a syntax: a message that is cut, and what of it is content
    "hermes": [
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool', ""),
        ('Yes.<tool_call>\n{"name": "no', "Yes."),
        ("1 <", "1 <"),
        ("1 <tool", "1 <tool"),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_c', ""),
    ],
    "qwen-coder": [
        ("<tool_call>\n<function=now>\n</function>\n</tool_", ""),
        ("<tool_call>\n<function=now>\n</func", ""),
        ("<tool_call>\n<function=now>\n<param", ""),
    ],
    "gemma": [("<|tool_call>call:now{}<tool_ca", ""), ("<|tool_call>call:n", "")],
    "mistral": [("[TOOL_CALLS]now[ARGS]{}[TOOL_CA", "")],
    "llama": [('{"name": "now", "parameters": {}}; {"na', "")],
    "phi": [('<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool', "")],
    "deepseek-v3.1": [("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁en", "")],
}


@pytest.mark.parametrize("name", CUTS)
def test_a_mark_that_was_cut_is_no_content_and_a_text_that_ends_by_itself_stays(name):
    template = next(each for each in TEMPLATES.values() if ChatFormat({"default": each}, {}).syntax.NAME == name)  # noqa: SIM300
    chat = ChatFormat({"default": template}, {})
    for text, content in CUTS[name]:
        for pieces in ([text], list(text)):
            parser = chat.parser([NOW], "[assistant]")
            deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish(is_cut=True)
            assert "".join(each.text for each in deltas if isinstance(each, Content)) == content, text
    parser = chat.parser([NOW], "[assistant]")
    assert (parser.push("1 <") + parser.finish())[-1].text.endswith("<")
