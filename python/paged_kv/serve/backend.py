"""The interface of whatever computes for the application: start a request, yield its pieces, say how things stand."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from paged_kv.engine.requests import Output
from paged_kv.engine.sampling import Logprobs, Sampling
from paged_kv.errors import PagedKVError


@dataclass(frozen=True)
class Job:
    """One prompt as it goes to a backend."""

    tokens: tuple[int, ...]
    sampling: Sampling
    """With a seed, so that it can be computed again."""
    n: int = 1
    namespace: Hashable = None
    adapter: str | None = None
    """The name of the LoRA adapter that computes it."""
    avoid: frozenset[str] = frozenset()
    """Names of replicas on which it failed."""


class Piece(NamedTuple):
    """The output of one step for one sample of a job: a token, as `engine.Output`."""

    sample: int
    tokens: tuple[int, ...]
    text: str
    finish: str | None
    error: str | None
    logprobs: tuple[Logprobs, ...] = ()
    cached_tokens: int = 0
    """Tokens of the prompt that were in the cache when the job began."""
    prompt_logprobs: tuple[Logprobs, ...] = ()
    """Log-probabilities of the prompt's tokens but the first, with the first piece of sample 0, where the job asks
    for them.
    """
    vector: npt.NDArray[np.float32] | None = None
    """`[size]`: what a model that embeds or ranks texts gives, in place of tokens."""

    @staticmethod
    def of(output: Output) -> Piece:
        """An output of an engine."""
        return Piece(
            output.sample,
            output.tokens,
            output.text,
            output.finish,
            output.error,
            output.logprobs,
            output.cached_tokens,
            output.prompt_logprobs,
        )


@dataclass(frozen=True)
class Status:
    """A backend's present work, and its counts so far."""

    running: int = 0
    """Samples that have pages."""
    waiting: int = 0
    """Samples that wait for pages or for their turn."""
    free_pages: int = 0
    cached_pages: int = 0
    used_pages: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    """Tokens of prompts that were asked about in the cache."""
    found_tokens: int = 0
    """Those of them that it had."""
    restored_tokens: int = 0
    """Those of them that were read from the disk."""
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Busy(PagedKVError):
    """Too many requests wait: ask again later."""


class Gone(PagedKVError):
    """The engine does not answer any more."""


class Failed(PagedKVError):
    """A step raised in which the request was, or every replica that computed it was lost."""


class Backend(Protocol):
    """Computes jobs."""

    def start(self, job: Job) -> AsyncGenerator[list[Piece], None]:
        """The pieces of a job as they come; a generator that is closed gives the job's pages back within a step.

        Raises:
            ContractError, ContractTypeError, CheckpointError, ToolchainError: the job cannot be computed as it is.
            Busy, Gone, Failed: as they say.
        """
        ...

    async def check(self) -> None:
        """Raises Gone where jobs would not be computed."""
        ...

    async def pool(self) -> dict[str, Any]:
        """The pages as the page at `/` shows them (`page`). Raises Gone where nothing says it."""
        ...

    def status(self) -> Status:
        """Return how things stand."""
        ...
