"""Calls of Gemma: a name and arguments in a notation of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from paged_kv.errors import ContractError
from paged_kv.serve.chat.grammar import Rules, literal
from paged_kv.serve.chat.message import Incoming, Outgoing, Say, Step
from paged_kv.serve.chat.schemas import Schema
from paged_kv.serve.chat.syntaxes.base import Asked, Call, Syntax, dumps
from paged_kv.serve.chat.tools import Tool

_KEY = re.compile(r'[^:{}\[\],<>"\s]+')
_REFUSED = ("allOf", "not", "if", "patternProperties", "propertyNames", "dependentRequired", "dependentSchemas")
_LIST_REFUSED = ("uniqueItems", "contains", "prefixItems")


class Gemma(Syntax):
    """`<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`, by Gemma 4."""

    NAME = "gemma"
    OPENING = "<|tool_call>"
    CLOSING: ClassVar[str] = "<tool_call|>"
    QUOTE: ClassVar[str] = '<|"|>'
    MARKS = (CLOSING, QUOTE)

    @classmethod
    def is_of(cls, template: str) -> bool:
        return cls.OPENING in template and cls.CLOSING in template and "call:" in template

    def check(self, tools: Sequence[Tool]) -> None:
        for tool in tools:
            self._object(Rules(), Schema(tool.parameters))

    def calls(self, rules: Rules, asked: Asked) -> str:
        call = rules.any(
            f"{literal(f'call:{tool.name}')} {self._object(rules, Schema(tool.parameters))} {rules.mark(self.CLOSING)}"
            for tool in asked.tools
        )
        return call + (f" ({rules.mark(self.OPENING)} {call})*" if asked.is_parallel else "")

    def _value(self, rules: Rules, schema: Schema) -> str:
        """The rule of a value by its schema.

        Raises:
            ContractError: this notation has no rule for it.
        """
        for name in (*_REFUSED, *_LIST_REFUSED):
            if schema.node.get(name) not in (None, False, True, {}, []):
                raise ContractError(f"tools: {name} in a schema of parameters cannot be held by this model's calls")
        if schema.values is not None:
            return rules.any(literal_of(self, rules, value) for value in schema.values)
        if schema.alternatives:
            return rules.any(self._value(rules, each) for each in schema.alternatives)
        each, plain = [], schema.kinds & {"integer", "number", "boolean", "null"}
        if "string" in schema.kinds:
            texts = rules.until(self.QUOTE)
            if any(name in schema.node for name in ("pattern", "minLength", "maxLength")):
                texts = f"{rules.terminal(' & '.join(schema.text_patterns))} {rules.mark(self.QUOTE)}"
            each.append(f"{rules.mark(self.QUOTE)} {texts}")
        if plain:
            numbers = {name: value for name, value in schema.node.items() if name.endswith(("imum", "multipleOf"))}
            each.append(rules.json({"type": sorted(plain)} | numbers))
        if "array" in schema.kinds:
            item = self._value(rules, schema.items) if schema.node.get("items") else self._anything(rules)
            least, most = schema.node.get("minItems", 0), schema.node.get("maxItems")
            each.append(_list(item, least, most))
        if "object" in schema.kinds:
            each.append(self._object(rules, schema))
        return rules.any(each)

    def _anything(self, rules: Rules) -> str:
        """The rule of a value without a schema: a scalar, or a list of them."""
        scalar = f"{rules.mark(self.QUOTE)} {rules.until(self.QUOTE)}"
        scalar = rules.any([scalar, rules.json({"type": ["number", "boolean", "null"]})])
        return rules.any([scalar, _list(scalar, 0, None)])

    def _object(self, rules: Rules, schema: Schema) -> str:
        if not schema.properties:
            further = schema.further
            if further is None:
                return '"{}"'
            value = self._anything(rules) if not further.node else self._value(rules, further)
            pair = rules.rule(f'/[A-Za-z0-9_.-]+/ ":" {value}')
            return rules.rule(f'"{{" ({pair} ("," {pair})*)? "}}"')
        pairs = []
        # The template sorts keys, so the model has learnt them sorted.
        for name, each in sorted(schema.properties.items()):
            if not _KEY.fullmatch(name):
                raise ContractError(f"tools: the parameter {name!r} cannot be named in this model's calls")
            pairs.append((rules.rule(f"{literal(name + ':')} {self._value(rules, each)}"), name in schema.required))
        after = ""  # the pairs after this one, each with its comma
        first = ""  # this pair or a later one without a comma
        can_be_none = True
        for pair, is_required in reversed(pairs):
            begun = f"{pair} {after}"
            first = rules.rule(begun if is_required or not first else f"{begun} | {first}")
            after = rules.rule(f'"," {pair} {after}' if is_required else f'("," {pair})? {after}')
            can_be_none = can_be_none and not is_required
        return rules.rule(f'"{{" {first}{"?" if can_be_none else ""} "}}"')

    def read_call(self, text: Incoming, out: Outgoing) -> Step[bool]:
        yield from text.space()
        if not (yield from text.take("call:")):
            return False
        pieces: list[str] = []
        if (yield from text.until(("{",), pieces.append)) is None or "".join(pieces) not in out.tools:
            return False
        out.call("".join(pieces))
        if (yield from self._read_members(text, out.arguments)):
            yield from text.space()
            yield from text.take(self.CLOSING)
        return True

    def _read_members(self, text: Incoming, say: Say) -> Step[bool]:
        """Reads an object after its brace, told as JSON; True once it is whole."""
        say("{")
        between = ""
        while True:
            yield from text.space()
            if (yield from text.take("}")):
                say("}")
                return True
            if between:
                yield from text.take(",")
                yield from text.space()
            yield from text.take(self.QUOTE)
            pieces: list[str] = []
            if (yield from text.until((":",), pieces.append)) is None:
                return False
            say(f"{between}{dumps(''.join(pieces).removesuffix(self.QUOTE).strip())}: ")
            if not (yield from self._read_value(text, say)):
                return False
            between = ", "

    def _read_value(self, text: Incoming, say: Say) -> Step[bool]:
        yield from text.space()
        if (yield from text.take(self.QUOTE)):
            say('"')
            mark = yield from text.until((self.QUOTE,), lambda piece: say(dumps(piece)[1:-1]))
            if mark is not None:
                say('"')
            return mark is not None
        if (yield from text.take("{")):
            return (yield from self._read_members(text, say))
        if (yield from text.take("[")):
            say("[")
            between = ""
            while True:
                yield from text.space()
                if (yield from text.take("]")):
                    say("]")
                    return True
                if between:
                    yield from text.take(",")
                say(between)
                if not (yield from self._read_value(text, say)):
                    return False
                between = ", "
        pieces: list[str] = []
        mark = yield from text.until((",", "}", "]"), pieces.append)
        text.at -= len(mark or "")
        value = "".join(pieces).strip()
        if mark is None or not value:
            return False
        try:
            json.loads(value)
        except ValueError:
            value = dumps(value)
        say(value)
        return True

    def write(self, calls: Sequence[Call]) -> str:
        each = []
        for call in calls:
            members = ",".join(f"{key}:{self.written(value)}" for key, value in sorted(call.arguments.items()))
            each.append(f"{self.OPENING}call:{call.name}{{{members}}}{self.CLOSING}")
        return "".join(each)

    def written(self, value: Any) -> str:
        """A value in this notation."""
        if isinstance(value, str):
            return f"{self.QUOTE}{value}{self.QUOTE}"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{self.written(each)}' for key, each in sorted(value.items()))}}}"
        if isinstance(value, list):
            return f"[{','.join(self.written(each) for each in value)}]"
        return dumps(value)


class FunctionGemma(Gemma):
    """The same with the marks of FunctionGemma."""

    NAME = "function-gemma"
    OPENING = "<start_function_call>"
    CLOSING = "<end_function_call>"
    QUOTE = "<escape>"
    MARKS = (CLOSING, QUOTE)


def literal_of(syntax: Gemma, rules: Rules, value: Any) -> str:
    """The rule of one value."""
    written = syntax.written(value).split(syntax.QUOTE)
    parts = [f" {rules.mark(syntax.QUOTE)} "] * (2 * len(written) - 1)
    parts[::2] = [literal(part) if part else "" for part in written]
    return "".join(parts)


def _list(item: str, least: int, most: int | None) -> str:
    if most == 0:
        return '"[]"'
    more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
    return f'"[" ({item} ("," {item}){more}){"" if least else "?"} "]"'
