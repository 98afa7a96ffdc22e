"""Conversations and tools for tests of chat templates and calls, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paged_kv.errors import ContractError
from paged_kv.serve.chat.template import Template

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "image_token": "<img>"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Says what the weather is in "München" & <elsewhere>.',
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "Where."},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["place", "days"],
        },
    },
}
SEND = {
    "type": "function",
    "function": {
        "name": "send-mail",
        "description": "Sends a mail.",
        "parameters": {
            "type": "object",
            "properties": {
                "to": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
                "urgent": {"type": "boolean"},
                "size": {"type": "number"},
                "head": {
                    "type": "object",
                    "properties": {"subject": {"type": "string"}, "level": {"type": ["integer", "null"]}},
                    "required": ["subject"],
                    "additionalProperties": False,
                },
            },
            "required": ["to", "head"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}
TOOLS = [WEATHER, SEND, NOW]
_CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"place": 'a "b" <c> ü', "days": 2}},
}
_ASKED: list[dict[str, Any]] = [{"role": "user", "content": "What is <b>2</b> & 3?"}]
_SYSTEM: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
_ANSWERED: list[dict[str, Any]] = [{"role": "assistant", "content": "Five."}, {"role": "user", "content": "Sure?"}]
_CALLED: list[dict[str, Any]] = [
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": '{"warm": true}'},
]
_THOUGHT: list[dict[str, Any]] = [
    {"role": "assistant", "content": "Five.", "reasoning_content": "2 and 3."},
    {"role": "user", "content": "Sure?"},
]
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "plain": (_ASKED, None),
    "turns": (_ASKED + _ANSWERED, None),
    "system": (_SYSTEM + _ASKED + _ANSWERED, None),
    "thought": (_ASKED + _THOUGHT, None),
    "thought by an older name": ([*_ASKED, {"role": "assistant", "content": "", "reasoning": "2 and 3."}], None),
    "tools": (_SYSTEM + _ASKED, TOOLS[:2]),
    "tool results": (_ASKED + _CALLED, TOOLS[:2]),
    "answered results": (_ASKED + _CALLED + _ANSWERED, TOOLS[:2]),
}
"""Messages and tools by what they try."""


def rendered(render: Callable[[], str]) -> str | None:
    """Return what a call renders; None where it refuses."""
    try:
        return render()
    except Exception:  # a template may raise anything
        return None


def ours(text: str, messages: Sequence[Mapping[str, Any]], tools: Any, **variables: Any) -> str | None:
    """A conversation by our template."""
    try:
        return Template(text, NAMES).render(messages, tools, **variables)
    except ContractError:
        return None


def theirs(text: str, messages: Sequence[Mapping[str, Any]], tools: Any, **variables: Any) -> str | None:
    """The same by transformers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    given = [{name: value for name, value in message.items() if value is not None} for message in messages]
    return rendered(
        lambda: render_jinja_template([given], tools=tools, chat_template=text, **(NAMES | variables))[0][0]
    )


def _template(call: str, between: str = "", around: tuple[str, str] = ("", ""), also: str = "") -> str:
    """A small template that writes calls; `call` is what it writes of one."""
    return (
        "{%- if tools %}{{ tools | tojson }}{% endif %}" + also + "{%- for message in messages %}"
        "[{{ message.role }}]{{ message.content }}{% if message.tool_calls %}"
        + around[0]
        + "{% for made in message.tool_calls %}{% set call = made.function %}"
        + f"{{% if not loop.first %}}{between}{{% endif %}}"
        + call
        + "{% endfor %}"
        + around[1]
        + "{% endif %}{% endfor %}[assistant]"
    )


_NAME, _ARGUMENTS = "{{ call.name }}", "{{ call.arguments | tojson }}"
_JSON = f'{{{{ "{{" }}}}"name": "{_NAME}", "arguments": {_ARGUMENTS}}}'
_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_THINKS = "{# <think> </think> #}"
_VALUES = (
    "{% for key, value in call.arguments | items %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
)
_MEMBERS = (
    "{% macro written(value) %}{% if value is string %}QUOTE{{ value }}QUOTE{% elif value is mapping %}{{ '{' }}"
    "{% for key, each in value | dictsort %}{% if not loop.first %},{% endif %}{{ key }}:{{ written(each) }}"
    "{% endfor %}{{ '}' }}{% elif value is sequence %}[{% for each in value %}{% if not loop.first %},{% endif %}"
    "{{ written(each) }}{% endfor %}]{% else %}{{ value | tojson }}{% endif %}{% endmacro %}"
)
_GEMMA = "call:{{ call.name }}{{ written(call.arguments) }}"
TEMPLATES = {
    "qwen-coder": _template(
        "<tool_call>\n<function={{ call.name }}>\n" + _VALUES + "</function>\n</tool_call>", "\n", also=_THINKS
    ),
    "hermes": _template(f"<tool_call>\n{_JSON}\n</tool_call>", "\n", also=_THINKS),
    "harmony": "{# analysis #}{%- for message in messages %}<|start|>{{ message.role }}"
    "{% if message.tool_calls %}{% set call = message.tool_calls[0].function %}"
    "<|channel|>commentary to=functions.{{ call.name }} <|constrain|>json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{% else %}<|channel|>final<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant",
    "mistral": _template(f"[TOOL_CALLS]{_NAME}[ARGS]{_ARGUMENTS}", also="{# [THINK] [/THINK] #}"),
    "mistral-list": _template(_JSON, ", ", ("[TOOL_CALLS][", "]")),
    "deepseek-v3.1": _template(
        f"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜>", "", _DEEPSEEK, _THINKS
    ),
    "deepseek-v3": _template(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}\n```json\n{_ARGUMENTS}\n```<｜tool▁call▁end｜>",
        "\n",
        _DEEPSEEK,
        _THINKS,
    ),
    "granite": _template(_JSON, ", ", ("<|tool_call|>[", "]"), "{# <|start_of_role|> #}"),
    "phi": "{# <|tool|> <|/tool|> #}{%- for message in messages %}{{ message.tools }}[{{ message.role }}]"
    "{{ message.content }}{% endfor %}[assistant]",
    "functools": _template(_JSON, ", ", ("functools[", "]")),
    "gemma": _MEMBERS.replace("QUOTE", '<|"|>')
    + _template(f"<|tool_call>{_GEMMA}<tool_call|>", also="{# <|channel>thought <channel|> #}"),
    "function-gemma": _MEMBERS.replace("QUOTE", "<escape>")
    + _template(f"<start_function_call>{_GEMMA}<end_function_call>"),
    "llama": _template(
        f'{{{{ "{{" }}}}"name": "{_NAME}", "parameters": {_ARGUMENTS}}}', "; ", also="{# <|start_header_id|> ipython #}"
    ),
}
"""A template of our own for each syntax, by its name."""
