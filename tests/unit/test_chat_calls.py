"""Calls of tools in every syntax: each is read back however its text is cut, and a structure lets no other come."""

import json
import random
from functools import cache
from itertools import pairwise

import jsonschema
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv.errors import ContractError, ContractTypeError
from paged_kv.serve.chat import CallArguments, CallStart, ChatFormat, Content, Reasoning
from paged_kv.structured_output import JsonSchema, Regex, StructureCompiler
from support.chats import NOW, TEMPLATES, TOOLS
from support.properties import examples

ASKED = [{"role": "user", "content": "text"}]
SINGLE = ("harmony",)
"""Syntaxes of one call a message."""
NUMBERS = {"type": "array", "items": {"type": "integer"}, "maxItems": 2}
CHOSEN = {"one": {"oneOf": [{"type": "integer"}, {"type": "null"}]}, "any": {"anyOf": [{"type": "boolean"}, NUMBERS]}}
CHOOSE = {"type": "object", "properties": CHOSEN, "required": ["one"]}
TEXT = {"type": "string", "pattern": '^(?:[ab]{2}\\n"\\\\?[0-9]x?)$'}
SAY = {"type": "object", "properties": {"input": TEXT}, "required": ["input"], "additionalProperties": False}
OFFERED = [
    *TOOLS,
    *(
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in (("choose", CHOOSE), ("space.say", SAY))
    ),
]
PARAMETERS = {each["function"]["name"]: each["function"].get("parameters", {}) for each in OFFERED}
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"], exclude_characters="<>[]{}|`"), max_size=9)
CALLS = st.one_of(
    st.builds(
        lambda place, days: ("get_weather", {"place": place, "days": days}),
        TEXTS | st.sampled_from(['a "b"\n\\', "</p>", "2", "null", '{"a": [1]}']),
        st.integers(1, 9),
    ),
    st.builds(
        lambda to, urgent, level: ("send-mail", {"to": to, "urgent": urgent, "head": {"subject": "x", "level": level}}),
        st.lists(TEXTS, min_size=1, max_size=3),
        st.booleans(),
        st.none() | st.integers(-9, 9),
    ),
    st.just(("now", {})),
)


@cache
def made(name, *, special=False):
    chat = ChatFormat({"default": TEMPLATES[name]}, {})
    tokens = marks(chat) if special else ()
    return ChatFormat({"default": TEMPLATES[name]}, {}, frozenset(tokens))


def marks(chat):
    thought = chat._thought
    found = {chat.syntax.OPENING, *chat.syntax.MARKS} | ({thought.opening, thought.closing} if thought else set())
    return sorted(found - {"", "functools["})


def read(chat, text, cuts, tools=TOOLS, prompt=""):
    """The answer, the thoughts and the calls of a text that comes in pieces."""
    parser = chat.parser(tools, prompt)
    ends = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    deltas = [delta for at, end in pairwise(ends) for delta in parser.push(text[at:end])]
    deltas += parser.finish()
    content = "".join(each.text for each in deltas if isinstance(each, Content))
    thoughts = "".join(each.text for each in deltas if isinstance(each, Reasoning))
    calls = [[each.name, ""] for each in deltas if isinstance(each, CallStart)]
    for each in deltas:
        if isinstance(each, CallArguments):
            calls[each.index][1] += each.text
    return content, thoughts, calls


def message(chat, calls, content=""):
    """The text of a message with calls, as the model would have written it."""
    made_calls = [
        {"id": "abcdefghi", "type": "function", "function": {"name": each, "arguments": json.dumps(arguments)}}
        for each, arguments in calls
    ]
    prompt = chat.render(ASKED, TOOLS)
    whole = chat.render([*ASKED, {"role": "assistant", "content": content, "tool_calls": made_calls}], TOOLS)
    return whole[len(prompt) :].removesuffix("[assistant]").removesuffix("<|start|>assistant").removesuffix("<|call|>")


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=examples(60))
@given(data=st.data())
def test_calls_that_a_template_writes_are_read_back_however_their_text_is_cut(name, data):
    chat = made(name)
    calls = data.draw(st.lists(CALLS, min_size=1, max_size=1 if name in SINGLE else 3))
    content = data.draw(st.sampled_from(["", "Let me look."])) if name not in ("harmony", "llama") else ""
    text = message(chat, calls, content)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    got = read(chat, text, cuts)
    assert got == read(chat, text, [])
    assert got == read(chat, text, range(len(text)))
    assert got[:2] == (content, "")
    assert [(each, json.loads(arguments)) for each, arguments in got[2]] == calls


@pytest.mark.parametrize("name", [name for name in TEMPLATES if made(name)._thought])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_thought_is_told_apart_whoever_opens_it(name, is_open):
    chat = made(name)
    thought = chat._thought
    prompt = f"[assistant]{thought.opening}{thought.title}\n" if is_open else "[assistant]"
    call = message(chat, [("now", {})])
    text = f"{'' if is_open else thought.opening + thought.title}\n2 < 3 {call[:9]}\n\n{thought.closing}\n\nYes. {call}"
    for cuts in ([], range(len(text))):
        assert read(chat, text, cuts, prompt=prompt) == ("Yes.", f"2 < 3 {call[:9]}".rstrip(), [["now", "{}"]])
    assert read(chat, "Yes.", [], prompt=f"[assistant]{thought.opening}\n{thought.closing}")[:2] == ("Yes.", "")


def test_channels_of_harmony_are_told_apart():
    text = (
        "<|channel|>analysis<|message|>2 and 3<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}"
    )
    for cuts in ([], range(len(text))):
        assert read(made("harmony"), text, cuts) == ("Wait.", "2 and 3", [["now", "{}"]])
    assert read(made("harmony"), "<|channel|>final<|message|>Five.", [3])[0] == "Five."


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("end", range(1, 60, 7))
def test_a_text_that_was_cut_off_or_calls_no_tool_is_told_once_and_without_an_error(name, end):
    chat = made(name)
    text = message(chat, [("get_weather", {"place": "x", "days": 2})])
    assert read(chat, text[:end], []) == read(chat, text[:end], range(end))
    other = text.replace("get_weather", "get_whether")
    content, _, calls = read(chat, other, range(len(text)))
    assert not calls
    assert "get_whether" in content or name == "harmony"
    # Without tools there are no calls.
    assert not read(chat, text, [], tools=None)[2]


@cache
def vocabulary(name, special):
    """A vocabulary of bytes, and a compiler for it: with the marks of a syntax as special tokens, or as text."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({each: at for at, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", *(marks(made(name)) if special else ())])
    return tokenizer, StructureCompiler(tokenizer)


def draw(name, structure, rng, begun="", most=4000, *, special):
    """A text of a structure by tokens that are drawn from those allowed; None where it does not end."""
    tokenizer, compiler = vocabulary(name, special)
    end = tokenizer.token_to_id("<end>")
    state = compiler.compile(structure).begin(frozenset([end]))
    tokens = tokenizer.encode(begun).ids
    is_whole, planned = False, []
    for token in tokens:
        is_whole = state.push(token)
    while not is_whole and len(tokens) < most:
        allowed = state.allowed()
        if not planned and rng.random() < 0.05:  # a closing mark of several letters comes by no chance of its own
            planned = tokenizer.encode(rng.choice(["\n</parameter>\n", "</parameter>", *marks(made(name))])).ids
        if planned and planned[0] in allowed:
            token = planned.pop(0)
        else:
            planned.clear()
            # What closes strings, lists and values is drawn more often than letters are.
            weights = [40 if token > 255 else 20 if tokenizer.id_to_token(token) in '"}]<,' else 1 for token in allowed]
            token = int(rng.choices(allowed, weights)[0])
        is_whole = state.push(token)
        tokens += [token] if token != end else []
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    state.add_text(text)
    if is_whole and "\ufffd" not in text:
        assert state.is_whole(), text
    return text if is_whole else None


CHOICES = ["auto", "required", {"name": "send-mail"}]


@pytest.mark.parametrize(
    ("name", "special"),
    # The marks of harmony are special tokens in every vocabulary of it.
    [(name, special) for name in TEMPLATES for special in (False, True) if special or name != "harmony"],
)
def test_no_call_that_a_structure_lets_through_is_malformed(name, special):
    chat, rng = made(name, special=special), random.Random(name)
    told = 0
    for turn in range(examples(16)):
        choice, parallel = CHOICES[turn % 3], turn % 2 == 0
        answer = JsonSchema({"type": "integer"}) if turn % 12 == 3 else None
        prompt = "[assistant]"
        structure = chat.structure(OFFERED, choice, parallel, answer, prompt)
        begun = ""
        if choice == "auto" and answer is None and name not in ("llama", "harmony") and turn % 4 < 2:
            begun = f"Well, <b>.\n{chat.syntax.OPENING}"
        text = draw(name, structure, rng, begun, special=special)
        if text is None:
            continue
        content, _, calls = read(chat, text, rng.choices(range(999), k=5), OFFERED, prompt)
        told += len(calls)
        assert len(calls) <= 1 or parallel
        assert calls or choice == "auto"
        if choice != "auto":
            assert not content, text
        if answer is not None and not calls and choice == "auto":
            assert isinstance(json.loads(content), int)
        for called, arguments in calls:
            assert called == "send-mail" or choice in ("auto", "required")
            jsonschema.validate(json.loads(arguments), {"type": "object"} | PARAMETERS[called])
    assert told >= examples(16) // 3


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_required_call_is_held_from_the_first_token_and_an_answer_after_a_thought(name):
    chat = made(name)
    tokenizer, compiler = vocabulary(name, special=False)
    required = compiler.compile(chat.structure(TOOLS, "required", True, None, "[assistant]"))
    first = {tokenizer.decode([token]) for token in required.begin().allowed()}
    begins = {message(chat, [("now", {})])[0]} | ({chat._thought.opening[0]} if chat._thought else set())
    assert first <= begins | ({" ", "<"} if name in ("harmony", "llama") else set())
    if chat._thought:
        closed = f"[assistant]{chat._thought.opening}\n{chat._thought.closing}\n"
        assert chat.structure(None, "none", True, Regex("a+"), closed) == Regex("a+")
        opened = chat.structure(
            None, "none", True, Regex("a+/"), f"[assistant]{chat._thought.opening}{chat._thought.title}\n"
        )
        text = f"x{chat._thought.closing}\naa/"
        assert compiler.accepts(opened, text)
        assert not compiler.accepts(opened, "aa/")
        assert not compiler.accepts(opened, text + "b")
    assert chat.structure(TOOLS, "none", True, None) is None


REFUSED = [
    ("tools", "required", ContractTypeError, "tools: expected a list"),
    ([{"type": "function"}], "auto", ContractTypeError, r"tools\[0\]: expected an object with a function"),
    ([{"type": "web", "function": {"name": "a"}}], "auto", ContractError, r"tools\[0\].type: expected function"),
    ([{"type": "function", "function": {"name": "a b"}}], "auto", ContractError, "1 to 128 of"),
    ([NOW, NOW], "auto", ContractError, "duplicate function name 'now'"),
    ([{"function": {"name": "a", "parameters": 5}}], "auto", ContractTypeError, "parameters: expected a JSON schema"),
    ([{"function": {"name": "a", "parameters": {"type": "array"}}}], "auto", ContractError, "expected the type object"),
    ([], "required", ContractError, "tool_choice: required requires"),
    ([NOW], {"name": "then"}, ContractError, "expected the name of a tool, got 'then'"),
    ([NOW], "always", ContractTypeError, "tool_choice: expected none, auto, required"),
]


@pytest.mark.parametrize(("tools", "choice", "error", "words"), REFUSED)
def test_wrong_tools_are_refused_by_name(tools, choice, error, words):
    with pytest.raises(error, match=words):
        made("hermes").check_tools(tools, choice)
