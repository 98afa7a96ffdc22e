"""Chats of every API: the request to the model, and its answer as a message or in blocks."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from paged_kv.engine.sampling import Logprobs
from paged_kv.errors import ContractError
from paged_kv.serve.backend import Job, Piece
from paged_kv.serve.chat import CallStart, ChatFormat, Content, Delta, MessageParser, Reasoning
from paged_kv.serve.chat.tools import ToolError
from paged_kv.serve.client_tools import ClientTool, ToolCall, read_calls
from paged_kv.serve.fields import BodyFields, FieldError
from paged_kv.serve.request_exchange import Event, Exchange
from paged_kv.serve.sampling import read_max_tokens, read_sampling
from paged_kv.serve.served_model import ServedModel
from paged_kv.structured_output import Structure


@dataclass(frozen=True)
class Conversation:
    """A chat request: a prompt, and how its answer is read and held to its syntax."""

    format: ChatFormat
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    choice: Any = "none"
    """The tools that are called: "none", "auto", "required" or as `ChatFormat.structure` has it."""
    parallel: bool = True
    template: Mapping[str, Any] = field(default_factory=dict)
    """Further values for the template."""
    client_tools: Mapping[str, ClientTool] = field(default_factory=dict)
    """The client's tools by the names of their functions."""
    schema_paths: Sequence[str] = ()
    """The field of the request that each tool's schema is in."""
    continues: bool = False
    """True if the answer continues the last message."""

    def prompt(self) -> str:
        """The text that the model goes on with. Raises ContractError where the template refuses it."""
        return self._rendered[0]

    @cached_property
    def _rendered(self) -> tuple[str, str]:
        """The prompt, and the part of it that is the message which is continued."""
        if self.tools is not None:
            with self._client_paths():
                self.format.check_tools(self.tools, self.choice)
        messages = _without_billing(self.messages)
        if self.continues:
            return self.format.render_begun(messages, self.tools, **self.template)
        return self.format.render(messages, self.tools, **self.template), ""

    def structure(self, prompt: str, answer: Structure | None) -> Structure | None:
        """Return what the answer to a prompt must be; `answer` where it is no call. Raises ContractError."""
        texts = {name: tool.grammar for name, tool in self.client_tools.items() if tool.is_text}
        begun = self._rendered[1]
        with self._client_paths():
            return self.format.structure(self.tools, self.choice, self.parallel, answer, prompt, begun, texts)

    @contextmanager
    def _client_paths(self) -> Iterator[None]:
        """Errors of tools name the field of the request: some of its tools may be left out, others in a namespace."""
        try:
            yield
        except ToolError as error:
            path = self.schema_paths[error.index]
            function = path.rpartition(".")[0]
            whole = function.removesuffix(".function")
            paths = {"": whole, "type": f"{whole}.type", "name": f"{function}.name", "parameters": path}
            raise FieldError(paths[error.field], error.problem) from None

    def message(self, prompt: str) -> Message:
        """The message that the answer to a prompt is."""
        tools = self.tools if self.choice != "none" else None
        return Message(self.format.parser(tools, prompt, self._rendered[1]), self.client_tools)

    def job(
        self,
        body: BodyFields,
        model: ServedModel,
        answer: Structure | None,
        limits: tuple[str, ...],
        *,
        name: str = "messages",
        n: int = 1,
        **options: Any,
    ) -> tuple[Job, str]:
        """Return the job of a backend, and the prompt. Reads the body's sampling fields.

        Args:
            body: The body of the request.
            model: Whose answer it is.
            answer: What the text must be where it is no call.
            limits: The fields of new tokens at most; what is left where none is there.
            name: The name of the field that holds the conversation.
            n: Samples.
            options: fields of `Sampling`.

        Raises:
            ContractError, ContractTypeError, CheckpointError, ToolchainError: a field cannot be taken.
        """
        prompt = self.prompt()
        tokens = model.tokens(name, prompt, is_template=True)
        left = model.left(name, tokens)
        structure = self.structure(prompt, answer)
        most = read_max_tokens(body, limits, left, 1, left)
        options |= {"structured_output": structure, "skip_special_tokens": self.format.skip_special_tokens}
        sampling = read_sampling(body, model, most, **options)
        return Job(tokens, sampling, n, body.text("cache_salt", None), model.adapter), prompt


_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE)
"""A line of Claude Code's system messages that changes with each request, so no prefix could be shared."""


def _without_billing(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    cleaned = []
    for message in messages:
        content = message.get("content")
        if message["role"] in ("system", "developer") and isinstance(content, str) and _BILLING.search(content):
            message = {**message, "content": _BILLING.sub("", content)}
            if not message["content"]:
                continue
        cleaned.append(message)
    return cleaned


def chat_format(model: ServedModel) -> ChatFormat:
    """The model's.

    Raises:
        ContractError: it has none.
    """
    if model.chat is None:
        raise ContractError("this model has no chat template: use /v1/completions, or serve it with --chat-template")
    return model.chat


@dataclass
class Message:
    """One message of the assistant as it grows; the parts of it, for whatever API."""

    parser: MessageParser
    client_tools: Mapping[str, ClientTool] = field(default_factory=dict)
    """The client's tools by the names of their functions."""
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    finish: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)

    def take(self, pieces: Sequence[Piece]) -> list[Delta]:
        """Note pieces, and return what they say."""
        deltas: list[Delta] = []
        for piece in pieces:
            deltas += self.parser.push(piece.text)
            self.tokens += piece.tokens
            self.logprobs += zip(piece.tokens, piece.logprobs, strict=False)
            if piece.finish is not None:
                deltas += self.parser.finish(is_cut=piece.finish == "length")
                self.finish = piece.finish
        for delta in deltas:
            if isinstance(delta, Content):
                self.content += delta.text
            elif isinstance(delta, Reasoning):
                self.reasoning += delta.text
        return read_calls(deltas, self.calls, self.client_tools)


@dataclass
class ContentBlock:
    """A part of an answer: text, a thought, or a call."""

    kind: Literal["text", "reasoning", "call"]
    index: int
    id: str = ""
    tool: ClientTool = field(default_factory=lambda: ClientTool(""))
    """The tool that is called."""
    text: str = ""
    """With a call its arguments, or its input."""


class BlockExchange(Exchange):
    """An answer in blocks, one after the other, of one sample.

    Args:
        job: What is computed.
        message: Reads its text.
        stream: Whether the answer is a stream of events.
    """

    NAMED_EVENTS = True

    def __init__(self, job: Job, message: Message, *, stream: bool) -> None:
        super().__init__([job], stream=stream)
        self.message = message
        self.blocks: list[ContentBlock] = []
        self._is_open = False

    @abstractmethod
    def opened(self, block: ContentBlock) -> list[Event]:
        """The events of a block that begins."""

    @abstractmethod
    def grown(self, block: ContentBlock, text: str) -> list[Event]:
        """The events of a block's further text."""

    @abstractmethod
    def closed(self, block: ContentBlock) -> list[Event]:
        """The events of a block that is whole."""

    def take(self, job: int, sample: int, pieces: Sequence[Piece]) -> list[Event]:  # noqa: ARG002
        events: list[Event] = []
        for delta in self.message.take(pieces):
            if isinstance(delta, CallStart):
                tool = self.message.calls[delta.index].tool
                events += self._open(ContentBlock("call", len(self.blocks), delta.id, tool))
                continue
            kind: Any = {Content: "text", Reasoning: "reasoning"}.get(type(delta), "call")
            if not self._is_open or self.blocks[-1].kind != kind:
                events += self._open(ContentBlock(kind, len(self.blocks)))
            self.blocks[-1].text += delta.text
            events += self.grown(self.blocks[-1], delta.text)
        return events + (self._close() if self.message.finish is not None else [])

    def _open(self, block: ContentBlock) -> list[Event]:
        events = self._close()
        self.blocks.append(block)
        self._is_open = True
        return events + self.opened(block)

    def _close(self) -> list[Event]:
        was_open, self._is_open = self._is_open, False
        return self.closed(self.blocks[-1]) if was_open else []
