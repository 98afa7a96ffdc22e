"""Messages that a client has begun: the prompt is transformers', and what follows is read as their rest."""

import pytest

from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo_model import FOLDER
from paged_kv.errors import ContractError
from paged_kv.serve.anthropic_messages import read_messages_request
from paged_kv.serve.chat import CallArguments, CallStart, ChatFormat, Content, Reasoning
from paged_kv.serve.fields import BodyFields
from paged_kv.serve.openai_chat import read_chat
from paged_kv.serve.served_model import ServedModel
from paged_kv.structured_output import JsonSchema
from support.chats import CHATS, NAMES, TEMPLATES, TOOLS, theirs
from support.tool_chats import HERMES

TRIMS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
DROPS = "{% for m in messages %}{{ m.content[:3] }}{% endfor %}"
THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
OWN = {"trims": TRIMS, "drops": DROPS, "thinks": THINKS, "tools": HERMES}


@pytest.mark.parametrize("text", [*TEMPLATES.values(), *OWN.values()], ids=[*TEMPLATES, *OWN])
@pytest.mark.parametrize("content", ["It is", "It is ", "{", "<think>Say"])
def test_a_prompt_ends_with_the_message_as_transformers_has_it(text, content):
    chat = ChatFormat({"default": text}, NAMES)
    for messages, tools in CHATS.values():
        begun = [*messages, {"role": "assistant", "content": content}]
        expected = theirs(text, begun, tools, continue_final_message=True)
        if chat.syntax.NAME in ("phi", "harmony") and tools:
            continue  # the messages themselves are made ready for the template first
        if expected is None:
            with pytest.raises(ContractError, match=rf"messages\[{len(messages)}\]: cannot be continued"):
                chat.render_begun(begun, tools)
        elif chat.syntax.HIDES_TOOLS and tools:
            prompt = chat.render_begun(begun, tools)[0]
            assert prompt.startswith(chat.render(messages, tools, add_generation_prompt=False))
            assert prompt.endswith(expected[-len(content) - len("<assistant>") :])
        else:
            assert chat.render_begun(begun, tools)[0] == expected


CALL = '<tool_call>\n{"name": "now", "arguments": {'
ROWS = [
    # template, what was begun, what follows, what is told of it
    (HERMES, "The answer", " is 5. ", [("content", " is 5. ")]),
    (HERMES, "The answer ", "is 5.", [("content", "is 5.")]),
    (HERMES, "2 <", "3", [("content", "3")]),
    (HERMES, "2 <", '<tool_call>\n{"name": "now", "arguments": {}}', [("call", "now"), ("arguments", "{}")]),
    (HERMES, "Look: <tool_", 'call>\n{"name": "now", "arguments": {}}', [("call", "now"), ("arguments", "{}")]),
    (HERMES, CALL, "}}\n</tool_call>", [("call", "now"), ("arguments", "{}")]),
    (THINKS, "It is", " 5.<think>", [("content", " 5.<think>")]),  # no thought comes after a text
    (THINKS, "<think>2 and", " 3.</think>5", [("reasoning", " 3."), ("content", "5")]),
    (THINKS, "<think>2 and 3.</think>It", " is", [("content", " is")]),
    (THINKS, "<think>", "2.</think>5", [("reasoning", "2."), ("content", "5")]),
    (TEMPLATES["harmony"], "It is", " 5.<|end|>", [("content", " 5.")]),
    (
        TEMPLATES["llama"],
        "It is",
        ' {"name": "now", "parameters": {}}',
        [("content", ' {"name": "now", "parameters": {}}')],
    ),
]
KINDS = {Content: "content", Reasoning: "reasoning", CallStart: "call", CallArguments: "arguments"}


@pytest.mark.parametrize(("template", "begun", "follows", "expected"), ROWS, ids=range(len(ROWS)))
@pytest.mark.parametrize("question", ["x", "What is <think> and <tool_call>?"])
def test_what_follows_is_the_rest_of_the_message(template, begun, follows, expected, question):
    chat = ChatFormat({"default": template}, {})
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": begun}]
    prompt, message = chat.render_begun(messages, TOOLS)
    for pieces in ([follows], follows):
        parser, told = chat.parser(TOOLS, prompt, message), list[tuple[str, str]]()
        for delta in [each for piece in pieces for each in parser.push(piece)] + parser.finish():
            kind = KINDS[type(delta)]
            text = delta.name if kind == "call" else delta.text
            if told and told[-1][0] == kind:
                text = told.pop()[1] + text
            told.append((kind, text))
        assert told == expected


def test_a_structure_holds_what_follows():
    answer = JsonSchema({"type": "object"})
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]
    chat = ChatFormat({"default": THINKS}, {})
    assert chat.structure(None, "none", True, answer, *chat.render_begun(messages)) == answer  # no thought comes first
    messages[-1]["content"] = "<think>Is"
    assert "until" in chat.structure(None, "none", True, answer, *chat.render_begun(messages)).lark
    chat = ChatFormat({"default": TEMPLATES["harmony"]}, {})
    assert chat.structure(TOOLS, "auto", True, None, *chat.render_begun(messages)) is None
    with pytest.raises(ContractError, match="tool_choice: expected none or auto"):
        chat.structure(TOOLS, "required", True, None, *chat.render_begun(messages))


def test_requests_that_go_on_with_a_message():
    model = ServedModel(open_source(FOLDER), "demo", 2048, HERMES)
    asked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]

    def prompt(read, **fields):
        (job,) = read(BodyFields({"max_tokens": 1, "messages": asked} | fields), model).jobs
        return model.text(job.tokens)

    begun, fresh = "user: xassistant: It is", "user: xassistant: It isassistant: "
    assert prompt(read_messages_request) == begun
    assert prompt(read_chat, continue_final_message=True, add_generation_prompt=False) == begun
    assert prompt(read_chat, continue_final_message=True) == begun
    assert prompt(read_chat) == fresh
    assert prompt(read_chat, add_generation_prompt=False) == fresh.removesuffix("assistant: ")
    blocks = [{"type": "text", "text": "It is"}, {"type": "tool_use", "id": "1", "name": "now", "input": {}}]
    assert prompt(read_messages_request, messages=[*asked[:1], {"role": "assistant", "content": blocks}]) != begun
