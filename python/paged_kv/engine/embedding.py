"""Vectors of texts, and scores of documents: one step a batch, whose pages nothing keeps.

A text's tokens take one step, whatever its length, and its K and V are not read again, so the pages are those of one
step and the next one overwrites them. Texts of a step lie one after the other without padding: none waits for a longer
one, and texts need no order by length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from max.dtype import DType

from paged_kv.arguments import integer, one_of, printable, shown
from paged_kv.checkpoint.embedding_files import (
    QWEN3_INSTRUCTION,
    Array,
    Recipe,
    Task,
    normed,
    open_embedding,
    optional_fields,
)
from paged_kv.checkpoint.source import Source, open_source
from paged_kv.checkpoint.weights import OnProgress
from paged_kv.engine.interfaces import StepStates
from paged_kv.engine.model import DecoderModel
from paged_kv.engine.requests import check_prompt
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.errors import ContractError, ContractTypeError
from paged_kv.graphs.models.config import with_step_cache
from paged_kv.pool import pages_needed

Tokens: TypeAlias = Sequence[int]
_KINDS = ("query", "document")
_PLACES = re.compile(r"\{(instruction|query|document)\}")
PAGE_SIZE = 64
MOST_TEXTS = 256
"""Texts of one step."""
STEP_TOKENS = 2048


class TextEncoder:
    """Tokens of texts, as a model that embeds or ranks them takes them; needs no weights.

    Args:
        source: The checkpoint.
        recipe: What `open_embedding` says of it.
        max_length: Tokens of the longest text; None: the model's.

    Raises:
        CheckpointError: the tokenizer cannot be read.
        ContractTypeError, ContractError: `max_length` is no integer, or above the model's context.
    """

    def __init__(self, source: Source, recipe: Recipe, max_length: int | None = None) -> None:
        self.config, self.recipe = source.config, recipe
        self.tokenizer = Tokenizer(source, source.config)
        context = source.config.max_position_embeddings
        most = min(recipe.max_tokens or context, context)
        self.max_length = most if max_length is None else integer("max_length", max_length, 1, most)
        ends = self.tokenizer.encode("a")
        self._last = ends[len(ends) - ends[::-1].index(self._plain("a")[-1]) :]
        self._appended: list[int] = []
        """The end token, where the checkpoint asks for it and the tokenizer does not add it."""
        if not self._last and optional_fields(source.folder / "tokenizer_config.json").boolean("add_eos_token"):
            self._last = self._appended = list(source.config.eos_token_ids[:1])

    @property
    def size(self) -> int:
        """The length of a vector; 1 of a model that ranks."""
        hidden = np.ones((1, self.config.hidden_size), np.float32)
        return 1 if self.recipe.task == "rerank" else self.recipe.finish(hidden).shape[1]

    def prompt(self, name: str | None) -> str:
        """The text that precedes others, by its name in the checkpoint; the default one where it is None.

        Raises:
            ContractError: there is none of this name.
        """
        prompts = self.recipe.prompts
        name = self.recipe.default_prompt if name is None else name
        if name not in (None, *prompts):
            names = " or ".join(map(repr, prompts)) or "none: the checkpoint names no prompts"
            raise ContractError(f"prompt_name: expected {printable(names)}, got {shown(name)}")
        return "" if name is None else prompts[name]

    def text(self, name: str, text: Any, prompt: str = "", most: int | None = None) -> tuple[int, ...]:
        """The tokens of a text after a prompt, with the special tokens of the tokenizer, or tokens as they are.

        Args:
            name: The argument's name in errors.
            text: A string, or token ids.
            most: Cuts texts to so many tokens, those that end a text included; None: a longer text is refused.

        Raises:
            ContractTypeError, ContractError: it is neither, empty, too long, or not in the vocabulary.
        """
        if isinstance(text, str):
            if not text:
                raise ContractError(f"{name}: expected a text, got an empty one")
            tokens = self.tokenizer.encode(prompt + text)
            tokens += self._appended if tokens[-1:] != self._appended else []
            return self._fitting(name, tokens, most, len(self._last))
        if isinstance(text, list | tuple | np.ndarray):
            return self._fitting(name, list(check_prompt(self.config, name, text[:most])), most, 0)
        raise ContractTypeError(f"{name}: expected a text or token ids, got {shown(text)}")

    def pairs(
        self, name: str, query: Any, documents: Sequence[Any], instruction: str | None = None, most: int | None = None
    ) -> list[tuple[int, ...]]:
        """The tokens whose results `Recipe.scores` takes: each pair of a query and a document in the template; of a
        model that embeds the query and each document. Arguments and errors as `text`.
        """
        named = [(f"{name}[{index}]", document) for index, document in enumerate(documents)]
        if self.recipe.template is None:
            of_query, of_document = (self.prompt(kind if kind in self.recipe.prompts else None) for kind in _KINDS)
            tokens = [self.text(where, document, of_document, most) for where, document in named]
            return [self.text("query", query, of_query, most), *tokens]
        before, pair, after = self.recipe.template
        start, end, parts = self._plain(before), self._plain(after), _PLACES.split(pair)
        tokens = []
        for where, document in named:
            values = {"instruction": instruction or QWEN3_INSTRUCTION, "query": query, "document": document}
            for key, value in values.items():
                if not isinstance(value, str) or not value:
                    raise ContractTypeError(f"{where}: expected a text that is not empty as {key}, got {shown(value)}")
            text = "".join(values[part] if index % 2 else part for index, part in enumerate(parts))
            tokens.append(self._fitting(where, [*start, *self._plain(text), *end], most, len(end)))
        return tokens

    def check_dimensions(self, dimensions: int | None) -> int | None:
        """A size to cut vectors to. Raises ContractTypeError, ContractError where the model allows no such size."""
        allowed = self.recipe.dimensions
        if dimensions is not None and allowed is not None and dimensions not in (*allowed, self.size):
            listed = " or ".join(map(str, (*allowed, self.size)))
            raise ContractError(f"dimensions: expected {listed}, as config.json says, got {shown(dimensions)}")
        return None if dimensions is None else integer("dimensions", dimensions, 1, self.size)

    def _plain(self, text: str) -> list[int]:
        """The tokens of a part of a text, without special ones around it."""
        return self.tokenizer.encode(text, is_template=True) if text else []

    def _fitting(self, name: str, tokens: list[int], most: int | None, last: int) -> tuple[int, ...]:
        """Tokens that fit the model, cut to `most` before the `last` ones."""
        if most is not None and len(tokens) > most:
            if most <= last:
                raise ContractError(f"{name}: expected more than {last} tokens, those that end a text, got {most}")
            tokens = [*tokens[: most - last], *tokens[len(tokens) - last :]]
        if len(tokens) > self.max_length:
            raise ContractError(f"{name}: expected at most {self.max_length} tokens, got {len(tokens)}; or truncate it")
        return tuple(tokens)


class Embedder:
    """Embeds texts, or ranks documents. Made by `load_embedder`; its calls may not overlap.

    Args:
        model: A step of hidden states, or of logits where two tokens are compared, whose pages it takes all.
        encoder: The tokens of texts.
        max_step_tokens: Tokens of one step; a longer text has a step of its own.
    """

    def __init__(self, model: DecoderModel, encoder: TextEncoder, max_step_tokens: int = STEP_TOKENS) -> None:
        self.model, self.encoder = model, encoder
        self._most = integer("max_step_tokens", max_step_tokens, 1)

    @property
    def task(self) -> Task:
        """The model's use: "embed" or "rerank"."""
        return self.encoder.recipe.task

    @property
    def size(self) -> int:
        """The length of a vector; 1 of a model that ranks."""
        return self.encoder.size

    def embed(
        self,
        texts: Sequence[str | Tokens],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> Array:
        """The vectors `[n, size]` float32 of texts or token ids, in their order.

        Args:
            prompt_name: The checkpoint's prompt before each text, such as "query"; its default one where None.
            dimensions: Cuts vectors to the first so many numbers and norms them again.
            truncate: Cuts long texts at their end; else they are refused.

        Raises:
            ContractTypeError, ContractError: a text is empty or too long, a token is not in the vocabulary, or the
                model has no such prompt or size; it ranks documents.
        """
        if self.task != "embed":
            raise ContractError("embed: expected a model that embeds texts, got one that ranks documents: call score")
        _check_list("texts", texts)
        encoder = self.encoder
        dimensions, prompt = encoder.check_dimensions(dimensions), encoder.prompt(prompt_name)
        most = encoder.max_length if truncate else None
        tokens = [encoder.text(f"texts[{index}]", text, prompt, most) for index, text in enumerate(texts)]
        return cut(self.compute(tokens), dimensions)

    def score(
        self, query: str, documents: Sequence[str], *, instruction: str | None = None, truncate: bool = False
    ) -> Array:
        """How well each document answers a query, `[n]` float32 in their order: a probability; of a model that embeds
        the cosine of both vectors, with its prompts "query" and "document" where it has them.

        Args:
            instruction: What is looked for; Qwen3-Reranker's own where None.
            truncate: Cuts long documents at their end; else they are refused.

        Raises:
            ContractTypeError, ContractError: as `embed`.
        """
        _check_list("documents", documents)
        most = self.encoder.max_length if truncate else None
        tokens = self.encoder.pairs("documents", query, documents, instruction, most)
        return self.encoder.recipe.scores(self.compute(tokens))

    def compute(self, texts: Sequence[Tokens]) -> Array:
        """The vectors `[n, size]`, or scores `[n, 1]`, of tokens that were checked, in as many steps as they need."""
        rows, first = [np.empty((0, self.size), np.float32)], 0
        while first < len(texts):
            count = self.fitting(len(text) for text in texts[first : first + MOST_TEXTS])
            rows.append(self.step(texts[first : first + count]))
            first += count
        return np.concatenate(rows)

    def fitting(self, lengths: Iterable[int]) -> int:
        """How many texts, of these lengths, are a step: one at least, of `MOST_TEXTS` at most."""
        total = 0
        for count, length in enumerate(lengths):
            total += length
            if count and (total > self._most or count == MOST_TEXTS):
                return count
        return count + 1

    def step(self, texts: Sequence[Tokens]) -> Array:
        """The vectors `[n, size]`, or scores `[n, 1]`, of tokens that `fitting` lets into a step."""
        lengths = [len(text) for text in texts]
        ends = np.cumsum([pages_needed(length, PAGE_SIZE) for length in lengths]).tolist()
        pages = [range(first, end) for first, end in zip([0, *ends[:-1]], ends, strict=True)]
        recipe = self.encoder.recipe
        states = None
        if self.model.num_states:
            states = StepStates([-1] * len(texts), [[(length, slot)] for slot, length in enumerate(lengths)])
        counts = None if recipe.pooling == "last" else lengths
        x = self.model.step(texts, [0] * len(texts), pages, counts, states)
        starts = np.cumsum([0, *lengths[:-1]])
        if recipe.pooling == "mean":
            x = np.add.reduceat(x, starts, axis=0) / np.array(lengths, np.float32)[:, None]
        elif recipe.pooling == "first":
            x = x[starts]
        return recipe.finish(x)


def cut(vectors: Array, dimensions: int | None) -> Array:
    """Vectors `[n, size]` cut to their first numbers and normed again."""
    return vectors if dimensions is None else normed(vectors[:, :dimensions])


def _check_list(name: str, texts: Any) -> None:
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise ContractTypeError(f"{name}: expected a list of texts, got {shown(texts)}")


def load_embedder(
    folder: Path | str | Source,
    *,
    task: Task | None = None,
    dtype: str | None = None,
    max_length: int | None = None,
    max_step_tokens: int = STEP_TOKENS,
    on_progress: OnProgress | None = None,
) -> Embedder:
    """A model that embeds texts or ranks documents, on the CPU.

    Args:
        folder: A folder in Hugging Face format, a GGUF file, or a hub's model.
        task: "embed" or "rerank" a checkpoint that does not say so itself, such as any decoder or Qwen3-Reranker; what
            its files say where None.
        dtype: "float32" or "bfloat16"; the checkpoint's own where None.
        max_length: Tokens of the longest text; the model's context where None.
        max_step_tokens: Tokens of one step.
        on_progress: Called while weights are loaded.

    Raises:
        CheckpointError: there is no checkpoint that this package runs, or it generates texts and there is no `task`.
        ContractTypeError, ContractError: an argument has the wrong type or is out of range.
    """
    one_of("task", task, ("embed", "rerank", None))
    one_of("dtype", dtype, ("float32", "bfloat16", None))
    source, recipe = open_embedding(folder if isinstance(folder, Source) else open_source(folder), task)
    encoder = TextEncoder(source, recipe, max_length)
    kind = DType.bfloat16 if (dtype or source.config.dtype) == "bfloat16" else DType.float32
    return embedder_of(source, encoder, kind, max_step_tokens, on_progress)


def embedder_of(
    source: Source,
    encoder: TextEncoder,
    dtype: DType,
    max_step_tokens: int = STEP_TOKENS,
    on_progress: OnProgress | None = None,
) -> Embedder:
    """The embedder of a source and an encoder that were made together. Raises as `DecoderModel.from_folder`."""
    longest = max(integer("max_step_tokens", max_step_tokens, 1), encoder.max_length)
    model = DecoderModel.from_folder(
        replace(source, config=with_step_cache(source.config)),
        dtype=dtype,
        num_pages=pages_needed(longest, PAGE_SIZE) + MOST_TEXTS,  # each text may leave a part of a page
        page_size=PAGE_SIZE,
        num_states=None if source.config.recurrence is None else MOST_TEXTS,
        num_window_pages=0,
        on_progress=on_progress,
        output=encoder.recipe.output,
    )
    return Embedder(model, encoder, max_step_tokens)
