"""A long conversation of an agent with a served model: it calls a tool each turn, and sends everything again."""

from __future__ import annotations

from collections.abc import Iterator
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
TEXT = {"type": "text"}


class Turn(NamedTuple):
    """The tokens of a request."""

    prompt: int
    cached: int
    """Those that its `usage` says were in the cache."""
    computed: int
    """Those of its prompt that steps computed, by the engine's counter."""
    answer: int
    """Those of the answer, without the one that ends it."""


def ends(number: int) -> bool:
    """Return whether the answer of a turn is words."""
    return number % EVERY == EVERY - 1


def turns(api: str, template: str, count: int, *, thinks: bool = True, reminds: bool = True) -> Iterator[Turn]:
    """The turns of a conversation.

    Args:
        api: A name of `APIS`.
        template: The chat template.
        count: How many.
        thinks: Whether the model thinks before it calls.
        reminds: Whether a system message with a number that changes follows what the agent sends.
    """
    thought = "<think>Which file is it this time?</think>" if thinks else ""
    script = [
        "[done]" if ends(number) else thought + call(NAMES[number % 15], path=f"/src/{number}.py")
        for number in range(count)
    ]
    server, history = ScriptedServer(script, template=template), APIS[api]()
    with TestClient(server.app, base_url="http://localhost") as http:
        history.user("Find the fault.")
        for number in range(count):
            if reminds:
                history.system(f"{count - number}00 tokens are left.")
            before = server.engine.statistics.prompt_tokens
            answer = http.post(history.path, json=history.body())
            assert answer.status_code == 200, answer.text
            computed = server.engine.statistics.prompt_tokens - before
            said = len(server.served.tokenizer.encode(script[number], is_template=True))
            yield Turn(len(server.jobs[-1].tokens), history.cached(answer.json()["usage"]), computed, said)
            history.answered(answer.json(), f"line {number} of a file\n" * 5)
            if ends(number):
                history.user("There is another one.")


class Chat:
    """The conversation as /v1/chat/completions has it."""

    path = "/v1/chat/completions"

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]

    def user(self, text: str) -> None:
        self.entries.append({"role": "user", "content": text})

    def system(self, text: str) -> None:
        self.entries.append({"role": "system", "content": text})

    def body(self) -> dict[str, Any]:
        functions = [{"name": name, "description": "Reads a file.", "parameters": SCHEMA} for name in NAMES]
        return {"messages": self.entries, "tools": [{"type": "function", "function": each} for each in functions]}

    def answered(self, answer: Any, result: str) -> None:
        """Adds an answer, and the results of its calls."""
        message = answer["choices"][0]["message"]
        self.entries.append(message)
        for each in message.get("tool_calls", ()):
            self.entries.append({"role": "tool", "tool_call_id": each["id"], "content": result})

    def cached(self, usage: Any) -> int:
        return int(usage["prompt_tokens_details"]["cached_tokens"])


class Messages(Chat):
    """As Anthropic's /v1/messages has it."""

    path = "/v1/messages"

    def __init__(self) -> None:
        self.entries = []

    def body(self) -> dict[str, Any]:
        tools = [{"name": name, "description": "Reads a file.", "input_schema": SCHEMA} for name in NAMES]
        return {"max_tokens": 200, "system": SYSTEM, "messages": self.entries, "tools": tools}

    def answered(self, answer: Any, result: str) -> None:
        self.entries.append({"role": "assistant", "content": answer["content"]})
        calls = [each["id"] for each in answer["content"] if each["type"] == "tool_use"]
        blocks = [{"type": "tool_result", "tool_use_id": each, "content": [TEXT | {"text": result}]} for each in calls]
        self.entries += [{"role": "user", "content": blocks}] if blocks else []

    def cached(self, usage: Any) -> int:
        return int(usage["cache_read_input_tokens"])


class Responses(Chat):
    """As /v1/responses has it."""

    path = "/v1/responses"

    def __init__(self) -> None:
        self.entries = []

    def body(self) -> dict[str, Any]:
        tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
        return {"instructions": SYSTEM, "input": self.entries, "tools": tools}

    def answered(self, answer: Any, result: str) -> None:
        self.entries += answer["output"]
        for each in answer["output"]:
            if each["type"] == "function_call":
                self.entries.append({"type": "function_call_output", "call_id": each["call_id"], "output": result})

    def cached(self, usage: Any) -> int:
        return int(usage["input_tokens_details"]["cached_tokens"])


APIS = {"chat": Chat, "messages": Messages, "responses": Responses}
