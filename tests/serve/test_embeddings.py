"""The server of a model that embeds or ranks texts: OpenAI's, Cohere's and vLLM's routes, and what is refused."""

import asyncio
import base64

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.embedding import Embedder
from paged_kv.engine.sampling import Sampling
from paged_kv.errors import ContractError
from paged_kv.serve import embedding_backend
from paged_kv.serve.backend import Job
from paged_kv.serve.embedding_backend import EmbeddingBackend
from paged_kv.serve.launch import embedding_server
from paged_kv.serve.settings import Settings
from support.embedding_models import (
    DOCUMENTS,
    PROMPTS,
    QUERY,
    TEXTS,
    expected_scores,
    make_embedding,
    make_reranker,
    tokens_of,
)
from support.served import Served, served

CLOSE = {"rtol": 0, "atol": 1e-4}


def serving(folder, task):
    """The application that `paged-kv serve` has for a folder."""
    settings = Settings(folder, "demo", port=0, dtype="float32")
    app, rules, sockets, _ = embedding_server(settings, open_source(folder), task)
    for each in sockets:
        each.close()
    assert rules.max_body_bytes == 8 << 20
    return Served(TestClient(app, base_url="http://localhost", raise_server_exceptions=False), None, None)


@pytest.fixture(scope="module")
def embedding(tmp_path_factory):
    """The server of a model that embeds, its folder, and the vectors that texts must have."""
    folder = tmp_path_factory.mktemp("embedding")
    expected = make_embedding(folder, "qwen3, last")
    return serving(folder, "embed"), folder, expected


@pytest.fixture(scope="module")
def server(embedding):
    return embedding[0]


@pytest.fixture(scope="module")
def ranking(tmp_path_factory):
    """The server of a model that ranks, and the scores of `DOCUMENTS`."""
    folder = tmp_path_factory.mktemp("rerank")
    model = make_reranker(folder)
    return serving(folder, "rerank"), expected_scores(folder, model)


@pytest.fixture
def steps(monkeypatch):
    """How many texts each step has."""
    step, counts = Embedder.step, []
    monkeypatch.setattr(Embedder, "step", lambda self, texts: (counts.append(len(texts)), step(self, texts))[1])
    return counts


def test_embeddings_by_openais_client(embedding):
    server, folder, expected = embedding
    create, tokens = server.client.embeddings.create, tokens_of(folder, TEXTS)
    answer = create(model="demo", input=TEXTS)  # base64, which the client decodes
    np.testing.assert_allclose([each.embedding for each in answer.data], expected(TEXTS), **CLOSE)
    assert [each.index for each in answer.data] == list(range(len(TEXTS)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))
    floats = create(model="demo", input=tokens, encoding_format="float")
    assert [each.embedding for each in floats.data] == [each.embedding for each in answer.data]
    for one in (TEXTS[0], tokens[0]):
        (only,) = create(model="demo", input=one, dimensions=8).data
        small = expected(TEXTS[:1])[0, :8]
        np.testing.assert_allclose(only.embedding, small / np.linalg.norm(small), **CLOSE)


def test_fields_that_openai_lacks(embedding):
    server, _, expected = embedding
    _, answer = server.post("/v1/embeddings", {"input": "tea", "prompt_name": "query", "encoding_format": "base64"})
    row = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(row, expected([PROMPTS["query"] + "tea"])[0], **CLOSE)
    for most, tokens in ((5, 5), (-1, 300)):
        _, answer = server.post("/v1/embeddings", {"input": "tea " * 200, "truncate_prompt_tokens": most})
        assert answer["usage"]["prompt_tokens"] == tokens


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_ranked_documents(embedding, ranking, path):
    server, _, expected = embedding
    cosines = expected(DOCUMENTS) @ expected([PROMPTS["query"] + QUERY])[0]
    for each, scores in ((server, cosines), ranking):
        documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
        status, answer = each.post(path, {"model": "demo", "query": QUERY, "documents": documents})
        order = np.argsort(-scores)
        assert status == 200
        assert [result["index"] for result in answer["results"]] == order.tolist()
        assert [result["document"]["text"] for result in answer["results"]] == [DOCUMENTS[index] for index in order]
        np.testing.assert_allclose([result["relevance_score"] for result in answer["results"]], scores[order], **CLOSE)
        assert answer["usage"]["total_tokens"] > 0
        best = {"query": QUERY, "documents": DOCUMENTS, "top_n": 1, "return_documents": False}
        assert [set(result) for result in each.post(path, best)[1]["results"]] == [{"index", "relevance_score"}]


def test_scores_of_one_query_and_of_pairs(embedding, ranking):
    ranker, scores = ranking
    _, answer = ranker.post("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS})
    np.testing.assert_allclose([each["score"] for each in answer["data"]], scores, **CLOSE)
    server, _, expected = embedding
    queries = [QUERY, "what floats?"]
    _, answer = server.post("/score", {"text_1": queries, "text_2": DOCUMENTS[:2]})
    scores = np.sum(expected([PROMPTS["query"] + each for each in queries]) * expected(DOCUMENTS[:2]), axis=1)
    np.testing.assert_allclose([each["score"] for each in answer["data"]], scores, **CLOSE)


def test_texts_of_all_clients_share_steps(embedding, steps):
    server, _, expected = embedding

    async def ask_at_once():
        transport = httpx.ASGITransport(server.http.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            bodies = ({"input": [text, text]} for text in TEXTS)
            return await asyncio.gather(*(client.post("/v1/embeddings", json=body) for body in bodies))

    rows = [answer.json()["data"][1]["embedding"] for answer in asyncio.run(ask_at_once())]
    assert sum(steps) == 2 * len(TEXTS) > 3 * len(steps)
    np.testing.assert_allclose(rows, expected(TEXTS), **CLOSE)


def test_a_text_whose_client_has_left_is_not_computed(monkeypatch):
    embedder, computed = Embedder(None, None), []
    monkeypatch.setattr(embedder, "step", lambda texts: (computed.extend(texts), texts)[1])

    async def leave():
        backend = EmbeddingBackend(embedder)
        tasks = [asyncio.ensure_future(anext(backend.start(Job((index,), Sampling(1))))) for index in range(1, 4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(leave())
    assert computed == [(1,), (3,)]
    assert [type(result).__name__ for result in results] == ["list", "CancelledError", "list"]


def test_a_step_that_fails_is_an_error_of_its_requests(server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Embedder, "step", None)
        assert server.post("/v1/embeddings", {"input": "tea"})[0] == 500
    assert server.post("/v1/embeddings", {"input": "tea"})[0] == 200
    assert server.http.get("/health").status_code == 200
    assert server.metric("vllm:request_success_total", finished_reason="stop") > 0


def test_more_texts_than_may_wait_are_busy(server, monkeypatch):
    monkeypatch.setattr(embedding_backend, "MOST_WAITING", 2)
    assert server.post("/v1/embeddings", {"input": TEXTS})[0] == 429
    assert server.post("/v1/embeddings", {"input": TEXTS[:2]})[0] == 200


TEXT = {"input": "a"}
PAIR = {"query": "a", "documents": ["b"]}
REFUSED = {
    "no input": ("/v1/embeddings", {}, "input", "missing"),
    "empty list": ("/v1/embeddings", {"input": []}, None, "input is empty"),
    "one empty": ("/v1/embeddings", {"input": ["a", ""]}, None, "input[1]: expected a text, got an empty one"),
    "mixed": ("/v1/embeddings", {"input": ["a", 5]}, None, "input: expected a list of token ids"),
    "many": ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "input: expected 1 to 2048 texts, got 2049"),
    "longer": ("/v1/embeddings", {"input": "a" * 5000}, "input", "input: expected at most 4800 characters"),
    "encoding": ("/v1/embeddings", TEXT | {"encoding_format": "hex"}, "encoding_format", "expected one of"),
    "size": ("/v1/embeddings", TEXT | {"dimensions": 49}, None, "dimensions: expected at most 48, got 49"),
    "size 0": ("/v1/embeddings", TEXT | {"dimensions": 0}, "dimensions", "expected an integer from 1"),
    "prompt": ("/v1/embeddings", TEXT | {"prompt_name": "x"}, None, "prompt_name: expected 'query'"),
    "cut to 0": ("/v1/embeddings", TEXT | {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "got 0"),
    "no documents": ("/v1/rerank", PAIR | {"documents": []}, "documents", "expected a list of texts or of obj"),
    "a document": ("/v1/rerank", PAIR | {"documents": [{"image": "x"}]}, "documents[0]", "expected a text that"),
    "top": ("/v1/rerank", PAIR | {"top_n": 0}, "top_n", "expected an integer from 1"),
    "task": ("/v1/rerank", PAIR | {"instruction": "c"}, "instruction", "ranks documents"),
    "no texts": ("/v1/score", {"text_1": "a", "text_2": []}, "text_2", "expected 1 to 2048 texts, got 0"),
    "pairs": ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1", "expected one text, or as many"),
    "chat": ("/v1/chat/completions", {"messages": []}, None, "expected a model that can generate, got one that"),
    "name": ("/v1/embeddings", TEXT | {"model": "x"}, "model", "expected 'demo', got 'x'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_requests_are_refused(server, name):
    path, body, param, message = REFUSED[name]
    status, answer = server.post(path, body)
    assert status == (404 if name == "name" else 400)
    assert message in answer["error"]["message"]
    assert answer["error"]["param"] == param


def test_each_server_has_one_use(ranking):
    ranker, _ = ranking
    status, answer = ranker.post("/v1/embeddings", TEXT)
    assert status == 400
    assert "/v1/embeddings: expected a model that can embed, got one that can rerank" in answer["error"]["message"]
    with served() as generating:
        status, answer = generating.post("/v1/embeddings", TEXT)
    assert status == 400
    assert "it answers /v1/completions" in answer["error"]["message"]
    assert ranker.http.get("/v1/models").json()["data"][0]["id"] == "demo"
    assert ranker.http.get("/pool").status_code == 400


def test_options_of_generation_are_refused():
    with pytest.raises(ContractError, match="--speculate: requires a model that generates texts, got --task embed"):
        embedding_server(Settings(FOLDER, "demo", speculate="lookup"), open_source(FOLDER), "embed")
