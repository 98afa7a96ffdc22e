"""JSON schemas as trees: their parts, what closes them, and what relaxes them where not all of one can be enforced."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

ProblemOf: TypeAlias = Callable[[Any], str]
"""The reason why a schema cannot be enforced; "" where it can."""

_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = (
    *("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains"),
    *("propertyNames", "unevaluatedProperties", "unevaluatedItems"),
)
_NOT_MONOTONE = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains"),
    *("unevaluatedProperties", "unevaluatedItems"),
)
"""Keywords that accept less where a part of the schema accepts more: they go before anything else is dropped."""
_NEVER_ENFORCED = (
    *("uniqueItems", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
    *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
)
"""Further keywords that llguidance has not."""
_DEPENDENT = {
    "properties": ("additionalProperties",),
    "patternProperties": ("additionalProperties",),
    "prefixItems": ("items",),
    "items": ("additionalItems",),
}
"""Keywords whose meaning depends on another one: they go with it."""
_STRUCTURAL = ("properties", "items", "prefixItems", "additionalProperties", "anyOf", "allOf", "required", "type")
"""Keywords that are dropped last, in this order."""
_MOST_ROUNDS = 100
"""Keywords at most that are dropped one by one."""


class SchemaProblem(NamedTuple):
    """A part of a schema that cannot be enforced."""

    pointer: str
    """The JSON pointer of its keyword, or of a whole schema."""
    words: str

    def __str__(self) -> str:
        return f"{self.pointer}: {self.words}"


def parts(place: str, node: Any, *, deep: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas in a schema with their JSON pointers: itself and all below it, or those right below it."""
    if not isinstance(node, dict):
        return
    if deep:
        yield place, node
    below: list[tuple[str, Any]] = []
    for name in _MAPS:
        if isinstance(node.get(name), dict):
            below += [(f"{place}/{name}/{_escaped(key)}", each) for key, each in node[name].items()]
    for name in _LISTS:
        if isinstance(node.get(name), list):
            below += [(f"{place}/{name}/{index}", each) for index, each in enumerate(node[name])]
    below += [(f"{place}/{name}", node[name]) for name in _SINGLE if isinstance(node.get(name), dict)]
    for pointer, each in below:
        if deep:
            yield from parts(pointer, each)
        elif isinstance(each, dict):
            yield pointer, each


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def at(schema: Any, pointer: str) -> Any:
    """The part of a schema to which a pointer, which is there, leads."""
    for key in pointer.split("/")[1:]:
        name = key.replace("~1", "/").replace("~0", "~")
        schema = schema[int(name)] if isinstance(schema, list) else schema[name]
    return schema


def by_itself(schema: Any, pointer: str, without: str = "") -> dict[str, Any]:
    """A schema of one part alone; its references lead to the whole schema, which lies beside it.

    Args:
        schema: The whole schema.
        pointer: The part.
        without: A keyword that the part then has not.
    """
    whole = deepcopy(schema)
    if pointer != "#":
        whole.pop("$schema", None)
    if without:
        drop(at(whole, pointer), without)
    for _, node in parts("#", whole):
        if isinstance(node.get("$ref"), str) and node["$ref"].startswith("#"):
            node["$ref"] = "#/$defs/whole" + node["$ref"][1:]
    return {"$defs": {"whole": whole}, "$ref": "#/$defs/whole" + quote(pointer[1:], safe="/~!$&'()*+,;=:@?")}


def drop(node: dict[str, Any], keyword: str) -> None:
    """Takes a keyword from a schema, so that it accepts what it did and more."""
    for name in (keyword, *_DEPENDENT.get(keyword, ())):
        node.pop(name, None)


def without(schema: Any, keywords: Collection[str]) -> Any:
    """A schema that accepts what another does and more, without some keywords and without those that could make it
    accept less; `oneOf` becomes `anyOf`.
    """
    relaxed = deepcopy(schema)
    for _, node in list(parts("#", relaxed)):
        for name in (*keywords, *_NOT_MONOTONE):
            if name in node:
                drop(node, name)
        if "oneOf" in node:
            either = node.pop("oneOf")
            if "anyOf" in node:
                node["allOf"] = [*(node["allOf"] if isinstance(node.get("allOf"), list) else ()), {"anyOf": either}]
            else:
                node["anyOf"] = either
    return relaxed


def relax(schema: Any, problem_of: ProblemOf, seconds: float) -> tuple[Any, list[SchemaProblem]]:
    """A schema that can be enforced and accepts all that another accepts, and what was taken from that one.

    Keywords go one by one, each from the smallest part that has the problem alone. Where that takes more than the
    seconds of the CPU, the schema of anything is left.
    """
    until = time.process_time() + seconds
    problem = problem_of(schema)
    if not problem:
        return schema, []
    if not isinstance(schema, dict):
        return {}, [SchemaProblem("#", problem)]
    problems = [locate(schema, problem, problem_of, until)]
    relaxed = without(schema, _NEVER_ENFORCED)
    for _ in range(_MOST_ROUNDS):
        if not (problem := problem_of(relaxed)):
            return relaxed, problems
        if time.process_time() > until:
            break
        place = locate(relaxed, problem, problem_of, until)
        if place not in problems:
            problems.append(place)
        _drop_at(relaxed, place.pointer)
    return {}, [*problems, SchemaProblem("#", "too much of it cannot be enforced")]


def _drop_at(schema: dict[str, Any], pointer: str) -> None:
    """Takes the keyword to which a pointer leads, and the same with the same value elsewhere; or a whole part."""
    above, _, key = pointer.rpartition("/")
    name = key.replace("~1", "/").replace("~0", "~")
    if not above:
        schema.clear()
        return
    holder, value = at(schema, above), at(schema, pointer)
    if isinstance(holder, list):
        holder[int(name)] = {}
    elif any(node is holder for _, node in parts("#", schema)):
        drop(holder, name)
    else:  # one of the schemas of a keyword
        holder[name] = {}
    if isinstance(value, str):
        for _, node in parts("#", schema):
            if node.get(name) == value and name != "$ref":
                drop(node, name)


def locate(schema: Any, problem: str, problem_of: ProblemOf, until: float) -> SchemaProblem:
    """The smallest part of a schema that has a problem alone, and its keyword, as far as they are found in time."""
    place, has_moved = "#", True
    while has_moved:
        has_moved = False
        for pointer, _ in parts(place, at(schema, place), deep=False):
            if time.process_time() > until:
                return SchemaProblem(place, problem)
            if _same(problem_of(by_itself(schema, pointer)), problem):
                place, has_moved = pointer, True
                break
    node = at(schema, place)
    for keyword in sorted(node, key=lambda name: (_rank(name), f'"{name}"' not in problem)):
        if time.process_time() > until:
            break
        if keyword not in ("$defs", "definitions") and not _same(
            problem_of(by_itself(schema, place, keyword)), problem
        ):
            return SchemaProblem(f"{place}/{_escaped(keyword)}", problem)
    return SchemaProblem(place, problem)


def _rank(keyword: str) -> int:
    return _STRUCTURAL.index(keyword) if keyword in _STRUCTURAL else -1


def _same(one: str, other: str) -> bool:
    """Return whether two problems are one, whose numbers and places may differ."""
    one, other = (re.sub(r"\d+|/\$defs/whole", "", each) for each in (one, other))
    return one == other


_SAYS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
"""Keywords by which a schema says itself which further properties there are."""
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas", "$dynamicRef")
"""Keywords by which further schemas hold for the same object."""


def close(schema: Any) -> Any:
    """A schema whose objects have the properties that it names and no others, unless it says which.

    That is how servers read schemas that say nothing of `additionalProperties`. Schemas that hold for one object
    together are closed as one.
    """
    closed = deepcopy(schema)
    together: set[str] = set()
    for pointer, node in parts("#", closed):
        if _is_composed(node):
            _names(closed, node, together, {pointer})
    _close(closed, closed, "#", together, inside=False)
    return closed


def _is_composed(node: dict[str, Any]) -> bool:
    """Return whether several schemas that may name properties hold for an object."""
    applied = [name for name in _IN_PLACE if name in node]
    if isinstance(node.get("allOf"), list) and len(node["allOf"]) == 1 and not applied[1:] and "properties" not in node:
        return False
    return bool(applied) and ("properties" in node or "allOf" in node or len(applied) > 1)


def _branches(node: dict[str, Any]) -> list[Any]:
    branches = [each for name in ("allOf", "anyOf", "oneOf") for each in _list(node.get(name))]
    return branches + [node[name] for name in ("then", "else") if name in node]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _names(whole: Any, node: Any, together: set[str], path: set[str]) -> dict[str, None] | None:
    """The properties that a schema and those that hold with it name; None where one of them says which others are.

    The schemas that its references lead to are added to `together`.
    """
    if not isinstance(node, dict):
        return {}
    if any(name in node for name in _SAYS) or "dependentSchemas" in node or "$dynamicRef" in node:
        return None
    names: dict[str, None] = dict.fromkeys(node["properties"] if isinstance(node.get("properties"), dict) else ())
    below = [(each, path) for each in _branches(node)]
    reference = node.get("$ref")
    if isinstance(reference, str):
        try:
            target = at(whole, reference) if reference.startswith("#") else None
        except (LookupError, ValueError, TypeError):
            target = None
        if target is None or reference in path or len(path) > 16:
            return None
        together.add(reference)
        below.append((target, path | {reference}))
    is_open = False
    for each, way in below:
        further = _names(whole, each, together, way)
        is_open = is_open or further is None
        names |= further or {}
    return None if is_open else names


def _close(whole: Any, node: Any, place: str, together: set[str], *, inside: bool) -> None:
    if not isinstance(node, dict):
        return
    inside = inside or place in together
    is_composed = _is_composed(node)
    if not inside and not any(name in node for name in _SAYS):
        if is_composed:
            names = _names(whole, node, set(), {place})
            if names:
                own = node["properties"] if isinstance(node.get("properties"), dict) else {}
                node["properties"] = own | {name: True for name in names if name not in own}
                node["additionalProperties"] = False
        elif isinstance(node.get("properties"), dict):
            node["additionalProperties"] = False
    for pointer, each in parts(place, node, deep=False):
        name = pointer[len(place) + 1 :].split("/")[0]
        if name in ("not", "if", "contains", "propertyNames", "dependentSchemas"):
            continue
        holds_here = name in ("allOf", "anyOf", "oneOf", "then", "else")
        _close(whole, each, pointer, together, inside=holds_here and (inside or is_composed))
