"""System messages where a template takes them: some refuse or drop all but one at the beginning, or any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paged_kv.errors import ContractError
from paged_kv.serve.chat.template import Template

_ROLES = ("system", "developer")
_FIRST, _SECOND = "first_probe_of_systems", "second_probe_of_systems"
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

        Where it would not write one, all of them become one at the front, in their order; where it writes none there,
        they become the beginning of the first message of the user.
        """
        places = [at for at, message in enumerate(messages) if message["role"] in _ROLES]
        num_leading = sum(place == at for at, place in enumerate(places))
        is_written = self.at_front and (num_leading < 2 or self.several) and (num_leading == len(places) or self.later)
        if not places or is_written:
            return list(messages)
        text = "\n\n".join(messages[at]["content"] for at in places if messages[at]["content"])
        others: list[dict[str, Any]] = []
        for at, message in enumerate(messages):
            if at in places:
                continue
            if others and at - 1 in places and message["role"] == others[-1]["role"] == "user":
                others[-1] = _joined(others[-1], message)  # many templates want turns
            else:
                others.append(message)
        system = messages[places[0]] | {"content": text}
        if self.at_front:
            return [system, *others]
        user = next((at for at, message in enumerate(others) if message["role"] == "user"), None)
        if user is None:
            return list(messages)
        others[user] = others[user] | {"content": _joined(system, others[user])["content"]}
        return others


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    texts = (text for text in (first["content"], second["content"]) if text)
    return first | {"content": "\n\n".join(texts)}


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
