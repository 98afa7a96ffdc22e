"""A long conversation of an agent with a served model: it calls a tool each turn, and sends everything again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from starlette.testclient import TestClient

from support.scripted_server import ScriptedServer, call
from support.tool_chats import THINKING

SYSTEM_FIRST = (
    "{%- for message in messages %}{%- if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}{% endfor %}" + THINKING
)
"""A template that takes one system message, and leaves thoughts out."""
KEEPS_THOUGHTS = (
    "{%- set ns = namespace(last=0) %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + SYSTEM_FIRST.replace(
        "{{ message.content }}",
        "{% if message.reasoning_content and loop.index0 > ns.last %}<think>{{ message.reasoning_content }}</think>"
        "{% endif %}{{ message.content }}",
    )
)
"""One that writes thoughts since the user's last question, as Qwen 3's does."""
EVERY = 8
"""Turns after which the model answers in words, and the user asks again."""
NAMES = [f"tool_{number}" for number in range(15)]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string", "description": "A file."}}, "required": ["path"]}
SYSTEM = "You are an agent. " * 40


class Turn(NamedTuple):
    """The tokens of a request."""

    prompt: int
    cached: int
    """Those that its `usage` says were in the cache."""
    computed: int
    """Those of its prompt that steps computed, by the engine's counter."""
    answer: int
    """Those of the answer, without the one that ends it."""


def turns(api: str, template: str, count: int, *, thinks: bool = True) -> Iterator[Turn]:
    """The turns of a conversation on one of `APIS`. A system message with a number that changes follows whatever the
    agent sends.
    """
    thought = "<think>Which file is it this time?</think>" if thinks else ""
    script = [
        "[done]" if number % EVERY == EVERY - 1 else thought + call(NAMES[number % 15], path=f"/src/{number}.py")
        for number in range(count)
    ]
    server, (path, body, said) = ScriptedServer(script, template=template), APIS[api]
    entries: list[dict[str, Any]] = [{"role": "user", "content": "Find the fault."}]
    with TestClient(server.app, base_url="http://localhost") as http:
        for number in range(count):
            entries.append({"role": "system", "content": f"{count - number}00 tokens are left."})
            before = server.engine.statistics.prompt_tokens
            answer = http.post(path, json=body(entries))
            assert answer.status_code == 200, answer.text
            computed = server.engine.statistics.prompt_tokens - before
            cached, new = said(answer.json(), f"line {number} of a file\n" * 5)
            tokens = server.served.tokenizer.encode(script[number], is_template=True)
            yield Turn(len(server.jobs[-1].tokens), cached, computed, len(tokens))
            entries += new
            if number % EVERY == EVERY - 1:
                entries.append({"role": "user", "content": "There is another one."})


def _chat(entries: Any) -> Any:
    functions = [{"name": name, "description": "Reads a file.", "parameters": SCHEMA} for name in NAMES]
    tools = [{"type": "function", "function": each} for each in functions]
    return {"messages": [{"role": "system", "content": SYSTEM}, *entries], "tools": tools}


def _said_in_chat(answer: Any, result: str) -> Any:
    """The cached tokens of an answer, and what the agent adds to the conversation."""
    message = answer["choices"][0]["message"]
    calls = [each["id"] for each in message.get("tool_calls", ())]
    results = [{"role": "tool", "tool_call_id": each, "content": result} for each in calls]
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], [message, *results]


def _messages(entries: Any) -> Any:
    tools = [{"name": name, "description": "Reads a file.", "input_schema": SCHEMA} for name in NAMES]
    return {"max_tokens": 200, "system": SYSTEM, "messages": entries, "tools": tools}


def _said_in_messages(answer: Any, result: str) -> Any:
    calls = [each["id"] for each in answer["content"] if each["type"] == "tool_use"]
    blocks = [{"type": "tool_result", "tool_use_id": each, "content": result} for each in calls]
    new = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": blocks}]
    return answer["usage"]["cache_read_input_tokens"], new[: 1 + bool(blocks)]


APIS: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any, str], Any]]] = {
    "chat": ("/v1/chat/completions", _chat, _said_in_chat),
    "messages": ("/v1/messages", _messages, _said_in_messages),
}
