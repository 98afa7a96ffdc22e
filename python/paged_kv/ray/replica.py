"""A replica: an engine in a process of its own, on CPUs of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from paged_kv import set_deterministic, set_num_threads
from paged_kv.engine import Engine
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.errors import PagedKVError
from paged_kv.kv_formats import KVFormat
from paged_kv.options import CacheRotation
from paged_kv.ray.placement import claim
from paged_kv.ray.streams import BEGAN, FAILED, REFUSED
from paged_kv.serve.backend import Failed, Job, Piece
from paged_kv.serve.loading import set_up
from paged_kv.serve.local_backend import LocalBackend
from paged_kv.serve.settings import Settings

DEMO = "demo"
"""The name of the model that is part of the package."""


@dataclass(frozen=True)
class Model:
    """The model of every replica, and its machine."""

    model: str
    """A folder in Hugging Face format or a GGUF file, at the same path on every machine; or a hub's name; or `DEMO`."""
    dtype: str | None = None
    """"float32" or "bfloat16"; bfloat16 where None, unless the checkpoint is in float32."""
    num_pages: int = 512
    page_size: int = 16
    max_running: int = 256
    max_step_tokens: int = 2048
    cpus: int = 1
    """CPUs of each replica: what Ray counts and what it is bound to; it computes with one thread for each of their
    cores.
    """
    deterministic: bool = False
    """True: logits are bitwise identical in any batch, in bfloat16 on CPUs with AMX too."""
    cache_dtype: KVFormat | None = None
    cache_rotation: CacheRotation | None = None
    speculate: str | None = None
    """"lookup", or a smaller checkpoint at the same path on every machine."""
    max_gap: float | None = None
    kv_disk: Path | None = None
    """The folder of each machine; its replicas share it."""
    kv_disk_gb: float = 10.0
    compiled: Path | None = None

    @property
    def folder(self) -> Path:
        """The checkpoint."""
        return FOLDER if self.model == DEMO else Path(self.model)

    def engine(self) -> Engine:
        """Claims CPUs, binds this process to them and loads the model. Once a process.

        Raises:
            ContractError, CheckpointError, ToolchainError: as `set_up`, its `engine`, `claim` and `set_num_threads`.
        """
        setup = set_up(settings_of(self, model=self.folder, name=self.model, pages=self.num_pages))
        cores = claim(self.cpus)
        cores.bind()
        set_num_threads(cores.threads)
        set_deterministic(self.deterministic)
        return setup.engine(Tokenizer(setup.source, setup.source.config))


def settings_of(arguments: Any, **others: Any) -> Settings:
    """The settings of `paged-kv serve` that an object has by the same names, and some more."""
    return Settings(
        **{each.name: getattr(arguments, each.name) for each in fields(Settings) if hasattr(arguments, each.name)}
        | others
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
        # Ray counts requests: see `max_ongoing`.
        self._backend = LocalBackend(model.engine(), sys.maxsize, stall_seconds / 2)

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
            async with aclosing(self._backend.start(job)) as batches:
                async for batch in batches:
                    ready += batch
                    wake.set()
        except Failed as error:
            ready.append(Piece(FAILED, (), "", "error", str(error)))
        except PagedKVError as error:
            ready.append(Piece(REFUSED, (), "", "error", str(error)))
        finally:
            asyncio.get_running_loop().call_soon(wake.set)  # once this task is done

    async def _beat(self, pump: asyncio.Task[None], ready: list[Piece], wake: asyncio.Event) -> None:
        """Wakes a stream while the engine goes on; ends it where a step hangs, which another replica may not."""
        seconds = min(5, self._stall / 8)
        while True:
            await asyncio.sleep(seconds)
            still = self._backend.still()
            if still > self._stall / 2:
                pump.cancel()
                ready.append(Piece(FAILED, (), "", "error", f"a step has not ended for {still:.0f} s"))
            if still < seconds or still > self._stall / 2:
                wake.set()

    async def check_health(self) -> None:
        """Answer Ray's health check, every second. Where it raises three times in a row, the replica ends once its
        streams have.

        Raises:
            Gone: a step does not end, or no step ends without an error.
        """
        await self._backend.check()

    async def pool(self) -> tuple[str, dict[str, Any]]:
        """Its name, and its pages as the page at `/` shows them."""
        return self._name, await self._backend.pool()

    def status(self) -> dict[str, Any]:
        """Return what it does and where: for operators and tests."""
        return asdict(self._backend.status()) | {
            "pid": os.getpid(),
            "cpus": sorted(os.sched_getaffinity(0)),
            "decode_tokens": self._backend.engine.statistics.decode_tokens,
        }
