"""Calls of Mistral: `[TOOL_CALLS]` and a JSON list, or before each call its name."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from paged_kv.serve.chat.any_order import arguments_rule
from paged_kv.serve.chat.grammar import Rules, literal
from paged_kv.serve.chat.message import Incoming, Outgoing, Step
from paged_kv.serve.chat.syntaxes.base import Asked, Call, Syntax, dumps
from paged_kv.serve.chat.syntaxes.json_calls import list_rule, read_list, write_list

_ARGUMENTS, _ID = "[ARGS]", "[CALL_ID]"


class MistralList(Syntax):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, by templates until 2024."""

    NAME = "mistral-list"
    OPENING = "[TOOL_CALLS]"

    @classmethod
    def is_of(cls, template: str) -> bool:
        return cls.OPENING in template and _ARGUMENTS not in template

    def calls(self, rules: Rules, asked: Asked) -> str:
        return rules.rule(f'" "? "[" {list_rule(rules, asked)}')

    def read_call(self, text: Incoming, out: Outgoing) -> Step[bool]:
        return (yield from read_list(text, out))

    def write(self, calls: Sequence[Call]) -> str:
        return self.OPENING + write_list(calls)

    def new_id(self) -> str:
        """Nine letters and digits: the templates refuse any other id."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class Mistral(MistralList):
    """`[TOOL_CALLS]name[ARGS]{...}`, by newer templates; some have `[CALL_ID]` and an id between."""

    NAME = "mistral"
    MARKS = (_ARGUMENTS, _ID)

    @classmethod
    def is_of(cls, template: str) -> bool:
        return cls.OPENING in template and _ARGUMENTS in template

    def calls(self, rules: Rules, asked: Asked) -> str:
        call_id = f" {rules.mark(_ID)} /[A-Za-z0-9]{{9}}/" if _ID in self.template else ""
        call = rules.any(
            f"{literal(tool.name)}{call_id} {rules.mark(_ARGUMENTS)} {arguments_rule(rules, tool)}"
            for tool in asked.tools
        )
        return call + (f" ({rules.mark(self.OPENING)} {call})*" if asked.is_parallel else "")

    def read_call(self, text: Incoming, out: Outgoing) -> Step[bool]:
        start = text.at
        name: list[str] = []
        mark = yield from text.until((_ARGUMENTS, _ID, "{"), name.append)
        called = "".join(name).strip()
        if called not in out.tools:
            text.at = start  # some models write the older list all the same
            return (yield from read_list(text, out))
        if mark == _ID:
            mark = yield from text.until((_ARGUMENTS, "{"), lambda _: None)
        if mark is None:
            return False
        text.at -= mark == "{"
        out.call(called)
        yield from text.json(out.arguments)
        return True

    def write(self, calls: Sequence[Call]) -> str:
        has_id = _ID in self.template
        return "".join(
            f"{self.OPENING}{call.name}{_ID + call.id if has_id else ''}{_ARGUMENTS}{dumps(call.arguments)}"
            for call in calls
        )
