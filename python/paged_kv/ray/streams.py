"""A stream that outlives the replica that it came from: another one computes it again, and what was sent is left out.

What a request gets depends on its prompt, its options and its seed alone, so a second run gives the same text. It is
held against what was sent, token for token; where it differs, the stream ends with an error rather than another text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

from paged_kv.engine.sampling import Sampling
from paged_kv.errors import PagedKVError


@dataclass(frozen=True)
class Job:
    """A request as it goes to a replica."""

    tokens: tuple[int, ...]
    sampling: Sampling
    """With a seed, so that it can be computed again."""
    n: int = 1
    namespace: Hashable = None


class Piece(NamedTuple):
    """What one step gave one sample of a request: a token, as `engine.Output`."""

    sample: int
    """`REFUSED`: the engine took none of the request, and `error` says why."""
    tokens: tuple[int, ...]
    text: str
    finish: str | None
    error: str | None


REFUSED = -1

Attempt = Callable[[], AsyncGenerator[list[Piece], None]]
"""Starts a request on some replica."""


class Lost(PagedKVError):
    """The replicas of a request died, one after the other; how many is in the message."""


class Stalled(PagedKVError):
    """Nothing came for longer than a stream waits."""


class Diverged(PagedKVError):
    """A request that was computed again gave other tokens than those that were sent."""


async def resumed(
    attempt: Attempt, samples: int, *, lost: tuple[type[BaseException], ...], retries: int, seconds: float
) -> AsyncIterator[list[Piece]]:
    """The pieces of a request, each once, on as many replicas as it takes.

    Args:
        attempt: Starts it; what it started is closed before another one begins.
        samples: Of the request.
        lost: Errors that say that a replica is gone.
        retries: How often it is started again: a request that ends every replica ends no more than these and one.
        seconds: For which nothing may come.

    Raises:
        Lost, Stalled, Diverged: as they say. All other errors of `attempt` go through.
    """
    sent: list[list[Piece]] = [[] for _ in range(samples)]
    for tried in range(retries + 1):
        met = [0] * samples
        try:
            async with aclosing(attempt()) as pieces:
                while (batch := await _next(pieces, seconds)) is not None:
                    fresh = []
                    for piece in batch:
                        if piece.sample == REFUSED:
                            if any(sent):
                                raise Diverged(f"a request that had run was refused later: {piece.error}")
                            yield [piece]
                            return
                        mine, at = sent[piece.sample], met[piece.sample]
                        met[piece.sample] += 1
                        if at == len(mine):
                            mine.append(piece)
                            fresh.append(piece)
                        elif mine[at] != piece:
                            raise Diverged(f"token {at} of sample {piece.sample} differs from that of the first run")
                    if fresh:
                        yield fresh
                    if all(mine and mine[-1].finish for mine in sent):
                        return
        except lost as error:
            reason = type(error).__name__
        else:
            reason = "its stream ended too early"
        if tried == retries:
            raise Lost(f"{tried + 1} replicas were lost while they computed this request: {reason}")


async def _next(pieces: AsyncGenerator[list[Piece], None], seconds: float) -> Any:
    """The next ones; None at the end."""
    try:
        async with asyncio.timeout(seconds):
            return await anext(pieces, None)
    except TimeoutError:
        raise Stalled(f"nothing came for {seconds:.0f} s") from None
