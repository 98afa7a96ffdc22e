"""OpenAI's /v1/chat/completions: a conversation, with tools and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paged_kv.engine.sampling import Logprobs
from paged_kv.serve.backend import Job, Piece
from paged_kv.serve.chat import CallStart, ChatFormat, Content, Delta, Reasoning
from paged_kv.serve.chat_request import Conversation, Message, chat_format
from paged_kv.serve.client_tools import ClientTools, ToolCall, read_choice, read_text_tool, text_arguments
from paged_kv.serve.fields import BodyFields, OtherParts
from paged_kv.serve.openai_completions import MOST_SAMPLES
from paged_kv.serve.request_exchange import ChoicesExchange, Event, Exchange, Wishes
from paged_kv.serve.sampling import MOST_LOGPROBS, REFUSED, read_structure
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
_REFUSED = (*REFUSED, "functions", "function_call", "audio", "echo", "documents", "chat_template")
"""Fields that would change the answer: refused, not ignored."""
_OTHERS: dict[str, OtherParts] = {"tool": "name", "assistant": "drop"}
"""The fate of parts that are no texts; in other messages they are refused."""


def read_chat(body: BodyFields, model: ServedModel) -> Exchange:
    """A request to /v1/chat/completions.

    Raises:
        ContractError, ContractTypeError, CheckpointError, ToolchainError: a field cannot be taken.
    """
    model = model.check_name(body)
    conversation = read_conversation(body, model)
    n = body.integer("n", 1, 1, MOST_SAMPLES)
    model.check_samples("n", 1, n)
    wishes = Wishes.read(body)
    logprobs = body.flag("logprobs", False)
    top = body.integer("top_logprobs", 0, 0, MOST_LOGPROBS)
    if top and not logprobs:
        raise body.error("top_logprobs", "requires logprobs: true")
    for name in _REFUSED:
        body.refuse(name)
    body.refuse("modalities", (["text"],))
    if not body.flag("skip_special_tokens", True):
        raise body.error("skip_special_tokens", "expected true, got false")
    job, prompt = conversation.job(
        body,
        model,
        read_structure(body),
        ("max_completion_tokens", "max_tokens"),
        n=n,
        logprobs=top if logprobs else None,
    )
    body.end()
    return ChatCompletions(job, model, wishes, [conversation.message(prompt) for _ in range(n)])


def read_conversation(body: BodyFields, model: ServedModel) -> Conversation:
    """The messages and tools of a body, in OpenAI's words.

    Raises:
        FieldError: one of them is malformed.
        ContractError: the model has no chat format.
    """
    messages = [_message(each) for each in body.objects("messages")]
    if not messages:
        raise body.error("messages", "expected at least one message, got none")
    chat = chat_format(model)
    tools = _tools(body, chat)
    template = _template_values(body.object("chat_template_kwargs", None))
    if "reasoning_effort" in body:
        template["reasoning_effort"] = body.text("reasoning_effort")
    continues = body.flag("continue_final_message", False)
    if not body.flag("add_generation_prompt", not continues):
        template["add_generation_prompt"] = False
    elif continues:
        raise body.error("continue_final_message", "requires add_generation_prompt: false")
    return Conversation(
        chat,
        messages,
        tools.functions or None,
        read_choice(body, tools, nested=True),
        body.flag("parallel_tool_calls", True),
        template,
        tools.by_function,
        tools.schema_paths,
        continues,
    )


def _tools(body: BodyFields, chat: ChatFormat) -> ClientTools:
    tools = ClientTools()
    for tool in body.objects("tools"):
        kind = tool.text("type", "function")
        if kind == "function":
            tools.add(tool.raw(), tool.path("function.parameters"))
        elif kind == "custom":
            custom = tool.object("custom")
            function, client = read_text_tool(custom, has_grammars=chat.syntax.WRITES_JSON)
            tools.add(function, custom.path("format"), client)
        else:
            tool.leave_out(("function", "custom"))
    return tools


def _template_values(values: BodyFields) -> dict[str, Any]:
    """Further values for the template, other than those that a request has fields for."""
    for name in _OWN_VALUES:
        if name in values:
            raise values.error(name, "reserved: a request cannot set this variable of the template")
    return dict(values.raw())


def _message(entry: BodyFields) -> dict[str, Any]:
    """A message, each field of which has its type; `ChatFormat.render` makes it what the template takes."""
    role = entry.choice("role", _ROLES)
    message: dict[str, Any] = {"role": role}
    if "content" in entry:
        others = _OTHERS.get(str(role), "refuse")
        message["content"] = entry.texts("content", ("text", "refusal"), ("cache_control",), others)
    elif role != "assistant":
        raise entry.error("content", "missing")
    if "tool_calls" in entry:
        message["tool_calls"] = [_call(call) for call in entry.objects("tool_calls")]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if name in entry:
            message[name] = entry.text(name)
    if "reasoning" in entry:  # as some servers call it
        message["reasoning_content"] = entry.text("reasoning")
    for name in ("refusal", "audio", "function_call"):
        entry.refuse(name)
    entry.ignore(("annotations",))
    entry.end()
    return message


def _call(call: BodyFields) -> dict[str, Any]:
    kind = call.choice("type", ("function", "custom"), "function")
    inner = call.object(str(kind))
    arguments = inner.any("arguments", "{}") if kind == "function" else text_arguments(str(inner.text("input")))
    function = {"name": inner.text("name"), "arguments": arguments}
    tool_call = {"id": call.text("id", ""), "type": "function", "function": function}
    call.ignore(("index",))
    inner.end()
    call.end()
    return tool_call


class ChatCompletions(ChoicesExchange):
    """The answer of /v1/chat/completions."""

    def __init__(self, job: Job, model: ServedModel, wishes: Wishes, messages: Sequence[Message]) -> None:
        kind = "chat.completion.chunk" if wishes.stream else "chat.completion"
        super().__init__([job], model, wishes, "chatcmpl", kind)
        self._messages = messages
        self._started = [False] * job.n

    def take(self, job: int, sample: int, pieces: Sequence[Piece]) -> list[Event]:  # noqa: ARG002
        message = self._messages[sample]
        before = len(message.tokens)
        deltas = message.take(pieces)
        if not self.stream:
            return []
        chunk: dict[str, Any] = {}
        if not self._started[sample]:
            self._started[sample], chunk = True, {"role": "assistant", "content": ""}
        for delta in deltas:
            _add(chunk, delta, message.calls)
        choice = {"index": sample, "delta": chunk, "finish_reason": self._finish(message)}
        logprobs = self._logprobs(message.logprobs[before:])
        if not chunk and not message.finish and not logprobs:
            return []
        new = replace(message, tokens=message.tokens[before:])
        return [self.answer([choice | {"logprobs": logprobs} | self._tokens(new)], usage=False)]

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, message in enumerate(self._messages):
            reply: dict[str, Any] = {"role": "assistant", "content": message.content or None, "refusal": None}
            if not message.calls:
                reply["content"] = message.content
            if message.reasoning:
                reply["reasoning_content"] = message.reasoning
            if message.calls:
                reply["tool_calls"] = [_call_json(each, each.text) for each in message.calls]
            choice = {"index": index, "message": reply, "finish_reason": self._finish(message)}
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
        content = [self._of_token(token, each) for token, each in logprobs if token not in self.end_tokens]
        return {"content": content, "refusal": None}

    def _of_token(self, token: int, logprobs: Logprobs) -> dict[str, Any]:
        top = [self._likely(each, value) for each, value in logprobs.top.items()]
        return self._likely(token, logprobs.token) | {"top_logprobs": top}

    def _likely(self, token: int, logprob: float) -> dict[str, Any]:
        own = self.model.token_bytes(token)
        return {"token": self.model.token_text(token), "logprob": logprob, "bytes": list(own)}


def _call_json(call: ToolCall, text: str) -> dict[str, Any]:
    """A call in OpenAI's words, with its text, or the beginning of it."""
    kind, name = ("custom", "input") if call.tool.is_text else ("function", "arguments")
    return {"id": call.id, "type": kind, kind: {"name": call.tool.name, name: text}}


def _add(chunk: dict[str, Any], delta: Delta, calls: Sequence[ToolCall]) -> None:
    """Adds a part of a message, which has some calls, to the delta of a chunk."""
    if isinstance(delta, Content):
        chunk["content"] = chunk.get("content", "") + delta.text
    elif isinstance(delta, Reasoning):
        chunk["reasoning_content"] = chunk.get("reasoning_content", "") + delta.text
    else:
        call_chunks, call = chunk.setdefault("tool_calls", []), calls[delta.index]
        kind, name = ("custom", "input") if call.tool.is_text else ("function", "arguments")
        if isinstance(delta, CallStart):
            call_chunks.append({"index": delta.index, **_call_json(call, "")})
        elif call_chunks and call_chunks[-1]["index"] == delta.index:
            call_chunks[-1][kind][name] += delta.text
        else:
            call_chunks.append({"index": delta.index, kind: {name: delta.text}})
