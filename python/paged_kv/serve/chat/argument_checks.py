"""Check the arguments of a call against the whole schema of its tool, of which not all can be enforced.

Schemas come from clients, so work is bounded, nothing is fetched, and patterns run in llguidance's automata, which do
not backtrack. `unevaluatedProperties`, `unevaluatedItems`, `format` and dynamic references are not checked.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from operator import ge, gt, le, lt
from typing import Any

from paged_kv.arguments import printable
from paged_kv.errors import PagedKVError
from paged_kv.json_schemas import at
from paged_kv.serve.chat.schemas import kind_of
from paged_kv.structure_trials import matches

logger = logging.getLogger("paged_kv.serve")

_MOST_CHECKS = 50_000
"""Schemas that are applied at most for one call."""
_MOST_DEPTH = 200


def log_misfit(name: str, arguments: str, schema: Mapping[str, Any]) -> None:
    """Warns in the log where the arguments of a call do not fit the schema of its tool; the call stays as it is.

    The check runs in its own thread: compiling a new pattern takes a while.
    """
    _executor().submit(_log, name, arguments, schema)


@cache
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "paged-kv-arguments")


def _log(name: str, arguments: str, schema: Mapping[str, Any]) -> None:
    try:
        problem = misfit(json.loads(arguments), schema)
    except ValueError:
        problem = "the arguments are not JSON"
    except (PagedKVError, RecursionError):
        problem = None
    if problem:
        logger.warning("tool %r: a call does not fit its schema at %s", name, printable(problem))


def misfit(value: Any, schema: Any) -> str | None:
    """The place in a value and the schema keyword that rejects it; None if it fits, or the check is too much work.
    The value itself is not named: it is the user's.
    """
    try:
        return next(_Check(schema).problems(value, schema, "", 0), None)
    except _TooMuch:
        return None


class _TooMuch(Exception):
    pass


class _Check:
    """One value against one schema."""

    def __init__(self, root: Any) -> None:
        self._root, self._left = root, _MOST_CHECKS

    def fits(self, value: Any, schema: Any, depth: int) -> bool:
        return next(self.problems(value, schema, "", depth + 1), None) is None

    def problems(self, value: Any, schema: Any, place: str, depth: int) -> Iterator[str]:
        """The parts of a value that a schema does not accept."""
        self._left -= 1
        if self._left < 0 or depth > _MOST_DEPTH:
            raise _TooMuch
        if schema is False:
            yield f"{place or '/'}: nothing may be here"
        if not isinstance(schema, Mapping):
            return
        for keyword, operand in schema.items():
            check = _SCALARS.get(keyword)
            if check is not None:
                if not _holds(check, value, operand):
                    yield f"{place or '/'}: {keyword}"
            elif keyword in _APPLIED and not self._applies(keyword, value, operand, schema, depth):
                yield f"{place or '/'}: {keyword}"
        yield from self._below(value, schema, place, depth)

    def _applies(self, keyword: str, value: Any, operand: Any, schema: Mapping[str, Any], depth: int) -> bool:
        """Return whether a keyword that has schemas for the value itself accepts it."""
        every = operand if isinstance(operand, list) else []
        match keyword:
            case "$ref":
                return self._fits_reference(value, operand, depth)
            case "allOf":
                return all(self.fits(value, each, depth) for each in every)
            case "anyOf":
                return not every or any(self.fits(value, each, depth) for each in every)
            case "oneOf":
                return not every or sum(self.fits(value, each, depth) for each in every) == 1
            case "not":
                return not self.fits(value, operand, depth)
            case "if":
                branch = schema.get("then" if self.fits(value, operand, depth) else "else", True)
                return self.fits(value, branch, depth)
            case "propertyNames":
                return not isinstance(value, dict) or all(self.fits(name, operand, depth) for name in value)
            case "contains":
                return not isinstance(value, list) or self._contains(value, operand, schema, depth)
        pairs = operand.items() if isinstance(operand, Mapping) and isinstance(value, dict) else ()
        return all(
            _has(value, each) if isinstance(each, list) else self.fits(value, each, depth)
            for name, each in pairs
            if name in value
        )

    def _fits_reference(self, value: Any, reference: Any, depth: int) -> bool:
        if not isinstance(reference, str) or not reference.startswith("#"):
            return True
        try:
            return self.fits(value, at(self._root, reference), depth)
        except (LookupError, ValueError, TypeError):
            return True

    def _contains(self, value: list[Any], items: Any, schema: Mapping[str, Any], depth: int) -> bool:
        count = sum(self.fits(each, items, depth) for each in value)
        most = schema.get("maxContains")
        return count >= _number(schema.get("minContains"), 1) and count <= _number(most, len(value))

    def _below(self, value: Any, schema: Mapping[str, Any], place: str, depth: int) -> Iterator[str]:
        """The problems of an object's members or a list's items."""
        if isinstance(value, dict):
            properties, patterns = (_mapping(schema.get(name)) for name in ("properties", "patternProperties"))
            for name, each in value.items():
                schemas = [properties[name]] if name in properties else []
                schemas += [patterns[pattern] for pattern in patterns if matches(pattern, name)]
                for its in schemas or [schema.get("additionalProperties", True)]:
                    yield from self.problems(each, its, f"{place}/{name}", depth + 1)
        elif isinstance(value, list):
            items = schema.get("items", True)
            first = items if isinstance(items, list) else schema.get("prefixItems")
            rest = schema.get("additionalItems", True) if isinstance(items, list) else items
            for index, each in enumerate(value):
                its = first[index] if isinstance(first, list) and index < len(first) else rest
                yield from self.problems(each, its, f"{place}/{index}", depth + 1)


_APPLIED = (
    *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "propertyNames", "contains"),
    *("dependentSchemas", "dependentRequired", "dependencies"),
)


def _holds(check: Callable[[Any, Any], bool], value: Any, operand: Any) -> bool:
    """Return whether a value fits a keyword; what is malformed in a schema limits nothing."""
    try:
        return check(value, operand)
    except (TypeError, ValueError, OverflowError, ArithmeticError):
        return True


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any, default: int) -> Any:
    return value if _is_number(value) else default


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _key(value: Any) -> Any:
    """A value as it is compared: 1 and 1.0 are one, 1 and true are not."""
    if isinstance(value, dict):
        return "object", frozenset((name, _key(each)) for name, each in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_key, value))
    return (isinstance(value, bool), isinstance(value, str), value)


def _has(value: Any, names: Any) -> bool:
    return not isinstance(value, dict) or not isinstance(names, list) or all(name in value for name in names)


def _is_of_type(value: Any, expected: Any) -> bool:
    types = expected if isinstance(expected, list) else [expected]
    if any(each not in ("string", "integer", "number", "boolean", "null", "array", "object") for each in types):
        return True
    kind = kind_of(value)
    return (
        kind in types
        or (kind == "integer" and "number" in types)
        or (kind == "number" and "integer" in types and float(value).is_integer())
    )


def _is_multiple(value: Any, of: Any) -> bool:
    if not _is_number(value) or not of:
        return True
    if isinstance(value, int) and isinstance(of, int):
        return value % of == 0
    quotient = value / of
    return bool(abs(quotient - round(quotient)) <= 1e-9 * max(1, abs(quotient)))


def _compares(holds: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda value, limit: not (_is_number(value) and _is_number(limit)) or holds(value, limit)


def _sized(
    kind: type[str | list[Any] | dict[str, Any]], holds: Callable[[int, Any], bool]
) -> Callable[[Any, Any], bool]:
    return lambda value, limit: not (isinstance(value, kind) and _is_number(limit)) or holds(len(value), limit)


_SCALARS: dict[str, Callable[[Any, Any], bool]] = {
    "type": _is_of_type,
    "enum": lambda value, expected: _key(value) in map(_key, expected),
    "const": lambda value, expected: _key(value) == _key(expected),
    "required": _has,
    "multipleOf": _is_multiple,
    "minimum": _compares(ge),
    "maximum": _compares(le),
    "exclusiveMinimum": _compares(gt),
    "exclusiveMaximum": _compares(lt),
    "minLength": _sized(str, ge),
    "maxLength": _sized(str, le),
    "minItems": _sized(list, ge),
    "maxItems": _sized(list, le),
    "minProperties": _sized(dict, ge),
    "maxProperties": _sized(dict, le),
    "uniqueItems": lambda value, is_unique: (
        is_unique is not True or not isinstance(value, list) or len(set(map(_key, value))) == len(value)
    ),
    "pattern": lambda text, pattern: not isinstance(text, str) or _matches(pattern, text),
}


def _matches(pattern: str, text: str) -> bool:
    """Return whether a pattern is in a text. Look-aheads at its beginning are patterns of their own."""
    *ahead, rest = _split(pattern)
    begins = "^" if pattern.startswith("^") else ""
    if not begins and ahead:
        return True
    return (
        all(matches(f"^(?:{each})", text) is not is_negative for is_negative, each in ahead)
        and matches(begins + rest if ahead else pattern, text) is not False
    )


@lru_cache(256)
def _split(pattern: str) -> tuple[Any, ...]:
    """The look-aheads at the beginning of a pattern, each with whether it is a negative one, and the rest."""
    ahead: list[Any] = []
    rest = pattern.removeprefix("^")
    while head := re.match(r"\(\?[=!]", rest):
        depth, at, in_class = 0, 0, False
        while at < len(rest):
            character = rest[at]
            if character == "\\":
                at += 1
            elif in_class:
                in_class = character != "]"
            elif character == "[":
                in_class = True
            elif character in "()":
                depth += 1 if character == "(" else -1
                if not depth:
                    break
            at += 1
        ahead.append((head[0] == "(?!", rest[head.end() : at]))
        rest = rest[at + 1 :]
    return (*ahead, rest)
