"""The engine for asyncio: steps run in a thread while there are requests, and each request is an async iterator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial

from paged_kv.engine.engine import Engine
from paged_kv.engine.requests import Output, Request
from paged_kv.engine.sampling import Sampling
from paged_kv.errors import RequestError

logger = logging.getLogger("paged_kv.engine")


class AsyncEngine:
    """Runs an engine inside one event loop. Nothing else may call the engine's `step` meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queues: dict[int, asyncio.Queue[Output | Exception]] = {}
        self._running: asyncio.Task[None] | None = None
        # Forms have a thread of their own: those that take seconds to refuse keep no step waiting.
        self._forms = ThreadPoolExecutor(1, "paged-kv-forms")
        self.failures = 0
        """Steps that raised, since the last one that gave an output."""

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        n: int = 1,
        *,
        namespace: Hashable = None,
    ) -> AsyncGenerator[Output, None]:
        """The outputs of a request as they come. Raises as `prepare` and `run`."""
        async with aclosing(self.run(await self.prepare(prompt, sampling, n, namespace=namespace))) as outputs:
            async for output in outputs:
                yield output

    async def prepare(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        n: int = 1,
        *,
        namespace: Hashable = None,
    ) -> Request:
        """A request for `run`. Raises as `Engine.add_request`."""
        prepare = partial(self._engine.prepare, prompt, sampling, n, namespace=namespace)
        if getattr(sampling, "form", None) is None:
            return prepare()
        return await asyncio.get_running_loop().run_in_executor(self._forms, prepare)

    async def run(self, request: Request) -> AsyncGenerator[Output, None]:
        """Adds a request; its outputs as they come. A task that is cancelled, or an iterator that is closed, aborts it.

        Raises: what a step raises, to every request that had pages then. Those that waited for pages go on.
        """
        number = self._engine.add(request)
        queue = self._queues[number] = asyncio.Queue()
        self._wake()
        left = request.samples
        try:
            while left:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                left -= output.finish is not None
                yield output
        finally:
            self._queues.pop(number, None)
            if left:
                with suppress(RequestError):  # its last outputs were on their way
                    self._engine.abort(number)
                self._wake()

    def _wake(self) -> None:
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self._engine.is_idle:
            try:
                outputs = await asyncio.to_thread(self._engine.step)
            except Exception as error:
                logger.warning("a step raised", exc_info=error)
                self.failures += 1
                if not self._end(error):
                    return
                continue
            if outputs:
                self.failures = 0
            for output in outputs:
                if output.request in self._queues:
                    self._queues[output.request].put_nowait(output)
            await asyncio.sleep(0)

    def _end(self, error: Exception) -> bool:
        """Ends the requests that a step which raised may have held, all where none had pages; whether there were any.

        The next step gives their pages back.
        """
        held = self._queues.keys() & self._engine.running or set(self._queues)
        for number in held:
            with suppress(RequestError):
                self._engine.abort(number)
            self._queues.pop(number).put_nowait(error)
        return bool(held)
