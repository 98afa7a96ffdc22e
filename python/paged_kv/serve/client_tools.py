"""Tools as OpenAI's clients have them: functions, tools whose input is a text, and namespaces of both.

Models know functions only. A tool whose input is a text becomes a function of one string; the function of a tool in a
namespace has the namespace before its name. `ClientTool` leads back to the client's own words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paged_kv.arguments import printable, shown
from paged_kv.serve.chat import CallArguments, CallStart, Delta
from paged_kv.serve.chat.json_lark import in_json
from paged_kv.serve.fields import BodyFields
from paged_kv.structured_output import Grammar, JsonSchema, problem_of

INPUT = "input"
"""The argument that a text is in."""
_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?=[^\\]|\\[^u]|\\u[^dD])))*"
)


@dataclass(frozen=True)
class ClientTool:
    """A tool in its client's words."""

    name: str
    namespace: str | None = None
    is_text: bool = False
    """True if its input is a text, not JSON."""
    grammar: str | None = None
    """The grammar of the text, as `Tool.text_grammar`."""


@dataclass
class ClientTools:
    """The tools of a request."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    """As chat templates take them."""
    by_function: dict[str, ClientTool] = field(default_factory=dict)
    """The client's tools by the names of their functions; one that is itself a function may be absent."""
    schema_paths: list[str] = field(default_factory=list)
    """The field of the request that the schema of each function is in."""

    def add(self, tool: dict[str, Any], schema_path: str, client: ClientTool | None = None) -> None:
        """Offer a function, and note whose it is."""
        self.functions.append(tool)
        self.schema_paths.append(schema_path)
        if client is not None:
            self.by_function[tool["function"]["name"]] = client

    def of(self, function: str) -> ClientTool:
        """The tool that a function is."""
        return self.by_function.get(function) or ClientTool(function)

    def function(self, name: Any, namespace: str | None = None) -> str | None:
        """The name of the function of a client's tool; None if there is no such tool.

        Without a namespace: a tool in no namespace, else one in any.
        """
        functions = [tool.get("function") for tool in self.functions]
        names = [str(each.get("name")) for each in functions if isinstance(each, Mapping)]
        of_name = {self.of(each).namespace: each for each in reversed(names) if self.of(each).name == name}
        return of_name.get(namespace) or (next(reversed(of_name.values()), None) if namespace is None else None)


def qualified(name: str, namespace: str | None) -> str:
    """The name of a function in a namespace."""
    return name if namespace is None else f"{namespace}.{name}"


def text_arguments(text: str) -> str:
    """The arguments of the function that a tool with a text is."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def read_function(tool: BodyFields, schema: BodyFields, harmless: Collection[str]) -> dict[str, Any]:
    """A function that may be called, whose fields are those of an object itself; `schema` is of its arguments."""
    function: dict[str, Any] = {"name": tool.text("name"), "parameters": schema.raw()}
    if "description" in tool:
        function["description"] = tool.text("description")
    if tool.flag("strict", False):
        function["strict"] = True
    tool.ignore(harmless)
    tool.end()
    return {"type": "function", "function": function}


def read_text_tool(
    tool: BodyFields, namespace: str | None = None, *, has_grammars: bool = True
) -> tuple[dict[str, Any], ClientTool]:
    """A tool whose input is a text, and its function. The text's `format` is enforced, and part of the description.

    Args:
        tool: The tool.
        namespace: The namespace that it is in.
        has_grammars: Whether the model's calls are held to grammars of texts.

    Raises:
        FieldError: a field is malformed; or the server is strict, and the format cannot be enforced.
    """
    name, description = tool.text("name"), str(tool.text("description", ""))
    value: dict[str, Any] = {"type": "string"}
    inside = None
    form = tool.object("format", None)
    if form.choice("type", ("text", "grammar"), "text") == "grammar":
        grammar = form.object("grammar") if "grammar" in form else form  # chats have one more object around it
        syntax, definition = grammar.choice("syntax", ("lark", "regex")), str(grammar.text("definition"))
        if syntax == "regex":
            pattern = f"^(?:{definition})$"
            if is_enforced := not problem_of(JsonSchema({"type": "string", "pattern": pattern})):
                value["pattern"] = pattern
        else:
            inside = in_json(definition) if has_grammars else None
            if not (is_enforced := inside is not None and not problem_of(Grammar(inside))):
                inside = None
        if not is_enforced:
            grammar.pass_over("definition", "not enforced: the model only reads it")
        description = f"{description}\n\nThe input follows this {_SYNTAXES[str(syntax)]}:\n{definition}".strip()
        grammar.end()
    form.end()
    tool.ignore(("type",))
    tool.end()
    parameters = {"type": "object", "properties": {INPUT: value}, "required": [INPUT], "additionalProperties": False}
    about = {"description": description} if description else {}
    function = {"name": qualified(str(name), namespace), **about, "parameters": parameters}
    return {"type": "function", "function": function}, ClientTool(str(name), namespace, True, inside)


_SYNTAXES = {"lark": "grammar in Lark's syntax", "regex": "regular expression"}
_CHOICES = ("none", "auto", "required")
_KINDS = ("function", "custom")


def read_choice(body: BodyFields, tools: ClientTools, *, nested: bool) -> Any:
    """OpenAI's `tool_choice`, as `ChatFormat` takes it.

    Args:
        body: The body of the request.
        tools: Its tools.
        nested: Whether what a choice says is in a field of the name of its type.

    Raises:
        FieldError: it is malformed, names a tool that is not offered, or asks for a call where there are no tools.
    """
    has_tools = bool(tools.functions)
    choice = body.any("tool_choice", "auto" if has_tools else "none")
    if not isinstance(choice, dict):
        if choice not in _CHOICES:
            raise body.error("tool_choice", f"expected none, auto, required or a function, got {shown(choice)}")
        if choice == "required" and not has_tools:
            raise body.error("tool_choice", "required requires tools")
        return choice if has_tools else "none"
    requested = body.object("tool_choice")
    kind = str(requested.choice("type", (*_KINDS, "allowed_tools")))
    inner = requested.object(kind) if nested else requested
    if not has_tools:
        raise body.error("tool_choice", f"{kind} requires tools")
    if kind == "allowed_tools":
        mode = inner.choice("mode", ("auto", "required"))
        named = [_named(each, tools, nested) for each in inner.objects("tools")]
        names = [name for name in named if name is not None]
        if not names and mode == "required":
            raise inner.error("tools", "expected the name of an offered tool, got none")
        choice = {"names": names, "mode": mode} if names else "none"
    else:
        name, namespace = inner.text("name"), inner.text("namespace", None)
        choice = {"name": tools.function(name, namespace)}
        if choice["name"] is None:
            raise body.error("tool_choice", f"expected the name of a tool, got {printable(repr(name))}")
    inner.end()
    requested.end()
    return choice


def _named(entry: BodyFields, tools: ClientTools, nested: bool) -> str | None:
    """The function that an entry of `allowed_tools` names; None where its type is not offered here."""
    kind = str(entry.text("type"))
    if kind not in _KINDS:
        entry.leave_out(_KINDS)
        return None
    inner = entry.object(kind) if nested else entry
    name = tools.function(inner.text("name"), inner.text("namespace", None))
    if name is None:
        raise inner.error("name", f"expected the name of a tool, got {shown(inner.text('name'))}")
    inner.end()
    entry.end()
    return name


class TextInput:
    """The text in the arguments of a call as they come: `{"input": "..."}`."""

    def __init__(self) -> None:
        self._json, self._has_begun = "", False

    def push(self, json_text: str) -> str:
        """The further text in some more of the arguments."""
        self._json += json_text
        if not self._has_begun:
            begin = _BEGIN.match(self._json)
            if begin is None:
                return ""
            self._json, self._has_begun = self._json[begin.end() :], True
        match = _CHARACTERS.match(self._json)
        whole = match[0] if match else ""
        self._json = self._json[len(whole) :]
        return str(json.loads(f'"{whole}"', strict=False))


@dataclass
class ToolCall:
    """A call as it comes."""

    id: str
    tool: ClientTool
    text: str = ""
    """The arguments, or the input that is a text."""
    reader: TextInput = field(default_factory=TextInput)


def read_calls(deltas: Sequence[Delta], calls: list[ToolCall], tools: Mapping[str, ClientTool]) -> list[Delta]:
    """Note the calls of a message as they come; arguments become texts where tools have texts.

    Args:
        deltas: What has come.
        calls: The message's calls, which grow.
        tools: The client's tools by the names of their functions.
    """
    read: list[Delta] = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            calls.append(ToolCall(delta.id, tools.get(delta.name) or ClientTool(delta.name)))
        elif isinstance(delta, CallArguments):
            call = calls[delta.index]
            text = call.reader.push(delta.text) if call.tool.is_text else delta.text
            call.text += text
            if not text:
                continue
            delta = CallArguments(delta.index, text)
        read.append(delta)
    return read
