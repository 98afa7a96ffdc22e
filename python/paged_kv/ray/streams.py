"""A stream that outlives the replica that it came from: another one computes it again, and what was sent is left out.

What a request gets depends on its prompt, its options and its seed alone, so a second run gives the same text. It is
held against what was sent, token for token; where it differs, the stream ends with an error rather than another text.

A replica ends with all its requests, and nothing says which of them ended it. All are tried again at once; those whose
second replica ends too go one by one from then on (`Suspects`), so that the one that ends replicas takes no others with
it. A replica says every few seconds that its engine goes on, so that a long queue is no replica that hangs (`Clock`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from paged_kv.errors import PagedKVError
from paged_kv.serve.backend import Piece

BEGAN = -1
"""In a piece in place of the sample, as the two below: a replica has taken the request; `text` is its name. Empty
lists after it say that its engine goes on."""
REFUSED = -2
"""The engine took none of the request, and `error` says why."""
FAILED = -3
"""A step raised, whichever of its requests is to blame; `error` says what."""

Attempt = Callable[[frozenset[str]], AsyncGenerator[list[Piece], None]]
"""Starts a request on a replica; not on one of those named, unless there is no other."""


class Lost(PagedKVError):
    """All replicas that a request was tried on died or failed; the message has their number."""


class Stalled(PagedKVError):
    """Nothing came for longer than a stream waits."""


@dataclass
class Clock:
    """The timeout of an ingress's streams."""

    seconds: float
    """Seconds without any news, not even that the engine goes on, after which a stream ends."""
    heard: float = float("-inf")
    """The time at which something last came from any replica: a request that none has taken yet waits as long as
    others go on.
    """


class Suspects:
    """Requests that were lost with as many replicas as they may but one: each goes on alone until it is cleared."""

    PIECES = 16
    """Pieces of a sample, more than ever before, which clear it: as many as may be on their way when a replica ends."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def wait(self, seconds: float) -> None:
        """Waits for the turn of a request. Raises Stalled where it does not come in time."""
        try:
            async with asyncio.timeout(seconds):
                await self._turn.acquire()
        except TimeoutError:
            raise Stalled(f"other requests whose replicas were lost kept it waiting for {seconds:.0f} s") from None

    def clear(self) -> None:
        """The next one may go on."""
        self._turn.release()


class Diverged(PagedKVError):
    """A request that was computed again gave other tokens than those that were sent."""


async def resumed(
    attempt: Attempt,
    samples: int,
    *,
    lost: tuple[type[BaseException], ...],
    full: tuple[type[BaseException], ...],
    retries: int,
    clock: Clock,
    suspects: Suspects,
) -> AsyncGenerator[list[Piece], None]:
    """The pieces of a request, each once, on as many replicas as it takes.

    Args:
        attempt: Starts it; what it started is closed before another one begins.
        samples: The samples of the request.
        lost: Errors that say that a replica is gone.
        full: Errors that say that too many requests wait. One that was taken before waits with them.
        retries: How often it is started again, once more where it was cleared: a request that ends every replica at the
            same token ends no more than these and one, any other no more than these and two.
        clock: The clock of all streams of this ingress.
        suspects: As well.

    Raises:
        Lost, Stalled, Diverged: as they say. All other errors of `attempt` go through, `full` where it was never taken.
    """
    stream = _Resumed([[] for _ in range(samples)])
    tried, most, reason, until = 0, retries, "", 0.0
    while tried <= most:
        alone = 0 < tried >= retries
        if alone:
            await suspects.wait(clock.seconds)
        taken = False
        try:
            news = 0
            async with aclosing(attempt(frozenset(stream.failed))) as pieces:
                while (batch := await _next(pieces, clock, taken)) is not None:
                    taken = True
                    fresh = stream.take(batch)
                    news += len(fresh)
                    if alone and news > Suspects.PIECES * samples:
                        suspects.clear()
                        alone, most = False, retries + 1  # its replica may end in the turn of another one
                    if fresh:
                        yield fresh
                    if stream.is_over:
                        return
                    if stream.failure:
                        break
            reason = stream.failure or "its stream ended too early"
        except lost as error:
            reason = type(error).__name__
        except full:
            if not tried:
                raise
            until = until or asyncio.get_running_loop().time() + clock.seconds
            if asyncio.get_running_loop().time() > until:
                raise Stalled(f"its replica was lost, and the queue was full for {clock.seconds:.0f} s") from None
            await asyncio.sleep(min(0.1, clock.seconds / 10))
            continue
        finally:
            if alone:
                suspects.clear()
        stream.lose()
        tried, until = tried + 1, 0.0
    raise Lost(f"{tried} replicas were lost while they computed this request: {reason}")


class _Resumed:
    """The part of a request that was sent, and its present replica's progress."""

    def __init__(self, sent: list[list[Piece]]) -> None:
        self._sent, self._met = sent, [0] * len(sent)
        self._name: str | None = None
        self.failed: set[str] = set()
        self.failure = ""
        self.is_over = False

    def lose(self) -> None:
        """Its replica is gone, or failed."""
        if self._name is not None:
            self.failed.add(self._name)
        self._name, self._met, self.failure = None, [0] * len(self._sent), ""

    def take(self, batch: list[Piece]) -> list[Piece]:
        """Return what of a batch was not sent yet. Raises Diverged."""
        fresh = []
        for piece in batch:
            if piece.sample == BEGAN:
                self._name = piece.text
            elif piece.sample == FAILED:
                self.failure = piece.error or "it failed"
            elif piece.sample == REFUSED:
                if any(self._sent):
                    raise Diverged(f"a request that had run was refused later: {piece.error}")
                self.is_over = True
                return [piece]
            else:
                mine, at = self._sent[piece.sample], self._met[piece.sample]
                self._met[piece.sample] += 1
                if at == len(mine):
                    mine.append(piece)
                    fresh.append(piece)
                elif (mine[at].tokens, mine[at].finish) != (piece.tokens, piece.finish):
                    raise Diverged(f"token {at} of sample {piece.sample} differs from that of the first run")
        self.is_over = all(mine and mine[-1].finish for mine in self._sent)
        return fresh


async def _next(pieces: AsyncGenerator[list[Piece], None], clock: Clock, taken: bool) -> list[Piece] | None:
    """The next ones; None at the end."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(clock.seconds) as limit:
            prolonging = None if taken else loop.create_task(_prolong(limit, clock))
            try:
                batch = await anext(pieces, None)
            finally:
                if prolonging is not None:
                    prolonging.cancel()
            clock.heard = loop.time()
            return batch
    except TimeoutError:
        raise Stalled(f"nothing came for {clock.seconds:.0f} s") from None


async def _prolong(limit: asyncio.Timeout, clock: Clock) -> None:
    """Moves a limit on as long as any stream of this ingress goes on."""
    while not limit.expired():
        await asyncio.sleep(clock.seconds / 4)
        if clock.heard + clock.seconds > (limit.when() or 0):
            limit.reschedule(clock.heard + clock.seconds)
