"""Calls as JSON objects of a name and arguments, which several syntaxes share."""

from __future__ import annotations

import json
from collections.abc import Sequence

from paged_kv.serve.chat.any_order import arguments_rule
from paged_kv.serve.chat.grammar import Rules, literal
from paged_kv.serve.chat.message import Incoming, Outgoing, Step
from paged_kv.serve.chat.syntaxes.base import Asked, Call, dumps

_ARGUMENTS = ("arguments", "parameters")


def call_rule(rules: Rules, asked: Asked, arguments: str = "arguments") -> str:
    """The rule of one call: `{"name": ..., "arguments": {...}}`."""
    return rules.any(
        f"{literal(head(tool.name, arguments))} {arguments_rule(rules, tool)} {literal('}')}" for tool in asked.tools
    )


def list_rule(rules: Rules, asked: Asked) -> str:
    """The rule of a JSON list of calls, without its opening bracket."""
    call = call_rule(rules, asked)
    more = f' (", " {call})*' if asked.is_parallel else ""
    return f'{call}{more} "]"'


def head(name: str, arguments: str = "arguments") -> str:
    """A call up to its arguments."""
    return f'{{"name": {dumps(name)}, "{arguments}": '


def write_list(calls: Sequence[Call]) -> str:
    """A JSON list of calls."""
    return f"[{', '.join(f'{head(call.name)}{dumps(call.arguments)}}}' for call in calls)}]"


def read_object(text: Incoming, out: Outgoing) -> Step[bool]:
    """Reads one call; False where there is none, and nothing was told.

    Its members may come in any order, and others beside them; arguments may be JSON in a string.
    """
    if not (yield from text.take("{")):
        return False
    name, arguments, has_begun = "", "{}", False
    while True:
        yield from text.space()
        if (yield from text.take("}")):
            break
        key = yield from _value(text)
        yield from text.space()
        if not key.startswith('"') or not (yield from text.take(":")):
            return has_begun
        yield from text.space()
        is_text = (yield from text.peek()) == '"'
        if key.strip('"') in _ARGUMENTS and name and not has_begun and not is_text:
            out.call(name)
            has_begun = True
            if not (yield from text.json(out.arguments)):
                return True
        else:
            value = yield from _value(text)
            if not value:
                return has_begun
            if key == '"name"':
                name = _decoded(value)
                if name not in out.tools:
                    return has_begun
            elif key.strip('"') in _ARGUMENTS:
                arguments = _decoded(value) if is_text else value
        yield from text.space()
        if not (yield from text.take(",")):
            if not (yield from text.take("}")):
                return has_begun
            break
    if not has_begun and name:
        out.call(name)
        out.arguments(arguments)
        has_begun = True
    return has_begun


def read_list(text: Incoming, out: Outgoing) -> Step[bool]:
    """Reads a JSON list of calls; False where there is none, and nothing was told."""
    yield from text.space()
    if not (yield from text.take("[")):
        return False
    has_calls = False
    while True:
        yield from text.space()
        if not (yield from read_object(text, out)):
            return has_calls
        has_calls = True
        yield from text.space()
        if not (yield from text.take(",")):
            yield from text.take("]")
            return True


def _value(text: Incoming) -> Step[str]:
    pieces: list[str] = []
    is_whole = yield from text.json(pieces.append)
    return "".join(pieces) if is_whole else ""


def _decoded(value: str) -> str:
    try:
        decoded = json.loads(value)
    except ValueError:
        return ""
    return decoded if isinstance(decoded, str) else ""
