"""System messages wherever a conversation has them, in templates that write one at the front, any, or none."""

import pytest

from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo_model import FOLDER
from paged_kv.serve.anthropic_messages import read_messages_request
from paged_kv.serve.chat import ChatFormat
from paged_kv.serve.chat.systems import Systems
from paged_kv.serve.fields import BodyFields
from paged_kv.serve.openai_chat import read_chat
from paged_kv.serve.openai_responses import read_response
from paged_kv.serve.served_model import ServedModel

ANY = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
RAISES = ANY.replace(
    "[{{",
    "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}[{{",
)
DROPS = ANY.replace("[{{", "{% if loop.first or m.role != 'system' %}[{{").replace("{% endfor", "{% endif %}{% endfor")
SEVERAL = DROPS.replace("loop.first", "loop.first or messages[loop.index0 - 1].role == 'system'")
NONE = ANY.replace("[{{", "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}[{{")
TURNS = ANY.replace(
    "[{{",
    "{% if not loop.first and messages[loop.index0 - 1].role == m.role %}"
    "{{ raise_exception('Roles must alternate.') }}{% endif %}[{{",
)
TEMPLATES = {"any": ANY, "raises": RAISES, "drops": DROPS, "several": SEVERAL, "none": NONE, "turns": TURNS}
FRONT, LEADING = "[system]s[user]x\n\nt\n\ny[assistant]z", "[system]s\n\nt[user]x"
PROMPTS = {
    # the template's prompts of a later system message between two of the user, and of two at the beginning
    "any": ("[system]s[user]x[system]t[user]y[assistant]z", "[system]s[system]t[user]x"),
    "raises": (FRONT, LEADING),
    "drops": (FRONT, LEADING),
    "several": (FRONT, "[system]s[system]t[user]x"),
    "none": ("[user]s\n\nx\n\nt\n\ny[assistant]z", "[user]s\n\nt\n\nx"),
    "turns": ("[system]s[user]x[system]t[user]y[assistant]z", LEADING),
}


def messages(*texts):
    roles = {"r": "tool", "s": "system", "t": "developer", "x": "user", "y": "user", "z": "assistant"}
    return [{"role": roles[text], "content": text} for text in texts]


@pytest.mark.parametrize("name", TEMPLATES)
def test_system_messages_stand_where_the_template_writes_them(name):
    chat = ChatFormat({"default": TEMPLATES[name]}, {})
    later, leading = PROMPTS[name]
    assert chat.render(messages(*"sxtyz")) == later
    assert chat.render(messages(*"stx")) == leading
    assert chat.render(messages(*"xz")) == "[user]x[assistant]z"


LATER = {
    # texts of a conversation, and how they are arranged for a template that takes one system message at the front
    "sxtzrt": "[system]s[user]x\n\nt[assistant]z[tool]r\n\nt",
    "sxzttr": "[system]s[user]x[assistant]z[tool]t\n\nt\n\nr",
    "sxzty": "[system]s[user]x[assistant]z[user]t\n\ny",
    "xztz": "[user]x[assistant]z[user]t[assistant]z",
    "xzt": "[user]x[assistant]z[user]t",
    "st": "[system]s\n\nt",
}


@pytest.mark.parametrize("texts", LATER)
def test_a_later_system_message_changes_nothing_before_it(texts):
    arranged = Systems(several=False, later=False).arrange(messages(*texts))
    assert "".join(f"[{each['role']}]{each['content']}" for each in arranged) == LATER[texts]


BILLING = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize("name", ["any", "raises"])
def test_instructions_and_lines_that_change_leave_one_prefix(name):
    model = ServedModel(open_source(FOLDER), "demo", 2048, TEMPLATES[name])
    prompts, brief = set(), [{"role": "system", "content": "Be brief.\nBe kind."}]
    for hash_ in ("1f2", "a07"):
        line = BILLING.format(hash_)
        blocks = [{"type": "text", "text": text} for text in (line, "Be brief.", "Be kind.")]
        said = {"messages": messages("x"), "max_tokens": 9}
        for read, body in (
            (read_messages_request, said | {"system": blocks}),
            (read_messages_request, said | {"system": [*blocks[1:], blocks[0]]}),
            (read_messages_request, said | {"system": f"{line}\nBe brief.\nBe kind."}),
            (read_chat, {"messages": [{"role": "system", "content": blocks}, *messages("x")]}),
            (read_chat, {"messages": [{"role": "system", "content": line}, *brief, *messages("x")]}),
            (read_response, {"instructions": f"{line}\nBe brief.\nBe kind.", "input": "x"}),
        ):
            (job,) = read(BodyFields(body), model).jobs
            prompts.add(model.text(job.tokens).replace(".\n[", ".["))
    assert prompts == {"[system]Be brief.\nBe kind.[user]x"}
    (job,) = read_response(BodyFields({"instructions": "s", "input": messages("t", "x")}), model).jobs
    assert model.text(job.tokens) == ("[system]s\n\nt[user]x" if name == "raises" else "[system]s[system]t[user]x")
