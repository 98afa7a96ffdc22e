"""The gain of speculative decoding: tokens a second with drafts over those without, in turns.

    python -m benchmarks.speculation_cpu [code_edit] [quotes] [code_edit_4] [quotes_4] [random] [draft] [mtp]

The model is that of the benchmark's decode step: 1.1 G parameters, bfloat16, random weights. Its own text would be
noise, so each step is computed, and then the logits are those of a text that is given (`Replayed`). The texts of
`benchmarks/texts` are a code edit and a summary with quotes, whose answers repeat much of their prompts; words, marks
and white space are tokens, numbered as they come. Random texts are 1,024 tokens of 32,000, and of 50, where two tokens
often came before. The draft has a tenth of the parameters; of ten tokens it gets seven right. The MTP layer is one
more layer of the model, whose logits are those of the text too: always, or of five tokens in ten.

Prompts are in the cache before the clock runs. Both engines take turns of `TURN` tokens.
"""

from __future__ import annotations

import itertools
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from max.dtype import DType

from paged_kv.bench.job import take_turns
from paged_kv.bench.steps import StepProblem, decoder_config
from paged_kv.bench.weight_cases import StepCase
from paged_kv.checkpoint.draft_layers import DraftSource
from paged_kv.engine.engine import Engine
from paged_kv.engine.model import DecoderModel
from paged_kv.engine.sampling import Sampling
from paged_kv.graphs.models.config import DraftHead
from paged_kv.graphs.models.tensors import stored_tensors

TEXTS = Path(__file__).parent / "texts"
ANSWER = "\n======== the answer ========\n"
PAGES = 600
DRAFT = {"layers": 8, "hidden": 768, "intermediate": 2560, "heads": 12, "kv_heads": 4}
"""109 M parameters."""
AGREES = 7
TURN = 24
"""Tokens of all requests."""
KINDS = ("code_edit", "quotes", "code_edit_4", "quotes_4", "random", "draft", "mtp")
Text = tuple[list[int], list[int]]
"""A prompt and its answer."""


def random_model(with_layer: bool = False, **sizes: int) -> DecoderModel:
    """The benchmark's model, or one of other sizes; with an MTP layer that shares its embeddings and head."""
    problem = StepProblem(StepCase("step", "", context=1, **sizes), 0)  # type: ignore[arg-type]
    config, draft = decoder_config(problem.case), None
    if with_layer:
        shared = ("model.embed_tokens.weight", "lm_head.weight")
        head = DraftHead(kind="mtp", vocab_size=config.vocab_size, shared=shared)
        draft = DraftSource(replace(config, num_hidden_layers=1, draft_head=head), LayerOf(problem.weights))  # type: ignore[arg-type]
    return DecoderModel(config, problem.weights, dtype=DType.bfloat16, num_pages=PAGES, page_size=16, draft=draft)


class LayerOf:
    """A checkpoint of an MTP layer: the first layer of a model, and zeros."""

    def __init__(self, weights: Mapping[str, np.ndarray]) -> None:
        self._weights = weights

    def load(self, config: Any, *_: object) -> dict[str, np.ndarray]:
        kind = self._weights["lm_head.weight"].dtype
        tensors = stored_tensors(config).items()
        return {name: self._weights.get(name, np.zeros(shape, kind)) for name, shape in tensors}


class Replayed:
    """A model, or a draft layer, that computes its steps and then says what a given text says.

    Args:
        model: What computes.
        texts: Each prompt with its answer; no two begin alike.
        right: How many of ten tokens in a row are the text's, which ones is drawn; the others are wrong.
        layer_right: The same of its draft layer, where it has one.
    """

    def __init__(self, model: Any, texts: Sequence[Text], right: int = 10, layer_right: int = 10) -> None:
        self._model = model
        self._texts = {tuple(prompt[:8]): [*prompt, *answer] for prompt, answer in texts}
        rng = np.random.default_rng(0)
        self._is_right = np.concatenate([rng.permutation(10) < right for _ in range(PAGES)])  # by position
        self._text_of: dict[int, list[int]] = {}
        if getattr(model, "draft_layer", None) is not None:
            self.draft_layer = Replayed(model.draft_layer, (), layer_right)
            self.draft_layer._text_of = self._text_of
            self.draft_layer.step = self.draft_layer.step_of_layer  # type: ignore[assignment,method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def step(
        self,
        tokens: Sequence[Sequence[int]],
        cache_lengths: Sequence[int],
        pages: Sequence[Sequence[int]],
        counts: Sequence[int] | None = None,
        *rest: object,
    ) -> npt.NDArray[np.float32]:
        logits = self._model.step(tokens, cache_lengths, pages, counts, *rest)
        row = 0
        for new, length, own, count in zip(tokens, cache_lengths, pages, counts or [1] * len(pages), strict=True):
            if length == 0:
                self._text_of[own[0]] = self._texts[tuple(new[:8])]
            for at in range(length + len(new) - count + 1, length + len(new) + 1):
                self._say(logits[row], own[0], at)
                row += 1
        return logits

    def step_of_layer(
        self, tokens: Any, cache_lengths: Sequence[int], pages: Sequence[Sequence[int]], hidden: Any
    ) -> Any:
        logits, states = self._model.step(tokens, cache_lengths, pages, hidden)
        for row, length, own in zip(logits, cache_lengths, pages, strict=True):
            self._say(row, own[0], length + 1)
        return logits, states

    def _say(self, logits: npt.NDArray[np.float32], page: int, at: int) -> None:
        """Makes the largest logit that of a token at a place of the text of a request, or of a wrong one."""
        text = self._text_of[page]
        token = text[at] if at < len(text) else 0
        logits[token if self._is_right[at % self._is_right.size] else (token + 1) % len(logits)] = 1e4


def words_of(name: str) -> Text:
    """A text of `TEXTS` as tokens."""
    ids: dict[str, int] = {}
    prompt, answer = (
        [ids.setdefault(piece, len(ids)) for piece in re.findall(r" ?\w+| ?[^\w\s]|\s+", part)]
        for part in (TEXTS / f"{name}.txt").read_text().split(ANSWER)
    )
    return prompt, answer


def random_text(vocabulary: int, seed: int) -> Text:
    tokens = np.random.default_rng(seed).integers(0, vocabulary, 1024).tolist()
    return tokens[:512], tokens[512:]


def compare(title: str, model: DecoderModel, texts: Sequence[Text], draft: Any = "lookup", right: int = 10) -> None:
    """All texts at once, by an engine with drafts and by one without, in turns. They write to the same pages: what
    attention reads then is noise in any case.
    """
    runs: dict[str, Callable[[int], object]] = {}
    figures: dict[str, tuple[Engine, list[int], list[float]]] = {}
    for name, speculate in (("plain", None), ("drafts", draft)):
        engine = Engine(Replayed(model, texts, layer_right=right), speculate=speculate)
        for prompt, answer in texts:
            engine.add_request(prompt, Sampling(len(answer), ignore_end=True))
        while engine.statistics.prompt_tokens < sum(len(prompt) for prompt, _ in texts):
            engine.step()
        figures[name] = engine, tokens, predicted = engine, list[int](), list[float]()
        runs[name] = partial(generate, engine, tokens, predicted)
    times = take_turns(runs, 9)
    plain, drafted = (
        statistics.median(
            1e3 * took / count for took, count in zip(times[name], tokens[-len(times[name]) :], strict=True)
        )
        for name, (_, tokens, _) in figures.items()
    )
    engine, _, predicted = figures["drafts"]
    counts = engine.statistics
    print(
        f"{title}: {plain / drafted:.2f}x, {statistics.mean(predicted):.2f}x predicted: {plain:.1f} ms a token,"
        f" {drafted:.1f} with drafts; {counts.accepted_tokens} of {counts.draft_tokens} drafts were right,"
        f" {counts.decode_tokens} tokens in {counts.steps} steps",
        flush=True,
    )


def generate(engine: Engine, tokens: list[int], predicted: list[float], _: int) -> None:
    """A turn: at least `TURN` tokens; how many, and the speed-up that the engine predicts for each step, are noted."""
    count = 0
    while count < TURN and not engine.is_idle:
        count += sum(len(output.tokens) for output in engine.step())
        predicted.append(engine._speculation.speedup)
    tokens.append(count)


def main(kinds: Sequence[str]) -> None:
    model = random_model("mtp" in kinds)
    for kind in kinds:
        if kind in ("code_edit", "quotes"):
            compare(f"{kind}, B 1", model, [words_of(kind)])
        elif kind in ("code_edit_4", "quotes_4"):
            prompt, answer = words_of(kind[:-2])
            # The same text after four prompts that begin in four ways.
            compare(f"{kind[:-2]}, B 4", model, [([31000 + at, *prompt], answer) for at in range(4)])
        elif kind == "random":
            for vocabulary in (32000, 50):
                compare(f"random tokens of {vocabulary}, B 1", model, [random_text(vocabulary, 0)])
        elif kind == "draft":
            texts = [random_text(32000, 1)]
            compare("draft, B 1", model, texts, Replayed(random_model(False, **DRAFT), texts, AGREES))
        else:
            for batch, right in itertools.product((1, 4), (10, 5)):
                texts = [random_text(32000, seed) for seed in range(batch)]
                compare(f"MTP layer, {right} of 10 right, B {batch}", model, texts, "mtp", right)


if __name__ == "__main__":
    main(sys.argv[1:] or KINDS)
