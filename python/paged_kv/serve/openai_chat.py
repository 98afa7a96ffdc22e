"""OpenAI's /v1/chat/completions: a conversation, with tools and their results."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paged_kv.arguments import shown
from paged_kv.engine.sampling import Logprobs
from paged_kv.errors import ContractError
from paged_kv.forms import Form
from paged_kv.serve.backend import Job, Piece
from paged_kv.serve.chat import (
    CallStart,
    ChatFormat,
    Content,
    Delta,
    MessageParser,
    Reasoning,
)
from paged_kv.serve.exchange import Event, Exchange
from paged_kv.serve.fields import Fields
from paged_kv.serve.openai_completions import MOST_SAMPLES, StreamOptions
from paged_kv.serve.sampling import MOST_LOGPROBS, read_form, read_max_tokens, read_sampling
from paged_kv.serve.served_model import ServedModel

_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    """What is asked of a chat: a prompt, and how its answer is read and held to its syntax."""

    format: ChatFormat
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    choice: Any = "none"
    """Which tools are called: "none", "auto", "required" or `{"name": ...}`."""
    parallel: bool = True
    template: Mapping[str, Any] = field(default_factory=dict)
    """Further values for the template."""

    def prompt(self) -> str:
        """The text that the model goes on with. Raises ContractError where the template refuses it."""
        if self.tools is not None:
            self.format.check_tools(self.tools, self.choice)
        return self.format.render(self.messages, self.tools, **self.template)

    def form(self, prompt: str, answer: Form | None) -> Form | None:
        """What the answer to a prompt must be; `answer` where it is no call. Raises ContractError."""
        return self.format.structure(self.tools, self.choice, self.parallel, answer, prompt)

    def parser(self, prompt: str) -> MessageParser:
        """Reads the answer to a prompt."""
        return self.format.parser(self.tools if self.choice != "none" else None, prompt)


def chat_format(model: ServedModel) -> ChatFormat:
    """The model's.

    Raises:
        ContractError: it has none.
    """
    if model.chat is None:
        raise ContractError("this model has no chat template: ask for /v1/completions, or see --chat-template")
    return model.chat


def read_chat(body: Fields, model: ServedModel) -> Exchange:
    """A request to /v1/chat/completions.

    Raises:
        ContractError, ContractTypeError, CheckpointError, ToolchainError: a field cannot be taken.
    """
    model.check_name(body)
    conversation = read_conversation(body, model)
    prompt = conversation.prompt()
    tokens = model.tokens("messages", prompt, is_template=True)
    n = body.integer("n", 1, 1, MOST_SAMPLES)
    stream, options = body.flag("stream", False), StreamOptions.read(body)
    logprobs = body.flag("logprobs", False)
    top = body.integer("top_logprobs", 0, 0, MOST_LOGPROBS)
    if top and not logprobs:
        raise body.error("top_logprobs", "belongs to a request with logprobs: true")
    returns_tokens = body.flag("return_token_ids", False)
    namespace = body.text("cache_salt", None)
    for name in ("functions", "function_call", "audio", "echo", "continue_final_message"):
        body.refuse(name)
    body.refuse("modalities", (["text"],))
    if not body.flag("skip_special_tokens", True):
        raise body.error("skip_special_tokens", "is not supported other than true")
    left = model.left("messages", tokens)
    form = conversation.form(prompt, read_form(body))
    most = read_max_tokens(body, ("max_completion_tokens", "max_tokens"), left, 1, left)
    sampling = read_sampling(
        body,
        most,
        form=form,
        logprobs=top if logprobs else None,
        skip_special_tokens=conversation.format.skip_special_tokens,
    )
    sampling.check_vocabulary(model.config.vocab_size)
    body.end()
    return ChatCompletions(
        Job(tokens, sampling, n, namespace),
        model,
        [conversation.parser(prompt) for _ in range(n)],
        stream=stream,
        usage=options,
        returns_tokens=returns_tokens,
    )


def read_conversation(body: Fields, model: ServedModel) -> Conversation:
    """The messages and tools of a body, in OpenAI's words.

    Raises:
        FieldError: one of them is malformed.
        ContractError: the model has no chat format.
    """
    messages = [_message(each) for each in body.objects("messages")]
    if not messages:
        raise body.error("messages", "must be a list of at least one message")
    tools = [each.raw() for each in body.objects("tools")] or None
    choice = body.any("tool_choice", "auto" if tools else "none")
    if isinstance(choice, dict):
        choice = _named_choice(body.object("tool_choice"))
    elif choice not in ("none", "auto", "required"):
        raise body.error("tool_choice", f"must be none, auto, required or a function's name, not {shown(choice)}")
    if not tools and choice not in ("none", "auto"):
        raise body.error("tool_choice", "asks for a call, and there are no tools")
    template = dict(body.object("chat_template_kwargs", None).raw())
    if "reasoning_effort" in body:
        template["reasoning_effort"] = body.text("reasoning_effort")
    if not body.flag("add_generation_prompt", True):
        raise body.error("add_generation_prompt", "is not supported other than true")
    return Conversation(
        chat_format(model),
        messages,
        tools,
        choice if tools else "none",
        body.flag("parallel_tool_calls", True),
        template,
    )


def _named_choice(choice: Fields) -> dict[str, str]:
    choice.choice("type", ("function",))
    function = choice.object("function")
    name = str(function.text("name"))
    function.end()
    choice.end()
    return {"name": name}


def _message(given: Fields) -> dict[str, Any]:
    """A message, each field of which has its type; `ChatFormat.render` makes it what the template takes."""
    role = given.choice("role", _ROLES)
    message: dict[str, Any] = {"role": role}
    content = given.any("content", None)
    if isinstance(content, list):
        message["content"] = [_part(part) for part in given.objects("content")]
    elif content is not None:
        message["content"] = given.text("content")
    elif role != "assistant":
        raise given.error("content", "is missing")
    if "tool_calls" in given:
        message["tool_calls"] = [_call(call) for call in given.objects("tool_calls")]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if name in given:
            message[name] = given.text(name)
    if "reasoning" in given:  # as some servers call it
        message["reasoning_content"] = given.text("reasoning")
    for name in ("refusal", "audio", "function_call"):
        given.refuse(name)
    given.ignore(("annotations",))
    given.end()
    return message


def _part(part: Fields) -> dict[str, Any]:
    said = {"type": part.choice("type", ("text",)), "text": part.text("text")}
    part.ignore(("cache_control",))
    part.end()
    return said


def _call(call: Fields) -> dict[str, Any]:
    function = call.object("function")
    named = {"name": function.text("name"), "arguments": function.any("arguments", "{}")}
    said = {"id": call.text("id", ""), "type": call.choice("type", ("function",), "function"), "function": named}
    call.ignore(("index",))
    function.end()
    call.end()
    return said


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
        """Notes pieces; what they say."""
        deltas: list[Delta] = []
        for piece in pieces:
            deltas += self.parser.push(piece.text)
            self.tokens += piece.tokens
            self.logprobs += zip(piece.tokens, piece.logprobs, strict=False)
            if piece.finish is not None:
                deltas += self.parser.finish()
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


class ChatCompletions(Exchange):
    """The answer of /v1/chat/completions."""

    def __init__(
        self,
        job: Job,
        model: ServedModel,
        parsers: Sequence[MessageParser],
        *,
        stream: bool,
        usage: StreamOptions,
        returns_tokens: bool,
    ) -> None:
        super().__init__([job], stream=stream)
        self._model, self._usage, self._returns_tokens = model, usage, returns_tokens
        self._messages = [Message(parser) for parser in parsers]
        self._told = [False] * job.n
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if stream else "chat.completion",
            "created": int(time.time()),
            "model": model.name,
        }

    def take(self, job: int, sample: int, pieces: Sequence[Piece]) -> list[Event]:  # noqa: ARG002
        message = self._messages[sample]
        before = len(message.tokens)
        deltas = message.take(pieces)
        if not self.stream:
            return []
        said: dict[str, Any] = {}
        if not self._told[sample]:
            self._told[sample], said = True, {"role": "assistant", "content": ""}
        for delta in deltas:
            _add(said, delta)
        choice = {"index": sample, "delta": said, "finish_reason": self._finish(message)}
        logprobs = self._logprobs(message.logprobs[before:])
        if not said and not message.finish and not logprobs:
            return []
        new = replace(message, tokens=message.tokens[before:])
        return [self._event([choice | {"logprobs": logprobs} | self._tokens(new)])]

    def end(self) -> list[Event]:
        return [{**self._event([]), "usage": self.usage.openai()}] if self._usage.at_end else []

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, message in enumerate(self._messages):
            said: dict[str, Any] = {"role": "assistant", "content": message.content or None, "refusal": None}
            if not message.calls:
                said["content"] = message.content
            if message.reasoning:
                said["reasoning_content"] = message.reasoning
            if message.calls:
                said["tool_calls"] = [
                    {
                        "id": each["id"],
                        "type": "function",
                        "function": {key: each[key] for key in ("name", "arguments")},
                    }
                    for each in message.calls
                ]
            choice = {"index": index, "message": said, "finish_reason": self._finish(message)}
            choices.append(choice | {"logprobs": self._logprobs(message.logprobs)} | self._tokens(message))
        whole = {**self._head, "choices": choices, "usage": self.usage.openai()}
        return whole | ({"prompt_token_ids": list(self.jobs[0].tokens)} if self._returns_tokens else {})

    def _event(self, choices: list[dict[str, Any]]) -> Event:
        usage = {"usage": self.usage.openai()} if self._usage.always else {}
        return {**self._head, "choices": choices, **usage}

    def _finish(self, message: Message) -> str | None:
        return "tool_calls" if message.finish == "stop" and message.calls else message.finish

    def _tokens(self, message: Message) -> dict[str, Any]:
        return {"token_ids": message.tokens} if self._returns_tokens else {}

    def _logprobs(self, logprobs: Sequence[tuple[int, Logprobs]]) -> dict[str, Any] | None:
        if self.jobs[0].sampling.logprobs is None:
            return None
        return {"content": [self._of_token(token, each) for token, each in logprobs], "refusal": None}

    def _of_token(self, token: int, logprobs: Logprobs) -> dict[str, Any]:
        top = [self._likely(each, value) for each, value in logprobs.top.items()]
        return self._likely(token, logprobs.token) | {"top_logprobs": top}

    def _likely(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._model.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _add(said: dict[str, Any], delta: Delta) -> None:
    """Adds a part of a message to the delta of a chunk."""
    if isinstance(delta, Content):
        said["content"] = said.get("content", "") + delta.text
    elif isinstance(delta, Reasoning):
        said["reasoning_content"] = said.get("reasoning_content", "") + delta.text
    else:
        calls = said.setdefault("tool_calls", [])
        if isinstance(delta, CallStart):
            function = {"name": delta.name, "arguments": ""}
            calls.append({"index": delta.index, "id": delta.id, "type": "function", "function": function})
        elif calls and calls[-1]["index"] == delta.index:
            calls[-1]["function"]["arguments"] += delta.text
        else:
            calls.append({"index": delta.index, "function": {"arguments": delta.text}})
