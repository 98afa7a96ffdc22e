"""Replicas as the server's backend: a job runs on as many of them as it takes. It knows nothing of Ray."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from paged_kv.errors import ContractError
from paged_kv.ray.streams import REFUSED, Clock, Suspects, resumed
from paged_kv.serve.backend import Busy, Gone, Job, Piece, Status


@dataclass(frozen=True)
class Ways:
    """How replicas are reached, and what their ends mean."""

    start: Callable[[Job], AsyncGenerator[list[Piece], None]]
    lost: tuple[type[BaseException], ...]
    """Errors that say that a replica is gone."""
    full: tuple[type[BaseException], ...]
    """Errors that say that too many requests wait."""
    down: tuple[type[BaseException], ...] = ()
    """Errors that say that there is no replica, and that none is being started."""
    retries: int = 2
    """How often a job is started again whose replica died or failed."""
    seconds: float = 120.0
    """For which a stream waits for news: of its replica, or of any as long as none has taken it."""


class Replicas:
    """Runs jobs on replicas."""

    def __init__(self, ways: Ways) -> None:
        self._ways = ways
        self._clock, self._suspects = Clock(ways.seconds), Suspects()
        self._running = self._waiting = self._asked = self._found = 0

    async def start(self, job: Job) -> AsyncGenerator[list[Piece], None]:
        """The pieces of a job, each once.

        Raises:
            ContractError: the engine takes none of it.
            Busy, Gone, Lost, Stalled, Diverged: as they say.
        """
        ways, begun = self._ways, False
        stream = resumed(
            lambda avoid: ways.start(replace(job, avoid=avoid)),
            job.n,
            lost=ways.lost,
            full=ways.full,
            retries=ways.retries,
            clock=self._clock,
            suspects=self._suspects,
        )
        self._waiting += job.n
        try:
            async with aclosing(stream) as batches:
                async for batch in batches:
                    if batch[0].sample == REFUSED:
                        raise ContractError(str(batch[0].error))
                    if not begun:
                        begun = True
                        self._waiting, self._running = self._waiting - job.n, self._running + job.n
                        self._asked += len(job.tokens)
                        self._found += batch[0].cached_tokens
                    yield batch
        except ways.full:
            raise Busy("Too many requests wait: ask again later.") from None
        except ways.down:
            raise Gone("No engine could start: the operator's `serve status` says why.") from None
        finally:
            if begun:
                self._running -= job.n
            else:
                self._waiting -= job.n

    def check(self) -> None:
        """Raises nothing: Ray says which replicas there are, and starts those that are missing."""

    def status(self) -> Status:
        """The jobs of this ingress. Pages are each replica's own."""
        return Status(running=self._running, waiting=self._waiting, prompt_tokens=self._asked, found_tokens=self._found)
