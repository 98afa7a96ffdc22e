"""Calls of DeepSeek V3 and V3.1, between marks that are special tokens of their own."""

from __future__ import annotations

from collections.abc import Sequence

from paged_kv.serve.chat.any_order import arguments_rule
from paged_kv.serve.chat.grammar import Rules, literal
from paged_kv.serve.chat.message import Incoming, Outgoing, Step
from paged_kv.serve.chat.syntaxes.base import Asked, Call, Syntax, dumps

_CALL, _NAME, _END, _ALL_END = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)


class DeepSeek31(Syntax):
    """`begin call-begin name sep {...} call-end end`."""

    NAME = "deepseek-v3.1"
    OPENING = "<｜tool▁calls▁begin｜>"
    MARKS = (_CALL, _NAME, _END, _ALL_END)
    _BEFORE, _AFTER = "", ""
    """The text around the arguments."""
    _KIND = ""
    """The text before the name, with its mark."""
    _BETWEEN = ""

    @classmethod
    def is_of(cls, template: str) -> bool:
        return cls.OPENING in template and "```json" not in template

    def calls(self, rules: Rules, asked: Asked) -> str:
        call = rules.rule(
            f"{rules.mark(_CALL)} ({' | '.join(self._one(rules, asked))}) "
            f"{literal(self._AFTER) if self._AFTER else ''} {rules.mark(_END)}"
        )
        between = literal(self._BETWEEN) if self._BETWEEN else ""
        more = f" ({between} {call})*" if asked.is_parallel else ""
        return f"{call}{more} {rules.mark(_ALL_END)}"

    def _one(self, rules: Rules, asked: Asked) -> list[str]:
        return [f"{literal(tool.name)} {rules.mark(_NAME)} {arguments_rule(rules, tool)}" for tool in asked.tools]

    def read_call(self, text: Incoming, out: Outgoing) -> Step[bool]:
        has_calls = False
        while True:
            yield from text.space()
            if not (yield from text.take(_CALL)):
                yield from text.take(_ALL_END)
                return has_calls
            head: list[str] = []
            yield from text.until((_NAME,), head.append)
            name = "".join(head).strip()
            if name == "function":  # V3 names what is called first
                head.clear()
                yield from text.until(("\n",), head.append)
                name = "".join(head).strip()
                yield from text.take("```json\n")
            if name not in out.tools:
                return has_calls
            out.call(name)
            has_calls = True
            if not (yield from text.json(out.arguments)):
                return True
            yield from text.until((_END,), lambda _: None)

    def write(self, calls: Sequence[Call]) -> str:
        each = (
            f"{_CALL}{self._KIND}{call.name}{self._BEFORE or _NAME}{dumps(call.arguments)}{self._AFTER}{_END}"
            for call in calls
        )
        return f"{self.OPENING}{self._BETWEEN.join(each)}{_ALL_END}"


class DeepSeek3(DeepSeek31):
    """The same with `function` before the name, and the arguments in a block of code."""

    NAME = "deepseek-v3"
    _BEFORE, _AFTER, _BETWEEN = "\n```json\n", "\n```", "\n"
    _KIND = f"function{_NAME}"

    @classmethod
    def is_of(cls, template: str) -> bool:
        return cls.OPENING in template and "```json" in template

    def _one(self, rules: Rules, asked: Asked) -> list[str]:
        kind = f'"function" {rules.mark(_NAME)}'
        return [f"{kind} {literal(tool.name + self._BEFORE)} {arguments_rule(rules, tool)}" for tool in asked.tools]
