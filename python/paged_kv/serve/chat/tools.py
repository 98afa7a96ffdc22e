"""Tools as a request names them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paged_kv.arguments import shown
from paged_kv.errors import ContractError, ContractTypeError
from paged_kv.json_schemas import close
from paged_kv.structured_output import JsonSchema

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_FIELDS = {"": "", "type": ".type", "name": ".function.name", "parameters": ".function.parameters"}


def is_function_name(name: str) -> bool:
    """Return whether functions may have a name."""
    return _NAME.fullmatch(name) is not None


class ToolError(ContractError):
    """A tool of a request is malformed.

    Args:
        index: Its place among the tools.
        field: The field at fault: "type", "name" or "parameters"; "" for the tool itself.
        problem: What the field must be.
    """

    def __init__(self, index: int, field: str, problem: str) -> None:
        self.index, self.field, self.problem = index, field, problem
        self.param = f"tools[{index}]{_FIELDS[field]}"
        super().__init__(f"{self.param}: {problem}")


class ToolTypeError(ToolError, ContractTypeError):
    """A tool of a request, or its schema, has a wrong type."""


class ToolSchemaError(ToolError):
    """The schema of a tool's arguments cannot be enforced, and the request demands that it is.

    Args:
        tool: The tool.
        problem: The place in the schema, and the reason.
    """

    def __init__(self, tool: Tool, problem: str) -> None:
        words = f"{tool.name!r} is strict and cannot be enforced at {problem}"
        super().__init__(tool.index, "parameters", words)


@dataclass(frozen=True)
class Tool:
    """One function that a model may call."""

    name: str
    parameters: dict[str, Any]
    """The schema that its arguments are held to, an object. Where it names properties and says nothing of others,
    there are no others."""
    schema: Mapping[str, Any] = field(default_factory=dict)
    """The schema as the request has it: all of it is checked once a call was read."""
    is_strict: bool = False
    """True if all of the schema must be enforced."""
    index: int = 0
    """Its place in the request."""
    is_text: bool = False
    """True if its one argument is a text, whatever the schema."""
    text_grammar: str | None = None
    """The grammar, in Lark, of a text inside JSON's quotes; it is kept where calls are written as JSON."""
    is_ordered: bool = False
    """True if arguments come in the order of the schema, whatever it is."""

    def of_text(self, grammar: str | None) -> Tool:
        """The same tool, whose one argument is a text."""
        return replace(self, is_text=True, text_grammar=grammar)

    def held_by(self, parameters: dict[str, Any]) -> Tool:
        """The same tool, whose arguments are held to another schema."""
        return replace(self, parameters={"type": "object"} | parameters)

    def loosened(self) -> Tool:
        """The same tool, whose arguments are held to be an object alone, and those of a text to be one."""
        parameters: dict[str, Any] = {}
        if self.is_text:
            (name,) = self.parameters["properties"]
            parameters = self.parameters | {"properties": {name: {"type": "string"}}}
        return replace(self, text_grammar=None).held_by(parameters)


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """The tools of a request: `{"type": "function", "function": {"name": ..., "parameters": ...}}` each.

    Raises:
        ContractTypeError: they are no list.
        ToolError, ToolTypeError: one is no function, its name or its schema is wrong, or two have one name.
    """
    if tools is None:
        return ()
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise ContractTypeError(f"tools: expected a list, got {shown(tools)}")
    by_name: dict[str, Tool] = {}
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or not isinstance(function, Mapping):
            raise ToolTypeError(at, "", f"expected an object with a function, got {shown(tool)}")
        if tool.get("type", "function") != "function":
            raise ToolError(at, "type", f"expected function, got {shown(tool['type'])}")
        name = function.get("name")
        if not isinstance(name, str) or not is_function_name(name):
            raise ToolError(at, "name", f"expected 1 to 128 of A-Z a-z 0-9 _ . : -, got {shown(name)}")
        if name in by_name:
            raise ToolError(at, "name", f"duplicate function name {name!r}")
        schema = _parameters(at, function.get("parameters"))
        parameters = {"additionalProperties": False} | schema if function.get("parameters") is None else close(schema)
        by_name[name] = Tool(name, parameters, schema, function.get("strict") is True, at)
    return tuple(by_name.values())


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
            raise ContractError("tool_choice: required requires tools")
        return tools, True
    name = choice.get("name") if isinstance(choice, Mapping) else None
    if not isinstance(name, str):
        raise ContractTypeError(f"tool_choice: expected none, auto, required or a function's name, got {shown(choice)}")
    named = tuple(tool for tool in tools if tool.name == name)
    if not named:
        raise ContractError(f"tool_choice: expected the name of a tool, got {name!r}")
    return named, True


def _parameters(index: int, parameters: Any) -> dict[str, Any]:
    value = {} if parameters is None else parameters
    if not isinstance(value, Mapping):
        raise ToolTypeError(index, "parameters", f"expected a JSON schema, got {shown(parameters)}")
    try:
        schema = json.loads(str(JsonSchema(value).schema))
    except ContractTypeError as error:
        raise ToolTypeError(index, "parameters", f"cannot be read: {error}") from None
    except ContractError as error:
        raise ToolError(index, "parameters", f"cannot be read: {error}") from None
    if schema.setdefault("type", "object") != "object":
        raise ToolError(index, "parameters", f"expected the type object, got {shown(schema['type'])}")
    return schema
