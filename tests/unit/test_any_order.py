"""Arguments of calls in any order: each name once, all required ones, and JSON's escapes in their texts."""

import json
from itertools import permutations, product

import pytest

from paged_kv.engine.demo import byte_tokenizer
from paged_kv.serve.chat import ChatFormat
from paged_kv.serve.chat.any_order import object_rule
from paged_kv.serve.chat.grammar import Rules
from paged_kv.structured_output import JsonSchema, StructureCompiler
from support.chats import TEMPLATES

NODE = {"type": "object", "properties": {"n": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
TREE = {"$defs": {"node": NODE, "text": {"type": "string"}}}
CLOSED = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "title": "B"}, "é/c": {"$ref": "#/$defs/node"}},
    "required": ["b"],
    "additionalProperties": False,
} | TREE
OPEN = CLOSED | {"additionalProperties": {"type": "boolean"}, "required": ["z"]}
WRITTEN = {"a": "1", "b": '"x"', "é/c": '{"n": {}}', "q": "true", "z": "false"}


@pytest.fixture(scope="module")
def compiler():
    return StructureCompiler(byte_tokenizer())


def of(schema):
    rules = Rules()
    return rules.grammar(object_rule(rules, schema))


@pytest.mark.parametrize(("schema", "must", "may"), [(CLOSED, {"b"}, {"a", "b", "é/c"}), (OPEN, {"z"}, set(WRITTEN))])
def test_every_order_of_arguments_comes_once_and_whole(compiler, schema, must, may):
    grammar = of(schema)
    for count in range(len(WRITTEN)):
        for names in permutations(WRITTEN, count):
            text = "{" + ", ".join(f'"{name}": {WRITTEN[name]}' for name in names) + "}"
            assert compiler.accepts(grammar, text) == (must <= set(names) <= may), text
    for text in (
        '{"b": "x", "z": true, "b": "y"}',
        '{"b": "x", "z": true,}',
        '{"b": "x"',
        '{"\\u0062": true, "z": true}',
    ):
        assert not compiler.accepts(grammar, text), text


@pytest.mark.parametrize("further", [False, {"type": "boolean"}])
def test_parameters_between_tags_come_in_any_order_too(compiler, further):
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {}}}
    parameters |= {"required": ["b"], "additionalProperties": further}
    chat = ChatFormat({"default": TEMPLATES["qwen-coder"]}, {})
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    grammar, written = chat.structure([tool], "required", False, None), {"a": "1", "b": "x", "c": "[2]", "q": "true"}
    for count in range(5):
        for names in [*permutations(written, count), ("b", "b"), ("a", "b", "a")]:
            values = "".join(f"<parameter={name}>\n{written[name]}\n</parameter>\n" for name in names)
            text = f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"
            is_valid = "b" in names and len(set(names)) == len(names) and (further or "q" not in names)
            assert compiler.accepts(grammar, text) == bool(is_valid), text


def test_white_space_is_that_of_a_schema_in_its_order(compiler):
    pieces, grammar, schema = ["{", '"a"', ":", "1", ",", '"b"', ":", '"x"', "}", ""], of(CLOSED), JsonSchema(CLOSED)
    spaces = ("", " ", "\n", "\n\t ", "  ", " \n", "\n" + 21 * " ")
    odd = [tuple(space if at == place else "" for at in range(10)) for place, space in product(range(10), spaces)]
    for between in [*odd, ("", *8 * [" "], "")]:
        text = "".join(space + piece for space, piece in zip(between, pieces, strict=True))
        assert compiler.accepts(grammar, text) == compiler.accepts(schema, text), text


@pytest.mark.parametrize(
    "more",
    [
        {"minProperties": 1},
        {"allOf": [{}]},
        {"patternProperties": {"^x": {}}},
        {"required": ["z"]},
        {"properties": {f"p{at}": {} for at in range(65)}},
        {"properties": {"a": {"$ref": "#/properties/b"}, "b": {}}},
        {"$defs": {"node": {"$id": "x"}}},
        {"properties": {"a\n": {}}, "required": []},
    ],
)
def test_what_cannot_be_split_keeps_its_order(more):
    assert object_rule(Rules(), CLOSED | more) is None


def test_a_grammar_that_cannot_be_compiled_in_any_order_is_that_of_the_order(compiler):
    schema = {"type": "object", "properties": {"a": {"enum": []}, "b": {"type": "integer"}, "c": {}}}
    function = {"name": "f", "parameters": schema, "strict": True}
    chat = ChatFormat({"default": TEMPLATES["hermes"]}, {})
    grammar = chat.structure([{"type": "function", "function": function}], "required", False, None)
    for arguments, is_valid in (({"b": 1, "c": 2}, True), ({"c": 2, "b": 1}, False), ({"a": 1}, False)):
        call = json.dumps({"name": "f", "arguments": arguments})
        assert compiler.accepts(grammar, f"<tool_call>\n{call}\n</tool_call>") == is_valid


def test_texts_have_every_escape_that_is_a_character(compiler):
    free, short = of(CLOSED), JsonSchema({"type": "string", "maxLength": 2})
    for escape in (r"\u00e9", r"\u2014", r"\uD83D\ude00", r"\n", r"\"", r"\\", r"\/", r"\u0041", r"\u0000", "é", "😀"):
        assert json.loads(f'"{escape}"')
        assert compiler.accepts(free, f'{{"b": "x{escape}"}}'), escape
        assert compiler.accepts(short, f'"x{escape}"') == (escape != r"\/"), escape
    for escape in (r"\ud83d", r"\ude00", r"\ud83dx", r"\u00e", r"\x", "\n"):
        assert not compiler.accepts(free, f'{{"b": "{escape}"}}'), escape
        assert not compiler.accepts(short, f'"{escape}"'), escape
