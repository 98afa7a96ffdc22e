"""A conversation with a model in this process: its messages, and the engine that computes the answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from paged_kv.arguments import printable
from paged_kv.engine.engine import Engine
from paged_kv.engine.sampling import Sampling
from paged_kv.errors import ContractError, RequestError
from paged_kv.files import read_regular
from paged_kv.serve.backend import Piece
from paged_kv.serve.chat import Delta
from paged_kv.serve.chat_request import Conversation, Message
from paged_kv.serve.client_tools import ToolCall
from paged_kv.serve.served_model import ContextExceeded, ServedModel

_MOST_TOOLS = 1 << 22
"""Bytes of a file of tools."""
Tools = Sequence[Mapping[str, Any]]


class TurnCounts(NamedTuple):
    """The tokens of an answer, its seconds until the first token and in all, and `finish` as `engine.Output`: None
    where it was ended from outside.
    """

    prompt: int
    cached: int
    new: int
    first: float
    seconds: float
    finish: str | None


class ChatSession:
    """A conversation.

    Args:
        load: Makes the engine that computes the answers, when all else was checked.
        model: Whose they are.
        sampling: Fields of `Sampling` in place of the model's own.
        tools: Those that may be called, as OpenAI's API has them.
        system: The system message.

    Raises:
        ContractError, ContractTypeError: the model has no chat template; a tool or an option is malformed.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        model: ServedModel,
        sampling: Mapping[str, Any],
        tools: Tools | None = None,
        system: str | None = None,
    ) -> None:
        if model.chat is None:
            raise ContractError(
                f"{printable(model.name)}: expected a model with a chat template, got one without: pass --chat-template"
                " FILE, or use `paged-kv generate`"
            )
        self.model, self.tools, self.system = model, tools or None, system
        self._format = model.chat
        self._sampling = {"temperature": 1.0, **model.sampling, **sampling}
        Sampling(**{"max_tokens": model.most_tokens} | self._sampling).check_vocabulary(model.config.vocab_size)
        if tools is not None:
            self._format.check_tools(tools, "auto")
        self.messages: list[dict[str, Any]] = []
        """The messages, as OpenAI's API has them, without the system message."""
        self._first = 0
        self.calls: list[ToolCall] = []
        """The calls of the last answer, which wait for their results."""
        self.counts: TurnCounts | None = None
        """Of the last answer."""
        self.engine = load()

    @property
    def num_left_out(self) -> int:
        """The user's messages that the model sees no more, as the context is full."""
        return sum(message["role"] == "user" for message in self.messages[: self._first])

    def choose(self, name: str) -> None:
        """Lets the model of a name answer: the model itself or an adapter. Raises UnknownModel."""
        self.model = self.model.named(name)

    def body(self) -> dict[str, Any]:
        """The conversation as a request to the server's /v1/chat/completions."""
        messages = [*self._system(), *self.messages]
        return {"model": self.model.name, "messages": messages} | ({"tools": self.tools} if self.tools else {})

    def clear(self) -> None:
        """Forgets all messages but the system message."""
        self.messages, self._first, self.counts = [], 0, None

    def ask(self, text: str) -> None:
        """Adds what the user says. `answer` comes next."""
        self.messages.append({"role": "user", "content": text})

    def add_result(self, call: ToolCall, text: str) -> None:
        """Adds what a call returns. `answer` comes when all calls have theirs."""
        self.messages.append({"role": "tool", "tool_call_id": call.id, "name": call.tool.name, "content": text})

    def withdraw(self) -> None:
        """Forgets the last message of the user, and what followed it."""
        while self.messages and self.messages.pop()["role"] != "user":
            pass
        self._first = min(self._first, len(self.messages))

    def answer(self) -> Generator[Delta, None, None]:
        """The model's next message as it comes; `calls` has its calls then. An iterator that is closed ends it, and
        what has come remains a part of the conversation.

        Raises:
            ContractError: the template refuses the conversation, or its last turn alone is longer than the context.
            RequestError: the answer failed.
        """
        conversation, prompt, tokens = self._shown()
        message, left = conversation.message(prompt), self.model.left("conversation", tokens)
        options = self._sampling | {"max_tokens": min(self._sampling.get("max_tokens", left), left)}
        options |= {"structured_output": conversation.structure(prompt, None)}
        sampling = Sampling(**options, skip_special_tokens=self._format.skip_special_tokens)
        began, first, cached = perf_counter(), 0.0, 0
        stream = self.engine.stream(tokens, sampling, adapter=self.model.adapter)
        try:
            for output in stream:
                if output.error is not None:
                    raise RequestError(output.error)
                first, cached = first or perf_counter() - began, output.cached_tokens
                yield from message.take([Piece.of(output)])
        finally:
            stream.close()
            seconds = perf_counter() - began
            self.counts = TurnCounts(len(tokens), cached, len(message.tokens), first, seconds, message.finish)
            self._add(message)

    def _system(self) -> list[dict[str, Any]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _shown(self) -> tuple[Conversation, str, tuple[int, ...]]:
        """The conversation that the model sees, its prompt and its tokens.

        Where less than an eighth of the context is free, the oldest turns are left out until a quarter is: the turns
        after that share their prefix again.
        """
        most, least = self.model.most_tokens, 1 + self.model.most_tokens // 8
        while True:
            shown = [*self._system(), *self.messages[self._first :]]
            conversation = Conversation(self._format, shown, self.tools, "auto" if self.tools else "none")
            prompt = conversation.prompt()
            later = range(self._first + 1, len(self.messages))
            start = next((at for at in later if self.messages[at]["role"] == "user"), None)
            try:
                tokens = self.model.tokens("conversation", prompt, is_template=True)
                if start is None or most - len(tokens) >= least:
                    return conversation, prompt, tokens
            except ContextExceeded:
                if start is None:
                    raise
            self._first, least = start, most // 4

    def _add(self, message: Message) -> None:
        """Adds an answer, or the part of it that has come; nothing where none has."""
        self.calls = [call for call in message.calls if message.finish is not None and _is_json(call.text)]
        entry: dict[str, Any] = {"role": "assistant", "content": message.content}
        if message.reasoning:
            entry["reasoning_content"] = message.reasoning
        if self.calls:
            entry["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.tool.name, "arguments": call.text}}
                for call in self.calls
            ]
        if message.finish is not None or message.content or message.reasoning:
            self.messages.append(entry)


def read_tools(path: Path) -> Tools:
    """The tools of a file. Raises ContractError."""
    try:
        tools = json.loads(read_regular(path, _MOST_TOOLS))
    except (OSError, ValueError, RecursionError) as error:
        raise ContractError(f"--tools {printable(path)}: cannot be read: {printable(error)}") from None
    if not isinstance(tools, list):
        raise ContractError(f"--tools {printable(path)}: expected a JSON list of tools")
    return tools


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except ValueError:
        return False
