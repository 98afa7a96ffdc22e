"""The gain of speculative decoding: tokens a second with drafts over those without, in turns.

    python -m benchmarks.speculation_cpu [code_edit] [quotes] [code_edit_4] [quotes_4] [random] [draft]

The model is that of the benchmark's decode step: 1.1 G parameters, bfloat16, random weights. Its own text would be
noise, so each step is computed, and then the logits are those of a text that is given (`Replayed`). The texts of
`benchmarks/texts` are a code edit and a summary with quotes, whose answers repeat much of their prompts; words, marks
and white space are tokens, numbered as they come. Random texts are 1,024 tokens of 32,000, and of 50, where two tokens
often came before. The draft has a tenth of the parameters; of ten tokens it gets seven right.

Prompts are in the cache before the clock runs. Both engines take turns of a second.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from max.dtype import DType

from paged_kv.bench.steps import StepProblem, decoder_config
from paged_kv.bench.weight_cases import StepCase
from paged_kv.engine.engine import Engine
from paged_kv.engine.model import DecoderModel
from paged_kv.engine.sampling import Sampling

TEXTS = Path(__file__).parent / "texts"
ANSWER = "\n======== the answer ========\n"
PAGES = 600
DRAFT = {"layers": 8, "hidden": 768, "intermediate": 2560, "heads": 12, "kv_heads": 4}
"""109 M parameters."""
AGREES = 7
KINDS = ("code_edit", "quotes", "code_edit_4", "quotes_4", "random", "draft")
Text = tuple[list[int], list[int]]
"""A prompt and its answer."""


def random_model(**sizes: int) -> DecoderModel:
    """The benchmark's model, or one of other sizes."""
    problem = StepProblem(StepCase("step", "", context=1, **sizes), 0)  # type: ignore[arg-type]
    config = decoder_config(problem.case)
    return DecoderModel(config, problem.weights, dtype=DType.bfloat16, num_pages=PAGES, page_size=16)


class Replayed:
    """A model that computes its steps and then says what a given text says.

    Args:
        model: What computes.
        texts: Each prompt with its answer; no two begin alike.
        right: How many of ten tokens in a row are the text's, which ones is drawn; the others are wrong.
    """

    def __init__(self, model: DecoderModel, texts: Sequence[Text], right: int = 10) -> None:
        self._model = model
        self._texts = {tuple(prompt[:8]): [*prompt, *answer] for prompt, answer in texts}
        rng = np.random.default_rng(0)
        self._is_right = np.concatenate([rng.permutation(10) < right for _ in range(PAGES)])  # by position
        self._text_of: dict[int, list[int]] = {}
        for name in ("config", "num_pages", "page_size", "copy_page", "read_pages", "write_pages"):
            setattr(self, name, getattr(model, name))

    def step(
        self,
        tokens: Sequence[Sequence[int]],
        cache_lengths: Sequence[int],
        pages: Sequence[Sequence[int]],
        counts: Sequence[int] | None = None,
    ) -> npt.NDArray[np.float32]:
        logits = self._model.step(tokens, cache_lengths, pages, counts)
        row = 0
        for new, length, own, count in zip(tokens, cache_lengths, pages, counts or [1] * len(pages), strict=True):
            if length == 0:
                self._text_of[own[0]] = self._texts[tuple(new[:8])]
            text = self._text_of[own[0]]
            for at in range(length + len(new) - count + 1, length + len(new) + 1):
                says = text[at] if at < len(text) else 0
                if not self._is_right[at % self._is_right.size]:
                    says = (says + 1) % logits.shape[1]
                logits[row, says] = 1e4
                row += 1
        return logits


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


def compare(title: str, model: DecoderModel, texts: Sequence[Text], most: int, draft: Any = None) -> None:
    """All texts side by side, by an engine with drafts and by one without, a second each by turns.

    They write to the same pages: what attention reads then is noise in any case.
    """
    engines = [Engine(Replayed(model, texts), speculate=speculate) for speculate in (None, draft or "lookup")]  # type: ignore
    for engine in engines:
        for prompt, answer in texts:
            engine.add_request(prompt, Sampling(min(most, len(answer)), ignore_end=True))
        while engine.statistics.prompt_tokens < sum(len(prompt) for prompt, _ in texts):
            engine.step()
    seconds, tokens = [0.0, 0.0], [0, 0]
    while not all(engine.is_idle for engine in engines):
        for which, engine in enumerate(engines):
            began = time.perf_counter()
            while not engine.is_idle and time.perf_counter() < began + 1:
                tokens[which] += sum(len(output.tokens) for output in engine.step())
            seconds[which] += time.perf_counter() - began
    plain, drafted = (1e3 * took / count for took, count in zip(seconds, tokens, strict=True))
    figures = engines[1].statistics
    print(
        f"{title}: {plain / drafted:.2f}x: {plain:.1f} ms a token, {drafted:.1f} with drafts; {figures.accepted_tokens}"
        f" of {figures.draft_tokens} drafts were right, {figures.decode_tokens} tokens",
        flush=True,
    )


def main(wanted: Sequence[str]) -> None:
    model = random_model()
    for kind in wanted:
        if kind in ("code_edit", "quotes"):
            compare(f"{kind}, B 1", model, [words_of(kind)], 1000)
        elif kind in ("code_edit_4", "quotes_4"):
            prompt, answer = words_of(kind[:-2])
            # The same text after four prompts that begin in four ways.
            compare(f"{kind[:-2]}, B 4", model, [([31000 + at, *prompt], answer) for at in range(4)], 1000)
        elif kind == "random":
            for vocabulary in (32000, 50):
                compare(f"random tokens of {vocabulary}, B 1", model, [random_text(vocabulary, 0)], 512)
        else:
            texts = [random_text(32000, 1)]
            compare("draft, B 1", model, texts, 512, Replayed(random_model(**DRAFT), texts, AGREES))


if __name__ == "__main__":
    main(sys.argv[1:] or KINDS)
