"""The rules of calls' arguments: objects of JSON whose members come in any order.

llguidance's own grammar of a schema has them in the schema's order. Here a rule has a number whose bits are the names
that were written: none is written twice, and the object ends once all required ones are there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from paged_kv.json_schemas import parts
from paged_kv.serve.chat.grammar import Rules, literal
from paged_kv.serve.chat.tools import Tool
from paged_kv.structure_trials import WHITESPACE

MOST_NAMES = 64
"""Bits of a rule's number."""
_NOTES = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
"""Keywords that say nothing of what is valid."""
_DEFINITIONS = ("$defs", "definitions")
_SPLIT = frozenset({"type", "properties", "required", "additionalProperties", "$schema", *_DEFINITIONS, *_NOTES})
"""Keywords of an object that can be split into its members."""
_BASES = ("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef")
"""Keywords of a member by which references lead elsewhere than to the whole schema's definitions."""
_REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/%~]+)(/[^%]*)?")
_COLON, _COMMA = f"{WHITESPACE}:{WHITESPACE}", f"{WHITESPACE},{WHITESPACE}"
_OPENING, _CLOSING = rf"\{{{WHITESPACE}", rf"{WHITESPACE}\}}"
_PLAIN, _HEX = r'[^"\\\x00-\x1F\x7F]', "[0-9a-fA-F]"
_STRING = (
    rf'"({_PLAIN}|\\["\\/bfnrt]|\\u([0-9a-ce-fA-CE-F]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}}'
    rf'|[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}))*"'
)
"""Any string with any escapes, but for surrogates without their pair; llguidance knows no escaped slash."""
_KEY = rf'"({_PLAIN}|\\["\\bfnrt]|\\u00([01]{_HEX}|7[fF]))*"'
"""A string without the escapes by which a name of the schema could be written once more."""


def arguments_rule(rules: Rules, tool: Tool) -> str:
    """The arguments of a call of a tool as JSON; the name of their rule."""
    if tool.text_grammar is None:
        return (None if tool.is_ordered else object_rule(rules, tool.parameters)) or rules.json(tool.parameters)
    (name,) = tool.parameters["properties"]
    text = rules.rule(f"%lark {{\n{tool.text_grammar}\n}}")
    return rules.rule(f"{literal(f'{{{json.dumps(name)}: {chr(34)}')} {text} {literal(chr(34) + '}')}")


def object_rule(rules: Rules, schema: Mapping[str, Any]) -> str | None:
    """The rule of an object whose members come in any order, with the white space that llguidance allows; None where
    the schema cannot be split into those of its members.

    Args:
        rules: The grammar.
        schema: The object's, which llguidance can enforce.
    """
    split = _split(schema)
    if split is None:
        return None
    members, further = split
    required = [name for name in members if name in schema.get("required", ())]
    names = [*required, *(name for name in members if name not in required)]
    pairs = [
        f"{rules.pattern(f'({_written([name])}){_COLON}')} {_value(rules, schema, members[name])}" for name in names
    ]
    comma, extra, extras = rules.pattern(_COMMA), [], '""'
    if further is not None:
        key = rules.terminal(f"{rules.pattern(_KEY)} & ~{rules.pattern(_written(names))}")
        pair = rules.rule(f"{key} {rules.pattern(_COLON)} {_value(rules, schema, further)}")
        extra, extras = [pair], f"({comma} {pair})*"

    def rest(itself: str) -> str:
        end = f"{extras} %if is_ones([0:{len(required)}])" if required else extras
        more = (
            f"{extras} {comma} {pair} {itself}::set_bit({bit}) %if bit_clear({bit})" for bit, pair in enumerate(pairs)
        )
        return " | ".join([end, *more])

    after = rules.numbered(rest)
    first = [f"{pair} {after}::{1 << bit}" for bit, pair in enumerate(pairs)] + [f"{pair} {after}::0" for pair in extra]
    opening, closing = rules.pattern(_OPENING), rules.pattern(_CLOSING)
    return rules.any([f"{opening} {rules.any(first)} {closing}", *([] if required else [f'{opening} "}}"'])])


def _split(schema: Mapping[str, Any]) -> tuple[dict[str, Any], Any] | None:
    """The schemas of an object's named members, and of others, which is None where there are none; None where the
    object cannot be split into them.
    """
    properties, required = schema.get("properties"), schema.get("required", [])
    further = schema.get("additionalProperties", True)
    if schema.get("type") != "object" or not isinstance(properties, dict) or not properties:
        return None
    if not all(key in _SPLIT or key.startswith("x-") for key in schema):
        return None
    members = dict.fromkeys(required, further) | properties
    if len(members) > MOST_NAMES or not all(map(str.isprintable, members)):
        return None
    definitions = (each for kind in _DEFINITIONS for each in schema.get(kind, {}).values())
    if not all(map(_stands_alone, [*members.values(), *definitions])):
        return None
    if further is False:
        return members, None
    return (members, further) if _stands_alone(further) else None


def _stands_alone(member: Any) -> bool:
    """Return whether the schema of a member means the same beside the definitions of the whole schema."""
    nodes = [node for _, node in parts("#", member)]
    references = [node["$ref"] for node in nodes if "$ref" in node]
    is_based = any(name in node for node in nodes for name in _BASES)
    return member is True or (
        isinstance(member, dict)
        and not is_based
        and all(isinstance(each, str) and _REFERENCE.fullmatch(each) for each in references)
    )


def _value(rules: Rules, schema: Mapping[str, Any], member: Any) -> str:
    """The rule of a member's value."""
    alone = {} if member is True else {key: each for key, each in member.items() if key not in (*_NOTES, *_DEFINITIONS)}
    if alone == {"type": "string"}:
        return rules.pattern(_STRING)
    shared = {"$schema": schema["$schema"]} if "$schema" in schema else {}
    shared |= _definitions(schema, alone)
    return rules.once(f"json {json.dumps(shared | alone)}", lambda: rules.json(shared | alone))


def _definitions(schema: Mapping[str, Any], member: Any) -> dict[str, Any]:
    """The definitions to which a member's references lead, and theirs."""
    needed: dict[str, Any] = {}
    left = [member]
    while left:
        for _, node in parts("#", left.pop()):
            if match := _REFERENCE.fullmatch(node.get("$ref", "")):
                kind, name = match[1], match[2]
                if name not in needed.setdefault(kind, {}) and name in schema.get(kind, {}):
                    needed[kind][name] = schema[kind][name]
                    left.append(schema[kind][name])
    return needed


def _written(names: Iterable[str]) -> str:
    """An expression for names in their quotes, as they are or with escapes of what is not ASCII."""
    texts = dict.fromkeys(json.dumps(name, ensure_ascii=escaped) for name in names for escaped in (False, True))
    return "|".join(map(re.escape, texts))
