"""From settings to a listening server. Bad settings are refused before anything is compiled."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from starlette.applications import Starlette
from uvicorn import Config

from paged_kv.arguments import printable
from paged_kv.checkpoint.embedding_files import Task, open_embedding, task_of
from paged_kv.checkpoint.source import Source, open_source
from paged_kv.checkpoint.weights import progress_bar
from paged_kv.engine.embedding import MOST_TEXTS, STEP_TOKENS, TextEncoder, embedder_of
from paged_kv.engine.model import DecoderModel
from paged_kv.engine.sampling import OF_MODEL
from paged_kv.errors import ContractError
from paged_kv.files import read_regular
from paged_kv.output import say
from paged_kv.runtime.threads import allowed_cpus, pool_threads
from paged_kv.serve.access_rules import AccessRules
from paged_kv.serve.address import listening_sockets, url_of
from paged_kv.serve.application import application
from paged_kv.serve.connections import GuardedServer
from paged_kv.serve.embedding_backend import EmbeddingBackend
from paged_kv.serve.loading import EngineSetup, dtype_of, set_up
from paged_kv.serve.local_backend import LocalBackend
from paged_kv.serve.metrics import Metrics
from paged_kv.serve.profiling import Profiling
from paged_kv.serve.served_model import ServedModel
from paged_kv.serve.settings import API_KEY, Settings

_MOST_TEMPLATE = 1 << 22
"""Bytes of a file with a chat template."""
_OF_GENERATION = (
    *("cache_dtype", "cache_rotation", "pages", "memory_gb", "kv_disk", "speculate", "chat_template"),
    *("profile", "lora", "lora_loading"),
)
"""Settings of models that generate texts."""
EMBEDDING_TOKENS = 1 << 19
"""Tokens of the texts of one request to a model that embeds or ranks them: a body of 8 MiB."""


def serve(settings: Settings) -> None:
    """Serves until a signal ends it.

    Raises:
        CheckpointError: there is no model that this package runs.
        ContractError: a setting is bad or does not go with another, the port is taken, or the cache does not fit;
            --profile of steps that MAX runs.
        ToolchainError: the step cannot be compiled.
        OSError: stdout cannot be written when the server is ready.
    """
    settings.check()
    source = open_source(settings.model)
    if (task := settings.task or task_of(source)) != "generate":
        app, rules, sockets, model = embedding_server(settings, source, task)
        listen(app, rules, sockets, settings, model)
        return
    setup = set_up(settings)
    rules = settings.rules(setup.size.max_length)
    most_samples = settings.max_running + settings.max_queue
    model = served_model(settings, setup.source, setup.size.max_length, most_samples)
    sockets = listening_sockets(settings.host, settings.port)  # from here on, the port is no other program's
    os.environ.pop(API_KEY, None)  # nothing that this process starts needs it
    for line in described(setup, model):
        say(line)
    engine = setup.engine(model.tokenizer)
    model.store = engine if settings.lora or settings.lora_loading else None
    backend = LocalBackend(engine, most_samples, settings.stall_seconds)
    profiling = Profiling(cast("DecoderModel", engine.model)) if settings.profile else None
    metrics = Metrics(settings.name, backend)
    app = application(model, backend, metrics, strict=settings.strict, profiling=profiling)
    listen(app, rules, sockets, settings, model)
    engine.flush()


def embedding_server(
    settings: Settings, source: Source, task: Task
) -> tuple[Starlette, AccessRules, list[socket.socket], ServedModel]:
    """The server of a model that embeds or ranks texts: what `listen` takes. Raises as `serve`."""
    for name in _OF_GENERATION:
        if getattr(settings, name) not in (None, False, ()):
            raise ContractError(f"--{name.replace('_', '-')}: requires a model that generates texts, got --task {task}")
    source, recipe = open_embedding(source, task)
    dtype = dtype_of(source, settings.dtype)
    encoder = TextEncoder(source, recipe, settings.max_length)
    most = encoder.max_length
    rules = settings.rules(max(most, EMBEDDING_TOKENS))
    model = ServedModel(source, settings.name, most, aliases=settings.aliases, encoder=encoder)
    sockets = listening_sockets(settings.host, settings.port)
    os.environ.pop(API_KEY, None)
    pooled = f"pooled by {recipe.pooling}, {encoder.size} numbers a text" if task == "embed" else "scores of documents"
    say(f"model: {printable(settings.model)}, {dtype.name}: {pooled}, {most} tokens at most")
    if recipe.prompts:
        say(f"prompts: {printable(', '.join(recipe.prompts))}")
    step_tokens = max(settings.max_step_tokens, STEP_TOKENS)  # smaller steps take a third more time a text
    say(f"steps: {step_tokens} tokens and {MOST_TEXTS} texts at most")
    with progress_bar("weights") as on_progress:
        embedder = embedder_of(source, encoder, dtype, step_tokens, on_progress)
    backend = EmbeddingBackend(embedder, settings.stall_seconds)
    app = application(model, backend, Metrics(settings.name, backend), strict=settings.strict)
    return app, rules, sockets, model


def served_model(settings: Settings, source: Source, most_tokens: int, most_samples: int | None = None) -> ServedModel:
    """The model as requests are read for it, of `most_tokens` and of `most_samples` at most.

    Raises:
        ContractError: the chat template cannot be read.
        CheckpointError: the model's own files cannot be, or say what is not supported.
    """
    sampling = source.sampling(OF_MODEL) if settings.generation_config == "model" else {}
    return ServedModel(
        source,
        settings.name,
        most_tokens,
        read_template(settings.chat_template),
        sampling,
        aliases=settings.aliases,
        most_samples=most_samples,
    )


def described(setup: EngineSetup, model: ServedModel) -> list[str]:
    """Return what was chosen, and how much memory it takes; the fifth line says that the server is ready."""
    settings, size, dtype = setup.settings, setup.size, setup.dtype
    kind = settings.cache_dtype or dtype.name
    kinds = dict.fromkeys(encoding for _, encoding in model.config.encodings)
    narrow = f"; {size.num_window_pages} pages of the layers with windows" if size.num_window_pages else ""
    rotated = f", rotated by {settings.cache_rotation}" if settings.cache_rotation else ""
    chat = "no chat template: /v1/completions alone" if model.chat is None else "chat by the model's template"
    others, threads = [chat], pool_threads() or len(allowed_cpus())
    if model.sampling:
        chosen = ", ".join(f"{name} {value:g}" for name, value in model.sampling.items())
        others.append(f"where a request does not say it, the model's {chosen}")
    if settings.speculate:
        others.append(f"speculation by {printable(settings.speculate)}")
    if settings.lora:
        others.append(f"adapters {', '.join(printable(name) for name, _ in settings.adapters())}")
    if settings.kv_disk:
        others.append(f"prefixes in {printable(settings.kv_disk)}, {settings.kv_disk_gb:g} GB at most")
    return [
        f"model: {printable(settings.model)}, weights {' and '.join(kinds) or dtype.name}, {_size(size.weight_bytes)}",
        f"cache: {size.num_pages} pages of {size.page_size} tokens in {kind}{rotated}, {_size(size.bytes)}: "
        f"{size.tokens} tokens, the longest request has {size.max_length}{narrow}",
        f"steps: {settings.max_running} samples and {settings.max_step_tokens} tokens at most on {threads} threads; "
        f"{settings.max_queue} samples may wait",
        "with: " + "; ".join(others),
    ]


def listen(
    app: Any, rules: AccessRules, sockets: Sequence[socket.socket], settings: Settings, model: ServedModel
) -> None:
    """Runs the application until a signal ends it. Raises OSError where stdout cannot be written."""
    config = Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=max(int(settings.drain_seconds), 1),
    )
    address = url_of(settings.host, int(sockets[0].getsockname()[1]))
    server = _Announced(rules, sockets, config, ready_lines(address, model, rules.key is not None))
    asyncio.run(server.serve())
    if server.error is not None:
        raise server.error


class _Announced(GuardedServer):
    """Prints some lines when it answers. A server that cannot say that it is ready ends."""

    def __init__(self, rules: AccessRules, sockets: Sequence[socket.socket], config: Config, lines: str) -> None:
        super().__init__(rules, sockets, config)
        self._lines = lines
        self.error: OSError | None = None
        """The error that kept them from being printed."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        try:
            print(self._lines, flush=True)
        except OSError as error:
            self.error, self.should_exit = error, True


def ready_lines(address: str, model: ServedModel, asks_for_key: bool) -> str:
    """Return where the server is, and a request that works."""
    prompt = "In the beginning"
    asked: dict[str, Any]
    if model.task == "embed":
        route, asked = "embeddings", {"input": [prompt]}
    elif model.task == "rerank":
        route, asked = "rerank", {"query": "water", "documents": ["rain"]}
    elif model.chat is None:
        route, asked = "completions", {"prompt": prompt}
    else:
        route, asked = "chat/completions", {"messages": [{"role": "user", "content": prompt}]}
    if model.task == "generate":
        asked |= {"max_tokens": 32, "temperature": 0}
    body = shlex.quote(json.dumps({"model": model.name} | asked))
    key = f' -H "Authorization: Bearer ${API_KEY}"' if asks_for_key else ""
    curl = f"curl {address}/v1/{route} -H 'Content-Type: application/json'{key} -d {body}"
    return f"paged-kv: ready on {address}\n{curl}"


def read_template(file: Path | None) -> str | None:
    """The text of `--chat-template`. Raises ContractError where it cannot be read."""
    if file is None:
        return None
    try:
        return read_regular(file, _MOST_TEMPLATE).decode()
    except (OSError, ValueError) as error:
        raise ContractError(f"--chat-template {printable(file)}: cannot be read: {printable(error)}") from None


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
