"""Qwen3-MoE and GPT-OSS: their config.json field by field, their experts in every layout, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from max.dtype import DType
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from paged_kv.checkpoint import mxfp4
from paged_kv.checkpoint.source import open_source
from paged_kv.checkpoint.weights import SINGLE_FILE, open_checkpoint
from paged_kv.errors import CheckpointError
from paged_kv.graphs.encodings import row_bytes
from paged_kv.graphs.models.mixture import ClampedUnits, Experts
from paged_kv.graphs.models.tensors import expected_tensors
from paged_kv.graphs.rope import Yarn
from support.checkpoints import TORCH, random_tensors, raw_safetensors, read, to_torch
from support.gguf_blocks import dequantise
from support.refusals import refused

QWEN = json.loads("""
{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "bos_token_id": 151643,
"decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
"intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
"model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32,
"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
"output_router_logits": false, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0,
"sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_sliding_window": false,
"vocab_size": 151936}
""")
"""As Qwen publishes it with Qwen3-30B-A3B."""
GPT = json.loads("""
{"architectures": ["GptOssForCausalLM"], "attention_bias": true, "eos_token_id": 200002, "experts_per_token": 4,
"head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
"intermediate_size": 2880, "max_position_embeddings": 131072, "model_type": "gpt_oss",
"num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
"num_local_experts": 32, "output_router_logits": false, "pad_token_id": 199999, "rms_norm_eps": 1e-05,
"rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": false, "vocab_size": 201088,
"quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
"rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
"rope_type": "yarn", "truncate": false}}
""")
"""As OpenAI publishes it with gpt-oss-20b, without the list of windows, whose default it is."""
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
         "num_hidden_layers": 2, "num_experts_per_tok": 2, "bos_token_id": None, "eos_token_id": None,
         "intermediate_size": 32}  # fmt: skip
SMALL_QWEN = QWEN | SIZES | {"num_experts": 4, "moe_intermediate_size": 24}
SMALL_GPT = GPT | SIZES | {"num_local_experts": 4}
EXPERTS = "model.layers.1.mlp.experts"


def load(folder, config, tensors, dtype=DType.float32):
    save_file(tensors, folder / SINGLE_FILE)
    loaded = open_checkpoint(folder).load(config, dtype)
    shapes = expected_tensors(config)
    shapes |= {name: (*shapes[name][:-1], row_bytes(kind, shapes[name][-1])) for name, kind in config.encodings}
    assert {name: tuple(buffer.shape) for name, buffer in loaded.items()} == shapes
    return loaded


def test_qwen3_moes_file(tmp_path):
    config = read(tmp_path, QWEN)
    assert config.experts == Experts(count=128, chosen=8, inner=768, layers=(True,) * 48, sums_to_one=True)
    assert (config.qk_norm, config.qkv_bias, config.o_bias, config.windows) == ("head", False, False, ())


def test_gpt_oss_file(tmp_path):
    config = read(tmp_path, GPT)
    layout = {"router": "router", "bias": True, "transposed": True, "alternating": True, "sums_to_one": True}
    layout["units"] = ClampedUnits(alpha=1.702, limit=7.0)
    assert config.experts == Experts(count=32, chosen=4, inner=2880, layers=(True,) * 24, **layout)
    assert dict(config.encodings) == {
        f"model.layers.{layer}.mlp.experts.{name}_proj.weight": "MXFP4"
        for layer in range(24)
        for name in ("gate_up", "down")
    }
    assert not config.float32_activations
    assert (config.sinks, config.qkv_bias, config.o_bias, config.norm_rounds_once) == (True, True, True, True)
    assert config.windows == (127, -1) * 12
    assert config.rope.theta == 150000.0
    assert config.rope.scaling == Yarn(32.0, 4096, Yarn.sharpening(32.0), truncate=False)
    assert read(tmp_path, GPT, rope_scaling=None).rope == config.rope
    assert read(tmp_path, GPT, layer_types=["full_attention", "sliding_attention"] * 12).windows == (-1, 127) * 12


def test_which_layers_are_mixtures(tmp_path):
    every_third = read(tmp_path, QWEN, num_hidden_layers=6, decoder_sparse_step=3)
    assert every_third.experts.layers == (False, False, True) * 2
    but_one = read(tmp_path, QWEN, num_hidden_layers=3, mlp_only_layers=[1])
    assert but_one.experts.layers == (True, False, True)
    assert [but_one.has_experts(layer) for layer in range(3)] == [True, False, True]
    assert read(tmp_path, QWEN, num_hidden_layers=2, mlp_only_layers=[0, 1]).experts is None


def test_the_number_of_experts_as_transformers_writes_it(tmp_path):
    values = {key: value for key, value in QWEN.items() if key != "num_experts"}
    assert read(tmp_path, values, num_local_experts=16).experts.count == 16


@pytest.mark.parametrize(
    ("values", "said", "message"),
    [
        (QWEN, {"num_experts": None}, "num_experts is missing"),
        (QWEN, {"num_local_experts": 64}, "num_local_experts: expected num_experts = 128.*, got 64"),
        (QWEN, {"num_experts_per_tok": 129}, "num_experts_per_tok: expected at most the 128 experts.*, got 129"),
        (QWEN, {"moe_intermediate_size": 0}, "moe_intermediate_size: expected a positive integer.*, got 0"),
        (QWEN, {"scoring_func": "sigmoid"}, 'scoring_func: expected "softmax".*, got "sigmoid"'),
        (
            QWEN,
            {"topk_method": "noaux_tc"},
            'topk_method: expected "greedy" or "group_limited_greedy".*, got "noaux_tc"',
        ),
        (QWEN, {"norm_topk_prob": 1}, "norm_topk_prob: expected true or false.*, got 1"),
        (QWEN, {"decoder_sparse_step": 0}, "decoder_sparse_step: expected a positive integer.*, got 0"),
        (QWEN, {"mlp_only_layers": [48]}, r"mlp_only_layers: expected a list of layers from 0 to 47.*, got \[48\]"),
        (QWEN, {"mlp_only_layers": 1}, "mlp_only_layers: expected a list of layers.*, got 1"),
        (QWEN, {"hidden_act": "gelu"}, 'hidden_act: expected "silu".*, got "gelu"'),
        (
            QWEN,
            {"quantization_config": {"quant_method": "quanto"}},
            'quantization_config: quantized.*, got .*"quanto".*',
        ),
        (QWEN, {"quantization_config": {"quant_method": "mxfp4"}}, 'quantization_config: quantized.*, got .*"mxfp4".*'),
        (
            GPT,
            {"quantization_config": {"quant_method": "quanto"}},
            'quantization_config: quantized.*, got .*"quanto".*',
        ),
        (GPT, {"quantization_config": {}}, "quantization_config: quantized.*, got {}"),
        (
            GPT,
            {"hidden_size": 2896},
            "hidden_size: expected a multiple of 32, the values of an MXFP4 block.*, got 2896",
        ),
        (GPT, {"intermediate_size": 2864}, "intermediate_size: expected a multiple of 32.*, got 2864"),
        (GPT, {"swiglu_limit": -7.0}, "swiglu_limit: expected a positive number.*, got -7.0"),
        (GPT, {"scoring_func": "sigmoid"}, 'scoring_func: expected "softmax".*, got "sigmoid"'),
        (GPT, {"hidden_act": "gelu"}, 'hidden_act: expected "silu".*, got "gelu"'),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, values, said, message):
    refused(read, tmp_path, values, **said, match=message)


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_experts_that_lie_apart_and_those_in_a_stack_are_loaded_alike(tmp_path, dtype):
    config = read(tmp_path, SMALL_QWEN)
    tensors = random_tensors(config)
    loaded = load(tmp_path, config, tensors, dtype)
    stacks = {}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{at}.{expert}.{name}_proj.weight") for expert in range(4)])
            for name in ("gate", "up", "down")
        )
        stacks |= {f"{at}.gate_up_proj": torch.cat([gate, up], dim=1), f"{at}.down_proj": down}
    in_stacks = load(tmp_path, config, tensors | stacks, dtype)
    for name, tensor in stacks.items():
        assert torch.equal(to_torch(loaded[f"{name}.weight"]), tensor.to(TORCH[dtype]))
        assert torch.equal(to_torch(in_stacks[f"{name}.weight"]), tensor.to(TORCH[dtype]))


def test_stacks_whose_gate_and_up_alternate(tmp_path):
    config = read(tmp_path, SMALL_GPT, quantization_config=None)
    tensors = random_tensors(config)
    loaded = load(tmp_path, config, tensors)
    stack, bias = tensors[f"{EXPERTS}.gate_up_proj"], tensors[f"{EXPERTS}.gate_up_proj_bias"]
    for first, part in ((0, slice(0, 32)), (1, slice(32, 64))):
        weights = to_torch(loaded[f"{EXPERTS}.gate_up_proj.weight"])[:, part]
        assert torch.equal(weights, stack[:, :, first::2].transpose(1, 2))
        assert torch.equal(to_torch(loaded[f"{EXPERTS}.gate_up_proj.bias"])[:, part], bias[:, first::2])
    down = tensors[f"{EXPERTS}.down_proj"]
    assert torch.equal(to_torch(loaded[f"{EXPERTS}.down_proj.weight"]), down.transpose(1, 2))
    assert torch.equal(to_torch(loaded[f"{EXPERTS}.down_proj.bias"]), tensors[f"{EXPERTS}.down_proj_bias"])


def in_blocks(config, largest_scale=140):
    """The tensors of a checkpoint with MXFP4 experts, and its experts as transformers unpacks them."""
    random = np.random.default_rng(3)
    tensors, unpacked = random_tensors(dataclasses.replace(config, encodings=())), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, columns, rows = tensors.pop(name).shape
        blocks = torch.from_numpy(random.integers(0, 256, (count, rows, columns // 32, 16), np.uint8))
        scales = torch.from_numpy(random.integers(0, largest_scale, (count, rows, columns // 32), np.uint8))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        unpacked[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return tensors, unpacked


def values_of(blocks):
    """Return the values of MXFP4 blocks as they are loaded, by the `gguf` package."""
    return dequantise(blocks.reshape(-1, blocks.shape[-1]), "MXFP4").reshape(*blocks.shape[:-1], -1)


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_experts_in_mxfp4_stay_in_blocks_of_their_values(tmp_path, dtype):
    config = read(tmp_path, SMALL_GPT)
    tensors, unpacked = in_blocks(config)
    loaded = load(tmp_path, config, tensors, dtype)
    for name, values in unpacked.items():
        blocks = loaded[f"{name}.weight"]
        count, rows, row = blocks.shape
        stored = sum(tensors[f"{name}_{part}"].numel() for part in ("blocks", "scales"))
        assert (blocks.dtype, count * rows * row) == (np.uint8, stored)
        expected = values.transpose(1, 2)  # [E, out, in]
        if "gate_up" in name:
            expected = torch.cat([expected[:, 0::2], expected[:, 1::2]], dim=1)
        np.testing.assert_array_equal(values_of(blocks), expected.numpy())


def test_every_code_of_mxfp4_at_every_scale():
    """The definition, value by value in float64; each byte holds the earlier value in its low bits."""

    def value(code, scale):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        return (-1) ** sign * magnitude * 2.0 ** (scale - 127)

    codes = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(1, 16, 16), (255, 16, 16))
    scales = np.broadcast_to(np.arange(255, dtype=np.uint8)[:, None], (255, 16))
    with np.errstate(over="ignore"):
        got = values_of(mxfp4.blocks_of(codes, scales))
        expected = [[[value(byte & 15, s), value(byte >> 4, s)] for byte in range(256)] for s in range(255)]
        expected = np.array(expected).reshape(255, 512).astype(np.float32)
    np.testing.assert_array_equal(got, expected)


def test_damaged_blocks_are_named(tmp_path):
    config = read(tmp_path, SMALL_GPT)
    tensors, _ = in_blocks(config)
    blocks, scales = f"{EXPERTS}.down_proj_blocks", f"{EXPERTS}.down_proj_scales"
    nan = tensors[scales].clone()
    nan[3, 63, 0] = mxfp4.NAN
    for changed, message in (
        ({scales: nan}, f"tensor {scales} has a scale that is NaN"),
        ({scales: tensors[scales][:, :-1].contiguous()}, rf"tensor {scales}: expected shape .*, got \[4, 63, 1\]"),
        ({blocks: tensors[blocks].float()}, f"tensor {blocks}: expected dtype U8, got F32"),
        ({f"{EXPERTS}.down_proj": torch.zeros(4, 32, 64)}, f"tensor {EXPERTS}.down_proj is no part of the model"),
    ):
        refused(load, tmp_path, config, tensors | changed, match=message)
    del tensors[scales]
    refused(load, tmp_path, config, tensors, match=f"tensor {scales} is missing")


def test_blocks_that_config_json_does_not_announce_are_refused(tmp_path):
    config = read(tmp_path, SMALL_GPT, quantization_config=None)
    tensors, _ = in_blocks(config)
    refused(load, tmp_path, config, tensors, match=r"experts\.gate_up_proj is missing")


@pytest.mark.parametrize(("values", "key"), [(SMALL_QWEN, "num_experts"), (SMALL_GPT, "num_local_experts")])
def test_numbers_of_experts_that_no_checkpoint_has_are_refused_before_names_are_made(tmp_path, values, key):
    read(tmp_path, values, **{key: 2**31 - 8})
    tensors = {f"{index}": ("F32", (1,), b"abcd") for index in range(24)}
    (tmp_path / SINGLE_FILE).write_bytes(raw_safetensors(tensors))
    with pytest.raises(CheckpointError, match=r"experts, but only 24 tensors|is missing"):
        open_source(tmp_path).load(DType.float32)
