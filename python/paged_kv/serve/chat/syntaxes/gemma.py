"""Calls of Gemma: a name and arguments in a notation of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from paged_kv.errors import ContractError
from paged_kv.json_schemas import SchemaProblem, parts, without
from paged_kv.serve.chat.grammar import Rules, literal
from paged_kv.serve.chat.message import Incoming, Outgoing, Say, Step
from paged_kv.serve.chat.schemas import Schema
from paged_kv.serve.chat.syntaxes.base import Asked, Call, Syntax, dumps

_KEY = re.compile(r'[^:{}\[\],<>"\s]+')
_NOT_HELD = ("allOf", "patternProperties", "prefixItems", "minProperties", "maxProperties")
"""Keywords for which this notation has no rule."""


class Gemma(Syntax):
    """`<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`, by Gemma 4."""

    NAME = "gemma"
    WRITES_JSON = False
    OPENING = "<|tool_call>"
    CLOSING: ClassVar[str] = "<tool_call|>"
    QUOTE: ClassVar[str] = '<|"|>'
    MARKS = (CLOSING, QUOTE)

    @classmethod
    def is_of(cls, template: str) -> bool:
        return cls.OPENING in template and cls.CLOSING in template and "call:" in template

    def problem(self, parameters: Mapping[str, Any]) -> SchemaProblem | None:
        for pointer, node in parts("#", dict(parameters)):
            for name in _NOT_HELD:
                if name in node:
                    return SchemaProblem(f"{pointer}/{name}", "this model's notation of calls has no rule for it")
        try:
            self._object(Rules(), Schema(parameters))
        except ContractError as error:
            return SchemaProblem("#", str(error))
        return None

    def relaxed(self, parameters: dict[str, Any]) -> dict[str, Any]:
        relaxed: dict[str, Any] = without(parameters, _NOT_HELD)
        return {} if self.problem(relaxed) else relaxed

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
        if not schema.node:
            return self._anything(rules)
        return rules.once(f"value {schema.key}", lambda: self._any_kind(rules, schema))

    def _any_kind(self, rules: Rules, schema: Schema) -> str:
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
            item = self._value(rules, schema.items)
            least, most = schema.node.get("minItems", 0), schema.node.get("maxItems")
            each.append(_list(item, int(least), None if most is None else int(most)))
        if "object" in schema.kinds:
            each.append(self._object(rules, schema))
        return rules.any(each)

    def _anything(self, rules: Rules) -> str:
        """The rule of a value without a schema."""
        return rules.once("value", lambda: self._any_value(rules))

    def _any_value(self, rules: Rules) -> str:
        text = f"{rules.mark(self.QUOTE)} {rules.until(self.QUOTE)}"
        plain = rules.json({"type": ["number", "boolean", "null"]})
        value = self._anything(rules)
        return " | ".join([text, plain, _list(value, 0, None), self._map(rules, value)])

    def _map(self, rules: Rules, value: str, others: Collection[str] = ()) -> str:
        """The rule of an object whose keys are any."""
        pair = self._pair(rules, value, others)
        return rules.rule(f'"{{" ({pair} ("," {pair})*)? "}}"')

    def _pair(self, rules: Rules, value: str, others: Collection[str]) -> str:
        """The rule of a key other than some, and its value."""
        key = "/[A-Za-z0-9_.-]+/"
        if others:
            key = f"{key} & ~/{'|'.join(re.escape(name).replace('/', chr(92) + '/') for name in others)}/"
        return rules.rule(f'{rules.terminal(key)} ":" {value}')

    def _key(self, rules: Rules, name: str) -> str:
        """The rule of a key and its colon."""
        return f"{literal_of(self, rules, name)} {literal(':')}" if not _KEY.fullmatch(name) else literal(name + ":")

    def _object(self, rules: Rules, schema: Schema) -> str:
        further = None if schema.further is None else self._value(rules, schema.further)
        if not schema.properties:
            return '"{}"' if further is None else self._map(rules, further)
        pairs = []
        # The template sorts keys, so the model has learnt them sorted.
        for name, each in sorted(schema.properties.items()):
            if self.QUOTE in name:
                raise ContractError(f"the parameter {name!r} cannot be named in this model's calls")
            pairs.append((rules.rule(f"{self._key(rules, name)} {self._value(rules, each)}"), name in schema.required))
        # The pairs after the one that is looked at, each with its comma; further ones come last.
        plain = [name for name in schema.properties if _KEY.fullmatch(name)]
        extra = None if further is None else self._pair(rules, further, plain)
        after = "" if extra is None else f'("," {extra})*'
        first = "" if extra is None else rules.rule(f"{extra} {after}")  # this pair or a later one without a comma
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
            pieces: list[str] = []
            if (yield from text.take(self.QUOTE)):
                yield from text.until((self.QUOTE,), pieces.append)
                key = "".join(pieces)
                pieces.clear()
            else:
                key = ""
            if (yield from text.until((":",), pieces.append)) is None:
                return False
            say(f"{between}{dumps(key or ''.join(pieces).strip())}: ")
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
        return "".join(
            f"{self.OPENING}call:{call.name}{self.written(dict(call.arguments))}{self.CLOSING}" for call in calls
        )

    def _quoted(self, key: str) -> str:
        """A key, in quotes where it needs them."""
        return key if _KEY.fullmatch(key) else self.written(key)

    def written(self, value: Any) -> str:
        """A value in this notation."""
        if isinstance(value, str):
            return f"{self.QUOTE}{value}{self.QUOTE}"
        if isinstance(value, dict):
            members = ",".join(f"{self._quoted(key)}:{self.written(each)}" for key, each in sorted(value.items()))
            return f"{{{members}}}"
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
