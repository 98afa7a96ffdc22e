"""Calls of Qwen3-Coder: parameters between tags, as they are where they are strings, else as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paged_kv.errors import ContractError
from paged_kv.json_schemas import SchemaProblem
from paged_kv.serve.chat.any_order import MOST_NAMES
from paged_kv.serve.chat.grammar import Rules, literal
from paged_kv.serve.chat.message import Incoming, Outgoing, Say, Step
from paged_kv.serve.chat.schemas import Schema, kind_of
from paged_kv.serve.chat.syntaxes.base import Asked, Call, Syntax, dumps

_CLOSING, _VALUE_END, _LINE = "</tool_call>", "</parameter>", "\n"


class QwenCoder(Syntax):
    r"""`<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>`."""

    NAME = "qwen-coder"
    WRITES_JSON = False
    OPENING = "<tool_call>"
    MARKS = (_CLOSING,)

    @classmethod
    def is_of(cls, template: str) -> bool:
        return all(text in template for text in (cls.OPENING, "<function=", "<parameter="))

    def calls(self, rules: Rules, asked: Asked) -> str:
        call = rules.any(
            f"{literal(f'{_LINE}<function={tool.name}>{_LINE}')} "
            f"{_parameters(rules, tool.parameters, is_ordered=tool.is_ordered)} "
            f"{literal(f'</function>{_LINE}')} {rules.mark(_CLOSING)}"
            for tool in asked.tools
        )
        return call + (f' ("\\n" {rules.mark(self.OPENING)} {call})*' if asked.is_parallel else "")

    def problem(self, parameters: Mapping[str, Any]) -> SchemaProblem | None:
        try:
            _parameters(Rules(), parameters)
        except ContractError as error:
            return SchemaProblem("#", str(error))
        return None

    def relaxed(self, parameters: dict[str, Any]) -> dict[str, Any]:
        return {} if self.problem(parameters) else parameters

    def read_call(self, text: Incoming, out: Outgoing) -> Step[bool]:
        yield from text.space()
        if not (yield from text.take("<function=")):
            return False
        pieces: list[str] = []
        yield from text.until((">",), pieces.append)
        name = "".join(pieces)
        if name not in out.tools:
            return False
        schema = Schema(out.tools[name].parameters)
        out.call(name)
        out.arguments("{")
        between = ""
        while True:
            yield from text.space()
            if not (yield from text.take("<parameter=")):
                if (yield from text.take("</function>")):
                    out.arguments("}")
                    yield from text.space()
                    yield from text.take(_CLOSING)
                return True
            pieces.clear()
            yield from text.until((">",), pieces.append)
            key = "".join(pieces)
            out.arguments(f"{between}{dumps(key)}: ")
            if not (yield from _read_value(text, out.arguments, schema.properties.get(key) or Schema({}))):
                return True
            between = ", "

    def write(self, calls: Sequence[Call]) -> str:
        each = []
        for call in calls:
            values = "".join(
                f"<parameter={key}>\n{_written(value)}\n{_VALUE_END}\n" for key, value in call.arguments.items()
            )
            each.append(f"{self.OPENING}\n<function={call.name}>\n{values}</function>\n{_CLOSING}")
        return "\n".join(each)


def _parameters(rules: Rules, parameters: Mapping[str, Any], *, is_ordered: bool = False) -> str:
    """The rule of a call's parameters: each once and all required ones, in any order or in that of the schema."""
    schema = Schema(parameters)
    names = sorted(schema.properties, key=lambda name: name not in schema.required)
    further = ""
    if schema.further is not None:
        key = "/[A-Za-z0-9_.-]+/"
        if names:
            others = "|".join(re.escape(name).replace("/", "\\/") for name in names)
            key = f"{key} & ~/{others}/"
        further = rules.rule(f'("<parameter=" {rules.terminal(key)} ">\\n" {_value_rule(rules, schema.further)})*')
    pairs = {
        name: rules.rule(f"{literal(f'<parameter={name}>{_LINE}')} {_value_rule(rules, value)}")
        for name, value in schema.properties.items()
    }
    if is_ordered or not 1 < len(names) <= MOST_NAMES:
        each = [pair if name in schema.required else f"({pair})?" for name, pair in pairs.items()]
        return " ".join([*each, further]).strip() or '""'
    required = len(set(names) & set(schema.required))

    def rest(itself: str) -> str:
        end = f"{further} %if is_ones([0:{required}])" if required else further
        more = (
            f"{further} {pairs[name]} {itself}::set_bit({bit}) %if bit_clear({bit})" for bit, name in enumerate(names)
        )
        return " | ".join([end or '""', *more])

    return f"{rules.numbered(rest)}::0"


def _value_rule(rules: Rules, schema: Schema) -> str:
    """The rule of a value and what ends it."""
    if schema.values is not None:
        return rules.any(literal(f"{_written(value)}\n{_VALUE_END}\n") for value in schema.values)
    if "string" not in schema.kinds:
        return f"{rules.json(schema.whole)} {literal(f'{_LINE}{_VALUE_END}{_LINE}')}"
    texts = rules.terminal(" & ".join(schema.text_patterns))
    ended = rules.terminal(f"{texts} {literal(_LINE + _VALUE_END)}")
    once = rules.terminal(rf"{ended} & ~/(.|\n)*<\/parameter>(.|\n)+/")
    return f'{rules.rule(once, "[lazy]")} "\\n"'


def _read_value(text: Incoming, say: Say, schema: Schema) -> Step[bool]:
    """Reads a value up to its end; True once it is whole."""
    if schema.kinds == {"string"}:
        say('"')
        lines = _Inner(say)
        mark = yield from text.until((_VALUE_END,), lines.add)
        if mark is not None:
            say('"')
        return mark is not None
    pieces: list[str] = []
    if "string" not in schema.kinds:
        yield from text.space()
        if (yield from text.peek()) in ("{", "["):
            yield from text.json(pieces.append)  # a string in it may have the text that ends values
    mark = yield from text.until((_VALUE_END,), pieces.append)
    if mark is not None:
        say(dumps(_converted("".join(pieces).removeprefix("\n").removesuffix("\n"), schema)))
    return mark is not None


class _Inner:
    """A text as it comes, as the inside of a JSON string, without the line's end on both sides."""

    def __init__(self, say: Say) -> None:
        self._say, self._has_begun, self._held = say, False, ""

    def add(self, text: str) -> None:
        if not self._has_begun and text:
            self._has_begun = True
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._say(dumps(text.removesuffix("\n"))[1:-1])


def _converted(text: str, schema: Schema) -> Any:
    """A value by its schema's type; a text where it has none of them."""
    named = {"True": True, "False": False, "None": None}
    try:
        value = named[text.strip()] if text.strip() in named else json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if kind_of(value) in schema.kinds else text


def _written(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)
