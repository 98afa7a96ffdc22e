"""Calls of Phi-4-mini: a JSON list in `<|tool_call|>` and `<|/tool_call|>`, or after `functools`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paged_kv.serve.chat.grammar import Rules
from paged_kv.serve.chat.message import Incoming, Outgoing, Step
from paged_kv.serve.chat.syntaxes.base import Asked, Call, Syntax, dumps
from paged_kv.serve.chat.syntaxes.json_calls import list_rule, read_list, write_list

_CLOSING = "<|/tool_call|>"


class Phi(Syntax):
    """`<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>`, by the model's own template.

    That template has no variable of tools: it writes those that a system message brings.
    """

    NAME = "phi"
    OPENING = "<|tool_call|>"
    MARKS = (_CLOSING,)

    @classmethod
    def is_of(cls, template: str) -> bool:
        return "<|tool|>" in template and "<|/tool|>" in template

    def calls(self, rules: Rules, asked: Asked) -> str:
        return rules.rule(f'"[" {list_rule(rules, asked)} {rules.mark(_CLOSING)}')

    def read_call(self, text: Incoming, out: Outgoing) -> Step[bool]:
        if not (yield from read_list(text, out)):
            return False
        yield from text.space()
        yield from text.take(_CLOSING)
        return True

    def adapt(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
        if not tools:
            return messages
        has_system = bool(messages) and messages[0]["role"] == "system"
        system = messages[0] if has_system else {"role": "system", "content": "You are a helpful assistant with tools."}
        functions = dumps([tool["function"] for tool in tools])
        return [system | {"tools": functions}, *messages[has_system:]]

    def write(self, calls: Sequence[Call]) -> str:
        return self.OPENING + write_list(calls) + _CLOSING


class Functools(Syntax):
    """`functools[{"name": ..., "arguments": {...}}]`, by templates that ask for it, as one of vLLM's does."""

    NAME = "functools"
    OPENING = "functools["

    @classmethod
    def is_of(cls, template: str) -> bool:
        return "functools" in template

    def calls(self, rules: Rules, asked: Asked) -> str:
        return rules.rule(list_rule(rules, asked))

    def read_call(self, text: Incoming, out: Outgoing) -> Step[bool]:
        text.at -= 1  # the mark's bracket is the list's
        return (yield from read_list(text, out))

    def write(self, calls: Sequence[Call]) -> str:
        return "functools" + write_list(calls)
