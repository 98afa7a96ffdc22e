"""The engine's requests and outputs: requests, and the tokens and texts that come."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from paged_kv.engine.adapters import Adapter
from paged_kv.engine.sampling import History, Logprobs, Sampling
from paged_kv.engine.stop_text import StopText
from paged_kv.errors import ContractError, ContractTypeError
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.structured_output import CompiledStructure

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Output:
    """The output of one step for one sample of a request."""

    request: int
    sample: int
    """The number of the sample among the request's `n`."""
    tokens: tuple[int, ...]
    """The new token; none where the sample fails."""
    text: str
    """The text that it completes, perhaps none; always empty without a tokenizer."""
    finish: FinishReason | None = None
    """The reason if the sample ends with it: "stop" for an end token, a stop text or its structure's end, "length" for
    its limit, "error"."""
    error: str | None = None
    """The error, if there was one."""
    logprobs: tuple[Logprobs, ...] = ()
    """One for each of the tokens, where the request's `Sampling` asks for them."""
    cached_tokens: int = 0
    """Tokens of the request's prompt that were in the cache when it began."""
    prompt_logprobs: tuple[Logprobs, ...] = ()
    """Log-probabilities of the prompt's tokens but the first, where they are asked for: with the first output of
    sample 0.
    """


@dataclass(eq=False, slots=True)
class Place:
    """A place in a queue of outputs."""

    next: Link | None = field(default=None, kw_only=True)


@dataclass(eq=False, slots=True)
class Link(Place):
    """An output in a queue."""

    sample: Sample
    length: int
    """Tokens of the sample before those of the output."""
    output: Output


class Outbox:
    """Outputs in order: a reader follows links from `read`.

    An output counts from the moment on in which a step hangs its link to `last`. When its sample has noted it, the link
    is the last one; so what is behind `last` after an exception was given and is to be noted.
    """

    def __init__(self) -> None:
        self.last: Place = Place()
        self.read: Place = self.last

    @property
    def is_empty(self) -> bool:
        """True if all was read."""
        return self.read.next is None

    def take(self) -> list[Output]:
        """Return what was not read yet, but for requests that were aborted; several threads may call it."""
        while True:
            first = last = self.read
            outputs = []
            while (link := last.next) is not None:
                last = link
                if not link.sample.request.aborted:
                    outputs.append(link.output)
            # No signal and no other thread comes between here and the return: nothing is called.
            if self.read is first:
                self.read = last
                return outputs


@dataclass(eq=False)
class Request:
    """A prompt with its options."""

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling
    samples: int
    namespace: Hashable
    seed: int
    limit: int
    """Tokens of a sample, the prompt's included, at which it ends."""
    end_tokens: frozenset[int]
    outbox: Outbox
    """The queue for its outputs."""
    structure: CompiledStructure | None = None
    """The structure that its texts must have."""
    ended: set[int] = field(default_factory=set)
    """The samples that have ended."""
    aborted: bool = False
    """True if its caller has cancelled it."""
    root: bytes | None = None
    """The root of the chains of its pages on disk (`disk_tier`); None where they are not kept there."""
    adapter: Adapter | None = None
    """The adapter that computes it; None for the model itself, and when it has ended: an adapter's memory is free when
    nothing refers to it."""
    cached: int = 0
    """Tokens of its prompt that were in the cache when it began."""
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    """Those computed so far, from the second token on."""

    @property
    def wants_prompt(self) -> bool:
        """True if log-probabilities of prompt tokens are still to be computed."""
        return self.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt) - 1


@dataclass
class Luck:
    """The share of a sample's drafted tokens that were right, the later ones counting more (`speculation`)."""

    LONGEST_WAIT: ClassVar[int] = 128
    tried: float = 0.0
    right: float = 0.0
    wait: int = 4
    """Steps between two attempts, where drafts are not worth their rows."""
    waited: int = 0

    def share(self, usual: float) -> float:
        """Return the share of drafted tokens that are right, as if two of the usual share had been seen before."""
        return min((self.right + 2 * usual) / (self.tried + 2), 0.98)

    def add(self, tried: int, right: int) -> None:
        """Counts the drafts of a step."""
        self.tried, self.right = 0.95 * self.tried + tried, 0.95 * self.right + right
        if right:
            self.wait = 4

    def is_due(self) -> bool:
        """Return whether it is time for another attempt; the next one comes after twice as many steps."""
        self.waited += 1
        if self.waited < self.wait:
            return False
        self.waited, self.wait = 0, min(2 * self.wait, self.LONGEST_WAIT)
        return True


@dataclass(eq=False)
class Sample:
    """One continuation of a request, with what of it is in the cache."""

    request: Request
    index: int
    tokens: list[int]
    """The prompt, then the new tokens."""
    text: StopText | None = None
    """The text of the new tokens; made with the first one."""
    cached: int = 0
    """The number of `tokens` whose K and V are in the cache."""
    stored: int = 0
    """The number of them that the prefix cache has."""
    chain: list[bytes] = field(init=False)
    """The disk tier's root for its request, and the digests of its first full pages; empty where it keeps none."""
    offered: int = 0
    """The number of them that the disk tier was offered."""
    saves: dict[int, int] = field(default_factory=dict)
    """In a hybrid model, the slots of its states in the step under way, by how many of its tokens came before."""
    edges: set[int] = field(default_factory=set)
    """The ends of pages of what it began with at which a state is kept for other prompts (`states`)."""
    passing: int | None = None
    """Token offset of the last page boundary of its text with a saved state; replaced at the next boundary."""
    luck: Luck = field(default_factory=Luck)
    """The share of drafted tokens that were right."""
    history: History = field(init=False)
    """The history that its next tokens are chosen by."""

    def __post_init__(self) -> None:
        request = self.request
        self.chain = [] if request.root is None else [request.root]
        structure = None if request.structure is None else request.structure.begin(request.end_tokens)
        self.history = History(
            request.sampling, request.seed, self.index, self.tokens, len(request.prompt), structure, request.end_tokens
        )

    @property
    def key(self) -> tuple[int, int]:
        """Its place in the order of arrival; also its id in the pool."""
        return self.request.number, self.index

    @property
    def is_prefilling(self) -> bool:
        """True if more than its last token has to be computed."""
        return len(self.tokens) - self.cached > 1

    @property
    def forks(self) -> bool:
        """True if the other samples of its request begin when its prompt is in the cache."""
        return self.index == 0 and self.request.samples > 1 and len(self.tokens) == len(self.request.prompt)

    @property
    def rows(self) -> int:
        """Rows of a step that it takes, those of the samples that will begin with it included."""
        return self.request.samples if self.forks else 1


def check_prompt(config: DecoderConfig, name: str, prompt: Any) -> tuple[int, ...]:
    """A prompt's token ids.

    Raises:
        ContractTypeError: it is no list of integers; the message calls it `name`.
        ContractError: it is empty, longer than the model's positions, or has a token that is not in the vocabulary.
    """
    try:
        array = np.asarray(prompt)
        if isinstance(prompt, list | tuple) and any(isinstance(token, bool | np.bool_) for token in prompt):
            array = np.empty((0, 0), np.float64)  # NumPy takes True for 1 where integers are beside it
    except MemoryError:
        raise
    except Exception:  # rows of several lengths; arrays of other libraries raise what they like
        array = np.empty((0, 0), np.float64)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ContractTypeError(f"{name}: expected a list of token ids, integers below 2^63; a text needs a tokenizer")
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
