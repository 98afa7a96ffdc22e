"""The server's application around an engine that says texts of a script; its pages, prefixes and formats are real."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from starlette.applications import Starlette
from uvicorn import Config

from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.engine import Engine
from paged_kv.serve.access_rules import AccessRules
from paged_kv.serve.address import listening_sockets
from paged_kv.serve.application import application
from paged_kv.serve.backend import Job, Piece
from paged_kv.serve.connections import GuardedServer
from paged_kv.serve.ignored import HEADER
from paged_kv.serve.local_backend import LocalBackend
from paged_kv.serve.metrics import Metrics
from paged_kv.serve.served_model import ServedModel
from support.fake_model import FakeModel
from support.tool_chats import THINKING

CONTEXT = 1 << 17
"""The most tokens of a request: agents send thousands, more in the demo's vocabulary."""
NUM_PAGES, PAGE_SIZE = 1 << 14, 16
Text = str | Callable[[str], str]
START_SECONDS = 30  # that only a hang exceeds


def call(name: str, **arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


class ScriptedModel(FakeModel):
    """Goes on with the text that its script has for a prompt; no compiler is needed."""

    def __init__(self) -> None:
        super().__init__(NUM_PAGES, PAGE_SIZE)
        demo = open_source(FOLDER).config
        self.config = replace(
            self.config,
            vocab_size=demo.vocab_size,
            max_position_embeddings=CONTEXT,
            eos_token_ids=demo.eos_token_ids,
        )
        self.answers: list[tuple[np.ndarray, list[int]]] = []
        """Prompts and the tokens after them, the latest last."""

    def step(
        self,
        tokens: Sequence[Sequence[int]],
        cache_lengths: Sequence[int],
        pages: Sequence[Any],
        counts: Sequence[int] | None = None,
        states: Any = None,
        window_pages: Any = None,
    ) -> np.ndarray:
        assert counts is states is window_pages is None
        logits = np.zeros((len(tokens), self.config.vocab_size), np.float32)
        for row, (new, cached, mine) in enumerate(zip(tokens, cache_lengths, pages, strict=True)):
            for position, token in enumerate(new, cached):
                self.storage[mine[position // self.page_size], position % self.page_size] = token
            past = self.storage[list(mine)].ravel()[: cached + len(new)]
            logits[row, self.next_token(past)] = 99
        return logits

    def next_token(self, past: np.ndarray) -> int:
        """The token after others; any where they are a part of a prompt."""
        for prompt, answer in reversed(self.answers):
            if len(prompt) <= len(past) and np.array_equal(past[: len(prompt)], prompt):
                said = past[len(prompt) :]
                assert np.array_equal(said, answer[: len(said)]), "the request does not allow what the script says"
                return answer[len(said)]
        return 0


@dataclass
class Exchanged:
    """A request, and how it was answered."""

    path: str
    body: bytes
    status: int = 0
    ignored: str = ""
    """The header of the answer."""


class ScriptedServer(LocalBackend):
    """A backend and an application that note all that is asked.

    Args:
        script: Texts of the answers in their order, or what makes one from its prompt.
        name: The model's name.
        template: Its chat template.
    """

    def __init__(self, script: Iterable[Text], name: str = "demo", template: str = THINKING) -> None:
        self.model = ScriptedModel()
        source = replace(open_source(FOLDER), config=replace(self.model.config))
        self.served = ServedModel(source, name, CONTEXT, template)
        super().__init__(Engine(self.model, self.served.tokenizer, max_step_tokens=1 << 15), 100)
        self._script = iter(script)
        self.jobs: list[Job] = []
        self.exchanges: list[Exchanged] = []
        self._app: Starlette = application(self.served, self, Metrics(name, self))

    async def start(self, job: Job) -> AsyncGenerator[list[Piece], None]:
        """The pieces of the text that the script has for a job."""
        self.jobs.append(job)
        text = next(self._script)
        text = text if isinstance(text, str) else text(self.prompt(job))
        tokens = self.served.tokenizer.encode(text, is_template=True)
        self.model.answers.append((np.array(job.tokens), [*tokens, *self.model.config.eos_token_ids]))
        async with contextlib.aclosing(super().start(job)) as batches:
            async for batch in batches:
                yield batch

    def prompt(self, job: Job) -> str:
        """The text that a job goes on with."""
        return self.served.tokenizer.decode(list(job.tokens), skip_special_tokens=False)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        message = await receive()
        exchange = Exchanged(scope["path"], message["body"])
        self.exchanges.append(exchange)
        messages = iter([message])

        async def read() -> Any:
            return next(messages, None) or await receive()

        async def write(event: Any) -> None:
            if event["type"] == "http.response.start":
                exchange.status = event["status"]
                exchange.ignored = dict(event["headers"]).get(HEADER.encode(), b"").decode()
            await send(event)

        await self._app(scope, read, write)

    @contextlib.contextmanager
    def listening(self) -> Iterator[int]:
        """The port of loopback on which it answers."""
        (bound,) = listening_sockets("127.0.0.1", 0)
        config = Config(self.app, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        server = GuardedServer(AccessRules(max_body_bytes=16 * CONTEXT), [bound], config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
        thread.start()
        try:
            end = time.monotonic() + START_SECONDS
            while not server.started and time.monotonic() < end:
                time.sleep(0.01)
            yield bound.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(START_SECONDS)
