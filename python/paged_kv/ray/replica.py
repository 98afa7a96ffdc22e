"""A replica: an engine in a process of its own, on cores of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_kv import set_num_threads
from paged_kv.engine import AsyncEngine, Engine, load
from paged_kv.engine.demo_model import FOLDER
from paged_kv.errors import PagedKVError
from paged_kv.ray.placement import claim
from paged_kv.ray.streams import REFUSED, Job, Piece

DEMO = "demo"
"""The name of the model that is part of the package."""


@dataclass(frozen=True)
class Model:
    """What every replica loads, and what it runs on."""

    model: str
    """A folder in Hugging Face format or a GGUF file, at the same path on every machine; or `DEMO`."""
    dtype: str | None = None
    """"float32" or "bfloat16"; the checkpoint's own where None, float32 of the demo's."""
    num_pages: int = 512
    page_size: int = 16
    max_step_tokens: int = 2048
    cpus: int = 1
    """Of each replica: what Ray counts, what it is bound to, and what its threads are made from."""

    @property
    def folder(self) -> Path:
        """The checkpoint."""
        return FOLDER if self.model == DEMO else Path(self.model)

    def engine(self) -> Engine:
        """Claims cores, binds this process to them and loads the model. Once a process.

        Raises:
            ContractError, CheckpointError, ToolchainError: as `claim`, `set_num_threads` and `load`.
        """
        cores = claim(self.cpus)
        cores.bind()
        set_num_threads(cores.threads)
        dtype = "float32" if self.dtype is None and self.model == DEMO else self.dtype
        return load(
            self.folder,
            num_pages=self.num_pages,
            page_size=self.page_size,
            dtype=dtype,
            max_step_tokens=self.max_step_tokens,
        )


class Replica:
    """The deployment that `app` makes replicas of; it knows nothing of Ray."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._engine = model.engine()
        self._streams = AsyncEngine(self._engine)

    async def generate(self, job: Job) -> AsyncIterator[list[Piece]]:
        """The pieces of a request. Those that come while the last ones are on their way go together.

        A stream that is cancelled or closed gives its pages back.
        """
        ready: list[Piece] = []
        wake = asyncio.Event()
        pump = asyncio.create_task(self._pump(job, ready, wake))
        try:
            while True:
                await wake.wait()
                wake.clear()
                batch, ready[:] = ready[:], []
                if batch:
                    yield batch
                if pump.done() and not ready:
                    pump.result()
                    return
        finally:
            pump.cancel()

    async def _pump(self, job: Job, ready: list[Piece], wake: asyncio.Event) -> None:
        began = False
        try:
            outputs = self._streams.generate(job.tokens, job.sampling, job.n, namespace=job.namespace)
            async with aclosing(outputs):  # type: ignore[type-var]
                async for output in outputs:
                    ready.append(Piece(output.sample, output.tokens, output.text, output.finish, output.error))
                    began = True
                    wake.set()
        except PagedKVError as error:
            if began:
                raise
            ready.append(Piece(REFUSED, (), "", "error", str(error)))
        finally:
            asyncio.get_running_loop().call_soon(wake.set)  # once this task is done

    def status(self) -> dict[str, Any]:
        """What it does and where: for operators and tests."""
        engine, pages = self._engine, self._engine.pool.count()
        return {
            "pid": os.getpid(),
            "cpus": sorted(os.sched_getaffinity(0)),
            "running": engine.num_running,
            "waiting": engine.num_waiting,
            "pages": {"free": pages.free, "cached": pages.cached, "used": pages.used},
            "tokens_found": engine.tokens_found,
            "prompt_tokens": engine.statistics.prompt_tokens,
            "decode_tokens": engine.statistics.decode_tokens,
        }
