"""Tools as a request names them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paged_kv.arguments import shown
from paged_kv.errors import ContractError, ContractTypeError
from paged_kv.structured_output import JsonSchema

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref", "if")
"""Keywords by which a schema limits further properties itself."""


@dataclass(frozen=True)
class Tool:
    """One function that a model may call."""

    name: str
    parameters: dict[str, Any]
    """The schema of its arguments, an object. Where it names its properties and says nothing of others, there are no
    others."""
    text_grammar: str | None = None
    """The grammar, in Lark, of its one argument inside JSON's quotes; it is kept where calls are written as JSON."""


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """The tools of a request: `{"type": "function", "function": {"name": ..., "parameters": ...}}` each.

    Raises:
        ContractTypeError, ContractError: one is no function, its name or its schema is wrong, or two have one name.
    """
    if tools is None:
        return ()
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise ContractTypeError(f"tools must be a list, not {shown(tools)}")
    found: dict[str, Tool] = {}
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or not isinstance(function, Mapping):
            raise ContractTypeError(f"tools[{at}] must be an object with a function, not {shown(tool)}")
        if tool.get("type", "function") != "function":
            raise ContractError(f"tools[{at}]: type is {shown(tool['type'])}; a function is expected")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ContractError(
                f"tools[{at}]: the name of a function is 1 to 128 of A-Z a-z 0-9 _ . : -, not {shown(name)}"
            )
        if name in found:
            raise ContractError(f"tools[{at}]: a second function is called {name!r}")
        found[name] = Tool(name, _parameters(f"tools[{at}] ({name})", function.get("parameters")))
    return tuple(found.values())


def chosen_tools(tools: tuple[Tool, ...], choice: Any) -> tuple[tuple[Tool, ...], bool]:
    """The tools that may be called, and whether one must be.

    Args:
        tools: All of them.
        choice: "none", "auto", "required", `{"name": ...}`, or `{"names": [...], "mode": "auto" or "required"}` for
            some of them.

    Raises:
        ContractTypeError, ContractError: it is none of these, or names no tool.
    """
    if isinstance(choice, Mapping) and "names" in choice:
        named = tuple(tool for tool in tools if tool.name in choice["names"])
        return chosen_tools(named, choice.get("mode", "auto"))
    if choice == "none":
        return (), False
    if choice == "auto":
        return tools, False
    if choice == "required":
        if not tools:
            raise ContractError("tool_choice is required, and there are no tools")
        return tools, True
    name = choice.get("name") if isinstance(choice, Mapping) else None
    if not isinstance(name, str):
        raise ContractTypeError(f"tool_choice must be none, auto, required or a function's name, not {shown(choice)}")
    named = tuple(tool for tool in tools if tool.name == name)
    if not named:
        raise ContractError(f"tool_choice: there is no tool {name!r}")
    return named, True


def _parameters(place: str, parameters: Any) -> dict[str, Any]:
    given = {} if parameters is None else parameters
    if not isinstance(given, Mapping):
        raise ContractTypeError(f"{place}: parameters must be a JSON schema, not {shown(parameters)}")
    try:
        schema = json.loads(str(JsonSchema(given).schema))
    except ContractTypeError as error:
        raise ContractTypeError(f"{place}: parameters: {error}") from None
    except ContractError as error:
        raise ContractError(f"{place}: parameters: {error}") from None
    if schema.setdefault("type", "object") != "object":
        raise ContractError(f"{place}: parameters describe {shown(schema['type'])}; they must be an object")
    if parameters is None or (schema.get("properties") and not any(name in schema for name in _OPEN)):
        schema["additionalProperties"] = False
    return schema
