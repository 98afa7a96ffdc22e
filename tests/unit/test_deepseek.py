"""DeepSeek-V2 and V3: their config.json field by field, its weights as they are put together, and what is refused."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from max.dtype import DType
from max.graph import DeviceRef, Graph
from safetensors.torch import save_file

from paged_kv.checkpoint.config import load_config
from paged_kv.checkpoint.source import open_source
from paged_kv.checkpoint.weights import SINGLE_FILE, open_checkpoint
from paged_kv.engine.uncached_forward import recompute
from paged_kv.errors import CheckpointError, ContractError
from paged_kv.graphs.models import decoder
from paged_kv.graphs.models.config import LatentSizes
from paged_kv.graphs.models.mixture import Experts
from paged_kv.graphs.models.parameters import Parameters
from paged_kv.graphs.models.tensors import assembled_tensors, expected_tensors
from support.checkpoints import TORCH, random_tensors, raw_safetensors, read, to_torch, write_config
from support.refusals import refused

YARN = json.loads("""
{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
"original_max_position_embeddings": 4096, "type": "yarn"}
""")
LITE = json.loads("""
{"architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false, "aux_loss_alpha": 0.001,
"bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
"hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
"model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
"n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 16,
"num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1,
"q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
"routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": true, "tie_word_embeddings": false,
"topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 102400}
""") | {"rope_scaling": YARN}
"""As DeepSeek publishes it with DeepSeek-V2-Lite."""
LARGE = LITE | json.loads("""
{"hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 8,
"n_routed_experts": 160, "num_attention_heads": 128, "num_hidden_layers": 60, "num_key_value_heads": 128,
"q_lora_rank": 1536, "routed_scaling_factor": 16.0, "topk_group": 3, "topk_method": "group_limited_greedy"}
""")
"""And with DeepSeek-V2."""
MOONLIGHT = {key: value for key, value in LITE.items() if key != "rope_scaling"} | json.loads("""
{"architectures": ["DeepseekV3ForCausalLM"], "intermediate_size": 11264, "max_position_embeddings": 8192,
"model_type": "deepseek_v3", "norm_topk_prob": true, "num_nextn_predict_layers": 0, "rope_theta": 50000.0,
"routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "vocab_size": 163840}
""")
"""A model of 16 billion parameters like DeepSeek-V3, with the keys of V3's file and Moonlight's sizes."""
SMALL = LITE | json.loads("""
{"bos_token_id": null, "eos_token_id": null, "hidden_size": 48, "intermediate_size": 40, "kv_lora_rank": 32,
"moe_intermediate_size": 24, "n_routed_experts": 4, "num_attention_heads": 4, "num_experts_per_tok": 2,
"num_hidden_layers": 3, "num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
"vocab_size": 64}
""")


def test_v2_lites_file(tmp_path):
    config = read(tmp_path, LITE)
    assert config.latent == LatentSizes(q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    assert config.experts == Experts(count=64, chosen=6, inner=1408, shared_inner=2816, layers=(False,) + (True,) * 26)
    assert (config.head_dim, config.rope.dims, config.rope.amplitude) == (192, 64, 1.0)
    assert config.sm_scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2, rel=1e-12)
    assert decoder.cache_shape(config, 7, 16) == [7, 27, 16, 576]
    assert [config.has_experts(layer) for layer in (0, 1, 26)] == [False, True, True]


def test_v2s_file(tmp_path):
    config, lite = read(tmp_path, LARGE), read(tmp_path, LITE)
    assert config.latent.q_rank == 1536
    sizes = {"count": 160, "inner": 1536, "shared_inner": 3072, "groups": 8, "chosen_groups": 3, "scale": 16.0}
    assert config.experts == replace(lite.experts, layers=(False,) + (True,) * 59, **sizes)


def test_a_file_like_v3(tmp_path):
    config, lite = read(tmp_path, MOONLIGHT), read(tmp_path, LITE)
    assert config.experts == replace(lite.experts, sigmoid=True, sums_to_one=True, scale=2.446)
    bias = {name: shape for name, shape in expected_tensors(config).items() if name.endswith("correction_bias")}
    assert bias == {f"model.layers.{i}.mlp.gate.e_score_correction_bias": (64,) for i in range(1, 27)}


def test_the_bias_of_the_choice_stays_float32(tmp_path):
    config = read(tmp_path, SMALL | {key: MOONLIGHT[key] for key in ("architectures", "scoring_func", "topk_method")})
    tensors = random_tensors(config)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    save_file(
        {key: tensor if key == name else tensor.bfloat16() for key, tensor in tensors.items()}, tmp_path / SINGLE_FILE
    )
    loaded = open_checkpoint(tmp_path).load(config, DType.bfloat16)
    np.testing.assert_array_equal(loaded[name], tensors[name].numpy())


def test_without_a_scaling_scores_have_the_size_of_keys(tmp_path):
    assert read(tmp_path, LITE, rope_scaling=None).sm_scale == 192**-0.5


def test_a_model_may_have_no_experts(tmp_path):
    assert read(tmp_path, LITE, first_k_dense_replace=27).experts is None


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"attention_bias": True}, "attention_bias: not supported for this family.*, got true"),
        ({"mlp_bias": True}, "mlp_bias: not supported for this family.*, got true"),
        ({"norm_topk_prob": True}, "norm_topk_prob: not supported.*, got true"),
        ({"scoring_func": "sigmoid"}, 'scoring_func: expected "softmax".*, got "sigmoid"'),
        ({"topk_method": "noaux_tc"}, 'topk_method: expected "greedy" or "group_limited_greedy".*, got "noaux_tc"'),
        ({"moe_layer_freq": 2}, "moe_layer_freq: expected 1.*, got 2"),
        ({"num_key_value_heads": 8}, "num_key_value_heads: expected num_attention_heads = 16.*, got 8"),
        ({"kv_lora_rank": 520}, "kv_lora_rank: expected a multiple of 8 and at most 512.*, got 520"),
        ({"qk_nope_head_dim": 20}, "qk_nope_head_dim: expected a multiple of 8 and at most 448.*, got 20"),
        ({"qk_rope_head_dim": 72}, "qk_rope_head_dim: expected a multiple of 8 and at most 64.*, got 72"),
        ({"v_head_dim": "a"}, 'v_head_dim: expected a positive integer.*, got "a"'),
        ({"q_lora_rank": 0}, "q_lora_rank: expected a positive integer.*, got 0"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok: expected at most the 64 experts.*, got 65"),
        ({"n_routed_experts": -1}, "n_routed_experts: expected a positive integer.*, got -1"),
        ({"n_shared_experts": 0}, "n_shared_experts: expected a positive integer.*, got 0"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace: expected an integer from 0 on.*, got -1"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor: expected a positive number.*, got 0"),
        (
            {"topk_method": "group_limited_greedy", "n_group": 5},
            "n_group: expected a divisor of n_routed_experts = 64.*, got 5",
        ),
        (
            {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 9},
            "topk_group: expected at most 8.*, got 9",
        ),
        (
            {"topk_method": "group_limited_greedy", "n_group": 32},
            "num_experts_per_tok: expected at most the 2 experts.*, got 6",
        ),
        ({"hidden_act": "gelu"}, 'hidden_act: expected "silu".*, got "gelu"'),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 'rope_scaling: expected "yarn".*, got .*'),
        (
            {"rope_scaling": YARN | {"mscale_all_dim": "x"}},
            r'rope_scaling.mscale_all_dim: expected a positive number.*, got "x"',
        ),
        ({"quantization_config": {}}, "quantization_config: quantized checkpoints are not supported.*, got .*"),
        (MOONLIGHT | {"scoring_func": "softmax"}, 'scoring_func: expected "sigmoid".*, got "softmax"'),
        (MOONLIGHT | {"topk_method": "greedy"}, 'topk_method: expected "noaux_tc".*, got "greedy"'),
        (MOONLIGHT | {"rope_interleave": False}, "rope_interleave: expected true.*, got false"),
        (MOONLIGHT | {"n_group": 64}, "n_group: expected groups of several experts.*, got 64"),
    ],
    ids=range(29),
)
def test_what_is_not_computed_is_refused(tmp_path, said, message):
    refused(read, tmp_path, said if "architectures" in said else LITE | said, match=message)


@pytest.fixture
def small(tmp_path):
    """A folder, its configuration, and its tensors, in bfloat16 and float32."""
    config = read(tmp_path, SMALL)
    tensors = random_tensors(config)
    tensors = {name: tensor.bfloat16() if "proj" in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / SINGLE_FILE)
    return tmp_path, config, tensors


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_stacks_are_put_together_from_the_checkpoints_tensors(small, dtype):
    folder, config, tensors = small
    loaded = open_checkpoint(folder).load(config, dtype)
    assert {name: tuple(buffer.shape) for name, buffer in loaded.items()} == expected_tensors(config)
    for layer in range(3):
        at = f"model.layers.{layer}"
        heads = tensors[f"{at}.self_attn.kv_b_proj.weight"].reshape(4, 40, 32).to(TORCH[dtype])
        assert torch.equal(to_torch(loaded[f"{at}.self_attn.k_up_proj.weight"]), heads[:, :16].transpose(1, 2))
        assert torch.equal(to_torch(loaded[f"{at}.self_attn.v_up_proj.weight"]), heads[:, 16:])
    assert not any(name in loaded for name in tensors if ".experts.0." in name or "kv_b_proj" in name)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.0.self_attn.kv_b_proj.weight"]
)
def test_a_tensor_of_a_stack_is_named_in_errors(small, name):
    folder, config, tensors = small
    cut = {key: tensor for key, tensor in tensors.items() if key != name}
    save_file(cut, folder / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=rf"tensor {name} is missing"):
        open_checkpoint(folder).load(config, DType.float32)
    save_file(cut | {name: tensors[name][:-1].contiguous()}, folder / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=rf"tensor {name}: expected shape .*, got \[\d+, \d+\]"):
        open_checkpoint(folder).load(config, DType.float32)


def test_a_number_of_heads_that_no_checkpoint_has_is_refused_before_names_are_made(tmp_path):
    read(tmp_path, SMALL, num_attention_heads=2**31 - 8, num_key_value_heads=2**31 - 8)
    tensors = {f"{index}": ("F32", (1,), b"abcd") for index in range(24)}
    (tmp_path / SINGLE_FILE).write_bytes(raw_safetensors(tensors))
    with pytest.raises(CheckpointError, match="is missing"):
        open_source(tmp_path).load(DType.float32)


def test_what_runs_plain_decoders_alone_says_so(small):
    _, config, _ = small
    with pytest.raises(ContractError, match=r"only plain decoders are recomputed \(sm_scale, latent, experts\)"):
        recompute(config, {}, [1, 2, 3])
    devices = [DeviceRef.GPU(0), DeviceRef.GPU(1)]
    with Graph("shares") as graph, pytest.raises(ContractError, match="latent attention or experts runs on one device"):
        Parameters.shares(graph, config, DType.float32, devices)
    assert len(assembled_tensors(config)) == 2 * 3 + 2 * 2
    assert np.prod(expected_tensors(config)["model.layers.1.mlp.experts.gate_up_proj.weight"]) == 4 * 2 * 24 * 48


def test_other_models_are_loaded_as_they_are(tmp_path):
    assert assembled_tensors(load_config(write_config(tmp_path))) == {}
