"""Adapters as they are read: PEFT's folders and GGUF files hold the same, and what no adapter may change is refused."""

import numpy as np
import pytest

from paged_kv.checkpoint.adapters import read_adapter
from paged_kv.errors import CheckpointError
from paged_kv.graphs.models.adapters import adaptable_layers
from support.adapters import noise, write_gguf_adapter, write_peft
from support.checkpoints import read_config
from support.refusals import refused

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def config(tmp_path):
    return read_config(tmp_path)


@pytest.fixture
def layers(config):
    return noise(adaptable_layers(config), 4, 0)


def test_folders_and_gguf_files_hold_the_same(tmp_path, config, layers):
    heads = config.num_attention_heads, config.num_key_value_heads
    folder = read_adapter(write_peft(tmp_path / "peft", layers, 4, 6.0), config)
    file = read_adapter(write_gguf_adapter(tmp_path / "adapter.gguf", layers, 6.0, heads), config)
    assert folder.digest == file.digest
    assert folder.layers.keys() == layers.keys()
    for layer, (a, b) in folder.layers.items():
        np.testing.assert_array_equal(a, layers[layer][0])
        np.testing.assert_array_equal(b, layers[layer][1] * np.float32(6.0 / 4))


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({}, 1.5),
        ({"use_rslora": True}, 3.0),
        ({"alpha_pattern": {"k_proj": 8, "0.self_attn.q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 2}, "use_rslora": True}, 1.0),
    ],
)
def test_the_scale_is_what_the_configuration_says(tmp_path, config, layers, fields, scale):
    adapter = read_adapter(write_peft(tmp_path / "peft", {Q: layers[Q]}, 4, 6.0, **fields), config)
    np.testing.assert_array_equal(adapter.layers[Q][1], layers[Q][1] * np.float32(scale))


def test_layers_may_have_the_names_of_the_models_files(tmp_path, config, layers):
    """Names of the checkpoint's own, and those of a text model inside one that takes images."""
    for name in ("language_model.model.layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.q_proj"):
        folder = write_peft(tmp_path / name, {name: layers[Q]}, 4, 6.0)
        assert read_adapter(folder, config).layers.keys() == {Q}
    folder = write_peft(tmp_path / "own", {"decoder.q": layers[Q]}, 4, 6.0)
    assert read_adapter(folder, config, {"decoder.q": Q}).layers.keys() == {Q}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, 'peft_type: expected "LORA", got "IA3"'),
        ({"use_dora": True}, "use_dora: not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: not supported.*lm_head"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters: not supported"),
        ({"bias": "all"}, 'bias: expected "none", got "all"'),
        ({"init_lora_weights": "pissa"}, "init_lora_weights.*pissa"),
        ({"lora_alpha": None}, "lora_alpha is missing"),
        ({"lora_alpha": float("inf")}, "lora_alpha: expected"),
        ({"alpha_pattern": {".*q_proj": 2}}, r"alpha_pattern: expected names of layers, got \.\*q_proj"),
    ],
)
def test_what_is_more_than_two_matrices_is_refused(tmp_path, config, layers, fields, message):
    folder = write_peft(tmp_path / "peft", layers, 4, 6.0, **fields)
    refused(read_adapter, folder, config, match=message)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"base_model.model.lm_head.lora_A.weight": (4, 48)}, "lm_head.*no linear layer"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (4, 9)}, "lora_embedding_A.*no linear layer"),
        ({f"base_model.model.{Q}.lora_magnitude_vector": (64,)}, "magnitude.*no linear layer"),
        ({"base_model.model.model.layers.99.self_attn.q_proj.lora_A.weight": (4, 48)}, "layers.99.*no linear layer"),
        ({f"base_model.model.{Q}.lora_A.weight": (4, 47)}, r"expected A \[rank, 48\].*got \[4, 47\]"),
        ({f"base_model.model.{Q}.lora_A.weight": (3, 48)}, r"got \[3, 48\] and \[64, 4\]"),
    ],
)
def test_tensors_that_no_layer_has_are_refused(tmp_path, config, layers, tensors, message):
    more = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    folder = write_peft(tmp_path / "peft", {Q: layers[Q]}, 4, 6.0, tensors=more)
    refused(read_adapter, folder, config, match=message)


def test_a_half_a_file_and_an_adapter_that_is_missing_are_refused(tmp_path, config, layers):
    one = {f"base_model.model.{Q}.lora_B.weight": layers[Q][1]}
    half = write_peft(tmp_path / "half", {}, 4, 6.0, tensors=one)
    refused(read_adapter, half, config, match="its other half is missing")
    empty = write_peft(tmp_path / "empty", {}, 4, 6.0)
    refused(read_adapter, empty, config, match="the adapter has no layers")
    (half / "adapter_model.safetensors").unlink()
    refused(read_adapter, half, config, match="adapter_model.safetensors is missing")
    (half / "adapter_config.json").write_text("[")
    for path in (half, tmp_path / "nothing", tmp_path / "nothing.gguf"):
        with pytest.raises(CheckpointError, match=path.name):
            read_adapter(path, config)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.type": "model"}, "general.type: expected adapter, got model"),
        ({"adapter.type": "control"}, "adapter.type: expected lora, got control"),
        ({"adapter.alora.invocation_tokens": "1"}, "alora.*not supported"),
        ({"architecture": "bert"}, "general.architecture: expected one of"),
    ],
)
def test_gguf_files_that_are_no_such_adapter_are_refused(tmp_path, config, layers, metadata, message):
    file = write_gguf_adapter(tmp_path / "a.gguf", {Q: layers[Q]}, 6.0, (8, 2), **metadata)
    refused(read_adapter, file, config, match=message)
