"""Answers about the server itself: its health, models, metrics, pages, and where the time of steps goes."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from paged_kv.serve.backend import Backend
from paged_kv.serve.error_forms import ANTHROPIC_VERSION
from paged_kv.serve.metrics import Metrics
from paged_kv.serve.profiling import Profiling
from paged_kv.serve.served_model import ServedModel
from paged_kv.serve.web_page import HEADERS, PAGE


@dataclass(frozen=True)
class ServerState:
    """What the application serves with."""

    model: ServedModel
    backend: Backend
    metrics: Metrics
    profiling: Profiling | None = None


async def list_models(server: ServerState, request: Request) -> Response:
    """Each name of the model, in the words of OpenAI's /v1/models or of Anthropic's."""
    model, for_anthropic = server.model, ANTHROPIC_VERSION in request.headers
    listed = {"data": [model.named(each).describe(for_anthropic=for_anthropic) for each in model.served_names]}
    if for_anthropic:
        return JSONResponse(
            listed | {"has_more": False, "first_id": model.served_names[0], "last_id": model.served_names[-1]}
        )
    return JSONResponse({"object": "list"} | listed)


async def show_model(server: ServerState, request: Request) -> Response:
    """The model by one of its names. Raises UnknownModel."""
    model = server.model.named(request.path_params["name"])
    return JSONResponse(model.describe(for_anthropic=ANTHROPIC_VERSION in request.headers))


async def check_health(server: ServerState, _: Request) -> Response:
    """Raises Gone where jobs would not be computed."""
    await server.backend.check()
    return JSONResponse({"status": "ok"})


async def show_metrics(server: ServerState, _: Request) -> Response:
    """The metrics as Prometheus reads them."""
    return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def show_page(_server: ServerState, _: Request) -> Response:
    """The page at `/`."""
    return Response(PAGE, media_type="text/html; charset=utf-8", headers=HEADERS)


async def show_pool(server: ServerState, _: Request) -> Response:
    """The pages of the cache, as the page at `/` shows them. Raises Gone."""
    return JSONResponse(await server.backend.pool(), headers={"cache-control": "no-store"})


async def start_profile(server: ServerState, _: Request) -> Response:
    """Begins to time steps."""
    assert server.profiling is not None
    server.profiling.start()
    return Response()


async def stop_profile(server: ServerState, _: Request) -> Response:
    """The times of the steps since the start. Raises ContractError where there was none."""
    assert server.profiling is not None
    return PlainTextResponse("\n".join([*await server.profiling.stop(), ""]))
