"""OpenAI's /v1/responses, as far as it needs no state on the server."""

from __future__ import annotations

import secrets
import time
from typing import Any

from paged_kv.serve.backend import Job
from paged_kv.serve.chat import ChatFormat
from paged_kv.serve.chat.tools import is_function_name
from paged_kv.serve.chat_request import BlockExchange, ContentBlock, Conversation, Message, chat_format
from paged_kv.serve.client_tools import (
    ClientTool,
    ClientTools,
    qualified,
    read_choice,
    read_function,
    read_text_tool,
    text_arguments,
)
from paged_kv.serve.fields import BodyFields
from paged_kv.serve.request_exchange import Event
from paged_kv.serve.sampling import REFUSED, STRUCTURES, check_structure, read_schema
from paged_kv.serve.served_model import ServedModel
from paged_kv.structured_output import JsonSchema, Structure

_REFUSED = ("previous_response_id", "conversation", "background", "prompt", "max_tool_calls", "top_logprobs", "stop")
_HARMLESS = ("include", "stream_options", "context_management", "client_metadata")
_ITEMS = (
    *("message", "reasoning", "function_call", "function_call_output"),
    *("custom_tool_call", "custom_tool_call_output"),
)
_PARTS = ("input_text", "output_text", "text", "refusal")
_TOOLS = ("function", "custom", "namespace")
_OF_TEXTS = ("annotations", "logprobs")
_REASONING = ("reasoning_text", "summary_text", "text")


def read_response(body: BodyFields, model: ServedModel) -> Responses:
    """A request to /v1/responses.

    Raises:
        ContractError, ContractTypeError, CheckpointError, ToolchainError: a field cannot be taken.
    """
    model = model.check_name(body)
    _refuse(body)
    if body.flag("store", False):
        raise body.error("store", "expected false, got true: responses are not stored")
    conversation = _conversation(body, model)
    stream, answer = body.flag("stream", False), _structure(body)
    echoed = {name: body.any(name, default) for name, default in _ECHOED.items()}
    job, prompt = conversation.job(body, model, answer, ("max_output_tokens",), name="input")
    body.end()
    echoed |= {"temperature": job.sampling.temperature, "top_p": job.sampling.top_p}
    return Responses(job, model, conversation.message(prompt), echoed, stream=stream)


def count_input_tokens(body: BodyFields, model: ServedModel) -> dict[str, Any]:
    """A request to /v1/responses/input_tokens, and its answer. Raises as `read_response`."""
    model = model.check_name(body)
    _refuse(body)
    prompt = _conversation(body, model).prompt()
    _structure(body)
    body.end()
    tokens = model.tokens("input", prompt, is_template=True)
    return {"object": "response.input_tokens", "input_tokens": len(tokens)}


def _refuse(body: BodyFields) -> None:
    for name in (*_REFUSED, *REFUSED, *STRUCTURES):
        body.refuse(name)
    body.refuse("truncation", ("disabled",))
    body.ignore(_HARMLESS)


_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
}
"""Fields of a request that its answer repeats, and their defaults."""


def _conversation(body: BodyFields, model: ServedModel) -> Conversation:
    """The conversation of a body, as /v1/chat/completions has it."""
    messages: list[dict[str, Any]] = []
    if "instructions" in body:
        messages.append({"role": "system", "content": body.text("instructions")})
    if isinstance(body.any("input"), list):
        for item in body.objects("input"):
            _add_item(messages, item)
    else:
        messages.append({"role": "user", "content": body.text("input")})
    if not messages:
        raise body.error("input", "expected a text or at least one item, got an empty list")
    chat, tools = chat_format(model), ClientTools()
    for each in body.objects("tools"):
        _add_tool(tools, each, chat)
    choice = read_choice(body, tools, nested=False)
    reasoning = body.object("reasoning", None)
    template = {"reasoning_effort": reasoning.text("effort")} if "effort" in reasoning else {}
    reasoning.ignore(("summary", "generate_summary"))
    reasoning.end()
    parallel = body.flag("parallel_tool_calls", True)
    functions, clients = tools.functions or None, tools.by_function
    return Conversation(chat, messages, functions, choice, parallel, template, clients, tools.schema_paths)


def _add_item(messages: list[dict[str, Any]], item: BodyFields) -> None:
    """Adds an item of the input. Thoughts, texts and calls that follow each other are one message of the assistant."""
    kind = str(item.text("type", "message"))
    if kind == "item_reference":
        raise item.error("type", "item_reference is not supported, as items are not stored: send the item itself")
    if kind not in _ITEMS:
        item.leave_out(_ITEMS)
        return
    item.ignore(("id", "status", "phase"))
    if kind == "message":
        role = item.choice("role", ("system", "developer", "user", "assistant"))
        text = item.texts("content", _PARTS, _OF_TEXTS, "drop" if role == "assistant" else "refuse")
        last = messages[-1] if messages else {}
        if role == "assistant" and last.get("role") == role and not last["content"] and "tool_calls" not in last:
            last["content"] = text
        else:
            messages.append({"role": role, "content": text})
    elif kind.endswith("_output"):
        content = item.texts("output", _PARTS, _OF_TEXTS, "name")
        item.ignore(("name",))
        messages.append({"role": "tool", "tool_call_id": item.text("call_id"), "content": content})
    elif kind == "reasoning":
        thought = item.texts("content" if "content" in item else "summary", _REASONING, _OF_TEXTS, "drop")
        item.ignore(("summary", "encrypted_content"))
        if thought:
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    else:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        is_text = kind == "custom_tool_call"
        arguments = text_arguments(str(item.text("input"))) if is_text else item.text("arguments")
        name = qualified(str(item.text("name")), item.text("namespace", None))
        call = {"id": item.text("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}
        messages[-1].setdefault("tool_calls", []).append(call)
        item.ignore(("caller",))
    item.end()


def _add_tool(tools: ClientTools, entry: BodyFields, chat: ChatFormat, namespace: str | None = None) -> None:
    """Adds a tool, or those of a namespace; one that cannot be offered is left out."""
    kind = entry.text("type")
    if kind == "namespace" and namespace is None:
        name, about, inner = str(entry.text("name")), entry.text("description", None), entry.objects("tools")
        first = len(tools.functions)
        for each in inner:
            _add_tool(tools, each, chat, name)
        if about and len(tools.functions) > first:  # templates have no place for it but a function's description
            function = tools.functions[first]["function"]
            function["description"] = f"{about}\n\n{function.get('description', '')}".strip()
        entry.end()
        return
    if kind == "function":
        tool, path = read_function(entry, entry.object("parameters", None), ("type",)), entry.path("parameters")
        client = ClientTool(tool["function"]["name"], namespace)
        tool["function"]["name"] = qualified(client.name, namespace)
    elif kind == "custom":
        tool, client = read_text_tool(entry, namespace, has_grammars=chat.syntax.WRITES_JSON)
        path = entry.path("format")
    else:
        entry.leave_out(_TOOLS if namespace is None else _TOOLS[:2])
        return
    name = tool["function"]["name"]
    if namespace is not None and not is_function_name(name):
        entry.leave_out(("1 to 128 of A-Z a-z 0-9 _ . : - with its namespace",), "name")
        return
    tools.add(tool, path, client)


def _structure(body: BodyFields) -> Structure | None:
    """Return what the text must be, by `text.format`."""
    text = body.object("text", None)
    form = text.object("format", None)
    kind, structure = form.choice("type", ("text", "json_object", "json_schema"), "text"), None
    if kind == "json_object":
        structure = JsonSchema({"type": "object"})
    elif kind == "json_schema":
        form.ignore(("name", "description", "strict"))
        structure = read_schema(form, "schema")
        check_structure(form.path("schema"), structure)
    form.end()
    text.ignore(("verbosity",))
    text.end()
    return structure


class Responses(BlockExchange):
    """The answer of /v1/responses: each block is an item of its output."""

    def __init__(self, job: Job, model: ServedModel, message: Message, echoed: dict[str, Any], *, stream: bool) -> None:
        super().__init__(job, message, stream=stream)
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model.name,
            "error": None,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
        } | echoed
        self._ids: list[str] = []
        self._events = 2  # the numbers 0 and 1 are those of `begin`

    def begin(self) -> list[Event]:
        response = self._response("in_progress") | {"output": [], "usage": None}
        kinds = ("response.created", "response.in_progress")
        return [{"type": kind, "sequence_number": at, "response": response} for at, kind in enumerate(kinds)]

    def opened(self, block: ContentBlock) -> list[Event]:
        self._ids.append(_new_id(block))
        item = self._item(block, "in_progress")
        events = [
            self._event("output_item.added", block, item=item | ({} if block.kind == "call" else {"content": []}))
        ]
        if block.kind == "text":
            events.append(self._event("content_part.added", block, content_index=0, part=_part(block)))
        return events

    def grown(self, block: ContentBlock, text: str) -> list[Event]:
        return [self._event(f"{_NAMES[_kind(block)]}.delta", block, delta=text, **_place(block))]

    def closed(self, block: ContentBlock) -> list[Event]:
        whole = {_TEXTS.get(_kind(block), "text"): block.text}
        whole |= {"name": block.tool.name} if _kind(block) == "call" else {}
        events = [self._event(f"{_NAMES[_kind(block)]}.done", block, **whole, **_place(block))]
        if block.kind == "text":
            events.append(self._event("content_part.done", block, content_index=0, part=_part(block)))
        return [*events, self._event("output_item.done", block, item=self._item(block, self._status(block)))]

    def end(self) -> list[Event]:
        status = "incomplete" if self.message.finish == "length" else "completed"
        return [{"type": f"response.{status}", "sequence_number": self._next(), "response": self.whole()}]

    def whole(self) -> dict[str, Any]:
        return self._response("incomplete" if self.message.finish == "length" else "completed")

    def _response(self, status: str) -> dict[str, Any]:
        usage, reason = self.usage, {"reason": "max_output_tokens"} if status == "incomplete" else None
        if len(self._ids) < len(self.blocks):  # no stream has named them
            self._ids = [_new_id(block) for block in self.blocks]
        return self._head | {
            "status": status,
            "incomplete_details": reason,
            "output": [self._item(block, self._status(block)) for block in self.blocks],
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt + usage.completion,
            },
        }

    def _status(self, block: ContentBlock) -> str:
        is_cut = self.message.finish == "length" and block is self.blocks[-1]
        return "incomplete" if is_cut else "completed"

    def _item(self, block: ContentBlock, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._ids[block.index], "status": status}
        if block.kind == "call":
            kind = "custom_tool_call" if block.tool.is_text else "function_call"
            call = {"call_id": block.id, "name": block.tool.name, _TEXTS[_kind(block)]: block.text}
            return item | {"type": kind} | call | ({"namespace": block.tool.namespace} if block.tool.namespace else {})
        if block.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": block.text}]
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": [_part(block)]}

    def _event(self, kind: str, block: ContentBlock, **values: Any) -> Event:
        place = {"output_index": block.index} | ({} if "item" in values else {"item_id": self._ids[block.index]})
        return {"type": f"response.{kind}", "sequence_number": self._next(), **place, **values}

    def _next(self) -> int:
        self._events += 1
        return self._events - 1


_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc", "text call": "ctc"}
_NAMES = {
    "text": "output_text",
    "reasoning": "reasoning_text",
    "call": "function_call_arguments",
    "text call": "custom_tool_call_input",
}
_TEXTS = {"call": "arguments", "text call": "input"}
"""The fields of calls that have their texts."""


def _kind(block: ContentBlock) -> str:
    return "text call" if block.tool.is_text else block.kind


def _new_id(block: ContentBlock) -> str:
    return f"{_PREFIXES[_kind(block)]}_{secrets.token_hex(12)}"


def _part(block: ContentBlock) -> dict[str, Any]:
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _place(block: ContentBlock) -> dict[str, Any]:
    """Return where in an item a text is."""
    return {} if block.kind == "call" else {"content_index": 0} | ({"logprobs": []} if block.kind == "text" else {})
