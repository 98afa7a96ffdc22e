"""Anthropic's /v1/messages and /v1/messages/count_tokens: a conversation in blocks, with tools and their results."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from typing import Any

from paged_kv.arguments import shown
from paged_kv.serve.backend import Job
from paged_kv.serve.chat_request import BlockExchange, ContentBlock, Conversation, Message, chat_format
from paged_kv.serve.client_tools import ClientTools, read_function
from paged_kv.serve.fields import BodyFields
from paged_kv.serve.request_exchange import Event
from paged_kv.serve.sampling import REFUSED, STRUCTURES, check_structure, read_schema
from paged_kv.serve.served_model import ServedModel
from paged_kv.structured_output import Structure

_HARMLESS = ("metadata", "service_tier", "context_management", "betas", "cache_control")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def read_messages_request(body: BodyFields, model: ServedModel) -> Messages:
    """A request to /v1/messages.

    Raises:
        ContractError, ContractTypeError, CheckpointError, ToolchainError: a field cannot be taken.
    """
    model = model.check_name(body)
    conversation = _conversation(body, model)
    body.any("max_tokens")
    for name in ("container", "mcp_servers", "stop", *REFUSED, *STRUCTURES):
        body.refuse(name)
    answer = _structure(body)
    stream, stops = body.flag("stream", False), body.any("stop_sequences", [])
    body.ignore(_HARMLESS)
    job, prompt = conversation.job(body, model, answer, ("max_tokens",), stop=stops)
    body.end()
    return Messages(job, model, conversation.message(prompt), stream=stream)


def count_tokens(body: BodyFields, model: ServedModel) -> dict[str, Any]:
    """A request to /v1/messages/count_tokens, and its answer. Raises as `read_messages_request`."""
    prompt = _conversation(body, model.check_name(body)).prompt()
    _structure(body)
    body.ignore(_HARMLESS)
    body.end()
    return {"input_tokens": len(model.tokens("messages", prompt, is_template=True))}


def _structure(body: BodyFields) -> Structure | None:
    """Return what the text must be, by `output_config.format`, or `output_format` as it was called before."""
    config = body.object("output_config", None)
    named = [(config, "format")] * ("format" in config) + [(body, "output_format")] * ("output_format" in body)
    if len(named) > 1:
        raise body.error("output_format", "expected this or output_config.format, got both")
    config.any("format", None)
    config.end()
    if not named:
        return None
    holder, name = named[0]
    form = holder.object(name)
    form.choice("type", ("json_schema",))
    structure = read_schema(form, "schema")
    check_structure(form.path("schema"), structure)
    form.ignore(("name", "strict"))
    form.end()
    return structure


def _conversation(body: BodyFields, model: ServedModel) -> Conversation:
    """The conversation of a body, as OpenAI's API has it."""
    messages: list[dict[str, Any]] = []
    if "system" in body:
        messages.append({"role": "system", "content": body.texts("system", ("text",), _OF_TEXTS)})
    entries = body.objects("messages")
    if not entries:
        raise body.error("messages", "expected at least one message, got none")
    for message in entries:
        messages += _messages(message)
    tools = ClientTools()
    for each in body.objects("tools"):
        _add_tool(tools, each)
    names = [each["function"]["name"] for each in tools.functions]
    choice, parallel = _choice(body.object("tool_choice", None), names)
    thinking = body.object("thinking", None)
    template = {}
    if "type" in thinking:
        template["enable_thinking"] = thinking.choice("type", ("enabled", "adaptive", "disabled")) != "disabled"
    thinking.ignore(("budget_tokens", "display"))
    thinking.end()
    last = messages[-1]
    continues = last["role"] == "assistant" and bool(last["content"].strip()) and "tool_calls" not in last
    return Conversation(
        chat_format(model),
        messages,
        tools.functions or None,
        choice,
        parallel,
        template,
        tools.by_function,
        tools.schema_paths,
        continues,
    )


def _messages(entry: BodyFields) -> list[dict[str, Any]]:
    """The messages that one of Anthropic's is: each result of a tool is one of its own."""
    role = entry.choice("role", ("user", "assistant", "system"))
    if not isinstance(entry.any("content"), list):
        message: dict[str, Any] = {"role": role, "content": entry.text("content")}
        entry.end()
        return [message]
    results, texts, thoughts, calls = list[dict[str, Any]](), list[str](), list[str](), list[dict[str, Any]]()
    for block in entry.objects("content"):
        kind, kinds = str(block.text("type")), _BLOCKS[str(role)]
        if kind not in kinds:
            if role != "assistant":
                block.choice("type", kinds)
            block.leave_out(kinds)
            continue
        if kind == "text":
            texts.append(str(block.text("text")))
        elif kind == "thinking":
            thoughts.append(str(block.text("thinking")))
        elif kind == "tool_use":
            function = {"name": block.text("name"), "arguments": block.object("input").raw()}
            calls.append({"id": block.text("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            output = block.texts("content", ("text",), _OF_TEXTS, "name") if "content" in block else ""
            output = f"Error: {output}" if block.flag("is_error", False) else output
            results.append({"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": output})
        block.ignore(("cache_control", "citations", "signature", "data", "caller"))
        block.end()
    entry.end()
    if not (texts or calls or thoughts) and results:
        return results
    message = {"role": role, "content": "\n".join(texts)}
    message |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return [*results, message | ({"tool_calls": calls} if calls else {})]


_OF_TEXTS = ("cache_control", "citations")
_BLOCKS = {
    "user": ("text", "tool_result"),
    "system": ("text",),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}
"""Types of blocks that are read; others of the assistant, which are results of a server's tools, are left out."""


def _add_tool(tools: ClientTools, tool: BodyFields) -> None:
    """Adds a function; a tool that Anthropic's servers know, or run themselves, is left out."""
    if tool.text("type", "custom") != "custom":
        tool.leave_out(("custom",))
        return
    function = read_function(tool, tool.object("input_schema"), ("cache_control", "eager_input_streaming"))
    tools.add(function, tool.path("input_schema"))


def _choice(requested: BodyFields, names: Collection[str]) -> tuple[Any, bool]:
    """Return which of some tools are called, and whether several may be."""
    kind = requested.choice("type", (*_CHOICES, "tool"), "auto" if names else "none")
    parallel = not requested.flag("disable_parallel_tool_use", False)
    if not names and kind in ("any", "tool"):
        raise requested.error("type", f"{kind} requires tools")
    choice: Any = {"name": requested.text("name")} if kind == "tool" else _CHOICES[str(kind)]
    if kind == "tool" and choice["name"] not in names:
        raise requested.error("name", f"expected the name of a tool, got {shown(choice['name'])}")
    requested.end()
    return (choice if names else "none"), parallel


class Messages(BlockExchange):
    """The answer of /v1/messages."""

    def __init__(self, job: Job, model: ServedModel, message: Message, *, stream: bool) -> None:
        super().__init__(job, message, stream=stream)
        self._model = model
        self._head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model.name}

    def begin(self) -> list[Event]:
        message: dict[str, Any] = self._head | {"content": [], "stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": message | {"usage": self._usage() | {"output_tokens": 0}}}]

    def opened(self, block: ContentBlock) -> list[Event]:
        empty = self._block(ContentBlock(block.kind, block.index, block.id, block.tool))
        return [{"type": "content_block_start", "index": block.index, "content_block": empty}]

    def grown(self, block: ContentBlock, text: str) -> list[Event]:
        kind, name = _DELTAS[block.kind]
        return [{"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}]

    def closed(self, block: ContentBlock) -> list[Event]:
        return [{"type": "content_block_stop", "index": block.index}]

    def end(self) -> list[Event]:
        return [{"type": "message_delta", "delta": self._stop(), "usage": self._usage()}, {"type": "message_stop"}]

    def whole(self) -> dict[str, Any]:
        blocks = [self._block(block) for block in self.blocks]
        return self._head | {"content": blocks} | self._stop() | {"usage": self._usage()}

    def _block(self, block: ContentBlock) -> dict[str, Any]:
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        try:
            arguments = json.loads(block.text or "{}")
        except ValueError:  # the answer ended by length inside it
            arguments = {}
        return {"type": "tool_use", "id": block.id, "name": block.tool.name, "input": arguments}

    def _stop(self) -> dict[str, Any]:
        """The reason of the end, and the stop sequence where it is one."""
        message, reason, sequence = self.message, "end_turn", None
        if message.finish == "length":
            reason = "max_tokens"
        elif any(block.kind == "call" for block in self.blocks):
            reason = "tool_use"
        elif message.tokens and message.tokens[-1] not in self._model.config.eos_token_ids:
            text = self._model.text(message.tokens)
            hits = [(text.find(stop), stop) for stop in self.jobs[0].sampling.stop if stop in text]
            reason, sequence = ("stop_sequence", min(hits)[1]) if hits else (reason, None)
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, int]:
        usage = self.usage
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
        }


_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
