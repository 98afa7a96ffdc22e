"""The routes of the server: each is one line of `ROUTES`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from paged_kv.checkpoint.embedding_files import Task
from paged_kv.errors import ContractError
from paged_kv.serve import server_state
from paged_kv.serve.access_rules import Access
from paged_kv.serve.adapters import load_adapter, unload_adapter
from paged_kv.serve.anthropic_messages import count_tokens, read_messages_request
from paged_kv.serve.embeddings import read_embeddings, read_rerank, read_score
from paged_kv.serve.error_forms import ANTHROPIC, ANTHROPIC_VERSION, OPENAI, RESPONSES, ErrorForm
from paged_kv.serve.fields import BodyFields
from paged_kv.serve.openai_chat import read_chat
from paged_kv.serve.openai_completions import read_completion
from paged_kv.serve.openai_responses import count_input_tokens, read_response
from paged_kv.serve.request_exchange import Exchange
from paged_kv.serve.served_model import ServedModel
from paged_kv.serve.tokenization import detokenize, tokenize

Reader: TypeAlias = Callable[[BodyFields, ServedModel], Exchange | dict[str, Any]]
Answer: TypeAlias = Callable[[server_state.ServerState, Request], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """One route."""

    path: str
    """A path, or its beginning before a parameter in braces."""
    reader: Reader | None = None
    """Reads the body of a POST: into an exchange that computes tokens, or into the answer itself."""
    answer: Answer | None = None
    """Answers a request without a body, where there is no reader."""
    access: Access = "client"
    errors: ErrorForm = OPENAI
    is_shared: bool = False
    """True if OpenAI and Anthropic both have it; the errors have the form of the client that asks."""
    method: str = "GET"
    """Of a route without a reader."""
    tasks: tuple[Task, ...] = ("generate",)
    """The uses of models whose requests a reader reads."""

    @property
    def start(self) -> str:
        """The path up to its parameter."""
        return self.path.partition("{")[0]

    def is_at(self, path: str) -> bool:
        """Return whether a path leads here."""
        return path == self.path or (self.start != self.path and path.startswith(self.start))


ROUTES = (
    Route("/v1/completions", read_completion),
    Route("/v1/chat/completions", read_chat),
    Route("/v1/responses", read_response, errors=RESPONSES),
    Route("/v1/responses/input_tokens", count_input_tokens, errors=RESPONSES),
    Route("/v1/messages", read_messages_request, errors=ANTHROPIC),
    Route("/v1/messages/count_tokens", count_tokens, errors=ANTHROPIC),
    Route("/v1/embeddings", read_embeddings, tasks=("embed",)),
    *(Route(path, read_rerank, tasks=("embed", "rerank")) for path in ("/v1/rerank", "/rerank")),
    *(Route(path, read_score, tasks=("embed", "rerank")) for path in ("/v1/score", "/score")),
    Route("/v1/load_lora_adapter", load_adapter, access="adapters"),
    Route("/v1/unload_lora_adapter", unload_adapter, access="adapters"),
    Route("/tokenize", tokenize, tasks=("generate", "embed", "rerank")),
    Route("/detokenize", detokenize, tasks=("generate", "embed", "rerank")),
    Route("/v1/models", answer=server_state.list_models, is_shared=True),
    Route("/v1/models/{name:path}", answer=server_state.show_model, is_shared=True),
    Route("/pool", answer=server_state.show_pool),
    Route("/health", answer=server_state.check_health, access="open"),
    Route("/v1/health", answer=server_state.check_health, access="open"),
    Route("/ping", answer=server_state.check_health, access="open"),
    Route("/metrics", answer=server_state.show_metrics, access="metrics"),
    Route("/start_profile", answer=server_state.start_profile, access="profile", method="POST"),
    Route("/stop_profile", answer=server_state.stop_profile, access="profile", method="POST"),
    Route("/", answer=server_state.show_page, access="open"),  # the page asks for the key itself
)
"""What is in none of these lines is not served. The page is the last: `error_form` goes by the beginnings of paths."""


def route_at(path: str) -> Route | None:
    """The route that a path leads to; None where it is not served."""
    return next((route for route in ROUTES if route.is_at(path)), None)


def check_task(route: Route, task: Task) -> None:
    """Refuses a request to a model of another use. Raises ContractError."""
    if task not in route.tasks:
        others = ", ".join(each.path for each in ROUTES if each.reader is not None and task in each.tasks)
        problem = f"expected a model that can {' or '.join(route.tasks)}, got one that can {task} (`--task`)"
        raise ContractError(f"{route.path}: {problem}; it answers {others}")


def error_form(path: str, headers: Headers) -> ErrorForm:
    """The form of errors on a path; below an API's routes its own, though this server has no such route."""
    route = next((route for route in ROUTES if path.startswith(route.start)), None)
    if route is None:
        return OPENAI
    return ANTHROPIC if route.is_shared and ANTHROPIC_VERSION in headers else route.errors
