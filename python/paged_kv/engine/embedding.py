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

from paged_kv.arguments import integer, printable, shown
from paged_kv.checkpoint.embedding_files import (
    QWEN3_INSTRUCTION,
    Array,
    EmbeddingRecipe,
    Recipe,
    RerankRecipe,
    Task,
    normed,
    open_embedding,
)
from paged_kv.checkpoint.source import Source, open_source
from paged_kv.checkpoint.weights import OnProgress
from paged_kv.engine.interfaces import StepStates
from paged_kv.engine.model import DecoderModel
from paged_kv.engine.requests import check_prompt
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.errors import CheckpointError, ContractError, ContractTypeError
from paged_kv.graphs.models.config import with_step_cache
from paged_kv.graphs.models.fields import Fields
from paged_kv.pool import pages_needed

Tokens: TypeAlias = Sequence[int]
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
        CheckpointError: the tokenizer cannot be read, or lacks "yes" or "no" where a recipe compares them.
        ContractTypeError, ContractError: `max_length` is no integer, or above the model's context.
    """

    def __init__(self, source: Source, recipe: Recipe, max_length: int | None = None) -> None:
        self.config, self.recipe = source.config, recipe
        self.tokenizer = Tokenizer(source, source.config)
        if isinstance(recipe, RerankRecipe) and recipe.head is None and recipe.answers is None:
            self.recipe = replace(recipe, answers=self._yes_and_no())
        most = min(recipe.max_tokens or source.config.max_position_embeddings, source.config.max_position_embeddings)
        self.max_length = most if max_length is None else integer("max_length", max_length, 1, most)
        ends = self.tokenizer.encode("a")
        self._last = ends[len(ends) - ends[::-1].index(self._plain("a")[-1]) :]
        file = source.folder / "tokenizer_config.json"
        if not self._last and file.is_file() and Fields.read(file).boolean("add_eos_token"):
            self._last = list(source.config.eos_token_ids[:1])
            self._adds_last = True
        else:
            self._adds_last = False

    def _plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, is_template=True) if text else []

    def _yes_and_no(self) -> tuple[int, int]:
        tokens = [self._plain(text) for text in ("yes", "no")]
        if any(len(each) != 1 for each in tokens):
            raise CheckpointError('tokenizer: expected "yes" and "no" to be one token each')
        return tokens[0][0], tokens[1][0]

    def prompt(self, name: str | None) -> str:
        """The text that precedes others, by its name in the checkpoint; the default one where it is None.

        Raises:
            ContractError: there is none of this name.
        """
        recipe = self.recipe
        prompts = recipe.prompts if isinstance(recipe, EmbeddingRecipe) else {}
        if name is None:
            name = recipe.default_prompt if isinstance(recipe, EmbeddingRecipe) else None
        if name is not None and name not in prompts:
            names = " or ".join(map(repr, prompts)) or "none: the checkpoint names no prompts"
            raise ContractError(f"prompt_name: expected {printable(names)}, got {shown(name)}")
        return prompts[name] if name is not None else ""

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
            tokens = [*tokens, *self._last] if self._adds_last and tokens[-1:] != self._last else tokens
        elif isinstance(text, list | tuple | np.ndarray):
            tokens = list(check_prompt(self.config, name, text if most is None else text[:most]))
        else:
            raise ContractTypeError(f"{name}: expected a text or token ids, got {shown(text)}")
        return self._fitting(name, tokens, most, len(self._last) if isinstance(text, str) else 0)

    def pair(
        self, name: str, query: str, document: str, instruction: str | None = None, most: int | None = None
    ) -> tuple[int, ...]:
        """The tokens of a query and a document in a ranking model's template. Arguments and errors as `text`."""
        assert isinstance(self.recipe, RerankRecipe)
        before, pair, after = self.recipe.template
        values = {"instruction": instruction or QWEN3_INSTRUCTION, "query": query, "document": document}
        for key, value in values.items():
            if not isinstance(value, str) or not value:
                raise ContractTypeError(f"{name}: expected a text that is not empty as {key}, got {shown(value)}")
        text = _PLACES.sub(lambda place: values[place[1]], pair)
        tail = self._plain(after)
        return self._fitting(name, [*self._plain(before), *self._plain(text), *tail], most, len(tail))

    def _fitting(self, name: str, tokens: list[int], most: int | None, last: int) -> tuple[int, ...]:
        """Tokens that fit the model, cut to `most` before the `last` ones."""
        if most is not None and len(tokens) > most:
            if most <= last:
                raise ContractError(f"{name}: expected more than {last} tokens, those that end a text, got {most}")
            tokens = [*tokens[: most - last], *tokens[len(tokens) - last :]]
        if len(tokens) > self.max_length:
            raise ContractError(f"{name}: expected at most {self.max_length} tokens, got {len(tokens)}; or truncate it")
        return tuple(tokens)

    def check_dimensions(self, dimensions: int | None) -> int | None:
        """A size to cut vectors to. Raises ContractTypeError, ContractError where the model allows no such size."""
        if dimensions is None or not isinstance(self.recipe, EmbeddingRecipe):
            return None
        allowed, size = self.recipe.dimensions, self.size
        if allowed is not None and dimensions not in (*allowed, size):
            listed = " or ".join(map(str, (*allowed, size)))
            raise ContractError(f"dimensions: expected {listed}, as config.json says, got {shown(dimensions)}")
        return integer("dimensions", dimensions, 1, size)

    @property
    def size(self) -> int:
        """The length of a vector; 1 of a model that ranks."""
        if isinstance(self.recipe, RerankRecipe):
            return 1
        return int(self.recipe.finish(np.ones((1, self.config.hidden_size), np.float32)).shape[1])


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
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise ContractTypeError(f"texts: expected a list of texts, got {shown(texts)}")
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
        if isinstance(documents, str) or not isinstance(documents, Sequence):
            raise ContractTypeError(f"documents: expected a list of texts, got {shown(documents)}")
        most = self.encoder.max_length if truncate else None
        tokens = pairs(self.encoder, "documents", query, documents, instruction, most)
        return scores(self.encoder.recipe, self.compute(tokens))

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
        return np.asarray(recipe.finish(x), np.float32)


def cut(vectors: Array, dimensions: int | None) -> Array:
    """Vectors `[n, size]` cut to their first numbers and normed again."""
    return vectors if dimensions is None else normed(vectors[:, :dimensions])


def pairs(
    encoder: TextEncoder, name: str, query: Any, documents: Sequence[Any], instruction: str | None, most: int | None
) -> list[tuple[int, ...]]:
    """The tokens whose results `scores` takes: each pair of a query and a document, or the query and each document."""
    named = [(f"{name}[{index}]", document) for index, document in enumerate(documents)]
    if isinstance(encoder.recipe, RerankRecipe):
        return [encoder.pair(where, query, document, instruction, most) for where, document in named]
    before = [encoder.prompt(kind if kind in encoder.recipe.prompts else None) for kind in ("query", "document")]
    of_documents = [encoder.text(where, document, before[1], most) for where, document in named]
    return [encoder.text("query", query, before[0], most), *of_documents]


def scores(recipe: Recipe, rows: Array) -> Array:
    """The scores `[n]` of what was computed of the tokens that `pairs` gave."""
    if isinstance(recipe, RerankRecipe):
        return rows[:, 0]
    vectors = normed(rows)
    return vectors[1:] @ vectors[0]


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
    if task not in (None, "embed", "rerank"):
        raise ContractError(f"task: expected 'embed' or 'rerank', got {shown(task)}")
    if dtype not in (None, "float32", "bfloat16"):
        raise ContractError(f"dtype: expected 'float32' or 'bfloat16', got {shown(dtype)}")
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
