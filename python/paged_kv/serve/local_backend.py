"""The backend in this process: a queue with a limit around an engine."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from paged_kv.engine.async_engine import AsyncEngine
from paged_kv.engine.engine import Engine
from paged_kv.serve.backend import Busy, Failed, Gone, Job, Piece, Status
from paged_kv.serve.web_page import pool_now

MOST_FAILURES = 3
"""Steps in a row that raise, after which the engine counts as gone."""


class LocalBackend:
    """Runs jobs on an engine.

    Args:
        engine: Whose steps nothing else calls.
        most_samples: The largest number of samples of all jobs at a time, those that run and those that wait.
        stall_seconds: For which a step may take before the engine counts as gone.
    """

    def __init__(self, engine: Engine, most_samples: int, stall_seconds: float = 120.0) -> None:
        self.engine = engine
        self._streams = AsyncEngine(engine)
        self._most, self._stall = most_samples, stall_seconds
        self._samples = 0
        self._steps, self._since = 0, time.monotonic()
        self._asked_tokens = 0

    async def start(self, job: Job) -> AsyncGenerator[list[Piece], None]:
        """The pieces of a job. Raises as `Backend.start`."""
        if self._samples + job.n > self._most:
            raise Busy(f"{self._samples} samples run or wait, {self._most} may: ask again later")
        self._samples += job.n
        try:
            request = await self._streams.prepare(
                job.tokens, job.sampling, job.n, namespace=job.namespace, adapter=job.adapter
            )
            self._asked_tokens += len(job.tokens)
            try:
                async with aclosing(self._streams.run(request)) as batches:
                    async for outputs in batches:
                        yield [Piece.of(output) for output in outputs]
            except Exception as error:  # of a step, which may have held other jobs too
                raise Failed(f"a step raised {type(error).__name__}") from error
        finally:
            self._samples -= job.n

    async def check(self) -> None:
        """Raises Gone where steps raise one after the other, or one does not end."""
        if (still := self.still()) > self._stall:
            raise Gone(f"a step has not ended for {still:.0f} s")
        if self._streams.failures >= MOST_FAILURES:
            raise Gone(f"{self._streams.failures} steps in a row raised")

    def still(self) -> float:
        """Seconds since a step was last seen to end while there was work; each call looks."""
        now, steps = time.monotonic(), self.engine.statistics.steps
        if steps != self._steps or self.engine.is_idle:
            self._steps, self._since = steps, now
        return now - self._since

    async def pool(self) -> dict[str, Any]:
        """The pages as the page at `/` shows them."""
        return pool_now(self.engine)

    def status(self) -> Status:
        """Return how the engine stands."""
        engine, pages = self.engine, self.engine.pool.count()
        return Status(
            running=engine.num_running,
            waiting=engine.num_waiting,
            free_pages=pages.free,
            cached_pages=pages.cached,
            used_pages=pages.used,
            preemptions=engine.preemptions,
            prompt_tokens=self._asked_tokens,
            found_tokens=engine.tokens_found,
            restored_tokens=engine.tokens_restored,
            draft_tokens=engine.statistics.draft_tokens,
            accepted_tokens=engine.statistics.accepted_tokens,
        )
