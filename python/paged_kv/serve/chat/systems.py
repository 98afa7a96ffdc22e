"""System messages where a template takes them: some refuse or drop all but one at the beginning, or any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paged_kv.errors import ContractError
from paged_kv.serve.chat.template import Template

_ROLES = ("system", "developer")
_FIRST, _SECOND = "first_probe_of_systems", "second_probe_of_systems"
_TAKING = ("user", "tool")
"""Roles of messages that can have the text of a system message."""
_USER, _ASSISTANT = {"role": "user", "content": "text"}, {"role": "assistant", "content": "text"}


@dataclass(frozen=True)
class Systems:
    """The places where a template writes system messages: found by rendering some."""

    at_front: bool = True
    several: bool = True
    """True if more than one may stand at the front."""
    later: bool = True
    """True if one may stand behind other messages."""

    def arrange(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages of a conversation with its system messages where the template writes them.

        Those at the front become one where the template takes no more, or the beginning of the first message of the
        user where it takes none. A later one becomes text of the message before it, of the user or a tool, else of the
        message behind it, else a message of the user: so a conversation that grows keeps the prompt that it had.
        """
        num_leading = next((at for at, each in enumerate(messages) if each["role"] not in _ROLES), len(messages))
        leading = list(messages[:num_leading])
        others = list(messages[num_leading:]) if self.later else _in_turns(messages[num_leading:])
        if not leading or (self.at_front and (num_leading == 1 or self.several)):
            return [*leading, *others]
        text = _joined(leading)
        if self.at_front:
            return [leading[0] | {"content": text}, *others]
        user = next((at for at, message in enumerate(others) if message["role"] == "user"), None)
        if user is None:
            return [{"role": "user", "content": text}, *others] if text else list(messages)
        others[user] = others[user] | {"content": _joined([*leading, others[user]])}
        return others


def _in_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages, the first of which is no system message, with the texts of system messages in those of others."""
    turns: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []  # system messages behind one of the assistant
    follows = False
    for message in messages:
        role, before = message["role"], turns[-1]["role"] if turns else ""
        if role in _ROLES:
            follows = True
            if before in _TAKING:
                turns[-1] = turns[-1] | {"content": _joined([turns[-1], message])}
            else:
                waiting.append(message)
            continue
        if follows and role == before == "user":  # many templates want turns
            turns[-1] = turns[-1] | {"content": _joined([turns[-1], message])}
        elif role in _TAKING:
            turns.append(message | {"content": _joined([*waiting, message])})
        else:
            turns += [*_of_user(waiting), message]
        waiting, follows = [], False
    return [*turns, *_of_user(waiting)]


def _of_user(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    text = _joined(messages)
    return [{"role": "user", "content": text}] if text else []


def _joined(messages: Sequence[dict[str, Any]]) -> str:
    """The texts of messages, but for empty ones."""
    return "\n\n".join(message["content"] for message in messages if message["content"])


def read_systems(template: Template) -> Systems:
    """Return where a template writes system messages."""
    first, second = ({"role": "system", "content": text} for text in (_FIRST, _SECOND))
    if not _writes(template, [_USER]):
        return Systems()  # it wants something else
    return Systems(
        _writes(template, [first, _USER], _FIRST),
        _writes(template, [first, second, _USER], _FIRST, _SECOND),
        _writes(template, [first, _USER, _ASSISTANT, second, _USER], _FIRST, _SECOND),
    )


def _writes(template: Template, messages: Sequence[dict[str, Any]], *texts: str) -> bool:
    """Return whether a template takes messages, and writes some texts."""
    try:
        text = template.render(list(messages), None, add_generation_prompt=True)
    except ContractError:
        return False
    return all(each in text for each in texts)
