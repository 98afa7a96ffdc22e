"""Calls of Granite 3: a JSON list after `<|tool_call|>`."""

from __future__ import annotations

from collections.abc import Sequence

from paged_kv.serve.chat.grammar import Rules
from paged_kv.serve.chat.message import Incoming, Outgoing, Step
from paged_kv.serve.chat.syntaxes.base import Asked, Call, Syntax
from paged_kv.serve.chat.syntaxes.json_calls import list_rule, read_list, write_list


class Granite(Syntax):
    """`<|tool_call|>[{"name": ..., "arguments": {...}}]`."""

    NAME = "granite"
    OPENING = "<|tool_call|>"

    @classmethod
    def is_of(cls, template: str) -> bool:
        return cls.OPENING in template and "<|start_of_role|>" in template

    def calls(self, rules: Rules, asked: Asked) -> str:
        return rules.rule(f'"[" {list_rule(rules, asked)}')

    def read_call(self, text: Incoming, out: Outgoing) -> Step[bool]:
        return (yield from read_list(text, out))

    def write(self, calls: Sequence[Call]) -> str:
        return self.OPENING + write_list(calls)
