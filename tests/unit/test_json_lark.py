"""Grammars of texts as grammars of their JSON."""

import json

import pytest

from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo import byte_tokenizer
from paged_kv.engine.demo_model import FOLDER
from paged_kv.serve.chat import ChatFormat
from paged_kv.serve.chat.json_lark import in_json
from paged_kv.serve.chat.syntaxes import Call
from paged_kv.serve.fields import BodyFields
from paged_kv.serve.ignored import Ignored, UnknownParts
from paged_kv.serve.openai_responses import read_response
from paged_kv.serve.served_model import ServedModel
from paged_kv.structured_output import Grammar, StructureCompiler
from support.chats import TEMPLATES
from support.tool_chats import GENERIC, HERMES

COMPILER = StructureCompiler(byte_tokenizer())


def accepts(lark, text):
    return COMPILER.accepts(Grammar(lark), text)


LINES = """
start: head (line | "@@" LF)* "*** End {" LF? // a patch
head: "*** Begin" LF
line: ("+" | "-") /(.*)/ LF -> line
%import common.LF
"""
LETTERS = 'start: A "k"i ("é" | "\\n") B?\nA: /x{2,3}|\\/y/\nB: /./s'


@pytest.mark.parametrize(
    ("lark", "texts", "others"),
    [
        (
            LINES,
            ["*** Begin\n*** End {", '*** Begin\n+say("é\\n")\t\n@@\n-\n*** End {\n'],
            ["*** Begin\n", "*** Begin\n+x*** End {", "*** Begin\n x\n*** End {", '"'],
        ),
        ("start: /[^\\s'x]+/", ['a"\\', "é/"], ["", "a b", "x", "\n", "'"]),
        (LETTERS, ["xxKé", "/yk\n", "xxxké\n", 'xxké"'], ["xké", "/yk\n12"]),
        ("start: WS_INLINE INT\n%import common.WS_INLINE\n%import common.INT", [" \t07"], ["7", "\n7"]),
        ("start: /(?:[A-C\\d_]|\\u00df)*/i", ["", "aB3_ß"], ["d", '"']),
    ],
)
def test_a_grammar_of_texts_is_one_of_their_json(lark, texts, others):
    inside = in_json(lark)
    for text in (*texts, *others):
        written = json.dumps(text, ensure_ascii=False)[1:-1]
        assert accepts(lark, text) == accepts(inside, written) == (text in texts), text
        assert written == text or not accepts(inside, text)  # as it is, it would end the string


def told(template, syntax, definition):
    """The parts that are ignored where a tool has this format, and the structure of the answer."""
    ignored, model = Ignored(UnknownParts()), ServedModel(open_source(FOLDER), "demo", 4096, template)
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    tools = [{"type": "custom", "name": "f", "format": form}, {"type": "custom", "name": "g"}]
    (job,) = read_response(BodyFields({"input": "x", "tools": tools}, ignored=ignored), model).jobs
    return ignored.paths, job.sampling.structured_output


NO_JSON = ("qwen-coder", "gemma", "function-gemma")
NOT_WRITTEN = ("%ignore WS", "%json {}", "%import x.Y", "A: ~/x/", "A: /(?=x)/", "A: /x/u", 'A: "a".."z"', "A: <eos>")
NOT_WRITTEN = [f'start: "a"\n{part}\n' for part in (*NOT_WRITTEN, 'A: "\\n"i')]
NOT_COMPILED = [("regex", "("), ("regex", "(?=x)x"), ("lark", "start: other\n"), ("lark", "")]


@pytest.mark.parametrize(
    ("template", "syntax", "definition"),
    [
        *((HERMES, "lark", lark) for lark in NOT_WRITTEN),
        *((HERMES, *each) for each in NOT_COMPILED),
        *((TEMPLATES[name], "lark", LINES) for name in NO_JSON),
    ],
)
def test_a_format_that_cannot_be_enforced_is_told_to_the_model_alone(template, syntax, definition):
    """One that is not written, cannot be compiled, or is of a model whose calls are no JSON."""
    paths, structure = told(template, syntax, definition)
    assert paths == ["tools[0].format.definition"]
    assert structure is None or "%lark" not in structure.lark


@pytest.mark.parametrize("name", ["generic", *(name for name in TEMPLATES if name not in NO_JSON)])
def test_calls_that_are_json_are_held_to_a_grammar(name):
    chat = ChatFormat({"default": TEMPLATES.get(name, GENERIC)}, {})
    parameters = {"properties": {"input": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "patch", "parameters": parameters}}]
    structure = chat.structure(tools, "required", False, None, "[assistant]", "", {"patch": in_json(LINES)})
    for text, is_right in (('*** Begin\n+"\n*** End {', True), ("*** Begin\n", False), ("x", False)):
        written = chat.syntax.write([Call("patch", {"input": text}, "abcdefghi")])
        assert COMPILER.accepts(structure, written) == is_right
