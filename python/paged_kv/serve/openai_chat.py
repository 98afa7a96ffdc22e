"""OpenAI's /v1/chat/completions: a conversation, with tools and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paged_kv.engine.sampling import Logprobs
from paged_kv.serve.backend import Job, Piece
from paged_kv.serve.chat import CallStart, Content, Delta, MessageParser, Reasoning
from paged_kv.serve.chat_request import Conversation, Message, chat_format, read_choice
from paged_kv.serve.exchange import ChoicesExchange, Event, Exchange, Wishes
from paged_kv.serve.fields import Fields
from paged_kv.serve.openai_completions import MOST_SAMPLES
from paged_kv.serve.sampling import MOST_LOGPROBS, read_structure
from paged_kv.serve.served_model import ServedModel

_OWN_VALUES = (
    "messages",
    "tools",
    "self",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
)
"""Names of what transformers' `apply_chat_template` and the server take themselves."""
_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_chat(body: Fields, model: ServedModel) -> Exchange:
    """A request to /v1/chat/completions.

    Raises:
        ContractError, ContractTypeError, CheckpointError, ToolchainError: a field cannot be taken.
    """
    model.check_name(body)
    conversation = read_conversation(body, model)
    n = body.integer("n", 1, 1, MOST_SAMPLES)
    wishes = Wishes.read(body)
    logprobs = body.flag("logprobs", False)
    top = body.integer("top_logprobs", 0, 0, MOST_LOGPROBS)
    if top and not logprobs:
        raise body.error("top_logprobs", "belongs to a request with logprobs: true")
    for name in ("functions", "function_call", "audio", "echo", "continue_final_message"):
        body.refuse(name)
    body.refuse("modalities", (["text"],))
    if not body.flag("skip_special_tokens", True):
        raise body.error("skip_special_tokens", "is not supported other than true")
    job, prompt = conversation.job(
        body,
        model,
        read_structure(body),
        ("max_completion_tokens", "max_tokens"),
        n=n,
        logprobs=top if logprobs else None,
    )
    body.end()
    return ChatCompletions(job, model, wishes, [conversation.parser(prompt) for _ in range(n)])


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
    template = _template_values(body.object("chat_template_kwargs", None))
    if "reasoning_effort" in body:
        template["reasoning_effort"] = body.text("reasoning_effort")
    if not body.flag("add_generation_prompt", True):
        raise body.error("add_generation_prompt", "is not supported other than true")
    return Conversation(
        chat_format(model),
        messages,
        tools,
        read_choice(body, bool(tools), "function"),
        body.flag("parallel_tool_calls", True),
        template,
    )


def _template_values(given: Fields) -> dict[str, Any]:
    """Further values for the template, other than those that a request has fields for."""
    for name in _OWN_VALUES:
        if name in given:
            raise given.error(name, "is no value of the template that a request may set")
    return dict(given.raw())


def _message(given: Fields) -> dict[str, Any]:
    """A message, each field of which has its type; `ChatFormat.render` makes it what the template takes."""
    role = given.choice("role", _ROLES)
    message: dict[str, Any] = {"role": role}
    if "content" in given:
        message["content"] = given.texts("content", ("text",), ("cache_control",))
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


def _call(call: Fields) -> dict[str, Any]:
    function = call.object("function")
    named = {"name": function.text("name"), "arguments": function.any("arguments", "{}")}
    said = {"id": call.text("id", ""), "type": call.choice("type", ("function",), "function"), "function": named}
    call.ignore(("index",))
    function.end()
    call.end()
    return said


class ChatCompletions(ChoicesExchange):
    """The answer of /v1/chat/completions."""

    def __init__(self, job: Job, model: ServedModel, wishes: Wishes, parsers: Sequence[MessageParser]) -> None:
        kind = "chat.completion.chunk" if wishes.stream else "chat.completion"
        super().__init__([job], model, wishes, "chatcmpl", kind)
        self._messages = [Message(parser) for parser in parsers]
        self._told = [False] * job.n

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
        return [self.answer([choice | {"logprobs": logprobs} | self._tokens(new)], usage=False)]

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
        whole = self.answer(choices, usage=True)
        return whole | ({"prompt_token_ids": list(self.jobs[0].tokens)} if self.wishes.tokens else {})

    def _finish(self, message: Message) -> str | None:
        return "tool_calls" if message.finish == "stop" and message.calls else message.finish

    def _tokens(self, message: Message) -> dict[str, Any]:
        return {"token_ids": message.tokens} if self.wishes.tokens else {}

    def _logprobs(self, logprobs: Sequence[tuple[int, Logprobs]]) -> dict[str, Any] | None:
        if self.jobs[0].sampling.logprobs is None:
            return None
        return {"content": [self._of_token(token, each) for token, each in logprobs], "refusal": None}

    def _of_token(self, token: int, logprobs: Logprobs) -> dict[str, Any]:
        top = [self._likely(each, value) for each, value in logprobs.top.items()]
        return self._likely(token, logprobs.token) | {"top_logprobs": top}

    def _likely(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.model.token_text(token)
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
