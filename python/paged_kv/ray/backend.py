"""Replicas as the server's backend: a job runs on as many of them as it takes. It knows nothing of Ray."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from paged_kv.errors import ContractError
from paged_kv.ray.streams import REFUSED, Clock, Suspects, resumed
from paged_kv.serve.backend import Busy, Gone, Job, Piece, Status
from paged_kv.serve.web_page import together

NO_ENGINE = "No engine runs, or could start: the operator's `serve status` says why."


@dataclass(frozen=True)
class Ways:
    """Callbacks that reach replicas, and the errors that mean that one is gone."""

    start: Callable[[Job], AsyncGenerator[list[Piece], None]]
    running: Callable[[], Awaitable[int]]
    """The number of replicas that are well."""
    pools: Callable[[], Awaitable[Mapping[str, dict[str, Any]]]]
    """Each replica's report of its pages, by its name; raises TimeoutError where one does not answer."""
    lost: tuple[type[BaseException], ...]
    """Errors that say that a replica is gone."""
    full: tuple[type[BaseException], ...]
    """Errors that say that too many requests wait."""
    down: tuple[type[BaseException], ...] = ()
    """Errors that say that there is no replica, and that none is being started."""
    retries: int = 2
    """How often a job is started again after its replica died or failed."""
    seconds: float = 120.0
    """Seconds that a stream waits for news: of its replica, or of any replica as long as none has taken it."""


class Replicas:
    """Runs jobs on replicas."""

    def __init__(self, ways: Ways) -> None:
        self._ways = ways
        self._clock, self._suspects = Clock(ways.seconds), Suspects()
        self._running = self._waiting = self._asked = self._cached = 0

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
                        self._cached += batch[0].cached_tokens
                    yield batch
        except ways.full:
            raise Busy("Too many requests wait: ask again later.") from None
        except ways.down:
            raise Gone(NO_ENGINE) from None
        finally:
            if begun:
                self._running -= job.n
            else:
                self._waiting -= job.n

    async def check(self) -> None:
        """Raises Gone where no replica is well."""
        if not await self._ways.running():
            raise Gone(NO_ENGINE)

    async def pool(self) -> dict[str, Any]:
        """The pages of all replicas that report them. Raises Gone where none does, or one does not answer."""
        try:
            pools = await self._ways.pools()
        except TimeoutError:
            raise Gone("A replica does not say how its pages are.") from None
        except self._ways.down:
            raise Gone(NO_ENGINE) from None
        if not pools:
            raise Gone(NO_ENGINE)
        return together(pools)

    def status(self) -> Status:
        """The jobs of this ingress. Pages are each replica's own."""
        return Status(
            running=self._running, waiting=self._waiting, prompt_tokens=self._asked, found_tokens=self._cached
        )
