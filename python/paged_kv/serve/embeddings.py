"""OpenAI's /v1/embeddings, and Cohere's, Jina's and vLLM's /v1/rerank and /v1/score."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import shown
from paged_kv.checkpoint.embedding_files import RerankRecipe
from paged_kv.engine.embedding import TextEncoder, cut, pairs, scores
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
    inputs = body.any("input")
    if not _is_list_of(inputs, (str, list)):
        inputs = [inputs]
    if len(inputs) > MOST_INPUTS:
        raise body.error("input", f"expected at most {MOST_INPUTS} texts, got {len(inputs)}")
    encoding = body.choice("encoding_format", ("float", "base64"), "float")
    dimensions = encoder.check_dimensions(body.integer("dimensions", None, 1, 2**31 - 1))
    prompt = encoder.prompt(body.text("prompt_name", None))
    most = _truncation(body, encoder)
    body.ignore(("user",))
    names = [f"input[{index}]" if len(inputs) > 1 else "input" for index in range(len(inputs))]
    for name, text in zip(names, inputs, strict=True):
        _check_length(body, name, text, encoder)
    tokens = [encoder.text(name, text, prompt, most) for name, text in zip(names, inputs, strict=True)]
    body.end()
    return Embeddings(tokens, model, dimensions=dimensions, is_base64=encoding == "base64")


def read_rerank(body: BodyFields, model: ServedModel) -> Exchange:
    """A request to /v1/rerank. Raises as `read_embeddings`."""
    model = model.check_name(body)
    documents = body.any("documents")
    if not _is_list_of(documents, (str, dict)):
        raise body.error("documents", f"expected a list of texts or of objects with a text, got {shown(documents)}")
    texts: list[Any] = [each.get("text") if isinstance(each, dict) else each for each in documents]
    top = body.integer("top_n", len(texts), 1, 2**31 - 1)
    with_documents = body.flag("return_documents", True)
    tokens = _pairs(body, model, "query", body.text("query"), "documents", texts)
    return Ranking(tokens, model, texts if with_documents else None, int(top))


def read_score(body: BodyFields, model: ServedModel) -> Exchange:
    """A request to /v1/score. Raises as `read_embeddings`."""
    model = model.check_name(body)
    one, two = body.any("text_1"), body.any("text_2")
    queries, documents = (each if isinstance(each, list) else [each] for each in (one, two))
    if len(queries) not in (1, len(documents)):
        raise body.error("text_1", f"expected one text, or as many as text_2 has, {len(documents)}, got {len(queries)}")
    if len(queries) == 1:
        return Scores([_pairs(body, model, "text_1", queries[0], "text_2", documents)], model)
    groups = [_pairs(body, model, "text_1", *pair) for pair in _pairwise(queries, documents)]
    return Scores(groups, model)


def _pairwise(queries: Sequence[Any], documents: Sequence[Any]) -> list[tuple[Any, str, list[Any]]]:
    return [(query, "text_2", [document]) for query, document in zip(queries, documents, strict=True)]


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
    if len(documents) > MOST_INPUTS:
        raise body.error(of_documents, f"expected at most {MOST_INPUTS} texts, got {len(documents)}")
    names = [of_query, *(f"{of_documents}[{index}]" for index in range(len(documents)))]
    for name, text in zip(names, (query, *documents), strict=True):
        if not isinstance(text, str) or not text:
            raise body.error(name, f"expected a text that is not empty, got {shown(text)}")
        _check_length(body, name, text, encoder)
    instruction = body.text("instruction", None)
    if instruction is not None and not isinstance(encoder.recipe, RerankRecipe):
        raise body.error("instruction", "expected a model that ranks documents, got one that embeds texts")
    most = _truncation(body, encoder)
    body.ignore(("user", "encoding_format", "max_chunks_per_doc"))
    body.end()
    return pairs(encoder, of_documents, query, documents, instruction, most)


def _truncation(body: BodyFields, encoder: TextEncoder) -> int | None:
    """The tokens that long texts are cut to: vLLM's `truncate_prompt_tokens`, -1 for the longest text."""
    most = body.integer("truncate_prompt_tokens", None, -1, encoder.max_length)
    if most == 0:
        raise body.error("truncate_prompt_tokens", f"expected -1, or an integer from 1 to {encoder.max_length}, got 0")
    return encoder.max_length if most == -1 else most


def _check_length(body: BodyFields, name: str, text: Any, encoder: TextEncoder) -> None:
    """Refuses a text that has too many characters to be split into tokens."""
    most = CHARACTERS * encoder.max_length
    if isinstance(text, str) and len(text) > most:
        raise body.error(name, f"expected at most {most} characters, got {len(text)}")


class _OfTexts(Exchange):
    """The answer to a request whose jobs each give one vector."""

    LONG_ANSWER = True

    def __init__(self, tokens: Sequence[tuple[int, ...]], model: ServedModel) -> None:
        super().__init__([Job(each, _SAMPLING) for each in tokens], stream=False)
        self.model = model
        self._rows: list[npt.NDArray[np.float32] | None] = [None] * len(tokens)

    def take(self, job: int, sample: int, pieces: Sequence[Piece]) -> list[Event]:  # noqa: ARG002
        self._rows[job] = pieces[-1].vector
        return []

    @property
    def rows(self) -> npt.NDArray[np.float32]:
        """The vectors of all jobs, `[n, size]`."""
        return np.stack([row for row in self._rows if row is not None])

    def head(self, prefix: str) -> dict[str, Any]:
        """What every answer has."""
        usage = {"prompt_tokens": self.usage.prompt, "total_tokens": self.usage.prompt}
        return {"id": f"{prefix}-{secrets.token_hex(12)}", "model": self.model.name, "usage": usage}


class Embeddings(_OfTexts):
    """The answer of /v1/embeddings."""

    def __init__(
        self, tokens: Sequence[tuple[int, ...]], model: ServedModel, *, dimensions: int | None, is_base64: bool
    ) -> None:
        super().__init__(tokens, model)
        self._dimensions, self._is_base64 = dimensions, is_base64

    def whole(self) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": self._written(row)}
            for index, row in enumerate(cut(self.rows, self._dimensions))
        ]
        return self.head("embd") | {"object": "list", "created": int(time.time()), "data": data}

    def _written(self, row: npt.NDArray[np.float32]) -> str | list[float]:
        return base64.b64encode(row.astype("<f4").tobytes()).decode() if self._is_base64 else row.tolist()


class Ranking(_OfTexts):
    """The answer of /v1/rerank: the best documents first."""

    def __init__(
        self, tokens: Sequence[tuple[int, ...]], model: ServedModel, texts: Sequence[str] | None, top: int
    ) -> None:
        super().__init__(tokens, model)
        self._texts, self._top = texts, top

    def whole(self) -> dict[str, Any]:
        values = scores(_encoder(self.model).recipe, self.rows)
        results = []
        for index in np.argsort(-values, kind="stable")[: self._top].tolist():
            document = {} if self._texts is None else {"document": {"text": self._texts[index]}}
            results.append({"index": index, "relevance_score": float(values[index]), **document})
        return self.head("rerank") | {"results": results}


class Scores(_OfTexts):
    """The answer of /v1/score; `groups` are the tokens of each query's documents."""

    def __init__(self, groups: Sequence[Sequence[tuple[int, ...]]], model: ServedModel) -> None:
        super().__init__([tokens for group in groups for tokens in group], model)
        self._ends = np.cumsum([len(group) for group in groups])[:-1]

    def whole(self) -> dict[str, Any]:
        recipe = _encoder(self.model).recipe
        values = np.concatenate([scores(recipe, rows) for rows in np.split(self.rows, self._ends)])
        data = [{"object": "score", "index": index, "score": float(each)} for index, each in enumerate(values)]
        return self.head("score") | {"object": "list", "created": int(time.time()), "data": data}
