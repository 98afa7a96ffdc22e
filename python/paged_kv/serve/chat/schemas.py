"""Schemas of values that a syntax does not write as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from paged_kv.errors import ContractError
from paged_kv.serve.chat.grammar import regex

_KINDS = ("string", "integer", "number", "boolean", "null", "array", "object")
_MOST_PARTS = 20_000
"""Parts of a schema that are looked at, at most: references may name one part many times."""
_MOST_DEPTH = 32
"""The deepest schema that is followed; one that refers to itself has no end."""


class Schema:
    """A schema with its references followed.

    Args:
        node: The schema.
        root: The whole one, to which its references lead.

    Raises:
        ContractError: it is too deep or too large, or a reference leads nowhere.
    """

    def __init__(
        self, node: Any, root: Mapping[str, Any] | None = None, depth: int = 0, count: list[int] | None = None
    ) -> None:
        self._root, self._depth = node if root is None else root, depth
        self._count = [0] if count is None else count
        self._count[0] += 1
        if depth > _MOST_DEPTH or self._count[0] > _MOST_PARTS:
            raise ContractError(f"tools: expected schemas at most {_MOST_DEPTH} deep, got a deeper or endless one")
        self.node: dict[str, Any] = dict(node) if isinstance(node, Mapping) else {}
        if isinstance(self.node.get("$ref"), str):
            rest = {name: value for name, value in self.node.items() if name != "$ref"}
            self.node = self._below(self._referenced(self.node["$ref"])).node | rest

    @cached_property
    def properties(self) -> dict[str, Schema]:
        """The schemas of an object's properties."""
        properties = self.node.get("properties")
        return {name: self._below(each) for name, each in properties.items()} if isinstance(properties, dict) else {}

    @property
    def required(self) -> frozenset[str]:
        """The names of properties that an object must have."""
        required = self.node.get("required")
        return frozenset(required) if isinstance(required, list) else frozenset()

    @property
    def items(self) -> Schema:
        """The schema of a list's items."""
        return self._below(self.node.get("items"))

    @property
    def further(self) -> Schema | None:
        """The schema of properties without a name; None where there are none."""
        additional = self.node.get("additionalProperties", True)
        return None if additional is False else self._below(additional)

    @cached_property
    def alternatives(self) -> list[Schema]:
        """Those of `anyOf` or `oneOf`."""
        return [self._below(each) for each in self.node.get("anyOf") or self.node.get("oneOf") or ()]

    @cached_property
    def values(self) -> list[Any] | None:
        """The values of `enum` or `const`; None where others may be."""
        return [self.node["const"]] if "const" in self.node else self.node.get("enum")

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The types of JSON that a value may have; an integer is a number too."""
        if self.values is not None:
            return frozenset(kind_of(value) for value in self.values)
        types: Any = self.node.get("type")
        kinds = frozenset([types] if isinstance(types, str) else types or _KINDS)
        if self.alternatives:
            kinds &= frozenset().union(*(each.kinds for each in self.alternatives))
        return kinds | {"integer"} if "number" in kinds else kinds

    @property
    def key(self) -> str:
        """The schema as a text, which equal parts of one schema share."""
        return f"{id(self._root)} {json.dumps(self.node)}"

    @property
    def whole(self) -> dict[str, Any]:
        """The schema by itself, with what it may refer to."""
        definitions = {name: self._root[name] for name in ("$defs", "definitions") if name in self._root}
        return definitions | self.node

    @property
    def text_patterns(self) -> list[str]:
        """Regular expressions, in a grammar, that a string has to match, each as a whole."""
        patterns = []
        least, most = int(self.node.get("minLength", 0)), self.node.get("maxLength", "")
        most = most if most == "" else int(most)
        if least or most != "":
            patterns.append(regex(rf"(.|\n){{{least},{most}}}"))
        if isinstance(self.node.get("pattern"), str):
            pattern = self.node["pattern"]
            before = "" if pattern.startswith("^") else r"(.|\n)*"
            is_end = pattern.endswith("$") and not pattern.endswith("\\$")
            inner = pattern.removeprefix("^")[: -1 if is_end else None]
            patterns.append(regex(f"{before}({inner})" + ("" if is_end else r"(.|\n)*")))
        return patterns or [regex(r"(.|\n)*")]

    def _below(self, node: Any) -> Schema:
        return Schema(node, self._root, self._depth + 1, self._count)

    def _referenced(self, reference: str) -> Any:
        place: Any = self._root
        for key in reference.removeprefix("#").split("/")[1:]:
            name = key.replace("~1", "/").replace("~0", "~")
            if not isinstance(place, Mapping) or name not in place:
                raise ContractError(f"tools: a schema refers to {reference!r}, which does not exist")
            place = place[name]
        return place


def kind_of(value: Any) -> str:
    """The type of a value of JSON."""
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", type(None): "null", list: "array"}
    return names.get(type(value), "object")
