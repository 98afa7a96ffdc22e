"""The demo checkpoint: the format of a real one, the same bytes for a seed, written whole or not at all."""

import hashlib
import json
import resource

import numpy as np
import pytest
import torch
import transformers
from max.dtype import DType

from paged_kv.checkpoint.config import load_config
from paged_kv.checkpoint.weights import open_checkpoint
from paged_kv.engine import demo
from paged_kv.engine.demo import write_demo_checkpoint
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.engine.uncached_forward import recompute
from paged_kv.graphs.models.tensors import expected_tensors
from support.checkpoints import relative_error
from support.permissions import permissions_count
from support.refusals import refused

FILES = {f"{name}.json" for name in ("config", "generation_config", "tokenizer", "tokenizer_config", "demo")}
FILES |= {"model.safetensors"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_demo_checkpoint(tmp_path_factory.mktemp("demo") / "checkpoint")


def load(folder):
    config = load_config(folder)
    loaded = open_checkpoint(folder).load(config, DType.float32)
    return config, loaded


def digest(folder):
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_this_package_reads_it(folder):
    config, weights = load(folder)
    assert {file.name for file in folder.iterdir()} == FILES
    assert set(weights) == set(expected_tensors(config))
    assert Tokenizer(folder, config).encode("hi")[0] == config.bos_token_id
    assert config.eos_token_ids == (demo.EOS_ID,)


def test_transformers_reads_it_and_computes_the_same(folder):
    config, weights = load(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)("The same text for both.")["input_ids"]
    assert tokens == Tokenizer(folder, config).encode("The same text for both.")
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    assert relative_error(recompute(config, weights, tokens, np.float32), theirs) < 1e-4
    assert relative_error(recompute(config, weights, tokens), theirs) < 1e-4


def test_its_greedy_text_does_not_collapse(folder):
    config, weights = load(folder)
    tokenizer = Tokenizer(folder, config)
    for prompt in ("Hello", "Once upon a time"):
        tokens = tokenizer.encode(prompt)
        for _ in range(32):
            tokens.append(int(recompute(config, weights, tokens, np.float32)[-1].argmax()))
        text = tokenizer.decode(tokens)[len(prompt) :]
        assert len(text) == 32
        assert text.isascii()
        assert text.isprintable()
        assert max(text.count(letter) for letter in set(text)) < 12


def test_a_seed_always_gives_the_same_weights(folder, tmp_path):
    again = write_demo_checkpoint(tmp_path / "again", seed=0)
    other = write_demo_checkpoint(tmp_path / "other", seed=1)
    assert digest(again) == digest(folder)
    assert digest(other) != digest(folder)
    # The numbers themselves: a change of them raises VERSION.
    _, weights = load(folder)
    assert demo.VERSION == 2
    assert weights["model.embed_tokens.weight"][0, 0] == np.float32(0.069851376)
    assert weights["lm_head.weight"][258, 255] == np.float32(0.0035375077)


@pytest.mark.parametrize("change", ["version", "seed", "truncated", "missing"])
def test_any_other_demo_checkpoint_is_replaced(tmp_path, monkeypatch, change):
    folder = write_demo_checkpoint(tmp_path / "demo")
    expected, seed, weights = digest(folder), 0, folder / "model.safetensors"
    if change == "version":
        monkeypatch.setattr(demo, "VERSION", 99)
    elif change == "seed":
        expected, seed = digest(write_demo_checkpoint(tmp_path / "other", seed=1)), 1
    elif change == "truncated":
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        weights.unlink()
    write_demo_checkpoint(folder, seed=seed)
    assert digest(folder) == expected
    stamp = json.loads((folder / "demo.json").read_text())
    assert (stamp["version"], stamp["seed"]) == (demo.VERSION, seed)
    assert {file.name for file in tmp_path.iterdir()} <= {"demo", "other"}


def test_nothing_else_is_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    (tmp_path / "file").write_text("mine")
    for name in ("mine", "file"):
        refused(write_demo_checkpoint, tmp_path / name, match=rf"{name}: is there already and is no demo checkpoint")
    assert (tmp_path / "mine" / "config.json").read_text() == "{}"
    (tmp_path / "empty").mkdir()
    assert digest(write_demo_checkpoint(tmp_path / "empty"))


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_demo_checkpoint(tmp_path / "demo")
    assert list(tmp_path.iterdir()) == []


def test_two_writers_at_once_agree(tmp_path, monkeypatch):
    """The other process is done just before our rename."""
    folder, move = tmp_path / "demo", demo._move

    def overtaken(made, path, seed):
        monkeypatch.setattr(demo, "_move", move)
        write_demo_checkpoint(path, seed=seed)
        move(made, path, seed)

    monkeypatch.setattr(demo, "_move", overtaken)
    assert digest(write_demo_checkpoint(folder))
    assert {file.name for file in folder.iterdir()} == FILES
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("limit", [0, 100, 30_000, 1_000_000])
def test_a_full_disk_is_a_typed_error_and_leaves_nothing(tmp_path, limit):
    """In each of its files: the limit on the size of files ends a write in the middle, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        refused(write_demo_checkpoint, tmp_path / "demo", match="the demo checkpoint cannot be written: ")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    write_demo_checkpoint(tmp_path / "demo")


def test_a_whole_one_is_used_where_nothing_can_be_written(tmp_path):
    folder = write_demo_checkpoint(tmp_path / "demo")
    with permissions_count():
        for path in (folder, tmp_path):
            path.chmod(0o500)
        try:
            assert write_demo_checkpoint(folder) == folder
            refused(write_demo_checkpoint, tmp_path / "another", match=r"cannot be written: .*Permission denied")
        finally:
            for path in (tmp_path, folder):
                path.chmod(0o700)


@pytest.mark.parametrize("name", ["a" * 300, "a\0b"])
def test_a_path_that_the_system_refuses_is_a_typed_error(tmp_path, name):
    refused(write_demo_checkpoint, tmp_path / name, match="cannot be read")
