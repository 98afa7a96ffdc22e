"""JSON schemas as users write them, made of templates, schemas that want to be compiled for ever, and any values."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]
WORDS = ["id", "name", "city", "first name", "größe", "x-y", "created_at", "tags", 'quo"ted', "a/b"]


def _enum(rng: random.Random) -> Schema:
    values: list[Any] = [*rng.sample(WORDS, 4), *rng.sample(range(-50, 1000), 3), None, True, 2.5, "", ["a", 1]]
    return {"enum": rng.sample(values, rng.randint(1, 6))}


def _string(rng: random.Random) -> Schema:
    shortest = rng.randint(0, 4)
    return rng.choice(
        [
            {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randint(0, 8)},
            {"type": "string", "pattern": rng.choice(["^[A-Z]{2}[0-9]{3}$", "^(red|green|blue)$", "^[a-f0-9]{4,8}$"])},
            {"const": rng.choice(WORDS)},
        ]
    )


def _number(rng: random.Random) -> Schema:
    low = rng.randint(-1000, 1000)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)},
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 7},
            {"type": "integer", "multipleOf": rng.randint(2, 9), "minimum": 0, "maximum": 500},
            {"type": ["integer", "null"], "minimum": low, "maximum": low + 9},
        ]
    )


def _format(rng: random.Random) -> Schema:
    return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4", "ipv6"])}


def _leaf(rng: random.Random) -> Schema:
    return rng.choice([_enum, _string, _number, _format, lambda _: {"type": "boolean"}])(rng)


def _object(rng: random.Random, depth: int = 2) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 4))
    values = {name: _object(rng, depth - 1) if depth and rng.random() < 0.4 else _leaf(rng) for name in names}
    required = rng.sample(names, rng.randint(0, len(names)))
    return _closed(values, required)


def _closed(properties: Schema, required: list[str]) -> Schema:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random) -> Schema:
    shortest = rng.randint(0, 3)
    items = rng.choice([_leaf, lambda rng: _object(rng, 0)])(rng)
    return {"type": "array", "items": items, "minItems": shortest, "maxItems": shortest + rng.randint(0, 3)}


def _tuple(rng: random.Random) -> Schema:
    items = [_leaf(rng) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _references(rng: random.Random) -> Schema:
    defined = {"point": _object(rng, 0), "a/b": _leaf(rng)}
    values = {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}, "kind": {"$ref": "#/$defs/a~1b"}}
    return {"$defs": defined} | _closed(values, ["from", "kind"])


def _recursion(rng: random.Random) -> Schema:
    children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": rng.randint(0, 2)}
    node = _closed({"value": _number(rng), "children": children}, ["value"])
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _alternatives(rng: random.Random) -> Schema:
    def variant(kind: str) -> Schema:
        return _closed({"kind": {"const": kind}, "value": _leaf(rng)}, ["kind", "value"])

    return {rng.choice(["anyOf", "oneOf"]): [variant(kind) for kind in rng.sample(["a", "b", "c", "dd"], 2)]}


def _map(rng: random.Random) -> Schema:
    return {
        "type": "object",
        "patternProperties": {"^[a-z]{1,3}$": _number(rng)},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": rng.randint(1, 3),
    }


def _both(rng: random.Random) -> Schema:
    low = rng.randint(0, 50)
    return {"allOf": [{"type": "integer", "minimum": low}, {"type": "integer", "maximum": low + rng.randint(0, 20)}]}


TEMPLATES: list[Callable[[random.Random], Schema]] = [
    _enum,
    _object,
    _array,
    _tuple,
    _references,
    _recursion,
    _alternatives,
    _map,
    _both,
    lambda rng: {"type": "object", "properties": {"list": _array(rng), "when": _format(rng)}, "required": ["when"]},
]


def schemas(count: int) -> list[Schema]:
    """So many schemas, the same ones each time; the templates take turns."""
    rng = random.Random(31)
    return [TEMPLATES[index % len(TEMPLATES)](rng) for index in range(count)]


def _nested(depth: int, inner: Any, wrap: Callable[[Any], Any]) -> Any:
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def _doubling(levels: int) -> Schema:
    """2^levels leaves, were each reference written out."""
    defined: dict[str, Any] = {"d0": {"type": "string"}}
    for level in range(1, levels):
        below = {"$ref": f"#/$defs/d{level - 1}"}
        defined[f"d{level}"] = {"type": "object", "properties": {"a": below, "b": below}, "required": ["a", "b"]}
    return {"$defs": defined, "$ref": f"#/$defs/d{levels - 1}"}


def _product(factors: int) -> Schema:
    """2^factors cases, were allOf of anyOf multiplied out."""
    return {
        "allOf": [
            {
                "anyOf": [
                    {"type": "object", "properties": {f"p{i}": {"type": "string"}}, "required": [f"p{i}"]},
                    {"type": "object", "properties": {f"q{i}": {"type": "integer"}}, "required": [f"q{i}"]},
                ]
            }
            for i in range(factors)
        ]
    }


def _properties(count: int) -> Schema:
    """Optional properties, of which every subset is a text."""
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


HOSTILE: dict[str, Any] = {
    "doubling references": _doubling(60),
    "product of alternatives": _product(30),
    "nested repetitions": {"type": "string", "pattern": "^((((a{1,99}){1,99}){1,99}){1,99}){1,99}$"},
    "long repetition": {"type": "string", "minLength": 10_000_000, "maxLength": 90_000_000},
    "many items": {"type": "array", "items": {"type": "integer"}, "minItems": 10_000_000},
    "nested arrays with bounds": _nested(40, {"type": "null"}, lambda s: {"type": "array", "items": s, "minItems": 40}),
    "automaton of 2^200 states": {"type": "string", "pattern": "^(a|b)*a(a|b){200}$"},
    "reference to itself": {"$ref": "#"},
    "references in a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "needs itself": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "circle of allOf": {"allOf": [{"$ref": "#"}, {"type": "object"}]},
    "deep objects": _nested(3000, {"type": "null"}, lambda s: {"type": "object", "properties": {"a": s}}),
    "deep alternatives": _nested(3000, {"type": "null"}, lambda s: {"anyOf": [s, {"type": "string"}]}),
    "20,000 properties": _properties(20_000),
    "10 MB of words": {"enum": [f"word number {i}" for i in range(450_000)]},
    "10 MB in one word": {"const": "x" * 10_000_000},
    "4,000 patterns": {
        "type": "object",
        "patternProperties": {f"^[a-z]*{i}[a-z]*$": {"type": "integer"} for i in range(4000)},
    },
    "unsatisfiable": {"type": "integer", "minimum": 5, "maximum": 4},
    "huge multiple": {"type": "integer", "multipleOf": 999999999999999989, "minimum": 10**15, "maximum": 10**60},
    "keyword of no meaning here": {"type": "array", "uniqueItems": True},
}
"""Each is refused, or compiles and is followed, in bounded time; by name."""

_KEYWORDS = """
$id $schema $ref $defs $anchor definitions type enum const properties patternProperties additionalProperties items
prefixItems additionalItems allOf anyOf oneOf not if then else contains dependentSchemas required minLength maxLength
pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minItems maxItems minProperties
maxProperties uniqueItems propertyNames x-guidance
""".split()
_TEXTS = st.one_of(
    st.text(st.characters(codec=None, exclude_categories=()), max_size=6),
    st.sampled_from(["#", "#/$defs/a", "string", "object", "array", "integer", "date", "^a$", "(", "\ud800", "\0"]),
)
_LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-(10**400), 10**400), st.integers(-3, 3), st.floats(), _TEXTS)
_KEYS = st.one_of(st.sampled_from(_KEYWORDS), _TEXTS)
VALUES = st.recursive(
    _LEAVES,
    lambda below: st.one_of(st.lists(below, max_size=3), st.dictionaries(_KEYS, below, max_size=4)),
    max_leaves=12,
)
"""JSON values: under every keyword whatever may stand there or not, lone surrogates, NaN and huge integers."""
