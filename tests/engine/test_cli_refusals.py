"""The refusals of `paged-kv generate`: one line on stderr that names the fault, exit status 2, and no traceback."""

import json
import os
import re

import pytest
from max.driver import accelerator_count
from safetensors.numpy import load_file

from paged_kv.cli import _run
from paged_kv.engine.demo_model import FOLDER
from support.checkpoints import raw_safetensors, rewrite


@pytest.fixture
def refuse(capfd, folder):
    """Runs `generate` with bad input; the one line that it says."""

    def refuse(*args, model=folder, prompt="hello"):
        given = {"--model": model, "--prompt": prompt}
        options = [f"{name}={value}" for name, value in given.items() if value is not None]
        assert _run(["generate", *options, *map(str, args)]) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert re.fullmatch(r"error: [^\n]+\n", err)
        return err

    return refuse


def read_tensors(file):
    """{name: (safetensors dtype, shape, bytes)} of a float32 file."""
    return {name: ("F32", array.shape, array.tobytes()) for name, array in load_file(file).items()}


def test_a_draft_of_other_tokens_is_refused(refuse, tmp_path):
    assert "its tokens are not those of --model" in refuse("--speculate", FOLDER)
    assert "missing: no such folder" in refuse("--speculate", tmp_path / "missing")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--page-size", "0"], ["--page-size: expected at least 1, got 0"]),
        (["--page-size", "-1"], ["--page-size: expected at least 1, got -1"]),
        (["--page-size", "1.5"], ["--page-size", "1.5"]),
        (["--page-size", str(10**15)], [f"num_pages: 1 pages of {10**15} tokens need"]),
        (["--pages", "0"], ["--pages: expected at least 1, got 0"]),
        (["--pages", "4"], ["--pages 4 is too few", "need 5 pages of 16"]),
        (["--pages", str(10**13)], [f"num_pages: {10**13} pages of 16 tokens need"]),
        (["--pages", str(10**22)], [f"num_pages: {10**22} pages of 16 tokens need"]),
        (["--max-new-tokens", "0"], ["--max-new-tokens: expected at least 1, got 0"]),
        (["--temperature", "-0.1"], ["temperature", "-0.1"]),
        (["--temperature", "nan"], ["temperature", "nan"]),
        (["--top-p", "0"], ["top_p", "got 0.0"]),
        (["--top-p", "2"], ["top_p", "got 2.0"]),
        (["--seed", "-1"], ["seed", "-1"]),
        (["--top-k", "-2"], ["top_k: expected at least -1"]),
        (["--min-p", "2"], ["min_p: expected a number from 0 to 1, got 2.0"]),
        (["--repetition-penalty", "0"], ["repetition_penalty: expected a positive number, got 0.0"]),
        (["--presence-penalty", "nan"], ["presence_penalty", "nan"]),
        (["--frequency-penalty", "-3"], ["frequency_penalty: expected a number from -2 to 2, got -3.0"]),
        (["--logit-bias", "5"], ["--logit-bias: expected TOKEN=NUMBER, got '5'"]),
        (["--logit-bias", "x=1"], ["logit_bias: a token: expected an integer, got 'x'"]),
        (["--logit-bias", "99999=1"], ["logit_bias has token id 99999; the vocabulary is 0 to 258"]),
        (["--logprobs", "-1"], ["logprobs: expected at least 0"]),
        (["--stop-token", "-1"], ["stop_tokens: a token: expected at least 0"]),
        (["--dtype", "float64"], ["--dtype", "float64"]),
        (["--device", "tpu"], ["--device", "tpu"]),
        (["--colour"], ["--colour"]),
        (["surplus"], ["surplus"]),
    ],
)
def test_bad_options(refuse, args, words):
    message = refuse(*args)
    assert all(word in message for word in words)


@pytest.mark.skipif(accelerator_count() > 0, reason="there is a GPU")
def test_no_gpu(refuse, capfd):
    assert "GPU 0: MAX finds no such device" in refuse("--device", "gpu")
    assert _run(["demo", "--device", "gpu"]) == 2
    assert "GPU 0: MAX finds no such device" in capfd.readouterr().err


def test_missing_options(refuse):
    assert "--prompt" in refuse(prompt=None)
    assert "--model" in refuse(model=None)


def test_missing_commands(capsys):
    assert _run(["generates"]) == 2
    assert capsys.readouterr().err.startswith("error: No such command 'generates'")
    assert _run([]) == 2
    assert capsys.readouterr().err.startswith("Usage: paged-kv")


def test_bad_prompts(refuse):
    assert "prompt '' is empty" in refuse(prompt="")
    assert "not valid text" in refuse(prompt="a\udcff")
    assert "prompt 0 has 4097 tokens, max_position_embeddings is 4096" in refuse(prompt="a" * 4096)
    # A thousand letters do not fit into 10 pages.
    assert "--pages 10 is too few" in refuse("--pages", 10, prompt="a" * 1000)


def test_folders_that_are_none(refuse, folder, tmp_path):
    assert f"{tmp_path}/none: no such folder" in refuse(model=tmp_path / "none")
    assert "config.json: not a folder" in refuse(model=folder / "config.json")
    assert f"{tmp_path}/config.json: no such file" in refuse(model=tmp_path)


def test_bad_configurations(refuse, copy):
    config = copy / "config.json"
    good = config.read_text()
    for change, words in (
        (
            {"architectures": ["BloomForCausalLM"]},
            ["architectures", "BloomForCausalLM", "expected one of Llama, Mistral"],
        ),
        ({"head_dim": 12}, ["head_dim: expected", "got 12"]),
        ({"vocab_size": 200, "eos_token_id": 1, "bos_token_id": 1}, ["vocab"]),
        ({"hidden_act": "gelu"}, ["hidden_act"]),
    ):
        config.write_text(good)
        rewrite(config, **change)
        (copy / "generation_config.json").unlink(missing_ok=True)
        message = refuse(model=copy)
        assert all(word in message for word in words)
    config.write_text('{"hidden_size": ')
    assert "config.json: not readable as JSON" in refuse(model=copy)
    config.write_bytes(b"\xff\xfe")
    assert "config.json: not readable as JSON" in refuse(model=copy)


def test_bad_tokenizers(refuse, copy):
    file = copy / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["vocab"] |= {"ab": 259}
    file.write_text(json.dumps(values))
    message = refuse(model=copy)
    assert "vocabulary mismatch: token ids go up to 259, but vocab_size is 259" in message
    file.write_text("[]")
    assert "tokenizer.json: not a tokenizer" in refuse(model=copy)
    file.unlink()
    assert "tokenizer.json: no such file" in refuse(model=copy)


def test_bad_weights(refuse, copy):
    file = copy / "model.safetensors"
    whole, tensors = file.read_bytes(), read_tensors(file)
    name = "model.layers.2.mlp.up_proj.weight"
    file.write_bytes(raw_safetensors({key: tensor for key, tensor in tensors.items() if key != name}))
    assert f"tensor {name} is missing" in refuse(model=copy)
    dtype, (rows, columns), data = tensors[name]
    file.write_bytes(raw_safetensors(tensors | {name: (dtype, (columns, rows), data)}))
    assert f"tensor {name}: expected shape [768, 256], got [256, 768]" in refuse(model=copy)
    file.write_bytes(raw_safetensors(tensors | {name: ("I32", (rows, columns), data)}))
    assert f"tensor {name}: expected dtype F32 or BF16 or F16, got I32" in refuse(model=copy)
    file.write_bytes(whole[:-1])
    assert f"cut short: expected {len(whole)} bytes, got {len(whole) - 1}" in refuse(model=copy)
    file.write_bytes(whole[:100])
    assert "cut short" in refuse(model=copy)
    file.write_bytes(b"PK\x03\x04 not at all" * 99)
    assert "model.safetensors: not a safetensors file" in refuse(model=copy)
    file.write_bytes(b"")
    assert "model.safetensors" in refuse(model=copy)
    file.unlink()
    assert "neither model.safetensors nor" in refuse(model=copy)


def test_bad_shards(refuse, copy):
    tensors = read_tensors(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    shards = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for shard in set(shards.values()):
        held = {name: tensors[name] for name, where in shards.items() if where == shard}
        (copy / shard).write_bytes(raw_safetensors(held))
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    second = copy / "model-00002-of-00002.safetensors"
    os.truncate(second, second.stat().st_size - 4)
    assert f"{second}: cut short" in refuse(model=copy)
    second.unlink()
    assert "shard model-00002-of-00002.safetensors is missing" in refuse(model=copy)
