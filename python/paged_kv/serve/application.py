"""The ASGI application: routes, whole answers and streams of events, errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from paged_kv.errors import CheckpointError, ContractError, ContractTypeError, PagedKVError, ToolchainError
from paged_kv.serve.anthropic_messages import count_tokens, read_messages_request
from paged_kv.serve.backend import Backend, Busy, Failed, Gone, Job, Piece
from paged_kv.serve.fields import FieldError, Fields, parse
from paged_kv.serve.ignored import Ignored, UnknownParts
from paged_kv.serve.metrics import Metrics
from paged_kv.serve.middleware import (
    ANTHROPIC,
    ANTHROPIC_VERSION,
    Receive,
    Scope,
    Send,
    error_event,
    error_of,
    worded_as,
)
from paged_kv.serve.openai_chat import read_chat, read_conversation
from paged_kv.serve.openai_completions import read_completion
from paged_kv.serve.openai_responses import count_input_tokens, read_response
from paged_kv.serve.profiling import Profiling
from paged_kv.serve.request_exchange import Event, Exchange
from paged_kv.serve.served_model import ContextExceeded, ServedModel, UnknownModel
from paged_kv.serve.web_page import HEADERS, PAGE

logger = logging.getLogger("paged_kv.serve")

ROUTES: Mapping[str, Callable[[Fields, ServedModel], Exchange]] = {
    "/v1/completions": read_completion,
    "/v1/chat/completions": read_chat,
    "/v1/responses": read_response,
    "/v1/messages": read_messages_request,
}
"""Readers of the bodies of routes that compute tokens."""
_LONG = 4096
"""Bytes of a body above which it is read beside the event loop."""
_COMPILED = (
    *(b'"tools"', b'"response_format"', b'"structured_outputs"', b'"guided_', b'"grammar"'),
    *(b'"format"', b'"output_config"', b'"output_format"'),
)
"""Fields whose structures are tried out, perhaps for seconds."""
_REFUSALS = (ContractError, ContractTypeError, CheckpointError, ToolchainError)


def application(
    model: ServedModel, backend: Backend, metrics: Metrics, *, strict: bool = False, profiling: Profiling | None = None
) -> Starlette:
    """The application of one model; a strict one refuses parts of requests that it does not know.

    With `profiling` operators may ask where the time of steps goes.
    """
    unknown = UnknownParts(strict)

    def noted(request: Request) -> Ignored:
        """The parts of a request that will be ignored; an error's answer names it too."""
        request.state.ignored = Ignored(unknown)
        return request.state.ignored

    async def compute(request: Request) -> Reply:
        body, read, ignored = await request.body(), ROUTES[request.url.path], noted(request)
        exchange = await _beside(body, lambda: read(parse(body, ignored), model))
        return Reply(exchange, backend, metrics, ignored.headers())

    async def told(request: Request) -> JSONResponse:
        body, read, ignored = await request.body(), QUESTIONS[request.url.path], noted(request)
        answer = await _beside(body, lambda: read(parse(body, ignored), model))
        return JSONResponse(answer, headers=ignored.headers())

    async def models(request: Request) -> JSONResponse:
        name, for_anthropic = request.path_params.get("name"), ANTHROPIC_VERSION in request.headers
        if name is not None:
            return JSONResponse(model.named(name).describe(for_anthropic=for_anthropic))
        listed = {"data": [model.named(each).describe(for_anthropic=for_anthropic) for each in model.names]}
        if for_anthropic:
            return JSONResponse(listed | {"has_more": False, "first_id": model.names[0], "last_id": model.names[-1]})
        return JSONResponse({"object": "list"} | listed)

    async def health(_: Request) -> JSONResponse:
        await backend.check()
        return JSONResponse({"status": "ok"})

    async def show_metrics(_: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def page(_: Request) -> Response:
        return Response(PAGE, media_type="text/html; charset=utf-8", headers=HEADERS)

    async def show_pool(_: Request) -> JSONResponse:
        return JSONResponse(await backend.pool(), headers={"cache-control": "no-store"})

    routes = [Route(path, compute, methods=["POST"]) for path in ROUTES]
    routes += [Route(path, told, methods=["POST"]) for path in QUESTIONS]
    routes += [Route(path, health) for path in ("/health", "/v1/health", "/ping")]
    routes += [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", models),
        Route("/metrics", show_metrics),
        Route("/", page),
        Route("/pool", show_pool),
        *([] if profiling is None else _profile_routes(profiling)),
    ]
    handlers = {HTTPException: _http_error, PagedKVError: _error, Exception: _error}
    return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]


def _profile_routes(profiling: Profiling) -> list[Route]:
    async def start(_: Request) -> Response:
        profiling.start()
        return Response()

    async def stop(_: Request) -> Response:
        return PlainTextResponse("\n".join([*await profiling.stop(), ""]))

    return [Route("/start_profile", start, methods=["POST"]), Route("/stop_profile", stop, methods=["POST"])]


async def _beside(body: bytes, work: Callable[[], Any]) -> Any:
    """Return what reading a body gives; a long one, and one whose structures may be compiled, is read in a thread."""
    is_long = len(body) > _LONG or any(name in body for name in _COMPILED)
    return await asyncio.to_thread(work) if is_long else work()


def _tokenize(body: Fields, model: ServedModel) -> dict[str, Any]:
    model.check_name(body)
    is_chat = "messages" in body
    special = body.flag("add_special_tokens", not is_chat)
    body.refuse("chat_template")
    body.ignore(("mm_processor_kwargs", "media_io_kwargs"))
    if is_chat:
        tokens = model.tokens("messages", read_conversation(body, model).prompt(), special=special)
    else:
        tokens = model.tokens("prompt", body.text("prompt"), special=special)
    with_texts = body.flag("return_token_strs", False)
    body.end()
    names = [model.tokenizer.token_name(token) for token in tokens] if with_texts else None
    return {
        "count": len(tokens),
        "max_model_len": model.most_tokens,
        "tokens": list(tokens),
        "token_strs": names,
    }


def _detokenize(body: Fields, model: ServedModel) -> dict[str, Any]:
    model.check_name(body)
    tokens = body.any("tokens")
    if not isinstance(tokens, list):
        raise body.error("tokens", "must be a list of token ids")
    body.end()
    return {"prompt": model.text(model.tokens("tokens", tokens)) if tokens else ""}


QUESTIONS: Mapping[str, Callable[[Fields, ServedModel], dict[str, Any]]] = {
    "/v1/messages/count_tokens": count_tokens,
    "/v1/responses/input_tokens": count_input_tokens,
    "/tokenize": _tokenize,
    "/detokenize": _detokenize,
}
"""Handlers of the routes that compute no tokens."""


class Reply:
    """An ASGI answer that grows with the pieces of an exchange. A client that leaves ends its jobs.

    Args:
        exchange: The request, and its answer.
        backend: Computes its jobs.
        metrics: Watch them.
        headers: Further headers of the answer.
    """

    def __init__(self, exchange: Exchange, backend: Backend, metrics: Metrics, headers: dict[str, str]) -> None:
        self._exchange, self._backend, self._metrics, self._headers = exchange, backend, metrics, headers
        self._streams = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._answer(scope["path"], send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not work.done():
                work.cancel()
            with suppress(asyncio.CancelledError):
                await work

    async def _answer(self, path: str, send: Send) -> None:
        exchange = self._exchange
        try:
            async with aclosing(self._pieces()) as pieces:
                async for job, batch in pieces:
                    wrong = next((piece.error for piece in batch if piece.error is not None), None)
                    if wrong is not None:
                        raise Failed(wrong)
                    events = exchange.add(job, batch)
                    if exchange.stream:
                        await self._send_events(send, events)
            if exchange.stream:
                await self._send_events(send, exchange.end(), last=True)
            else:
                await _send_whole(send, 200, json.dumps(exchange.whole()).encode(), self._headers)
        except Exception as error:
            status, message, headers = _answer_of(error)
            said = _told(error, status, message, path)
            if self._streams:
                await send({"type": "http.response.body", "body": error_event(said, path)})
            else:
                await _send_whole(send, status, json.dumps(said).encode(), headers | self._headers)

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
                found = await ready.get()
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    left -= 1
                else:
                    yield found
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
        return self._metrics.watch(job, self._backend.start(job))

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


def _told(error: Exception, status: int, message: str, path: str) -> dict[str, Any]:
    """The body that tells an error."""
    if isinstance(error, ContextExceeded) and path.startswith(ANTHROPIC):
        message = error.anthropic
    param, code = (error.param, error.code) if isinstance(error, FieldError) else (None, None)
    return error_of(status, message, param, path, code)


async def _error(request: Request, error: Exception) -> Response:
    status, message, headers = _answer_of(error)
    ignored = getattr(request.state, "ignored", None)
    said = _told(error, status, message, worded_as(request.url.path, request.headers.raw))
    return JSONResponse(said, status, headers | (ignored.headers() if ignored else {}))


async def _http_error(request: Request, error: HTTPException) -> Response:
    wording = {404: "There is no such route here.", 405: "This route takes another method."}
    message = wording.get(error.status_code, error.detail)
    said = error_of(error.status_code, message, path=worded_as(request.url.path, request.headers.raw))
    return JSONResponse(said, error.status_code, error.headers)
