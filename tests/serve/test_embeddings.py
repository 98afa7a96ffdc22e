"""The server of a model that embeds or ranks texts: OpenAI's, Cohere's and vLLM's routes, and what is refused."""

import asyncio
import base64
import contextlib
import json

import httpx
import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

from paged_kv.checkpoint.source import open_source
from paged_kv.engine import load_embedder
from paged_kv.engine.demo_model import FOLDER
from paged_kv.errors import ContractError
from paged_kv.serve import embedding_backend
from paged_kv.serve.application import application
from paged_kv.serve.embedding_backend import EmbeddingBackend
from paged_kv.serve.embedding_launch import embedding_server
from paged_kv.serve.metrics import Metrics
from paged_kv.serve.served_model import ServedModel
from paged_kv.serve.settings import Settings
from support.embedding_models import DOCUMENTS, QUERY, TEXTS, expected_vectors, make_embedding, make_reranker
from support.served import served


class Server:
    """The application of an embedder in this process."""

    def __init__(self, folder, **options):
        self.embedder = load_embedder(folder, dtype="float32", **options)
        self.backend, encoder = EmbeddingBackend(self.embedder), self.embedder.encoder
        model = ServedModel(open_source(folder), "small", encoder.max_length, encoder=encoder)
        self.app = application(model, self.backend, Metrics("small", self.backend))
        self.http = TestClient(self.app, base_url="http://localhost", raise_server_exceptions=False)
        self.client = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=self.http)

    def post(self, path, **body):
        answer = self.http.post(path, json=body)
        return answer.status_code, answer.json()

    @contextlib.contextmanager
    def steps(self):
        """Notes how many texts each step has."""
        step, counts = self.embedder.step, []
        self.embedder.step = lambda texts: (counts.append(len(texts)), step(texts))[1]
        yield counts
        self.embedder.step = step


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedding")
    make_embedding(folder, "qwen3, last")
    return Server(folder)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rerank")
    make_reranker(folder)
    return Server(folder, task="rerank")


def test_embeddings_by_openais_client(server):
    expected = server.embedder.embed(TEXTS)
    answer = server.client.embeddings.create(model="small", input=TEXTS)  # base64, which the client decodes
    np.testing.assert_array_equal([each.embedding for each in answer.data], expected)
    assert [each.index for each in answer.data] == list(range(len(TEXTS)))
    tokens = [list(server.embedder.encoder.text("text", text)) for text in TEXTS]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))
    answer = server.client.embeddings.create(model="small", input=tokens, encoding_format="float")
    np.testing.assert_array_equal(np.float32([each.embedding for each in answer.data]), expected)
    for one in (TEXTS[0], tokens[0]):
        (only,) = server.client.embeddings.create(model="small", input=one, dimensions=8).data
        np.testing.assert_array_equal(only.embedding, server.embedder.embed(TEXTS[:1], dimensions=8)[0])


def test_fields_beside_openais(server):
    _, prompted = server.post("/v1/embeddings", input="tea", prompt_name="query", encoding_format="base64")
    row = np.frombuffer(base64.b64decode(prompted["data"][0]["embedding"]), "<f4")
    np.testing.assert_array_equal(row, server.embedder.embed(["tea"], prompt_name="query")[0])
    _, cut = server.post("/v1/embeddings", input="tea " * 200, truncate_prompt_tokens=5)
    assert cut["usage"]["prompt_tokens"] == 5
    assert server.post("/v1/embeddings", input="tea " * 200, truncate_prompt_tokens=-1)[0] == 200


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_ranked_documents(server, ranker, path):
    for each in (server, ranker):
        expected = each.embedder.score(QUERY, DOCUMENTS)
        given = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
        status, answer = each.post(path, model="small", query=QUERY, documents=given)
        order = np.argsort(-expected)
        assert status == 200
        assert [result["index"] for result in answer["results"]] == order.tolist()
        assert [result["document"]["text"] for result in answer["results"]] == [DOCUMENTS[index] for index in order]
        np.testing.assert_allclose([result["relevance_score"] for result in answer["results"]], expected[order])
        assert answer["usage"]["total_tokens"] > 0
        _, best = each.post(path, query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=False)
        assert [set(result) for result in best["results"]] == [{"index", "relevance_score"}]


def test_scores_of_one_query_and_of_pairs(ranker):
    expected = ranker.embedder.score(QUERY, DOCUMENTS)
    _, one = ranker.post("/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    np.testing.assert_allclose([each["score"] for each in one["data"]], expected)
    queries = [QUERY, "what floats?"]
    _, pairs = ranker.post("/score", text_1=queries, text_2=DOCUMENTS[:2])
    expected = [ranker.embedder.score(*pair)[0] for pair in zip(queries, [[text] for text in DOCUMENTS], strict=False)]
    np.testing.assert_allclose([each["score"] for each in pairs["data"]], expected, rtol=1e-6)


def test_texts_of_all_clients_share_steps(server):
    async def ask(client, text):
        return await client.post("/v1/embeddings", json={"input": [text, text]})

    async def both():
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await asyncio.gather(*(ask(client, text) for text in TEXTS))

    with server.steps() as counts:
        answers = asyncio.run(both())
    assert sum(counts) == 2 * len(TEXTS) > 3 * len(counts)
    rows = [answer.json()["data"][1]["embedding"] for answer in answers]
    np.testing.assert_array_equal(np.float32(rows), server.embedder.embed(TEXTS))


def test_a_text_whose_client_has_left_is_not_computed(server):
    from paged_kv.serve.backend import Job
    from paged_kv.serve.embeddings import _SAMPLING

    async def leave():
        backend = EmbeddingBackend(server.embedder)
        tasks = [asyncio.ensure_future(anext(backend.start(Job((index,), _SAMPLING)))) for index in range(1, 4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    with server.steps() as counts:
        results = asyncio.run(leave())
    assert sum(counts) == 2
    assert [type(result).__name__ for result in results] == ["list", "CancelledError", "list"]


def test_a_step_that_fails_is_an_error_of_its_requests(server, monkeypatch):
    def fail(_):
        raise ValueError

    monkeypatch.setattr(server.embedder, "step", fail)
    assert server.post("/v1/embeddings", input="tea")[0] == 500
    monkeypatch.undo()
    assert server.post("/v1/embeddings", input="tea")[0] == 200
    assert server.http.get("/health").status_code == 200
    assert 'request_success_total{finished_reason="stop",model_name="small"}' in server.http.get("/metrics").text


def test_more_texts_than_may_wait_are_busy(server, monkeypatch):
    monkeypatch.setattr(embedding_backend, "MOST_WAITING", 2)
    assert server.post("/v1/embeddings", input=TEXTS)[0] == 429
    assert server.post("/v1/embeddings", input=TEXTS[:2])[0] == 200


def test_the_server_of_a_folder(tmp_path):
    model = make_embedding(tmp_path, "qwen3, last")
    settings = Settings(tmp_path, "small", port=0, dtype="float32")
    app, rules, sockets, _ = embedding_server(settings, open_source(tmp_path), "embed")
    for each in sockets:
        each.close()
    assert rules.max_body_bytes == 8 << 20
    answer = TestClient(app, base_url="http://localhost").post("/v1/embeddings", json={"input": TEXTS}).json()
    rows = [each["embedding"] for each in answer["data"]]
    np.testing.assert_allclose(rows, expected_vectors(tmp_path, "qwen3, last", model, TEXTS), rtol=0, atol=1e-4)


REFUSED = {
    "no input": ("/v1/embeddings", {}, "input", "missing"),
    "empty": ("/v1/embeddings", {"input": ""}, None, "input: expected a text, got an empty one"),
    "empty list": ("/v1/embeddings", {"input": []}, None, "input is empty"),
    "one empty": ("/v1/embeddings", {"input": ["a", ""]}, None, "input[1]: expected a text, got an empty one"),
    "mixed": ("/v1/embeddings", {"input": ["a", 5]}, None, "input: expected a list of token ids"),
    "token": ("/v1/embeddings", {"input": [999]}, None, "999"),
    "many": ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "input: expected at most 2048 texts, got 2049"),
    "long": ("/v1/embeddings", {"input": "a" * 500}, None, "input: expected at most 300 tokens, got 501"),
    "longer": ("/v1/embeddings", {"input": "a" * 5000}, "input", "input: expected at most 4800 characters"),
    "encoding": ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "expected one of"),
    "size": ("/v1/embeddings", {"input": "a", "dimensions": 49}, None, "dimensions: expected at most 48, got 49"),
    "size 0": ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "expected an integer from 1"),
    "prompt": ("/v1/embeddings", {"input": "a", "prompt_name": "x"}, None, "prompt_name: expected 'query'"),
    "cut to 0": ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "got 0"),
    "no documents": ("/v1/rerank", {"query": "a", "documents": []}, "documents", "expected a list of texts or of obj"),
    "a document": ("/v1/rerank", {"query": "a", "documents": [{"image": "x"}]}, "documents[0]", "expected a text that"),
    "top": ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "expected an integer from 1"),
    "task": ("/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "instruction", "ranks documents"),
    "pairs": ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1", "expected one text, or as many"),
    "chat": (
        "/v1/chat/completions",
        {"messages": []},
        None,
        "expected a model that can generate, got one that",
    ),
    "name": ("/v1/embeddings", {"model": "x", "input": "a"}, "model", "expected 'small', got 'x'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_requests_are_refused(server, name):
    path, body, param, message = REFUSED[name]
    status, answer = server.post(path, **body)
    assert status == (404 if name == "name" else 400)
    assert message in answer["error"]["message"]
    assert answer["error"]["param"] == param


def test_each_server_has_one_use(ranker):
    status, answer = ranker.post("/v1/embeddings", input="a")
    assert status == 400
    assert "/v1/embeddings: expected a model that can embed, got one that can rerank" in answer["error"]["message"]
    with served() as generating:
        status, answer = generating.post("/v1/embeddings", {"input": "a"})
    assert status == 400
    assert "it answers /v1/completions" in answer["error"]["message"]
    assert json.loads(ranker.http.get("/v1/models").text)["data"][0]["id"] == "small"
    assert ranker.http.get("/pool").status_code == 400


def test_options_of_generation_are_refused():
    with pytest.raises(ContractError, match="--speculate: requires a model that generates texts, got --task embed"):
        embedding_server(Settings(FOLDER, "demo", speculate="lookup"), open_source(FOLDER), "embed")
