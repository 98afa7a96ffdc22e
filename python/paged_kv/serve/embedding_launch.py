"""From settings to a listening server of a model that embeds or ranks texts."""

from __future__ import annotations

import json
import os
import shlex
import socket

from starlette.applications import Starlette

from paged_kv.arguments import printable
from paged_kv.checkpoint.embedding_files import EmbeddingRecipe, Task, open_embedding
from paged_kv.checkpoint.source import Source
from paged_kv.checkpoint.weights import progress_bar
from paged_kv.engine.embedding import MOST_TEXTS, STEP_TOKENS, TextEncoder, embedder_of
from paged_kv.errors import ContractError
from paged_kv.output import say
from paged_kv.serve.access_rules import AccessRules
from paged_kv.serve.address import listening_sockets
from paged_kv.serve.application import application
from paged_kv.serve.embedding_backend import EmbeddingBackend
from paged_kv.serve.loading import dtype_of
from paged_kv.serve.metrics import Metrics
from paged_kv.serve.served_model import ServedModel
from paged_kv.serve.settings import API_KEY, Settings

_OF_GENERATION = (
    *("cache_dtype", "cache_rotation", "pages", "memory_gb", "kv_disk", "speculate", "chat_template"),
    *("profile", "lora", "lora_loading"),
)
"""Settings of models that generate texts."""
REQUEST_TOKENS = 1 << 19
"""Tokens of the texts of one request at most: a body of 8 MiB."""


def embedding_server(
    settings: Settings, source: Source, task: Task
) -> tuple[Starlette, AccessRules, list[socket.socket], ServedModel]:
    """The application, who may use it, where it listens, and its model. Raises as `launch.serve`."""
    for name in _OF_GENERATION:
        if getattr(settings, name) not in (None, False, ()):
            raise ContractError(f"--{name.replace('_', '-')}: requires a model that generates texts, got --task {task}")
    source, recipe = open_embedding(source, task)
    dtype = dtype_of(source, settings.dtype)
    encoder = TextEncoder(source, recipe, settings.max_length)
    rules = settings.rules(max(encoder.max_length, REQUEST_TOKENS))
    most = encoder.max_length
    model = ServedModel(source, settings.name, most, aliases=settings.aliases, encoder=encoder)
    sockets = listening_sockets(settings.host, settings.port)
    os.environ.pop(API_KEY, None)
    pooled = f"pooled by {recipe.pooling}, {encoder.size} numbers a text" if task == "embed" else "scores of documents"
    say(f"model: {printable(settings.model)}, {dtype.name}: {pooled}, {encoder.max_length} tokens at most")
    if isinstance(recipe, EmbeddingRecipe) and recipe.prompts:
        say(f"prompts: {printable(', '.join(recipe.prompts))}")
    step_tokens = max(settings.max_step_tokens, STEP_TOKENS)  # smaller steps take a third more time a text
    say(f"steps: {step_tokens} tokens and {MOST_TEXTS} texts at most")
    with progress_bar("weights") as on_progress:
        embedder = embedder_of(source, encoder, dtype, step_tokens, on_progress)
    backend = EmbeddingBackend(embedder, settings.stall_seconds)
    app = application(model, backend, Metrics(settings.name, backend), strict=settings.strict)
    return app, rules, sockets, model


def ready_request(model: ServedModel) -> tuple[str, str]:
    """The route and the body, for a shell, of a request that works."""
    body = {"input": ["In the beginning"]} if model.task == "embed" else {"query": "water", "documents": ["rain"]}
    return "embeddings" if model.task == "embed" else "rerank", shlex.quote(json.dumps({"model": model.name} | body))
