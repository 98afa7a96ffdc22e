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
    """Runs an engine for one event loop at a time. Nothing else may call the engine's `step` meanwhile.

    A thread computes step after step while there are requests; the loop takes their outputs beside it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queues: dict[int, asyncio.Queue[list[Output] | Exception]] = {}
        self._stepping: asyncio.Future[None] | None = None
        self._steps = ThreadPoolExecutor(1, "paged-kv-steps")
        # Structures are compiled in a thread of their own: those that take seconds to refuse keep no step waiting.
        self._compiling = ThreadPoolExecutor(1, "paged-kv-structures")
        self.failures = 0
        """Steps that raised, since the last one that gave an output."""

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        n: int = 1,
        *,
        namespace: Hashable = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[Output, None]:
        """The outputs of a request as they come. Raises as `prepare` and `run`."""
        async with aclosing(
            self.run(await self.prepare(prompt, sampling, n, namespace=namespace, adapter=adapter))
        ) as batches:
            async for outputs in batches:
                for output in outputs:
                    yield output

    async def prepare(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        n: int = 1,
        *,
        namespace: Hashable = None,
        adapter: str | None = None,
    ) -> Request:
        """A request for `run`. Raises as `Engine.add_request`."""
        prepare = partial(self._engine.prepare, prompt, sampling, n, namespace=namespace, adapter=adapter)
        if getattr(sampling, "structured_output", None) is None:
            return prepare()
        return await asyncio.get_running_loop().run_in_executor(self._compiling, prepare)

    async def run(self, request: Request) -> AsyncGenerator[list[Output], None]:
        """Adds a request; its outputs as they come, those that have come meanwhile together.

        A task that is cancelled, or an iterator that is closed, aborts it.

        Raises: what a step raises, to every request that had pages then. Those that waited for pages go on.
        """
        number = self._engine.add(request)
        queue = self._queues[number] = asyncio.Queue()
        self._wake()
        left = request.samples
        try:
            while left:
                outputs = await queue.get()
                while not isinstance(outputs, Exception) and not queue.empty():
                    further = queue.get_nowait()
                    outputs = further if isinstance(further, Exception) else outputs + further
                if isinstance(outputs, Exception):
                    raise outputs
                left -= sum(output.finish is not None for output in outputs)
                yield outputs
        finally:
            self._queues.pop(number, None)
            if left:
                with suppress(RequestError):  # its last outputs were on their way
                    self._engine.abort(number)
                self._wake()

    def _wake(self) -> None:
        """Starts the thread's work, unless it goes on."""
        if (self._stepping is None or self._stepping.done()) and not self._engine.is_idle:
            loop = asyncio.get_running_loop()
            self._stepping = loop.run_in_executor(self._steps, self._step, loop)
            # A request may have come after the thread looked for the last time.
            self._stepping.add_done_callback(lambda _: self._wake())

    def _step(self, loop: asyncio.AbstractEventLoop) -> None:
        """Computes steps until nothing is left to do; in the thread."""
        with suppress(RuntimeError, TimeoutError):  # the loop is closed: nothing takes outputs any more
            while not self._engine.is_idle:
                try:
                    outputs = self._engine.step()
                except Exception as error:
                    logger.warning("a step raised", exc_info=error)
                    self.failures += 1
                    asyncio.run_coroutine_threadsafe(self._end(error), loop).result(60)
                    continue
                if outputs:
                    self.failures = 0
                    loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[Output]) -> None:
        by_request: dict[int, list[Output]] = {}
        for output in outputs:
            by_request.setdefault(output.request, []).append(output)
        for number, its_outputs in by_request.items():
            if number in self._queues:
                self._queues[number].put_nowait(its_outputs)

    async def _end(self, error: Exception) -> None:
        """Ends the requests that a step which raised may have held, all where none had pages.

        The next step gives their pages back.
        """
        for number in self._queues.keys() & self._engine.running or set(self._queues):
            with suppress(RequestError):
                self._engine.abort(number)
            self._queues.pop(number).put_nowait(error)
