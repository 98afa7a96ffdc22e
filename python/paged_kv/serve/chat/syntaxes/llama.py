"""Calls of Llama 3: a message that is JSON of a name and parameters."""

from __future__ import annotations

from collections.abc import Sequence

from paged_kv.serve.chat.grammar import Rules
from paged_kv.serve.chat.message import Incoming, Outgoing, Step
from paged_kv.serve.chat.syntaxes.base import Asked, Call, Syntax, dumps, read_thought_of, thought_rule
from paged_kv.serve.chat.syntaxes.json_calls import call_rule, head, read_object

_TAG = "<|python_tag|>"
_OTHER = r"/([ \n]*[^{ \n](.|\n)*)?/"
"""Text that begins as no call does."""


class Llama(Syntax):
    """`{"name": ..., "parameters": {...}}` at the beginning, perhaps after `<|python_tag|>`."""

    NAME = "llama"
    MARKS = (_TAG,)
    IS_SOUGHT = False

    @classmethod
    def is_of(cls, template: str) -> bool:
        return "<|start_header_id|>" in template and '"parameters": ' in template and "ipython" in template

    def start(self, rules: Rules, asked: Asked) -> str:
        if not asked.tools:
            return super().start(rules, asked)
        call = call_rule(rules, asked, "parameters")
        is_single = not asked.is_parallel or "single tool-calls" in self.template
        calls = f"{rules.mark(_TAG)}? {call}" + ("" if is_single else f' ("; " {call})*')
        thought = thought_rule(rules, asked)
        return f"{thought} {calls}" if asked.is_required else f"{thought} ({calls} | {asked.answer or _OTHER})"

    def read(self, text: Incoming, out: Outgoing, asked: Asked, silent: tuple[str, ...]) -> Step[None]:
        yield from read_thought_of(text, out, asked)
        while asked.tools:
            start = text.at
            yield from text.space()
            yield from text.take(_TAG)
            if not (yield from read_object(text, out)):
                text.at = start
                break
            yield from text.space()
            yield from text.take(";")
        # A thought was read; no call comes after other text.
        yield from super().read(text, out, Asked(), silent)

    def write(self, calls: Sequence[Call]) -> str:
        return "; ".join(f"{head(call.name, 'parameters')}{dumps(call.arguments)}}}" for call in calls)
