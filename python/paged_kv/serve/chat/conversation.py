"""Conversations as OpenAI's API has them, made ready for a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paged_kv.arguments import printable, shown
from paged_kv.errors import CheckpointError, ContractError, ContractTypeError
from paged_kv.serve.chat.deltas import CallStart
from paged_kv.serve.chat.message import Incoming, Outgoing
from paged_kv.serve.chat.syntaxes import SYNTAXES, Asked, Call, Generic, Syntax
from paged_kv.serve.chat.systems import Systems
from paged_kv.serve.chat.template import Template
from paged_kv.serve.chat.template_limits import TemplateLimitError
from paged_kv.serve.chat.tools import Tool

_TOOL = {"name": "another", "description": "Another.", "parameters": {"type": "object", "properties": {}}}
_PROBE = "probe_of_calls"


@dataclass(frozen=True)
class Habits:
    """A template's handling of the calls of a conversation: found by rendering one."""

    as_objects: bool = True
    """True if arguments are objects; some templates take JSON in a string."""
    text: str | None = None
    """The conversation; None where no call is in it."""

    def has_call_of(self, syntax: Syntax) -> bool:
        """Return whether the call is read back by a syntax."""
        text, out = Incoming(), Outgoing({_PROBE: Tool(_PROBE, {})}, str)
        text.text, text.ended = self.text or "", True
        for _ in syntax.read(text, out, Asked(tuple(out.tools.values())), ()):
            pass
        return any(isinstance(delta, CallStart) for delta in out.drain())


def read_habits(template: Template) -> Habits:
    """Return what a template does with calls.

    Raises:
        CheckpointError: it takes more than a rendering's limits.
    """
    forms: tuple[Any, ...] = ({"marker": "value"}, '{"marker": "value"}')
    for arguments in forms:
        call: dict[str, Any] = {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": _PROBE, "arguments": arguments},
        }
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "text"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "abcdefghi", "name": _PROBE, "content": "text"},
        ]
        try:
            text = template.render(messages, [{"type": "function", "function": _TOOL}], add_generation_prompt=True)
        except ContractError as error:
            if isinstance(error.__cause__, TemplateLimitError):
                raise CheckpointError(f"the chat template cannot be used: {error.__cause__}") from error
            continue
        if "{'marker'" not in text:
            is_written = _PROBE in text and "marker" in text
            return Habits(not isinstance(arguments, str), text if is_written else None)
    return Habits()


def choose_syntax(template: Template, habits: Habits) -> Syntax:
    """The syntax of a template's calls; the generic one where it is not known here."""
    for each in SYNTAXES:
        syntax = each(template.text)
        if each.is_of(template.text) and (habits.text is None or not each.IS_SOUGHT or habits.has_call_of(syntax)):
            return syntax
    return Generic(template.text)


def read_messages(
    messages: Any,
    tools: Sequence[Mapping[str, Any]] | None,
    template: Template,
    syntax: Syntax,
    habits: Habits,
    systems: Systems,
) -> list[dict[str, Any]]:
    """The messages as a template takes them.

    Contents of several texts become one, arguments of calls become what the template takes, calls become text where it
    does not write them, and system messages one at the front where it demands that.

    Raises:
        ContractTypeError, ContractError: they are no messages of texts and calls.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ContractTypeError(f"messages: expected a list of messages, got {shown(messages)}")
    # Where calls are asked for in another syntax than the template's, it sees none of its own.
    is_native = habits.text is not None and not (tools and isinstance(syntax, Generic))
    as_objects = habits.as_objects if is_native else None
    read = [_message(f"messages[{at}]", message, template, syntax, as_objects) for at, message in enumerate(messages)]
    if isinstance(syntax, Generic):  # the system message that it writes goes where the template takes one
        return systems.arrange(read if is_native else syntax.adapt(read, tools))
    return syntax.adapt(systems.arrange(read), tools)


def _message(place: str, entry: Any, template: Template, syntax: Syntax, as_objects: bool | None) -> dict[str, Any]:
    """One message; `as_objects` is None where the template writes no calls."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("role"), str):
        raise ContractTypeError(f"{place}: expected a role and content, got {shown(entry)}")
    message = {name: value for name, value in entry.items() if value is not None}
    if message["role"] == "developer" and "developer" not in template.text:
        message["role"] = "system"
    calls = message.pop("tool_calls", None) or []
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ContractTypeError(f"{place}.tool_calls: expected a list, got {shown(calls)}")
    if "content" not in message and message["role"] != "assistant":
        raise ContractError(f"{place}.content: missing")
    message["content"] = _text(place, message.get("content", ""))
    if not calls:
        return message
    made = [_call(f"{place}.tool_calls[{at}]", call) for at, call in enumerate(calls)]
    if as_objects is not None:
        message["tool_calls"] = [_as_made(call, as_objects) for call in made]
    else:
        message["content"] += syntax.write(made)
    return message


def _text(place: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ContractTypeError(f"{place}.content: expected a text or a list of texts, got {shown(content)}")
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text"):
            raise ContractError(f"{place}.content[{at}].type: only text parts are supported, got {shown(kind)}")
        if not isinstance(part.get("text"), str):
            raise ContractTypeError(f"{place}.content[{at}].text: expected a string, got {shown(part.get('text'))}")
        texts.append(part["text"])
    return "\n".join(texts)


def _call(place: str, call: Any) -> Call:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ContractTypeError(f"{place}: expected a function with a name, got {shown(call)}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ContractError(f"{place}.function.arguments: invalid JSON: {printable(error)}") from None
    if not isinstance(arguments, Mapping):
        raise ContractTypeError(f"{place}.function.arguments: expected an object, got {shown(arguments)}")
    return Call(function["name"], arguments, str(call.get("id") or ""))


def _as_made(call: Call, as_objects: bool) -> dict[str, Any]:
    arguments = call.arguments if as_objects else json.dumps(call.arguments, ensure_ascii=False)
    identity = {"id": call.id} if call.id else {}
    return {**identity, "type": "function", "function": {"name": call.name, "arguments": arguments}}
