"""OpenAI's /v1/completions: one or several prompts, as texts or tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paged_kv.engine.sampling import Logprobs
from paged_kv.serve.backend import Job, Piece
from paged_kv.serve.exchange import ChoicesExchange, Event, Exchange, Wishes
from paged_kv.serve.fields import Fields
from paged_kv.serve.sampling import MOST_LOGPROBS, REFUSED, read_max_tokens, read_sampling, read_structure
from paged_kv.serve.served_model import ServedModel

MOST_PROMPTS = 128
"""Prompts of one request at most."""
MOST_SAMPLES = 16
"""Samples of one prompt at most."""


def read_completion(body: Fields, model: ServedModel) -> Exchange:
    """A request to /v1/completions.

    Raises:
        ContractError, ContractTypeError, CheckpointError, ToolchainError: a field cannot be taken.
    """
    model.check_name(body)
    prompts = _prompts(body)
    n = body.integer("n", 1, 1, MOST_SAMPLES)
    best_of = body.integer("best_of", n, 1, MOST_SAMPLES)
    wishes = Wishes.read(body)
    if best_of < n or (best_of > n and wishes.stream):
        raise body.error("best_of", f"is {best_of}: it is at least n, {n}, and no more in a stream")
    echo = body.flag("echo", False)
    logprobs = body.integer("logprobs", None, 0, MOST_LOGPROBS)
    namespace = body.text("cache_salt", None)
    for refused in ("suffix", *REFUSED):
        body.refuse(refused)
    tokens = [model.tokens(name, prompt, special=body.flag("add_special_tokens", True)) for name, prompt in prompts]
    left = min(model.left(name, each) for (name, _), each in zip(prompts, tokens, strict=True))
    most = read_max_tokens(body, ("max_tokens",), min(left, 16), 0 if echo else 1, left)
    sampling = read_sampling(
        body,
        model,
        max(most, 1),
        structured_output=read_structure(body),
        logprobs=0 if logprobs is None and best_of > n else logprobs,
        prompt_logprobs=logprobs if echo else None,
    )
    body.end()
    return Completions(
        [Job(each, sampling, best_of, namespace) for each in tokens],
        model,
        wishes,
        n=n,
        echo=[prompt if isinstance(prompt, str) else model.text(prompt) for _, prompt in prompts] if echo else None,
        logprobs=logprobs is not None,
        is_empty=most == 0,
    )


def _prompts(body: Fields) -> list[tuple[str, Any]]:
    """The prompts, each with its name in errors."""
    given = body.any("prompt")
    if isinstance(given, list) and given and all(isinstance(each, str | list) for each in given):
        if len(given) > MOST_PROMPTS:
            raise body.error("prompt", f"is a list of {len(given)} prompts, {MOST_PROMPTS} at most")
        return [(f"prompt[{index}]", each) for index, each in enumerate(given)]
    return [("prompt", given)]


@dataclass
class _Choice:
    """One continuation, as far as it has come."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, Logprobs | None]] = field(default_factory=list)
    finish: str | None = None
    told: bool = False
    offset: int = 0
    """Characters of the tokens whose log-probabilities were told."""

    @property
    def mean(self) -> float:
        """The mean log-probability of its tokens."""
        found = [each.token for _, each in self.logprobs if each is not None]
        return sum(found) / max(len(found), 1)


class Completions(ChoicesExchange):
    """The answer of /v1/completions."""

    def __init__(
        self,
        jobs: Sequence[Job],
        model: ServedModel,
        wishes: Wishes,
        *,
        n: int,
        echo: list[str] | None,
        logprobs: bool,
        is_empty: bool,
    ) -> None:
        super().__init__(jobs, model, wishes, "cmpl", "text_completion")
        self._n, self._echo, self._has_logprobs, self._is_empty = n, echo, logprobs, is_empty
        self._of_prompts: list[list[tuple[int, Logprobs | None]]] = [[] for _ in jobs]
        self._choices = [[_Choice() for _ in range(job.n)] for job in jobs]

    def take(self, job: int, sample: int, pieces: Sequence[Piece]) -> list[Event]:
        choice, new = self._choices[job][sample], _Choice()
        for piece in pieces:
            if piece.prompt_logprobs:
                known = (None, *piece.prompt_logprobs)
                self._of_prompts[job] = list(zip(self.jobs[job].tokens, known, strict=True))
            if self._is_empty:
                self.usage.completion -= len(piece.tokens)
            else:
                new.text += piece.text
                new.tokens += piece.tokens
                new.logprobs += zip(piece.tokens, piece.logprobs, strict=False)
            new.finish = piece.finish
        if self._echo is not None and not choice.told:
            new.text = self._echo[job] + new.text
            new.logprobs = self._prompt_logprobs(job) + new.logprobs
        choice.told = True
        choice.text += new.text
        choice.tokens += new.tokens
        choice.logprobs += new.logprobs
        choice.finish = new.finish
        if not self.stream or not (new.text or new.finish or new.logprobs):
            return []
        new.offset, choice.offset = choice.offset, choice.offset + self._length(new.logprobs)
        return [self.answer([self._said(job, sample, new)], usage=False)]

    def whole(self) -> dict[str, Any]:
        choices = []
        for job, samples in enumerate(self._choices):
            best = sorted(samples, key=lambda choice: -choice.mean)[: self._n] if len(samples) > self._n else samples
            choices += [self._said(job, rank, choice) for rank, choice in enumerate(best)]
        return self.answer(choices, usage=True)

    def _said(self, job: int, sample: int, choice: _Choice) -> dict[str, Any]:
        said = {
            "index": job * self._n + sample,
            "text": choice.text,
            "logprobs": self._logprobs(choice) if self._has_logprobs else None,
            "finish_reason": choice.finish,
        }
        if self.wishes.tokens:
            said |= {"token_ids": choice.tokens, "prompt_token_ids": list(self.jobs[job].tokens)}
        return said

    def _prompt_logprobs(self, job: int) -> list[tuple[int, Logprobs | None]]:
        if not self._has_logprobs:
            return []
        return self._of_prompts[job] or [(token, None) for token in self.jobs[job].tokens]

    def _logprobs(self, choice: _Choice) -> dict[str, Any]:
        texts = [self.model.token_text(token) for token, _ in choice.logprobs]
        offsets = [choice.offset]
        for token, _ in choice.logprobs:
            offsets.append(offsets[-1] + self.model.token_length(token))
        return {
            "tokens": texts,
            "token_logprobs": [each and each.token for _, each in choice.logprobs],
            "top_logprobs": [each and self._top(token, each) for token, each in choice.logprobs],
            "text_offset": offsets[:-1],
        }

    def _top(self, token: int, logprobs: Logprobs) -> dict[str, float]:
        """Return the log-probabilities of the most likely tokens and the chosen one, by their texts; of equal texts
        the most likely one's.
        """
        found: dict[str, float] = {}
        for each, value in (*logprobs.top.items(), (token, logprobs.token)):
            found.setdefault(self.model.token_text(each), value)
        return found

    def _length(self, logprobs: Sequence[tuple[int, Logprobs | None]]) -> int:
        return sum(self.model.token_length(token) for token, _ in logprobs)
