"""The ingress: OpenAI's API over HTTP, in front of all replicas. It is ASGI, and knows nothing of Ray.

What a request passes, and what it gets where it does not:

- the door (paged_kv.serve.door): Host, Origin, key, route, type and size of the body;
- the reader (protocol.py): fields, chat template, tokens: 400;
- a replica: 429 and Retry-After where the queue is full, 503 where no engine could start, 400 where its engine takes
  none of it, 500 and x-should-retry: false where every try ended its replica or a step that it was in, or nothing came
  for too long;
- from its first token on it is a stream (streams.py), and an error is its last event.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from paged_kv.errors import CheckpointError, ContractError, ContractTypeError, PagedKVError, ToolchainError
from paged_kv.ray.protocol import Answer, Asked, Reader
from paged_kv.ray.streams import REFUSED, Clock, Suspects, resumed
from paged_kv.serve.backend import Job, Piece
from paged_kv.serve.door import Message, Receive, Send, error_body

logger = logging.getLogger("paged_kv.ray")

_LONG = 4096
"""Bytes of a body above which its prompt is split into tokens beside the event loop."""


@dataclass(frozen=True)
class Replicas:
    """How an ingress reaches replicas, and what it makes of their ends."""

    start: Callable[[Job], AsyncGenerator[list[Piece], None]]
    lost: tuple[type[BaseException], ...]
    """Errors that say that a replica is gone."""
    full: tuple[type[BaseException], ...]
    """Errors that say that too many requests wait."""
    down: tuple[type[BaseException], ...] = ()
    """Errors that say that there is no replica, and that none is being started."""
    retries: int = 2
    """How often a request is started again whose replica died or failed."""
    seconds: float = 120.0
    """For which a stream waits for news: of its replica, or of any as long as none has taken it."""


class Application:
    """Answers what came through the door."""

    def __init__(self, reader: Reader, replicas: Replicas) -> None:
        self._reader, self._replicas = reader, replicas
        self._clock, self._suspects = Clock(replicas.seconds), Suspects()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        path, answer = scope["path"], _Sender(send)
        if path in ("/health", "/v1/health", "/ping"):
            await answer.whole(200, {"status": "ok"})
        elif path == "/v1/models":
            await answer.whole(200, {"object": "list", "data": [self._model()]})
        elif path == f"/v1/models/{self._reader.name}":
            await answer.whole(200, self._model())
        elif path not in ("/v1/completions", "/v1/chat/completions"):
            await answer.error(404, "There is no such route here.")
        elif scope["method"] != "POST":
            await answer.error(405, "This route takes POST.")
        else:
            body = (await receive()).get("body", b"")  # the door hands it over whole
            await self._complete(body, path == "/v1/chat/completions", answer)

    def _model(self) -> dict[str, Any]:
        return {"id": self._reader.name, "object": "model", "created": 0, "owned_by": "paged-kv"}

    async def _complete(self, body: bytes, is_chat: bool, answer: _Sender) -> None:
        try:
            if len(body) > _LONG:
                asked = await asyncio.to_thread(self._reader.read, body, is_chat=is_chat)
            else:
                asked = self._reader.read(body, is_chat=is_chat)
        except (ContractError, ContractTypeError, CheckpointError, ToolchainError) as error:
            await answer.error(400, str(error))
            return
        async with aclosing(self._pieces(asked.job)) as pieces:  # type: ignore[type-var]
            try:
                await self._answer(asked, pieces, answer)
            except self._replicas.full:
                await answer.error(429, "Too many requests wait: ask again later.", {"retry-after": "1"})
            except self._replicas.down:
                await answer.error(503, "No engine could start: the operator's `serve status` says why.")
            except PagedKVError as error:
                logger.warning("a request was given up: %s", error)
                # OpenAI's clients ask again after a 500, and would lead the request on to further replicas.
                await answer.error(500, str(error), {"x-should-retry": "false"})
            except Exception:
                logger.exception("a replica raised")
                await answer.error(500, "The engine failed on this request.", {"x-should-retry": "false"})

    def _pieces(self, job: Job) -> AsyncIterator[list[Piece]]:
        ways = self._replicas
        return resumed(
            lambda avoid: ways.start(replace(job, avoid=avoid)),
            job.n,
            lost=ways.lost,
            full=ways.full,
            retries=ways.retries,
            clock=self._clock,
            suspects=self._suspects,
        )

    async def _answer(self, asked: Asked, pieces: AsyncIterator[list[Piece]], answer: _Sender) -> None:
        content = Answer(asked, self._reader.name)
        async for batch in pieces:
            wrong = next((piece for piece in batch if piece.error is not None), None)
            if wrong is not None:
                await answer.error(400 if wrong.sample == REFUSED else 500, str(wrong.error))
                return
            events = content.add(batch)
            if asked.stream:
                await answer.events(events)
        if asked.stream:
            await answer.events(content.last())
            await answer.done()
        else:
            await answer.whole(200, content.whole())


class _Sender:
    """ASGI's `send`, for one answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._streams = False

    async def whole(self, status: int, content: Mapping[str, Any]) -> None:
        await self._respond(status, json.dumps(content).encode(), {})

    async def error(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        """An error; of a stream that has begun, its last event."""
        if self._streams:
            await self._write(b"data: " + error_body(status, message) + b"\n\n", more=False)
        else:
            await self._respond(status, error_body(status, message), headers or {})

    async def events(self, events: list[dict[str, Any]]) -> None:
        if not self._streams:
            self._streams = True
            kind = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": kind})
        if events:
            await self._write(b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events))

    async def done(self) -> None:
        await self._write(b"data: [DONE]\n\n", more=False)

    async def _write(self, body: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _respond(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        sent = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        sent += [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": sent})
        await self._write(body, more=False)


async def _live(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
