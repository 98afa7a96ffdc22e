"""The engine for asyncio: steps run in a thread while there are requests, and each request is an async iterator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import suppress

from paged_kv.engine.engine import Engine
from paged_kv.engine.requests import Output
from paged_kv.engine.sampling import Sampling
from paged_kv.errors import RequestError


class AsyncEngine:
    """Runs an engine inside one event loop. Nothing else may call the engine's `step` meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queues: dict[int, asyncio.Queue[Output | Exception]] = {}
        self._running: asyncio.Task[None] | None = None

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        n: int = 1,
        *,
        namespace: Hashable = None,
    ) -> AsyncIterator[Output]:
        """The outputs of a request as they come. A task that is cancelled, or an iterator that is closed, aborts it.

        Raises: as `Engine.add_request`; and what a step raises, to every request that then runs.
        """
        number = self._engine.add_request(prompt, sampling, n, namespace=namespace)
        queue = self._queues[number] = asyncio.Queue()
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        left = n
        try:
            while left:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                left -= output.finish is not None
                yield output
        finally:
            del self._queues[number]
            if left:
                with suppress(RequestError):  # its last outputs were on their way
                    self._engine.abort(number)

    async def _run(self) -> None:
        while not self._engine.is_idle:
            try:
                outputs = await asyncio.to_thread(self._engine.step)
            except Exception as error:
                for queue in self._queues.values():
                    queue.put_nowait(error)
                return
            for output in outputs:
                if output.request in self._queues:
                    self._queues[output.request].put_nowait(output)
            await asyncio.sleep(0)
