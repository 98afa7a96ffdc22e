"""Messages of GPT-OSS: channels for thoughts, calls and the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paged_kv.serve.chat.any_order import arguments_rule
from paged_kv.serve.chat.grammar import TEXT, Rules, literal
from paged_kv.serve.chat.message import Incoming, Outgoing, Step
from paged_kv.serve.chat.syntaxes.base import Asked, Call, Syntax, dumps

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_NAMED = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([A-Za-z0-9_.:-]+)")


class Harmony(Syntax):
    """`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`: one call a message.

    Channel `analysis` has thoughts, `final` the answer, `commentary` without a recipient text before calls.
    """

    NAME = "harmony"
    MARKS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN)

    @classmethod
    def is_of(cls, template: str) -> bool:
        return all(mark in template for mark in (_CHANNEL, _MESSAGE, "commentary", "analysis"))

    def start(self, rules: Rules, asked: Asked) -> str:
        channel, message = rules.mark(_CHANNEL), rules.mark(_MESSAGE)
        constrain = f'(" " {rules.mark(_CONSTRAIN)}? "json")?'
        before = ["analysis"] if asked.is_required or asked.answer else ["analysis", "commentary"]
        thoughts = rules.any(f"{channel} {literal(name)} {message} {rules.until(_END)}" for name in before)
        last = []
        for tool in asked.tools:
            to, arguments = f" to=functions.{tool.name}", arguments_rule(rules, tool)
            last.append(f"{channel} {literal('commentary' + to)} {constrain} {message} {arguments}")
            last.append(f'{literal(to)} {channel} "commentary" {constrain} {message} {arguments}')
        if not asked.is_required:
            answer = TEXT if asked.answer is None else asked.answer
            last.append(f'{channel} "final" {constrain if asked.answer else ""} {message} {answer}')
        return f'({thoughts} {rules.mark(_START)} "assistant")* {rules.any(last)}'

    def read(
        self,
        text: Incoming,
        out: Outgoing,
        asked: Asked,  # noqa: ARG002 - channels say what is a thought
        silent: tuple[str, ...],  # noqa: ARG002
    ) -> Step[None]:
        marks = (_END, _CALL, _RETURN, _START, _CHANNEL)
        has_thought = False
        while True:
            pieces: list[str] = []
            mark = yield from text.until((_MESSAGE,), pieces.append)
            header = "".join(pieces)
            if mark is None:
                if "<|" not in header and not header.lstrip().startswith("to="):
                    out.content(header)  # a message without channels
                return
            channel, recipient = _NAMED.search(header), _RECIPIENT.search(header)
            if recipient and recipient[1] in out.tools:
                out.call(recipient[1])
                yield from text.json(out.arguments)
                mark = yield from text.until(marks, lambda _: None)
            elif channel and channel[1] == "analysis":
                out.reasoning("\n" if has_thought else "")
                mark = yield from text.until(marks, out.reasoning)
                has_thought = True
            else:
                mark = yield from text.until(marks, out.content)
            if mark in (_START, _CHANNEL):
                text.at -= len(mark)

    def adapt(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,  # noqa: ARG002
    ) -> list[dict[str, Any]]:
        # The template writes the first call of a message and no other, and a thought or a text before it, not both.
        results = {message.get("tool_call_id"): message for message in messages if message["role"] == "tool"}
        adapted, moved = [], set()
        for message in messages:
            calls = message.get("tool_calls") or []
            if message.get("tool_call_id") in moved:
                continue
            if not calls:
                adapted.append(message)
                continue
            if any(message.get(name) for name in ("reasoning_content", "thinking", "reasoning")):
                message = message | {"content": ""}
            for call in calls:
                adapted.append(message | {"tool_calls": [call]})
                message = {"role": message["role"], "content": ""}
                if len(calls) > 1 and call.get("id") in results:
                    adapted.append(results[call["id"]])
                    moved.add(call["id"])
        return adapted

    def write(self, calls: Sequence[Call]) -> str:
        return "".join(
            f"{_CHANNEL}commentary to=functions.{call.name} {_CONSTRAIN}json{_MESSAGE}{dumps(call.arguments)}"
            for call in calls[:1]
        )
