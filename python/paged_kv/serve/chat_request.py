"""A chat whatever the API: what is asked of the model, and its answer as a message or as blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paged_kv.arguments import shown
from paged_kv.engine.sampling import Logprobs
from paged_kv.errors import ContractError
from paged_kv.serve.backend import Job, Piece
from paged_kv.serve.chat import CallStart, ChatFormat, Content, Delta, MessageParser, Reasoning
from paged_kv.serve.chat.tools import ToolSchemaError
from paged_kv.serve.exchange import Event, Exchange
from paged_kv.serve.fields import FieldError, Fields
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
    """The tools that are called: "none", "auto", "required" or `{"name": ...}`."""
    parallel: bool = True
    template: Mapping[str, Any] = field(default_factory=dict)
    """Further values for the template."""
    schema_field: str = "function.parameters"
    """The field of a tool that has the schema of its arguments, as the route calls it."""

    def prompt(self) -> str:
        """The text that the model goes on with. Raises ContractError where the template refuses it."""
        if self.tools is not None:
            self.format.check_tools(self.tools, self.choice)
        return self.format.render(self.messages, self.tools, **self.template)

    def structure(self, prompt: str, answer: Structure | None) -> Structure | None:
        """Return what the answer to a prompt must be; `answer` where it is no call. Raises ContractError."""
        try:
            return self.format.structure(self.tools, self.choice, self.parallel, answer, prompt)
        except ToolSchemaError as error:
            raise FieldError(f"tools[{error.index}].{self.schema_field}", error.problem) from None

    def parser(self, prompt: str) -> MessageParser:
        """Reads the answer to a prompt."""
        return self.format.parser(self.tools if self.choice != "none" else None, prompt)

    def job(
        self,
        body: Fields,
        model: ServedModel,
        answer: Structure | None,
        limits: tuple[str, ...],
        *,
        name: str = "messages",
        n: int = 1,
        **options: Any,
    ) -> tuple[Job, str]:
        """Return what a backend computes, and the prompt. The fields of a body that say how tokens are chosen are
        read here.

        Args:
            body: The body of the request.
            model: Whose answer it is.
            answer: What the text must be where it is no call.
            limits: The fields of new tokens at most; what is left where none is there.
            name: The name of the field that holds the conversation.
            n: Samples.
            options: Fields of `Sampling`.

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
        return Job(tokens, sampling, n, body.text("cache_salt", None)), prompt


def read_tool(given: Fields, schema: Fields, ignored: Collection[str]) -> dict[str, Any]:
    """A function that may be called, whose fields are those of an object itself; `schema` is of its arguments."""
    function: dict[str, Any] = {"name": given.text("name"), "parameters": schema.raw()}
    if "description" in given:
        function["description"] = given.text("description")
    if given.flag("strict", False):
        function["strict"] = True
    given.ignore(ignored)
    given.end()
    return {"type": "function", "function": function}


def read_choice(body: Fields, has_tools: bool, within: str | None = None) -> Any:
    """OpenAI's `tool_choice`; `within` is the field of a named function that holds its name.

    Raises:
        FieldError: it is malformed, or asks for a call where there are no tools.
    """
    choice = body.any("tool_choice", "auto" if has_tools else "none")
    if isinstance(choice, dict):
        given = body.object("tool_choice")
        given.choice("type", ("function",))
        function = given if within is None else given.object(within)
        choice = {"name": function.text("name")}
        function.end()
        given.end()
    elif choice not in ("none", "auto", "required"):
        raise body.error("tool_choice", f"must be none, auto, required or a function, not {shown(choice)}")
    if not has_tools and choice not in ("none", "auto"):
        raise body.error("tool_choice", "asks for a call, and there are no tools")
    return choice if has_tools else "none"


def chat_format(model: ServedModel) -> ChatFormat:
    """The model's.

    Raises:
        ContractError: it has none.
    """
    if model.chat is None:
        raise ContractError("this model has no chat template: ask for /v1/completions, or see --chat-template")
    return model.chat


@dataclass
class Message:
    """One message of the assistant as it grows; the parts of it, for whatever API."""

    parser: MessageParser
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Each with an id, a name and the text of its arguments."""
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
            elif isinstance(delta, CallStart):
                self.calls.append({"id": delta.id, "name": delta.name, "arguments": ""})
            else:
                self.calls[delta.index]["arguments"] += delta.text
        return deltas


@dataclass
class Block:
    """A part of an answer: text, a thought, or a call."""

    kind: Literal["text", "reasoning", "call"]
    index: int
    id: str = ""
    name: str = ""
    text: str = ""
    """The arguments of a call."""


class BlockExchange(Exchange):
    """An answer in blocks, one after the other, of one sample.

    Args:
        job: What is computed.
        parser: Reads its text.
        stream: Whether the answer is a stream of events.
    """

    NAMED_EVENTS = True

    def __init__(self, job: Job, parser: MessageParser, *, stream: bool) -> None:
        super().__init__([job], stream=stream)
        self.message = Message(parser)
        self.blocks: list[Block] = []
        self._is_open = False

    @abstractmethod
    def opened(self, block: Block) -> list[Event]:
        """The events of a block that begins."""

    @abstractmethod
    def grown(self, block: Block, text: str) -> list[Event]:
        """The events of a block's further text."""

    @abstractmethod
    def closed(self, block: Block) -> list[Event]:
        """The events of a block that is whole."""

    def take(self, job: int, sample: int, pieces: Sequence[Piece]) -> list[Event]:  # noqa: ARG002
        events: list[Event] = []
        for delta in self.message.take(pieces):
            if isinstance(delta, CallStart):
                events += self._open(Block("call", len(self.blocks), delta.id, delta.name))
                continue
            kind: Any = {Content: "text", Reasoning: "reasoning"}.get(type(delta), "call")
            if not self._is_open or self.blocks[-1].kind != kind:
                events += self._open(Block(kind, len(self.blocks)))
            self.blocks[-1].text += delta.text
            events += self.grown(self.blocks[-1], delta.text)
        return events + (self._close() if self.message.finish is not None else [])

    def _open(self, block: Block) -> list[Event]:
        events = self._close()
        self.blocks.append(block)
        self._is_open = True
        return events + self.opened(block)

    def _close(self) -> list[Event]:
        was_open, self._is_open = self._is_open, False
        return self.closed(self.blocks[-1]) if was_open else []
