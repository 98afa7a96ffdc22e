"""The backend of a model that embeds or ranks texts: a queue in front of its steps, which run in a thread."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from paged_kv.checkpoint.embedding_files import Array
from paged_kv.engine.embedding import Embedder
from paged_kv.errors import ContractError
from paged_kv.serve.backend import Busy, Failed, Gone, Job, Piece, Status
from paged_kv.serve.local_backend import MOST_FAILURES

MOST_WAITING = 1 << 15
"""Texts of all requests that may wait: sixteen of the longest requests."""


class EmbeddingBackend:
    """Embeds the texts of all clients in the order in which they came, as many as fit into each step.

    Args:
        embedder: Whose steps nothing else calls.
        stall_seconds: For which a step may take before the model counts as gone.
    """

    def __init__(self, embedder: Embedder, stall_seconds: float = 120.0) -> None:
        self.embedder = embedder
        self._stall, self._failures, self._tokens = stall_seconds, 0, 0
        self._waiting: deque[tuple[tuple[int, ...], asyncio.Future[Array]]] = deque()
        self._running, self._since = 0, time.monotonic()
        self._worker: asyncio.Task[None] | None = None

    async def start(self, job: Job) -> AsyncGenerator[list[Piece], None]:
        """One piece, with the vector of the job's tokens. Raises as `Backend.start`."""
        if len(self._waiting) >= MOST_WAITING:
            raise Busy(f"{len(self._waiting)} texts wait, {MOST_WAITING} may: ask again later")
        future: asyncio.Future[Array] = asyncio.get_running_loop().create_future()
        self._waiting.append((job.tokens, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._work())
        yield [Piece(0, (), "", "stop", None, vector=await future)]  # a client that leaves cancels the future too

    async def _work(self) -> None:
        """Steps, until no text waits."""
        while self._waiting:
            count = self.embedder.fitting(len(tokens) for tokens, _ in self._waiting)
            batch = [each for each in (self._waiting.popleft() for _ in range(count)) if not each[1].cancelled()]
            if not batch:
                continue
            self._running, self._since = len(batch), time.monotonic()
            try:
                rows = await asyncio.to_thread(self.embedder.step, [tokens for tokens, _ in batch])
                self._failures = 0
            except Exception as error:
                self._failures += 1
                for _, future in batch:
                    if not future.done():
                        failed = Failed(f"a step raised {type(error).__name__}")
                        failed.__cause__ = error
                        future.set_exception(failed)
                continue
            finally:
                self._running = 0
            for (tokens, future), row in zip(batch, rows, strict=True):
                self._tokens += len(tokens)
                if not future.done():
                    future.set_result(row)

    async def check(self) -> None:
        """Raises Gone where steps raise one after the other, or one does not end."""
        if self._running and (still := time.monotonic() - self._since) > self._stall:
            raise Gone(f"a step has not ended for {still:.0f} s")
        if self._failures >= MOST_FAILURES:
            raise Gone(f"{self._failures} steps in a row raised")

    async def pool(self) -> dict[str, Any]:
        """Raises ContractError: pages are those of one step."""
        raise ContractError("/pool: a model that embeds texts keeps no pages")

    def status(self) -> Status:
        """Return how many texts run and wait."""
        return Status(running=self._running, waiting=len(self._waiting), prompt_tokens=self._tokens)
