"""Requests in an engine that needs no compiler, whatever is raised in between: what each got against its lone run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import tokenizers

from paged_kv.engine.engine import Engine
from paged_kv.engine.interfaces import compile_structure
from paged_kv.engine.requests import Output, Sampling
from paged_kv.structured_output import StructureCompiler
from support.fake_model import VOCAB, FakeModel, alone

KINDS = [
    Sampling(30),
    Sampling(30, temperature=1.0, top_p=0.8, seed=1, logprobs=2),
    Sampling(30, temperature=0.8, top_k=5, repetition_penalty=1.3, seed=2),
    Sampling(30, temperature=1.2, min_p=0.1, presence_penalty=1.0, frequency_penalty=0.5, seed=3, logprobs=0),
    Sampling(30, repetition_penalty=1.5, logit_bias={3: 1.5, 4: -100}, stop_tokens=(9,)),
]
"""Each way to choose a token."""
MOST_STEPS = 3000
"""After which requests that have not ended never will."""


class Letters:
    """A tokenizer of letters: token i is the i-th of the alphabet. `before` is called before each token is decoded.

    A stream gives each letter with the next one, as one that waits for the rest of a character.
    """

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self.before, self._last = before, ""

    @property
    def structure_compiler(self) -> StructureCompiler:
        return _structures()

    def encode(self, prompt: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in prompt]

    def stream(self, *, skip_special_tokens: bool = True) -> Letters:  # noqa: ARG002 - it has none
        self.before()
        return Letters(self.before)

    def push(self, token: int) -> str:
        self.before()
        before, self._last = self._last, chr(ord("a") + token)
        return before

    def flush(self) -> str:
        self.before()
        return self._last


@cache
def _structures() -> StructureCompiler:
    letters = tokenizers.Tokenizer(tokenizers.models.BPE({chr(ord("a") + at): at for at in range(VOCAB)}, []))
    letters.decoder = tokenizers.decoders.ByteLevel()
    return StructureCompiler(letters)


def run(engine: Engine) -> dict[tuple[int, int], list[int]]:
    """Steps until all requests ended, none with an error; the tokens of each sample. The pool is empty then."""
    tokens: dict[tuple[int, int], list[int]] = defaultdict(list)
    while not engine.is_idle:
        before = engine.model.computed
        for output in engine.step():
            assert output.error is None
            tokens[output.request, output.sample] += output.tokens
        assert engine.model.computed > before or engine.is_idle
        engine.pool.check_integrity()
    assert engine.pool.num_used == 0
    return dict(tokens)


def guess_often(engine: Engine) -> None:
    """Takes rows for nearly free: drafts are made wherever there are some, whatever the clock says."""
    engine._speculation._line = lambda: (1.0, 1e-3)
    engine._speculation._draft and setattr(engine._speculation._draft, "seconds", 0.0)


@dataclass
class Asked:
    """The request under one number."""

    prompt: list[int]
    sampling: Sampling
    n: int = 1


@dataclass
class Ledger:
    """All requests of an engine and all outputs that came."""

    engine: Engine
    asked: dict[int, Asked] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    outputs: list[Output] = field(default_factory=list)

    def add(self, prompt: list[int], sampling: Sampling, n: int = 1, namespace: object = None) -> int:
        number = self.engine.add_request(prompt, sampling, n, namespace=namespace)
        self.asked[number] = Asked(prompt, sampling, n)
        return number

    def finish(self, step: Callable[[], Iterable[Output]] | None = None) -> None:
        """Steps until all requests ended. An exception in between loses no output of the ledger: nothing is called."""
        for _ in range(MOST_STEPS):
            if self.engine.is_idle:
                return
            self.outputs += (step or self.engine.step)()
        raise AssertionError(f"requests that never end: {self.engine.num_running} run, {self.engine.num_waiting} wait")

    def check(self, window: int = -1, most_errors: int = 0) -> int:
        """Check all that must hold once all requests ended; return how many samples ended with an error."""
        pool = self.engine.pool
        pool.check_integrity()
        assert pool.num_free + pool.num_cached == pool.num_pages, "pages are lost"
        assert (self.engine.num_running, self.engine.num_waiting) == (0, 0)
        found = defaultdict(list)
        for output in self.outputs:
            found[output.request, output.sample].append(output)
        assert {number for number, _ in found} <= set(self.asked), "outputs of nobody"
        errors = 0
        for number, asked in self.asked.items():
            for sample in range(asked.n):
                got = found[number, sample]
                tokens = [token for output in got for token in output.tokens]
                structure = compile_structure(Letters(), asked.sampling.structured_output)
                expected = alone(asked.prompt, asked.sampling, sample, window, structure)
                ends = [output.finish for output in got if output.finish]
                whole = ends in (["length"], ["stop"])
                assert tokens == (expected if whole else expected[: len(tokens)]), (number, sample)
                assert not ends or (got[-1].finish and len(ends) == 1), "outputs after the last"
                assert whole or ends == ["error"] or number in self.aborted, f"{number}, {sample} did not end: {ends}"
                errors += ends == ["error"]
                text = "".join(output.text for output in got)
                if self.engine._tokenizer is not None and not asked.sampling.stop:
                    letters = "".join(
                        chr(ord("a") + each) for each in expected if each not in asked.sampling.stop_tokens
                    )
                    assert text == letters if whole else letters.startswith(text), (number, sample)
        assert errors <= most_errors, f"{errors} samples failed, of {most_errors} that might"
        return errors


class Chat:
    """An engine around a `FakeModel`, one prompt after the other, and how many tokens it computes."""

    def __init__(self, model: FakeModel, **options: Any) -> None:
        self.model, self.engine = model, Engine(model, **options)
        self.text: list[int] = []
        """The last prompt and what its first sample wrote."""

    def computed(self, prompt: list[int], new: int = 1, n: int = 1) -> int:
        """The tokens of the prompt that were not found; texts are those of lone runs."""
        before, sampling = self.model.computed, Sampling(new, 1.0, seed=3)
        number = self.engine.add_request(prompt, sampling, n)
        found = run(self.engine)
        for sample in range(n):
            assert found[number, sample] == alone(prompt, sampling, sample)
        self.text = [*prompt, *found[number, 0]]
        return self.model.computed - before - n * (new - 1)


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
