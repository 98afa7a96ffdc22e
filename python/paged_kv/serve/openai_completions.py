"""OpenAI's /v1/completions: one or several prompts, as texts or tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paged_kv.engine.sampling import Logprobs
from paged_kv.engine.tokenizer import StreamDecoder
from paged_kv.serve.backend import Job, Piece
from paged_kv.serve.fields import BodyFields
from paged_kv.serve.request_exchange import ChoicesExchange, Event, Exchange, Wishes
from paged_kv.serve.sampling import MOST_LOGPROBS, REFUSED, read_max_tokens, read_sampling, read_structure
from paged_kv.serve.served_model import ServedModel

MOST_PROMPTS = 128
"""Prompts of one request at most."""
MOST_SAMPLES = 16
"""Samples of one prompt at most."""
_BYTES = "bytes:"
"""Precedes a token that is a part of a character, as OpenAI writes it."""


def read_completion(body: BodyFields, model: ServedModel) -> Exchange:
    """A request to /v1/completions.

    Raises:
        ContractError, ContractTypeError, CheckpointError, ToolchainError: a field cannot be taken.
    """
    model = model.check_name(body)
    prompts = _prompts(body)
    n = body.integer("n", 1, 1, MOST_SAMPLES)
    best_of = body.integer("best_of", n, 1, MOST_SAMPLES)
    wishes = Wishes.read(body)
    if best_of < n or (best_of > n and wishes.stream):
        raise body.error("best_of", f"expected at least n = {n}, and no more in a stream, got {best_of}")
    model.check_samples("best_of" if best_of > n else "n", len(prompts), best_of)
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
        [Job(each, sampling, best_of, namespace, model.adapter) for each in tokens],
        model,
        wishes,
        n=n,
        echo=[prompt if isinstance(prompt, str) else model.text(prompt) for _, prompt in prompts] if echo else None,
        logprobs=logprobs is not None,
        is_empty=most == 0,
    )


def _prompts(body: BodyFields) -> list[tuple[str, Any]]:
    """The prompts, each with its name in errors."""
    prompt = body.any("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(each, str | list) for each in prompt):
        if len(prompt) > MOST_PROMPTS:
            raise body.error("prompt", f"expected at most {MOST_PROMPTS} prompts, got {len(prompt)}")
        return [(f"prompt[{index}]", each) for index, each in enumerate(prompt)]
    return [("prompt", prompt)]


class _Scored(NamedTuple):
    """A token of an answer with its log-probabilities."""

    token: int
    logprobs: Logprobs | None
    offset: int
    """Characters of the text before it. A part of a character begins where the character does."""


class _Offsets:
    """The places of tokens in a text, as it is streamed.

    Args:
        decoder: The decoder of these tokens alone.
        start: Characters before the first of them.
    """

    def __init__(self, decoder: StreamDecoder, start: int = 0) -> None:
        self._decoder, self._end = decoder, start

    def next(self, token: int) -> int:
        """Characters before the next token."""
        offset = self._end
        self._end += len(self._decoder.push(token))
        return offset


@dataclass
class _Choice:
    """One continuation, as far as it has come."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scored: list[_Scored] = field(default_factory=list)
    """Its tokens with log-probabilities, end tokens left out."""
    scores: list[float] = field(default_factory=list)
    """Log-probabilities of all its tokens."""
    finish: str | None = None
    is_started: bool = False
    offsets: _Offsets | None = None
    """The places of tokens that come next."""

    @property
    def mean(self) -> float:
        """The mean log-probability of its tokens."""
        return sum(self.scores) / max(len(self.scores), 1)


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
        self._of_prompts: list[tuple[Logprobs | None, ...]] = [() for _ in jobs]
        self._choices = [[_Choice() for _ in range(job.n)] for job in jobs]

    def take(self, job: int, sample: int, pieces: Sequence[Piece]) -> list[Event]:
        choice, new = self._choices[job][sample], _Choice()
        for piece in pieces:
            if piece.prompt_logprobs:
                self._of_prompts[job] = (None, *piece.prompt_logprobs)
            if self._is_empty:
                self.usage.completion -= len(piece.tokens)
            else:
                new.text += piece.text
                new.tokens += piece.tokens
                new.scores += [each.token for each in piece.logprobs]
                if self._has_logprobs:
                    new.scored += self._scored(job, choice, piece)
            new.finish = piece.finish
        if self._echo is not None and not choice.is_started:
            new.text = self._echo[job] + new.text
            new.scored = self._of_prompt(job) + new.scored
        choice.is_started = True
        choice.text += new.text
        choice.tokens += new.tokens
        choice.scores += new.scores
        choice.scored += new.scored
        choice.finish = new.finish
        if new.finish:  # tokens of a stop text would begin behind the text
            new.scored, choice.scored = (
                [each._replace(offset=min(each.offset, len(choice.text))) for each in scored]
                for scored in (new.scored, choice.scored)
            )
        if not self.stream or not (new.text or new.finish or new.scored):
            return []
        return [self.answer([self._choice_json(job, sample, new)], usage=False)]

    def whole(self) -> dict[str, Any]:
        choices = []
        for job, samples in enumerate(self._choices):
            best = sorted(samples, key=lambda choice: -choice.mean)[: self._n] if len(samples) > self._n else samples
            choices += [self._choice_json(job, rank, choice) for rank, choice in enumerate(best)]
        return self.answer(choices, usage=True)

    def _choice_json(self, job: int, sample: int, choice: _Choice) -> dict[str, Any]:
        entry = {
            "index": job * self._n + sample,
            "text": choice.text,
            "logprobs": self._logprobs(choice.scored) if self._has_logprobs else None,
            "finish_reason": choice.finish,
        }
        if self.wishes.tokens:
            entry |= {"token_ids": choice.tokens, "prompt_token_ids": list(self.jobs[job].tokens)}
        return entry

    def _scored(self, job: int, choice: _Choice, piece: Piece) -> list[_Scored]:
        if choice.offsets is None:
            start = 0 if self._echo is None else len(self._echo[job])
            choice.offsets = self._offsets(job, start)
        offsets = choice.offsets
        return [
            _Scored(token, logprobs, offsets.next(token))
            for token, logprobs in zip(piece.tokens, piece.logprobs, strict=False)
            if token not in self.end_tokens
        ]

    def _of_prompt(self, job: int) -> list[_Scored]:
        """The tokens of a prompt that is echoed; their text may be longer than what the client has sent."""
        if not self._has_logprobs or self._echo is None:
            return []
        tokens, offsets, most = self.jobs[job].tokens, self._offsets(job), len(self._echo[job])
        logprobs = self._of_prompts[job] or (None,) * len(tokens)
        return [_Scored(*each, min(offsets.next(each[0]), most)) for each in zip(tokens, logprobs, strict=True)]

    def _offsets(self, job: int, start: int = 0) -> _Offsets:
        skips = self.jobs[job].sampling.skip_special_tokens
        return _Offsets(self.model.tokenizer.stream(skip_special_tokens=skips), start)

    def _logprobs(self, scored: Sequence[_Scored]) -> dict[str, Any]:
        return {
            "tokens": [self.model.token_text(each.token, _BYTES) for each in scored],
            "token_logprobs": [each.logprobs and each.logprobs.token for each in scored],
            "top_logprobs": [each.logprobs and self._top(each.token, each.logprobs) for each in scored],
            "text_offset": [each.offset for each in scored],
        }

    def _top(self, token: int, logprobs: Logprobs) -> dict[str, float]:
        """Return the log-probabilities of the most likely tokens and the chosen one, by their texts. Of several tokens
        with one text the chosen one, else the most likely one has it as its key; the others are `token_id:NUMBER`.
        """
        values = logprobs.top | ({} if token in logprobs.top else {token: logprobs.token})
        chosen = self.model.token_text(token, _BYTES)
        by_text: dict[str, float] = {}
        for each, value in values.items():
            key = self.model.token_text(each, _BYTES)
            is_taken = key in by_text or (key == chosen and each != token)
            by_text[f"token_id:{each}" if is_taken else key] = value
        return by_text
