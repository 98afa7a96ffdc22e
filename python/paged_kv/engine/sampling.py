"""Sampling: a request's options, and from the logits of a step to the next token of each of its samples.

The order is that of transformers' `generate`: `logit_bias`, then the penalties, the temperature, `top_k`, `top_p` of
what that leaves, `min_p`, `typical_p`. vLLM differs in two: it takes `min_p` before `top_k` and `top_p`, and has no
`typical_p`. MAX Serve has no bias.

What is kept and how a number draws is `categorical`'s.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import integer, shown
from paged_kv.categorical import Logits, draw, in_threads, largest, uniform, weights_of
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.structured_output import Grammar, JsonSchema, Regex, Structure, StructureState

Kind = Literal["number", "integer", "flag", "texts", "tokens", "biases", "structure"]
"""The kind of a field of `Sampling`; the command line makes its options of it, but of a structure."""


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, in the words of an error."""

    words: str
    least: float = math.ulp(0.0)
    """The least positive number where nothing is said."""
    most: float = sys.float_info.max

    def check(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise ContractTypeError(f"{name}: expected a number, got {type(value).__name__}")
        # Smaller floats of NumPy warn where they are compared with a number past their largest.
        number = value if isinstance(value, int) else float(value)
        if not self.least <= number <= self.most:
            raise ContractError(f"{name}: expected {self.words}, got {shown(value)}")
        return float(number)


def _at_least(minimum: int, *, or_none: bool = False) -> Callable[[str, Any], int | None]:
    return lambda name, value: None if or_none and value is None else integer(name, value, minimum)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ContractTypeError(f"{name}: expected true or false, got {shown(value)}")
    return bool(value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ContractTypeError(f"{name}: expected a string or several, got {shown(value)}")
    if not all(texts):
        raise ContractError(f"{name}: an empty text would end every sample")
    return tuple(texts)


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ContractTypeError(f"{name}: expected a list of token ids, got {shown(value)}")
    return tuple(integer(f"{name}: a token", token, 0) for token in value)


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [(token, bias) for token, bias in (value.items() if isinstance(value, Mapping) else value)]
    except (TypeError, ValueError):
        raise ContractTypeError(f"{name} must map token ids to numbers, not {shown(value)}") from None
    number = Range("a number from -100 to 100", -100, 100)
    biases = {}
    for key, bias in pairs:
        # The keys of a JSON object are texts.
        token = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key
        token = integer(f"{name}: a token", token, 0)
        biases[token] = number.check(f"{name} of token {shown(token)}", bias)
    return tuple(sorted(biases.items()))


def _structure(name: str, value: Any) -> Structure | None:
    if not isinstance(value, JsonSchema | Regex | Grammar | None):
        raise ContractTypeError(f"{name}: expected a JsonSchema, a Regex or a Grammar, got {shown(value)}")
    return value


def _option(
    kind: Kind,
    check: Callable[[str, Any], Any],
    text: str,
    flag: str | None = None,
    *,
    served: bool = True,
    of_model: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Describe a field.

    Args:
        kind: The kind of its values.
        check: Makes of its name and a value what is kept.
        text: The command line's help.
        flag: The command line's option, where it is not the field's name.
        served: True if a request to the server has it by its own name.
        of_model: The least and the most that a model's generation_config.json may have; None where it says nothing.
    """
    return {"kind": kind, "check": check, "help": text, "flag": flag, "served": served, "of_model": of_model}


def _number(numbers: Range, text: str, *, of_model: bool = False) -> dict[str, Any]:
    """Describe a field that is a number."""
    return _option("number", numbers.check, text, of_model=(numbers.least, numbers.most) if of_model else None)


@dataclass(frozen=True)
class Sampling:
    """Options of how a request's tokens are chosen, and where they end. Each field says of itself how the command line,
    the server and a model's generation_config.json have it.

    Raises:
        ContractTypeError, ContractError: a value has the wrong type or is out of range.
    """

    max_tokens: int = field(
        default=64,
        metadata=_option("integer", _at_least(1), "Most tokens after each prompt.", "--max-new-tokens", served=False),
    )
    """New tokens at most; at least 1."""
    temperature: float = field(
        default=0.0,
        metadata=_number(Range("0 or a positive number", 0), "0 is greedy.", of_model=True),
    )
    """0 takes the most likely token, the lowest id among equals; otherwise logits are divided by it."""
    top_p: float = field(
        default=1.0,
        metadata=_number(Range("a number above 0 and at most 1", most=1), "Nucleus sampling.", of_model=True),
    )
    """Keeps the smallest set of most likely tokens whose probabilities sum to at least this."""
    seed: int | None = field(
        default=None,
        metadata=_option("integer", _at_least(0, or_none=True), "Of the random streams: of prompt i, seed + i."),
    )
    """The seed of the random streams, one for each sample of the request; None: another one each time. A request's
    tokens depend on its prompt and its options alone."""
    stop: str | Sequence[str] = field(
        default=(), metadata=_option("texts", _texts, "A text that ends a sample; repeat it for several.")
    )
    """Texts that end a sample; they are not part of its text. They need a tokenizer."""
    stop_tokens: Sequence[int] = field(
        default=(),
        metadata=_option(
            "tokens", _tokens, "A token id that ends a sample; repeat it for several.", "--stop-token", served=False
        ),
    )
    """Tokens that end a sample, beside the model's own."""
    ignore_end: bool = field(
        default=False,
        metadata=_option("flag", _flag, "Take the model's own end tokens as tokens like others.", served=False),
    )
    """True if the model's own end tokens are tokens like others."""
    top_k: int = field(
        default=0,
        metadata=_option(
            "integer", _at_least(-1), "Keep so many of the most likely tokens; 0 keeps all.", of_model=(-1, 2**31 - 1)
        ),
    )
    """Keeps so many of the most likely tokens, of equals the lowest ids; 0 and -1 keep all."""
    min_p: float = field(
        default=0.0,
        metadata=_number(
            Range("a number from 0 to 1", 0, 1),
            "Keep tokens with this share of the largest probability.",
            of_model=True,
        ),
    )
    """Keeps tokens that are at least so many times as likely as the most likely one."""
    repetition_penalty: float = field(
        default=1.0,
        metadata=_number(Range("a positive number"), "On tokens of the prompt and after it.", of_model=True),
    )
    """Logits of tokens that the prompt or the sample has are divided by it where positive, else multiplied by it."""
    presence_penalty: float = field(
        default=0.0,
        metadata=_number(Range("a number from -2 to 2", -2, 2), "On tokens after the prompt."),
    )
    """Is subtracted from the logits of the sample's new tokens; the prompt does not count."""
    frequency_penalty: float = field(
        default=0.0,
        metadata=_number(
            Range("a number from -2 to 2", -2, 2), "On tokens after the prompt, each time that they came."
        ),
    )
    """The same, for each time that the token came."""
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = field(
        default=(),
        metadata=_option("biases", _biases, "Is added to the logit of a token id; repeat it for several."),
    )
    """Numbers that are added to logits, from -100 to 100: a mapping from token ids, which becomes a tuple of pairs."""
    logprobs: int | None = field(
        default=None,
        metadata=_option(
            "integer",
            _at_least(0, or_none=True),
            "Log-probabilities of each token and of so many most likely ones.",
            served=False,
        ),
    )
    """None for no log-probabilities; 0 for those of the tokens, n for those of the n most likely as well."""
    skip_special_tokens: bool = field(
        default=True,
        metadata=_option(
            "flag",
            _flag,
            "Leave special tokens out of the text, or show them.",
            "--skip-special-tokens/--show-special-tokens",
        ),
    )
    """True if special tokens are left out of the text. Those that end it are left out in any case."""
    structured_output: Structure | None = field(
        default=None, metadata=_option("structure", _structure, "", served=False)
    )
    """The structure of each text, from its first character to its last: a JSON schema, a regular expression or
    a grammar. It needs a tokenizer."""
    min_tokens: int = field(
        default=0, metadata=_option("integer", _at_least(0), "Tokens before which no end token or stop text counts.")
    )
    """New tokens before which no end token may come and no stop text is looked for; at most `max_tokens`. A
    structure may end its text before."""
    prompt_logprobs: int | None = field(
        default=None,
        metadata=_option(
            "integer", _at_least(0, or_none=True), "The same of each prompt's tokens, but for its first.", served=False
        ),
    )
    """The same for the tokens of the prompt, each given those before it; the first has none. The whole prompt is then
    computed, whatever of it is in the cache."""
    typical_p: float = field(
        default=1.0,
        metadata=_number(Range("a number above 0 and at most 1", most=1), "Locally typical sampling.", of_model=True),
    )
    """Keeps the tokens whose log-probabilities are nearest to their mean, the fewest that sum to at least this, and all
    that are as near as the last of them."""

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, each.metadata["check"](each.name, getattr(self, each.name)))
        if self.min_tokens > self.max_tokens:
            raise ContractError(f"min_tokens is {self.min_tokens}, max_tokens {self.max_tokens}")

    def check_vocabulary(self, size: int) -> None:
        """Refuses what a model with so many tokens cannot do.

        Raises:
            ContractError: `logit_bias` names a token that is not in the vocabulary.
        """
        outside = [token for token, _ in self.biases if token >= size]
        if outside:
            raise ContractError(f"logit_bias has token id {shown(outside[0])}; the vocabulary is 0 to {size - 1}")

    def end_tokens(self, of_model: Iterable[int]) -> frozenset[int]:
        """The tokens that end a sample, which have no text; `of_model` are the model's own."""
        return frozenset(self.stop_tokens) | frozenset(() if self.ignore_end else of_model)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    @property
    def uses_history(self) -> bool:
        """True if what comes next depends on the tokens before it by a penalty."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


SERVED = tuple(each.name for each in fields(Sampling) if each.metadata["served"])
"""Fields that a request to the server has by their own names."""
OF_MODEL: dict[str, tuple[Kind, float, float]] = {
    each.name: (each.metadata["kind"], *each.metadata["of_model"])
    for each in fields(Sampling)
    if each.metadata["of_model"]
}
"""Fields that a model's generation_config.json may have: their kind, their least and their most."""


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of probabilities by the model's own logits, before any bias, penalty or temperature."""

    token: float
    """The log-probability of the token that was chosen."""
    top: dict[int, float]
    """The log-probabilities of the most likely tokens by id, the most likely first; a token that is impossible is not
    among them.
    """


@dataclass(frozen=True)
class Choice:
    """The next token of a sample."""

    token: int
    logprobs: Logprobs | None = None
    """Log-probabilities, if its `Sampling` asks for them."""


class History:
    """A sample as its sampler sees it: options, random numbers and tokens.

    Args:
        sampling: The options.
        seed: The seed of the request.
        index: The index of the sample among those of the request.
        tokens: The prompt, and what was chosen so far; the caller appends to it.
        prompt_length: How many of them are the prompt's.
        structure: The progress of its text in the structure that it must have.
        end_tokens: Those that end the sample: they cannot come before `min_tokens`.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        index: int,
        tokens: list[int],
        prompt_length: int,
        structure: StructureState | None = None,
        end_tokens: Iterable[int] = (),
    ) -> None:
        self.sampling, self.structure = sampling, structure
        self._end_tokens = tuple(end_tokens)
        self._seed, self._index = seed, index
        self.tokens, self.prompt_length = tokens, prompt_length
        self._copied = np.empty(0, np.int64)
        self._num_copied = 0

    def uniform(self) -> float:
        """The number from [0, 1) that draws the next token: that of the seed, the sample and the token's position."""
        return uniform(self._seed, self._index, len(self.tokens) - self.prompt_length)

    def adjust(self, logits: Logits) -> Logits:
        """Logits `[V]` with bias and penalties, and -inf for early ends: a copy, or `logits` where there are none."""
        sampling = self.sampling
        is_early = len(self.tokens) - self.prompt_length < sampling.min_tokens and self._end_tokens
        if not sampling.biases and not sampling.uses_history and not is_early:
            return logits
        scores = logits.copy()
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused afterwards, as an infinite logit
            for token, bias in sampling.biases:
                scores[token] += np.float32(bias)
            if sampling.uses_history:
                tokens = self.array()
                before = scores[tokens].astype(np.float64)
                scores[tokens] = np.where(
                    before > 0, before / sampling.repetition_penalty, before * sampling.repetition_penalty
                )
                new, counts = np.unique(tokens[self.prompt_length :], return_counts=True)
                scores[new] -= (sampling.frequency_penalty * counts + sampling.presence_penalty).astype(np.float32)
        if is_early:
            scores[[token for token in self._end_tokens if token < scores.size]] = -np.inf
        return scores

    def ahead(self, vocab_size: int) -> History:
        """The same sample with its own copy of the tokens, no structure, and no bias on tokens that a model lacks."""
        sampling = self.sampling
        if any(token >= vocab_size for token, _ in sampling.biases):
            sampling = replace(sampling, logit_bias=[each for each in sampling.biases if each[0] < vocab_size])
        return History(
            sampling, self._seed, self._index, list(self.tokens), self.prompt_length, end_tokens=self._end_tokens
        )

    def array(self) -> npt.NDArray[np.int64]:
        """The tokens as an array that grows with them: a long list is not converted at each step."""
        length = len(self.tokens)
        if length > self._copied.size:
            grown = np.empty(2 * length, np.int64)
            grown[: self._num_copied] = self._copied[: self._num_copied]
            self._copied = grown
        self._copied[self._num_copied : length] = self.tokens[self._num_copied :]
        self._num_copied = length
        return self._copied[:length]


def choose(logits: Logits, rows: Sequence[int], histories: Sequence[History]) -> list[Choice | ContractError]:
    """The next token of each of some samples; what it is depends on the sample's row and its history alone.

    Args:
        logits: `[R, V]`; not written to.
        rows: The row of each sample; samples that begin with one prompt share theirs.
        histories: The samples.

    Returns:
        A choice for each sample; a `ContractError` where its row holds NaN or +inf, or only -inf, or no token continues
        its structure.

    Raises:
        ShapeError: `logits` is not of two dimensions with at least one column.
    """
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ShapeError(f"logits: expected [rows, vocabulary], got {list(logits.shape)}")
    each = [partial(_choose, logits[row], history) for row, history in zip(rows, histories, strict=True)]
    drawn = sum(history.sampling.temperature > 0 for history in histories)
    return in_threads(each, drawn, logits.shape[1])


def _choose(logits: Logits, history: History) -> Choice | ContractError:
    sampling = history.sampling
    scores = history.adjust(logits)
    token = int(scores.argmax())  # NaN is larger than any number
    if not np.isfinite(scores[token]):
        return ContractError("its logits hold NaN or +inf, or are all -inf")
    ids = None
    if history.structure is not None:
        try:
            ids = history.structure.allowed()
        except ContractError as error:
            return error
        scores = scores[ids]
        token = int(scores.argmax())
        if not np.isfinite(scores[token]):
            return ContractError("its logits are -inf for all tokens that its structure allows")
    if sampling.temperature > 0:
        token = _draw(scores, sampling, history.uniform())
    if ids is not None:
        token = int(ids[token])
    return Choice(token, None if sampling.logprobs is None else logprobs_of(logits, token, sampling.logprobs))


def _draw(scores: Logits, sampling: Sampling, number: float) -> int:
    """A token of those that the options keep of `[V]` scores."""
    ids = largest(scores, sampling.top_k) if 0 < sampling.top_k < scores.size else None
    weights = weights_of(scores if ids is None else scores[ids], sampling.temperature)
    at = draw(weights, number, top_p=sampling.top_p, min_p=sampling.min_p, typical_p=sampling.typical_p)
    return at if ids is None else int(ids[at])


def logprobs_of(logits: Logits, token: int, count: int) -> Logprobs:
    """Log-probabilities by `[V]` logits: of a token, and of the `count` most likely ones."""
    total = float(logits.max()) + float(np.log(np.exp(logits - logits.max()).sum(dtype=np.float64)))
    ids = largest(logits, min(count, logits.size)) if count else np.empty(0, np.int64)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    top = {int(id_): float(logits[id_]) - total for id_ in ids if logits[id_] > -np.inf}
    return Logprobs(float(logits[token]) - total, top)
