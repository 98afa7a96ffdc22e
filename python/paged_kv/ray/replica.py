"""A replica: an engine in a process of its own, on CPUs of its own."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_kv import set_num_threads
from paged_kv.engine import AsyncEngine, Engine, load
from paged_kv.engine.demo_model import FOLDER
from paged_kv.errors import PagedKVError, ToolchainError
from paged_kv.ray.placement import claim
from paged_kv.ray.streams import BEGAN, FAILED, REFUSED
from paged_kv.serve.backend import Job, Piece

MOST_FAILURES = 3
"""Steps in a row that raise, after which a replica calls itself unhealthy."""
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
    """Of each replica: what Ray counts and what it is bound to; it computes with one thread for each of their cores."""

    @property
    def folder(self) -> Path:
        """The checkpoint."""
        return FOLDER if self.model == DEMO else Path(self.model)

    def engine(self) -> Engine:
        """Claims CPUs, binds this process to them and loads the model. Once a process.

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
    """The deployment that `app` makes replicas of; it knows nothing of Ray.

    Args:
        model: What it loads.
        name: By which routers know it.
        stall_seconds: How long clients wait for news. A step may take half as long; then its streams end, and the
            replica calls itself unhealthy.
    """

    def __init__(self, model: Model, name: str, stall_seconds: float) -> None:
        self._name, self._stall = name, stall_seconds
        self._engine = model.engine()
        self._streams = AsyncEngine(self._engine)
        self._steps, self._since = 0, time.monotonic()

    async def generate(self, job: Job) -> AsyncIterator[list[Piece]]:
        """The pieces of a request, after `BEGAN`. Those that come while the last ones are on their way go together.

        An empty list says now and then that the engine goes on. A stream that is cancelled or closed gives its pages
        back.
        """
        ready = [Piece(BEGAN, (), self._name, None, None)]
        wake = asyncio.Event()
        wake.set()
        pump = asyncio.create_task(self._pump(job, ready, wake))
        beat = asyncio.create_task(self._beat(pump, ready, wake))
        try:
            while True:
                await wake.wait()
                wake.clear()
                batch, ready[:] = ready[:], []
                if batch or not pump.done():
                    yield batch
                if pump.done() and not ready:
                    if not pump.cancelled():
                        pump.result()
                    return
        finally:
            pump.cancel()
            beat.cancel()

    async def _pump(self, job: Job, ready: list[Piece], wake: asyncio.Event) -> None:
        try:
            request = await self._streams.prepare(job.tokens, job.sampling, job.n, namespace=job.namespace)
            try:
                async with aclosing(self._streams.run(request)) as batches:
                    async for outputs in batches:
                        ready += map(Piece.of, outputs)
                        wake.set()
            except Exception as error:  # of a step, which may have held other requests too
                ready.append(Piece(FAILED, (), "", "error", f"a step raised {type(error).__name__}"))
        except PagedKVError as error:
            ready.append(Piece(REFUSED, (), "", "error", str(error)))
        finally:
            asyncio.get_running_loop().call_soon(wake.set)  # once this task is done

    async def _beat(self, pump: asyncio.Task[None], ready: list[Piece], wake: asyncio.Event) -> None:
        """Wakes a stream while the engine goes on; ends it where a step hangs, which another replica may not."""
        seconds = min(5, self._stall / 8)
        while True:
            await asyncio.sleep(seconds)
            still = self._still()
            if still > self._stall / 2:
                pump.cancel()
                ready.append(Piece(FAILED, (), "", "error", f"a step has not ended for {still:.0f} s"))
            if still < seconds or still > self._stall / 2:
                wake.set()

    def _still(self) -> float:
        """For how long no step has ended, though there was something to compute; as far as was looked."""
        now, steps = time.monotonic(), self._engine.statistics.steps
        if steps != self._steps or self._engine.is_idle:
            self._steps, self._since = steps, now
        return now - self._since

    async def check_health(self) -> None:
        """What Ray asks every second. Where it raises three times in a row, the replica ends once its streams have.

        Raises:
            ToolchainError: a step does not end, or no step ends without an error.
        """
        if (still := self._still()) > self._stall / 2:
            raise ToolchainError(f"a step has not ended for {still:.0f} s")
        if self._streams.failures >= MOST_FAILURES:
            raise ToolchainError(f"{self._streams.failures} steps in a row raised")

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
