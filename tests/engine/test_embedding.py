"""Vectors and scores against transformers, for checkpoints in the formats of published models."""

import json
import shutil

import numpy as np
import pytest
import torch

from paged_kv.cli import main
from paged_kv.engine import load, load_embedder
from paged_kv.engine.demo import byte_tokenizer
from paged_kv.engine.embedding import Embedder
from paged_kv.errors import CheckpointError, ContractError, ContractTypeError
from support import gguf_files
from support.checkpoints import make_checkpoint, rewrite
from support.embedding_models import (
    CASES,
    DOCUMENTS,
    PROMPTS,
    QUERY,
    TEXTS,
    dense_layers,
    expected_scores,
    expected_vectors,
    make_embedding,
    make_reranker,
    modules,
    tokens_of,
)

CLOSE = {"rtol": 0, "atol": 1e-4}
LAST, GEMMA = "qwen3, last", "gemma3 both ways, mean, dense"


def loaded(folder, **options) -> Embedder:
    """An embedder whose pages hold NaN, so that a token nothing wrote shows; a program, which nothing compiled."""
    embedder = load_embedder(folder, **{"dtype": "float32", "max_step_tokens": 150} | options)
    embedder.model.blocks[:] = np.nan
    assert embedder.model._program is not None
    return embedder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of a case and the vectors that texts must have, made once."""
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("embedding")
            made[name] = folder, make_embedding(folder, name)
        return made[name]

    return make


@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_of_transformers(folders, name):
    folder, expected = folders(name)
    embedder = loaded(folder)
    got = embedder.embed(TEXTS)
    np.testing.assert_allclose(got, expected(TEXTS), **CLOSE)
    assert got.shape == (len(TEXTS), embedder.size)
    np.testing.assert_array_equal(embedder.embed(TEXTS[::-1]), got[::-1])  # other steps, the same vectors


def test_any_decoder_embeds_by_its_last_token(tmp_path):
    model = make_checkpoint(tmp_path, family="Llama")
    tokens = [list(range(70, 70 + length)) for length in (3, 160, 1)]
    got = loaded(tmp_path, task="embed").embed(tokens)
    np.testing.assert_allclose(got, expected_vectors(model.model, tokens), **CLOSE)
    with pytest.raises(CheckpointError, match="expected a model that embeds or ranks texts"):
        load_embedder(tmp_path)


def test_prompts_sizes_and_cut_texts(folders):
    folder, expected = folders(LAST)
    embedder = loaded(folder)
    prompted = expected([PROMPTS["query"] + "tea"])
    np.testing.assert_allclose(embedder.embed(["tea"], prompt_name="query"), prompted, **CLOSE)
    small = prompted[:, :16] / np.linalg.norm(prompted[:, :16])
    np.testing.assert_allclose(embedder.embed(["tea"], prompt_name="query", dimensions=16), small, **CLOSE)
    long = "tea " * 100
    np.testing.assert_allclose(embedder.embed([long], truncate=True), expected([long[:299]]), **CLOSE)  # and a BOS
    scores = expected(DOCUMENTS) @ expected([PROMPTS["query"] + QUERY])[0]
    np.testing.assert_allclose(embedder.score(QUERY, DOCUMENTS), scores, **CLOSE)


def test_a_cut_text_keeps_its_end_token(folders):
    folder, _ = folders("mistral, end token, last")
    encoder = loaded(folder).encoder
    tokens = encoder.text("text", "tea " * 100, most=9)
    assert tokens == (*encoder.text("text", "tea " * 100, most=300)[:8], encoder.text("text", "tea")[-1])


@pytest.mark.parametrize("form", ["classifier", "yes and no", "tokens of modules.json"])
def test_scores_are_those_of_the_published_prompt(tmp_path, form):
    model = make_reranker(tmp_path, classifier=form == "classifier")
    if form == "tokens of modules.json":
        (tmp_path / "1_LogitScore").mkdir()
        (tmp_path / "1_LogitScore/config.json").write_text(json.dumps({"true_token_id": 259, "false_token_id": 260}))
        (tmp_path / "modules.json").write_text(json.dumps(modules({"": "Transformer", "1_LogitScore": "LogitScore"})))
    embedder = loaded(tmp_path, task="rerank" if form == "yes and no" else None)
    np.testing.assert_allclose(embedder.score(QUERY, DOCUMENTS), expected_scores(tmp_path, model), **CLOSE)
    with pytest.raises(ContractError, match="embed: expected a model that embeds"):
        embedder.embed(TEXTS)


@pytest.mark.parametrize(
    ("architecture", "pooling", "expected_pooling"),
    [("qwen3", 1, "mean_tokens"), ("qwen3", 2, "cls_token"), ("qwen3", 3, "lasttoken"),
     ("gemma-embedding", 1, "mean_tokens")],
)  # fmt: skip
def test_a_gguf_file_names_its_pooling(tmp_path, architecture, pooling, expected_pooling):
    model = gguf_files.make_model(architecture)
    dense = [layer[0] for layer in dense_layers(256)] if architecture == "gemma-embedding" else []
    for layer in dense:
        layer.bias = None
    tensors = {f"dense_{index}.weight": layer.weight.detach().numpy() for index, layer in enumerate(dense, 2)}
    got = of_gguf(tmp_path, model, architecture, pooling, tensors).embed(TEXTS)
    expected = expected_vectors(model.model, tokens_of(tmp_path, TEXTS), expected_pooling, dense)
    np.testing.assert_allclose(got, expected, **CLOSE)


def test_a_gguf_file_that_ranks(tmp_path):
    model = gguf_files.make_model("qwen3")
    head = np.random.default_rng(0).standard_normal((2, 256)).astype(np.float32) / 16
    embedder = of_gguf(tmp_path, model, "qwen3", 4, {"cls.output.weight": head})
    tokens = embedder.encoder.pairs("documents", QUERY, DOCUMENTS)
    with torch.no_grad():
        hidden = [model.model(torch.tensor([each])).last_hidden_state[0, -1] for each in tokens]
    expected = torch.softmax(torch.stack(hidden) @ torch.from_numpy(head.T), 1)[:, 0]
    np.testing.assert_allclose(embedder.score(QUERY, DOCUMENTS), expected, **CLOSE)


def of_gguf(folder, model, architecture, pooling, tensors):
    """The embedder of a GGUF file of a model, with a tokenizer of bytes."""
    metadata = {f"{architecture}.pooling_type": pooling}
    file = folder / "model.gguf"
    gguf_files.write_gguf(file, model, lambda _: "F32", metadata=metadata, more_tensors=tensors)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return loaded(file)


REFUSED = {
    "no text": (lambda e: e.embed([""]), ContractError, r"texts\[0\]: expected a text, got an empty one"),
    "no tokens": (lambda e: e.embed([[]]), ContractError, r"texts\[0\] is empty"),
    "one text": (lambda e: e.embed("tea"), ContractTypeError, "texts: expected a list of texts, got 'tea'"),
    "number": (lambda e: e.embed([1.5]), ContractTypeError, r"texts\[0\]: expected a text or token ids, got 1.5"),
    "outside": (lambda e: e.embed([[1], [259]]), ContractError, r"texts\[1\].*259"),
    "long": (lambda e: e.embed(["a" * 400]), ContractError, r"texts\[0\]: expected at most 300 tokens, got 401"),
    "prompt": (lambda e: e.embed(["a"], prompt_name="x"), ContractError, "prompt_name: expected 'query' or 'document'"),
    "size 0": (lambda e: e.embed(["a"], dimensions=0), ContractError, "dimensions: expected at least 1, got 0"),
    "size": (lambda e: e.embed(["a"], dimensions=49), ContractError, "dimensions: expected at most 48, got 49"),
    "documents": (lambda e: e.score("a", "b"), ContractTypeError, "documents: expected a list of texts, got 'b'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_texts_are_refused(folders, name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call(loaded(folders(LAST)[0]))


POOLING, DENSE = "1_Pooling/config.json", "2_Dense/config.json"
BOTH = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}
MISH = {"in_features": 48, "out_features": 96, "activation_function": "torch.nn.Mish"}
FILES = {
    "module": ("modules.json", modules({"": "SpladePooling"}), "type: expected Transformer or .*'SpladePooling'"),
    "outside": ("modules.json", modules({"../x": "Pooling"}), "path: expected a folder below its own"),
    "no list": ("modules.json", {"path": ""}, "expected a list of modules with type and path"),
    "pooling": (POOLING, {"pooling_mode": "max"}, 'pooling_mode: expected "lasttoken" or "mean" or "cls"'),
    "two": (POOLING, BOTH, 'pooling_mode: expected "lasttoken" or "mean" or "cls"'),
    "prompts": (POOLING, {"include_prompt": False}, "include_prompt: expected true"),
    "activation": (DENSE, MISH, 'activation_function: expected "Identity" or'),
    "width": (DENSE, MISH | {"in_features": 47}, "in_features: expected 48, got 47"),
    "default": ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "default_prompt_name: expected one"),
    "lower": ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case: not supported"),
}


@pytest.mark.parametrize("name", FILES)
def test_modules_that_are_not_computed_are_refused(folders, tmp_path, name):
    file, values, message = FILES[name]
    folder = shutil.copytree(folders(GEMMA)[0], tmp_path / "model")
    (folder / file).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message):
        load_embedder(folder)


def test_sizes_that_config_json_names_are_the_only_ones(folders, tmp_path):
    folder = shutil.copytree(folders(LAST)[0], tmp_path / "model")
    rewrite(folder / "config.json", matryoshka_dimensions=[16, 32])
    embedder = loaded(folder)
    assert embedder.embed(["a"], dimensions=32).shape == (1, 32)
    with pytest.raises(ContractError, match=r"dimensions: expected 16 or 32 or 48, as config.json says, got 24"):
        embedder.embed(["a"], dimensions=24)


def test_a_model_that_sees_both_ways_generates_nothing(folders):
    with pytest.raises(CheckpointError, match="use_bidirectional_attention: expected false"):
        load(folders(GEMMA)[0], num_pages=4)


def test_the_command_prints_vectors_and_scores(folders, tmp_path, capsys):
    folder, expected = folders(LAST)
    (tmp_path / "texts").write_text("\n".join(TEXTS[:3]))
    assert run(folder, *TEXTS[:3]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    np.testing.assert_allclose([line["embedding"] for line in lines], expected(TEXTS[:3]), **CLOSE)
    assert run(folder, "--input", str(tmp_path / "texts"), "--output", str(tmp_path / "rows.npy")) == 0
    np.testing.assert_allclose(np.load(tmp_path / "rows.npy"), expected(TEXTS[:3]), **CLOSE)
    assert run(folder, "--query", QUERY, *DOCUMENTS) == 0
    scores = [json.loads(line)["relevance_score"] for line in capsys.readouterr().out.splitlines()]
    assert scores == sorted(scores, reverse=True)
    assert run(folder) == 2


def run(folder, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["embed", "--model", str(folder), *arguments])
    return ended.value.code
