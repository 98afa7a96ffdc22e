"""OpenAI's /v1/embeddings, and Cohere's, Jina's and vLLM's /v1/rerank and /v1/score."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from paged_kv.arguments import shown
from paged_kv.checkpoint.embedding_files import Array
from paged_kv.engine.embedding import TextEncoder, cut
from paged_kv.engine.sampling import Sampling
from paged_kv.serve.backend import Job, Piece
from paged_kv.serve.fields import BodyFields
from paged_kv.serve.request_exchange import Event, Exchange
from paged_kv.serve.served_model import CHARACTERS, ServedModel

MOST_INPUTS = 2048
"""Texts of one request at most, as OpenAI has it."""
_SAMPLING = Sampling(1)
"""No token is generated."""


def read_embeddings(body: BodyFields, model: ServedModel) -> Exchange:
    """A request to /v1/embeddings.

    Raises:
        ContractError, ContractTypeError, CheckpointError: a field cannot be taken.
    """
    model, encoder = model.check_name(body), _encoder(model)
    texts = body.any("input")
    if not _is_list_of(texts, (str, list)):
        texts = [texts]
    names = [f"input[{index}]" if len(texts) > 1 else "input" for index in range(len(texts))]
    _check_count(body, "input", texts)
    for name, text in zip(names, texts, strict=True):
        _check_length(body, name, text, encoder)
    is_base64 = body.choice("encoding_format", ("float", "base64"), "float") == "base64"
    dimensions = encoder.check_dimensions(body.integer("dimensions", None, 1, 2**31 - 1))
    prompt = encoder.prompt(body.text("prompt_name", None))
    most = _truncation(body, encoder)
    body.ignore(("user",))
    tokens = [encoder.text(name, text, prompt, most) for name, text in zip(names, texts, strict=True)]
    body.end()

    def answer(rows: Array) -> dict[str, Any]:
        vectors = cut(rows, dimensions).astype("<f4")
        texts = (base64.b64encode(row).decode() for row in vectors)
        return _list_of("embedding", texts if is_base64 else vectors.tolist())

    return TextsExchange(tokens, model, "embd", answer)


def read_rerank(body: BodyFields, model: ServedModel) -> Exchange:
    """A request to /v1/rerank, answered by the best documents first. Raises as `read_embeddings`."""
    model = model.check_name(body)
    documents = body.any("documents")
    if not _is_list_of(documents, (str, dict)):
        raise body.error("documents", f"expected a list of texts or of objects with a text, got {shown(documents)}")
    _check_count(body, "documents", documents)
    texts: list[Any] = [each.get("text") if isinstance(each, dict) else each for each in documents]
    top = int(body.integer("top_n", len(texts), 1, 2**31 - 1))
    with_documents = body.flag("return_documents", True)
    tokens = _pairs(body, model, "query", body.text("query"), "documents", texts)

    def answer(rows: Array) -> dict[str, Any]:
        scores, results = _encoder(model).recipe.scores(rows), []
        for index in np.argsort(-scores, kind="stable")[:top].tolist():
            document = {"document": {"text": texts[index]}} if with_documents else {}
            results.append({"index": index, "relevance_score": float(scores[index]), **document})
        return {"results": results}

    return TextsExchange(tokens, model, "rerank", answer)


def read_score(body: BodyFields, model: ServedModel) -> Exchange:
    """A request to /v1/score. Raises as `read_embeddings`."""
    model = model.check_name(body)
    queries, documents = (each if isinstance(each, list) else [each] for each in map(body.any, ("text_1", "text_2")))
    if len(queries) not in (1, len(documents)):
        raise body.error("text_1", f"expected one text, or as many as text_2 has, {len(documents)}, got {len(queries)}")
    _check_count(body, "text_2", documents)
    of_each = [documents] if len(queries) == 1 else [[document] for document in documents]
    pairs = zip(queries, of_each, strict=True)
    groups = [_pairs(body, model, "text_1", query, "text_2", its) for query, its in pairs]
    ends = np.cumsum([len(group) for group in groups])[:-1]

    def answer(rows: Array) -> dict[str, Any]:
        scores = [_encoder(model).recipe.scores(each) for each in np.split(rows, ends)]
        return _list_of("score", np.concatenate(scores).tolist())

    return TextsExchange([tokens for group in groups for tokens in group], model, "score", answer)


class TextsExchange(Exchange):
    """A request whose jobs each give one vector.

    Args:
        tokens: Those of each job.
        model: Whose answer it is.
        prefix: The start of the answer's id.
        answer: The fields of the answer that are not in every one, of the vectors of all jobs `[n, size]`.
    """

    LONG_ANSWER = True

    def __init__(
        self,
        tokens: Sequence[tuple[int, ...]],
        model: ServedModel,
        prefix: str,
        answer: Callable[[Array], dict[str, Any]],
    ) -> None:
        super().__init__([Job(each, _SAMPLING) for each in tokens], stream=False)
        self._id, self._name, self._answer = f"{prefix}-{secrets.token_hex(12)}", model.name, answer
        self._rows: dict[int, Array | None] = {}

    def take(self, job: int, sample: int, pieces: Sequence[Piece]) -> list[Event]:  # noqa: ARG002
        self._rows[job] = pieces[-1].vector
        return []

    def whole(self) -> dict[str, Any]:
        rows = np.array([self._rows[job] for job in range(len(self.jobs))])
        usage = {"prompt_tokens": self.usage.prompt, "total_tokens": self.usage.prompt}
        return {"id": self._id, "model": self._name, "usage": usage, **self._answer(rows)}


def _list_of(kind: str, values: Iterable[Any]) -> dict[str, Any]:
    """OpenAI's list of objects of a kind, each with its value by the name of the kind."""
    data = [{"object": kind, "index": index, kind: value} for index, value in enumerate(values)]
    return {"object": "list", "created": int(time.time()), "data": data}


def _encoder(model: ServedModel) -> TextEncoder:
    assert model.encoder is not None
    return model.encoder


def _is_list_of(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether a value is a list of some length whose entries are all of these kinds."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, kinds) for each in value)


def _pairs(
    body: BodyFields, model: ServedModel, of_query: str, query: Any, of_documents: str, documents: Sequence[Any]
) -> list[tuple[int, ...]]:
    """The tokens of a query's documents, and the fields that all routes of scores have."""
    encoder = _encoder(model)
    texts = {of_query: query} | {f"{of_documents}[{index}]": each for index, each in enumerate(documents)}
    for name, text in texts.items():
        if not isinstance(text, str) or not text:
            raise body.error(name, f"expected a text that is not empty, got {shown(text)}")
        _check_length(body, name, text, encoder)
    instruction = body.text("instruction", None)
    if instruction is not None and encoder.recipe.task == "embed":
        raise body.error("instruction", "expected a model that ranks documents, got one that embeds texts")
    most = _truncation(body, encoder)
    body.ignore(("user", "encoding_format", "max_chunks_per_doc"))
    body.end()
    return encoder.pairs(of_documents, query, documents, instruction, most)


def _truncation(body: BodyFields, encoder: TextEncoder) -> int | None:
    """The tokens that long texts are cut to: vLLM's `truncate_prompt_tokens`, -1 for the longest text."""
    most = body.integer("truncate_prompt_tokens", None, -1, encoder.max_length)
    if most == 0:
        raise body.error("truncate_prompt_tokens", f"expected -1, or an integer from 1 to {encoder.max_length}, got 0")
    return encoder.max_length if most == -1 else most


def _check_count(body: BodyFields, name: str, texts: Sequence[Any]) -> None:
    if not 1 <= len(texts) <= MOST_INPUTS:
        raise body.error(name, f"expected 1 to {MOST_INPUTS} texts, got {len(texts)}")


def _check_length(body: BodyFields, name: str, text: Any, encoder: TextEncoder) -> None:
    """Refuses a text that has too many characters to be split into tokens."""
    most = CHARACTERS * encoder.max_length
    if isinstance(text, str) and len(text) > most:
        raise body.error(name, f"expected at most {most} characters, got {len(text)}")
