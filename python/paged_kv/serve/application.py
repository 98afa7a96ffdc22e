"""The ASGI application: whole answers and streams of events, and errors in the form of each API."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from starlette import routing
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from paged_kv.errors import CheckpointError, ContractError, ContractTypeError, PagedKVError, ToolchainError
from paged_kv.serve.backend import Backend, Busy, Failed, Gone, Job, Piece
from paged_kv.serve.error_forms import ANTHROPIC, ErrorForm
from paged_kv.serve.fields import FieldError, parse
from paged_kv.serve.ignored import Ignored, UnknownParts
from paged_kv.serve.metrics import Metrics
from paged_kv.serve.profiling import Profiling
from paged_kv.serve.request_exchange import Event, Exchange
from paged_kv.serve.routes import ROUTES, Route, check_task, error_form
from paged_kv.serve.served_model import ContextExceeded, ServedModel, UnknownModel
from paged_kv.serve.server_state import ServerState

logger = logging.getLogger("paged_kv.serve")

_LONG = 4096
"""Bytes of a body above which it is read in a thread."""
_COMPILED = (
    *(b'"tools"', b'"response_format"', b'"structured_outputs"', b'"guided_', b'"grammar"'),
    *(b'"format"', b'"output_config"', b'"output_format"', b'"lora_path"'),
)
"""Fields whose structures are tried out, or whose files are read, perhaps for seconds."""
_REFUSALS = (ContractError, ContractTypeError, CheckpointError, ToolchainError)


def application(
    model: ServedModel, backend: Backend, metrics: Metrics, *, strict: bool = False, profiling: Profiling | None = None
) -> Starlette:
    """The application of one model; a strict one refuses parts of requests that it does not know.

    With `profiling` operators may ask where the time of steps goes.
    """
    server, unknown = ServerState(model, backend, metrics, profiling), UnknownParts(strict)
    routes = []
    for route in ROUTES:
        if route.reader is not None:
            endpoint = partial(_read_and_answer, server, unknown, route)
            routes.append(routing.Route(route.path, endpoint, methods=["POST"]))
        elif route.answer is not None and (route.access != "profile" or profiling is not None):
            routes.append(routing.Route(route.path, partial(route.answer, server), methods=[route.method]))
    handlers = {HTTPException: _http_error, PagedKVError: _error, Exception: _error}
    return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]


async def _read_and_answer(server: ServerState, unknown: UnknownParts, route: Route, request: Request) -> ASGIApp:
    """Read a body, and return its answer. A long body, or one whose structures may be compiled, is read in a thread."""
    check_task(route, server.model.task)
    body, reader = await request.body(), route.reader
    assert reader is not None
    ignored = request.state.ignored = Ignored(unknown)  # an error's answer names it too

    def read() -> Exchange | dict[str, Any]:
        return reader(parse(body, ignored), server.model)

    is_long = len(body) > _LONG or any(name in body for name in _COMPILED)
    answer = await asyncio.to_thread(read) if is_long else read()
    if isinstance(answer, Exchange):
        form = error_form(request.url.path, request.headers)
        return Reply(answer, server, form, ignored.headers())
    return JSONResponse(answer, headers=ignored.headers())


class Reply:
    """An ASGI answer that grows with the pieces of an exchange. A client that leaves ends its jobs.

    Args:
        exchange: The request, and its answer.
        server: Its backend computes the jobs, its metrics watch them.
        errors: The form of errors.
        headers: Further headers of the answer.
    """

    def __init__(self, exchange: Exchange, server: ServerState, errors: ErrorForm, headers: dict[str, str]) -> None:
        self._exchange, self._server, self._errors, self._headers = exchange, server, errors, headers
        self._streams = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        work = asyncio.ensure_future(self._answer(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not work.done():
                work.cancel()
            with suppress(asyncio.CancelledError):
                await work

    async def _answer(self, send: Send) -> None:
        exchange = self._exchange
        try:
            async with aclosing(self._pieces()) as pieces:
                async for job, batch in pieces:
                    problem = next((piece.error for piece in batch if piece.error is not None), None)
                    if problem is not None:
                        raise Failed(problem)
                    events = exchange.add(job, batch)
                    if exchange.stream:
                        await self._send_events(send, events)
            if exchange.stream:
                await self._send_events(send, exchange.end(), last=True)
            else:
                await _send_whole(send, 200, await _written_whole(exchange), self._headers)
        except Exception as error:
            status, message, headers = _answer_of(error)
            body = _error_body(error, status, message, self._errors)
            if self._streams:
                await send({"type": "http.response.body", "body": self._errors.in_stream(body)})
            else:
                await _send_whole(send, status, json.dumps(body).encode(), headers | self._headers)

    async def _pieces(self) -> AsyncGenerator[tuple[int, list[Piece]], None]:
        """The pieces of all jobs, each batch with its job's index."""
        jobs = self._exchange.jobs
        if len(jobs) == 1:
            async with aclosing(self._start(jobs[0])) as batches:
                async for batch in batches:
                    yield 0, batch
            return
        ready: asyncio.Queue[tuple[int, list[Piece]] | Exception | None] = asyncio.Queue()
        tasks = [asyncio.ensure_future(self._pump(index, job, ready)) for index, job in enumerate(jobs)]
        try:
            left = len(tasks)
            while left:
                batch_or_end = await ready.get()
                if isinstance(batch_or_end, Exception):
                    raise batch_or_end
                if batch_or_end is None:
                    left -= 1
                else:
                    yield batch_or_end
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, index: int, job: Job, ready: asyncio.Queue[Any]) -> None:
        try:
            async with aclosing(self._start(job)) as batches:
                async for batch in batches:
                    ready.put_nowait((index, batch))
            ready.put_nowait(None)
        except Exception as error:
            ready.put_nowait(error)

    def _start(self, job: Job) -> AsyncGenerator[list[Piece], None]:
        return self._server.metrics.watch(job, self._server.backend.start(job))

    async def _send_events(self, send: Send, events: Sequence[Event], last: bool = False) -> None:
        if not self._streams:
            self._streams, events = True, [*self._exchange.begin(), *events]
            kind = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            headers = kind + [(name.encode(), value.encode()) for name, value in self._headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        named = self._exchange.NAMED_EVENTS
        body = b"".join(_written(event, named) for event in events)
        if last and not named:
            body += b"data: [DONE]\n\n"
        if body or last:
            await send({"type": "http.response.body", "body": body, "more_body": not last})


def _written(event: Event, named: bool) -> bytes:
    data = json.dumps(event, separators=(",", ":"))
    return (f"event: {event['type']}\ndata: {data}\n\n" if named else f"data: {data}\n\n").encode()


async def _written_whole(exchange: Exchange) -> bytes:
    def written() -> bytes:
        return json.dumps(exchange.whole()).encode()

    return await asyncio.to_thread(written) if exchange.LONG_ANSWER else written()


async def _left(receive: Receive) -> None:
    """Waits until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_whole(send: Send, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    sent = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    sent += [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": sent})
    await send({"type": "http.response.body", "body": body})


def _answer_of(error: Exception) -> tuple[int, str, dict[str, str]]:
    """The status, the message and the headers that tell an error."""
    status, headers, message = 500, {"x-should-retry": "false"}, str(error)
    if isinstance(error, UnknownModel):
        status, headers = 404, {}
    elif isinstance(error, Busy):
        status, headers = 429, {"retry-after": "1"}
    elif isinstance(error, Gone):
        status, headers = 503, {}
    elif isinstance(error, _REFUSALS):
        status, headers = 400, {}
    elif isinstance(error, PagedKVError):
        # Clients ask again after a 500, and would lead the request on to further engines.
        logger.warning("a request was given up: %s", error)
    else:
        logger.error("a request failed", exc_info=error)
        message = "Internal server error."
    return status, message, headers


def _error_body(error: Exception, status: int, message: str, form: ErrorForm) -> dict[str, Any]:
    if isinstance(error, ContextExceeded) and form is ANTHROPIC:
        message = error.anthropic
    param, code = (error.param, error.code) if isinstance(error, FieldError) else (None, None)
    return form.error(status, message, param, code)


async def _error(request: Request, error: Exception) -> Response:
    status, message, headers = _answer_of(error)
    ignored = getattr(request.state, "ignored", None)
    body = _error_body(error, status, message, error_form(request.url.path, request.headers))
    return JSONResponse(body, status, headers | (ignored.headers() if ignored else {}))


async def _http_error(request: Request, error: HTTPException) -> Response:
    wording = {404: "no such route", 405: "method not allowed"}
    message = wording.get(error.status_code, error.detail)
    body = error_form(request.url.path, request.headers).error(error.status_code, message)
    return JSONResponse(body, error.status_code, error.headers)
