"""The server's application in this process, on the demo's model, and clients of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from starlette.testclient import TestClient

from paged_kv.checkpoint.source import open_source
from paged_kv.engine import load
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.engine import Engine
from paged_kv.engine.sampling import OF_MODEL
from paged_kv.serve.application import application
from paged_kv.serve.local_backend import LocalBackend
from paged_kv.serve.metrics import Metrics
from paged_kv.serve.profiling import Profiling
from paged_kv.serve.served_model import ServedModel

LENGTH = 512
"""The most tokens of a request."""
PAGE_SIZE = 16


@dataclass
class Served:
    """An application that answers."""

    http: TestClient
    engine: Engine
    backend: LocalBackend

    @property
    def client(self) -> openai.OpenAI:
        """OpenAI's own client."""
        return openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=self.http, max_retries=0)

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """The status and the answer of a request that no client would make."""
        answer = self.http.post(path, **({"content": body} if isinstance(body, bytes) else {"json": body}))
        return answer.status_code, answer.json()

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric."""
        said = ",".join(f'{key}="{value}"' for key, value in sorted(({"model_name": "demo"} | labels).items()))
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(f"{name}{{{said}}} "):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no {name}{{{said}}}")


@contextlib.contextmanager
def served(
    engine: Engine | None = None,
    *,
    folder: Path = FOLDER,
    length: int = LENGTH,
    most_samples: int = 100,
    template: str | None = None,
    strict: bool = False,
    profile: bool = False,
    **options: Any,
) -> Iterator[Served]:
    """An application on an engine of the demo's model or another one; `options` are those of `load`."""
    if engine is None:
        engine = load(folder, **{"num_pages": 512, "page_size": PAGE_SIZE, "dtype": "float32"} | options)
    source = open_source(folder)
    model = ServedModel(source, "demo", length, template, source.sampling(OF_MODEL), most_samples=most_samples)
    model.store = engine
    backend = LocalBackend(engine, most_samples)
    profiling = Profiling(engine.model) if profile else None
    app = application(model, backend, Metrics("demo", backend), strict=strict, profiling=profiling)
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as http:
        yield Served(http, engine, backend)
