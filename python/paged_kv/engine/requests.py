"""What users ask of the engine and what they get: sampling options, requests, and the tokens and texts that come."""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from paged_kv.arguments import integer, shown
from paged_kv.engine.sampling import Sampler
from paged_kv.engine.stop_text import StopText
from paged_kv.errors import ContractError, ContractTypeError
from paged_kv.graphs.models.config import DecoderConfig

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen, and where they end.

    Raises:
        ContractTypeError, ContractError: a value has the wrong type or is out of range.
    """

    max_tokens: int = 64
    """New tokens at most; at least 1."""
    temperature: float = 0.0
    """0 takes the most likely token; otherwise logits are divided by it."""
    top_p: float = 1.0
    """Keeps the smallest set of most likely tokens whose probabilities sum to at least this."""
    seed: int | None = None
    """Of the random streams, one for each sample of the request; None: another one each time. A request's tokens depend
    on its prompt and its seed alone."""
    stop: str | Sequence[str] = ()
    """Texts that end a sample; they are not part of its text. They need a tokenizer."""
    stop_tokens: Sequence[int] = ()
    """Tokens that end a sample, beside the model's own."""
    ignore_end: bool = False
    """Whether the model's own end tokens are tokens like others."""

    def __post_init__(self) -> None:
        integer("max_tokens", self.max_tokens, 1)
        Sampler(self.temperature, self.top_p, 0 if self.seed is None else self.seed)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
            raise ContractTypeError(f"stop must be a string or several, not {shown(self.stop)}")
        if not all(stop):
            raise ContractError("stop: an empty text would end every sample")
        object.__setattr__(self, "stop", tuple(stop))
        given: Any = self.stop_tokens
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise ContractTypeError(f"stop_tokens must be a list of token ids, not {shown(given)}")
        tokens = tuple(integer("stop_tokens: a token", token, 0) for token in given)
        object.__setattr__(self, "stop_tokens", tokens)

    def sampler(self) -> Sampler:
        """A sampler of these options; without a seed, one of its own."""
        return Sampler(self.temperature, self.top_p, secrets.randbits(64) if self.seed is None else self.seed)


@dataclass(frozen=True)
class Output:
    """What one step gave one sample of a request."""

    request: int
    sample: int
    """Which of the request's `n` samples."""
    tokens: tuple[int, ...]
    """The new token; none where the sample fails."""
    text: str
    """The text that it completes, perhaps none; always empty without a tokenizer."""
    finish: FinishReason | None = None
    """Why the sample ends with it: "stop" for an end token or a stop text, "length" for its limit, "error"."""
    error: str | None = None
    """What went wrong, where it did."""


@dataclass(eq=False)
class Request:
    """A prompt with its options."""

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling
    samples: int
    namespace: Hashable
    sampler: Sampler
    limit: int
    """Tokens of a sample, the prompt's included, at which it ends."""
    end_tokens: frozenset[int]


@dataclass(eq=False)
class Sample:
    """One continuation of a request, with what of it is in the cache."""

    request: Request
    index: int
    text: StopText
    tokens: list[int] = field(default_factory=list)
    """The prompt, then the new tokens."""
    cached: int = 0
    """How many of `tokens` have their K and V in the cache."""
    stored: int = 0
    """How many of them the prefix cache was told of."""

    @property
    def key(self) -> tuple[int, int]:
        """Its place in the order of arrival; also its id in the pool."""
        return self.request.number, self.index

    @property
    def is_prefilling(self) -> bool:
        """Whether more than its last token has to be computed."""
        return len(self.tokens) - self.cached > 1

    @property
    def forks(self) -> bool:
        """Whether the other samples of its request begin when its prompt is in the cache."""
        return self.index == 0 and self.request.samples > 1 and len(self.tokens) == len(self.request.prompt)


def check_prompt(config: DecoderConfig, name: str, prompt: Any) -> tuple[int, ...]:
    """A prompt's token ids.

    Raises:
        ContractTypeError: it is no list of integers; the message calls it `name`.
        ContractError: it is empty, longer than the model's positions, or has a token that is not in the vocabulary.
    """
    try:
        array = np.asarray(prompt)
    except (ValueError, OverflowError):  # rows of several lengths
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ContractTypeError(f"{name} must be a list of token ids, integers below 2^63; a text needs a tokenizer")
    outside = (array < 0) | (array >= config.vocab_size)
    if array.size == 0:
        raise ContractError(f"{name} is empty")
    if array.size > config.max_position_embeddings:
        raise ContractError(
            f"{name} has {array.size} tokens, max_position_embeddings is {config.max_position_embeddings}"
        )
    if outside.any():
        at = int(outside.argmax())
        raise ContractError(
            f"{name} has token id {array[at]} at position {at}; the vocabulary is 0 to {config.vocab_size - 1}"
        )
    return tuple(array.tolist())


def most_tokens(config: DecoderConfig, prompt: Sequence[int], sampling: Sampling) -> int:
    """Tokens of a sample at most, the prompt's included; the last one needs neither a position nor a slot."""
    return min(len(prompt) + sampling.max_tokens, config.max_position_embeddings + 1)
