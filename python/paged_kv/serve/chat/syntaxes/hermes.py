"""Calls of Hermes, Qwen 2.5, Qwen 3 and Granite 4: JSON between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from paged_kv.serve.chat.grammar import Rules, literal
from paged_kv.serve.chat.message import Incoming, Outgoing, Step
from paged_kv.serve.chat.syntaxes.base import Asked, Call, Syntax, dumps
from paged_kv.serve.chat.syntaxes.json_calls import call_rule, head, read_object

_CLOSING = "</tool_call>"


class Hermes(Syntax):
    r"""`<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`."""

    NAME = "hermes"
    OPENING = "<tool_call>"
    MARKS = (_CLOSING,)

    @classmethod
    def is_of(cls, template: str) -> bool:
        return all(text in template for text in (cls.OPENING, _CLOSING, "arguments")) and "<arg_key>" not in template

    def calls(self, rules: Rules, asked: Asked) -> str:
        call = rules.rule(f'"\\n" {call_rule(rules, asked)} "\\n" {rules.mark(_CLOSING)}')
        more = f" ({literal(chr(10))} {rules.mark(self.OPENING)} {call})*" if asked.is_parallel else ""
        return call + more

    def read_call(self, text: Incoming, out: Outgoing) -> Step[bool]:
        yield from text.space()
        if not (yield from read_object(text, out)):
            return False
        yield from text.space()
        yield from text.take(_CLOSING)
        return True

    def write(self, calls: Sequence[Call]) -> str:
        each = (f"{self.OPENING}\n{head(call.name)}{dumps(call.arguments)}}}\n{_CLOSING}" for call in calls)
        return "\n".join(each)
