"""Calls of models whose chat template has none that are known here: the server asks for them in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paged_kv.serve.chat.syntaxes.base import dumps
from paged_kv.serve.chat.syntaxes.hermes import Hermes

_RESULT = "<tool_response>\n{}\n</tool_response>"


class Generic(Hermes):
    r"""`<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`, which a system message asks for.

    The template sees plain messages alone: calls are text of the assistant, their results texts of the user.
    """

    NAME = "generic"
    HIDES_TOOLS = True

    @classmethod
    def is_of(cls, template: str) -> bool:  # noqa: ARG003 - it is of whatever has no other
        return True

    def adapt(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
        adapted: list[dict[str, Any]] = []
        if tools:
            messages = self._with_tools(messages, tools)
        for message in messages:
            is_result = message["role"] == "tool"
            plain = {"role": "user", "content": _RESULT.format(message["content"])} if is_result else message
            last = adapted[-1] if adapted else {"role": ""}
            # Results of several calls, and what the user says after them, are one turn: templates may want them to
            # alternate.
            if last["role"] == plain["role"] == "user" and (is_result or last.get("is_result")):
                adapted[-1] = last | {"content": f"{last['content']}\n{plain['content']}", "is_result": True}
            else:
                adapted.append(plain | ({"is_result": True} if is_result else {}))
        return [{name: value for name, value in message.items() if name != "is_result"} for message in adapted]

    def _with_tools(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        listed = "\n".join(dumps(tool["function"]) for tool in tools)
        text = _INSTRUCTION.format(listed)
        if messages[0]["role"] == "system":
            return [messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]


_INSTRUCTION = """You can call functions. Each line between <tools> and </tools> describes one as JSON:
<tools>
{}
</tools>
To call one, answer with its name and its arguments as JSON between <tool_call> and </tool_call>, and with nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>
Its result then comes between <tool_response> and </tool_response>. Where no function helps, answer in plain text."""
