"""Every metadata key that the `gguf` package knows, in files of every architecture: its value changes the model, or is
refused by name, or is one of those that llama.cpp's loader of the architecture makes nothing of.
"""

import dataclasses

import gguf
import numpy as np
import pytest
from max.dtype import DType

from paged_kv.checkpoint.gguf import GgufCheckpoint, open_gguf
from paged_kv.checkpoint.gguf_families import GGUF_FAMILIES
from paged_kv.checkpoint.gguf_header import Strings
from paged_kv.checkpoint.source import open_source
from paged_kv.errors import CheckpointError
from support.gguf_files import MODELS, make_model, write_gguf
from support.refusals import refused

WITHOUT_EFFECT = {
    "attention.group_norm_epsilon", "attention.group_norm_groups", "pooling_type",
    "classifier.output_labels", "classifier.pooling_type", "deepstack_mapping", "n_deepstack_layers",
    "rope.scaling.finetuned",
}  # fmt: skip
OWN = {
    "gpt-oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    "mistral3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "nemotron_h": {"layers_block_type": ["full_attention", "mlp"]},
    "gemma4": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    "nemotron_h_moe": {"layers_block_type": ["full_attention", "moe"]},
}
"""The keys that a plain file's model has of its own."""
GRANITE = {"expert_shared_feed_forward_length", "ssm.conv_kernel", "ssm.group_count", "ssm.inner_size",
           "ssm.state_size", "ssm.time_step_rank"}  # fmt: skip
"""The keys of Granite's hybrids that Granite 4's dense files have too."""
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
NEUTRAL = {
    "attention.causal": True, "attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0, "attention.scale": 0.0,
    "attention.rope_pattern": np.ones(2, bool), "attn_logit_softcapping": 0.0, "embedding_length_out": 256,
    "final_logit_softcapping": 0.0, "nextn_predict_layers": 0, "pooling_type": 3, "rope.dimension_count": 32,
    "rope.dimension_sections": np.zeros(4, np.int32), "rope.scale_linear": 1.0, "rope.scaling.alpha": 0.0,
    "rope.scaling.attn_factor": 1.0, "rope.scaling.factor": 0.0, "rope.scaling.finetuned": True,
    "rope.scaling.original_context_length": 2048, "rope.scaling.type": "none", "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0, "rope.scaling.yarn_ext_factor": -1.0,
    "rope.scaling.yarn_log_multiplier": 0.0, "use_parallel_residual": False, "vocab_size": 259,
    "attention.head_count": np.full(2, 8, np.uint32), "feed_forward_length": np.full(2, 512, np.uint32),
    "attention.layer_norm_epsilon": 0.5, "expert_group_count": 1, "expert_weights_scale": 1.0,
    "expert_gating_func": 1, "expert_weights_norm": True, "expert_shared_count": 0, "leading_dense_block_count": 0,
}  # fmt: skip
"""Values that leave any model as it is: llama.cpp's defaults, and what the tests' models have."""
NOT_NEUTRAL = {
    "granite": {"attention.scale"},
    "granitemoe": {"attention.scale", "feed_forward_length"},
    "gemma2": {"attn_logit_softcapping", "final_logit_softcapping"},
    "glm4": {"rope.dimension_count"},
    "gemma4": {"final_logit_softcapping", "rope.dimension_count"},
    "stablelm": {"attention.layer_norm_epsilon", "rope.dimension_count"},
    "command-r": {"attention.layer_norm_epsilon"},
    "cohere2": {"attention.layer_norm_epsilon"},
    "starcoder2": {"attention.layer_norm_epsilon"},
    "glm4moe": {"rope.dimension_count", "leading_dense_block_count", "expert_gating_func"}
    | {"expert_weights_scale", "expert_shared_count"},
    "ernie4_5-moe": {"leading_dense_block_count"},
    "llama4": {"expert_gating_func"},
    "minimax-m2": {"expert_gating_func", "feed_forward_length", "rope.dimension_count"},
    "deepseek2": {
        "rope.dimension_count",
        "leading_dense_block_count",
        "expert_gating_func",
        "expert_weights_scale",
        "expert_shared_count",
        "expert_group_count",
    },
    "olmoe": {"expert_weights_norm", "feed_forward_length"},
    "granitehybrid": {"attention.scale", "feed_forward_length", "rope.scaling.finetuned"},
    "nemotron_h": {"feed_forward_length"},
    "nemotron_h_moe": {"feed_forward_length", "expert_shared_count", "expert_weights_scale", "expert_weights_norm"},
}
FREE = {(kind, "feed_forward_length") for kind in ("gpt-oss", "minimax-m2")}
"""Without effect where all layers have experts."""
LAYER_NORMS = {"attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"}
OWN_WITHOUT_EFFECT = {
    "granite": GRANITE,
    "ernie4_5-moe": {"expert_shared_count"},
    "stablelm": {"use_parallel_residual"},
    **{key: {"full_attention_interval"} for key in ("qwen3next", "granitehybrid", "lfm2")},
    **{key: {"full_attention_interval"} for key in ("nemotron_h", "nemotron_h_moe")},
    **{key: {"full_attention_interval", "rope.dimension_sections"} for key in ("qwen35", "qwen35moe")},
}


HUGGING_FACE = {
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps", "block_count": "tensor",
    "leading_dense_block_count": "tensor", "interleave_moe_layer_step": "tensor",
    "logit_scale": "logits_scaling", "attention.layer_norm_epsilon": "norm_eps", "rope.freq_base": "rope_theta",
    "expert_used_count": "num_experts_per_tok", "expert_count": "expert", "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group", "embedding_length": "values", "feed_forward_length": "tensor",
    "attention.shared_kv_layers": "num_kv_shared_layers", "expert_weights_norm": "norm_topk_prob",
    "attention.q_lora_rank": "q_lora_rank", "attention.value_length_mla": "v_head_dim",
    "rope.scale_linear": "rope_scaling", "rope.scaling.factor": "rope_scaling",
    "ssm.group_count": "head", "ssm.inner_size": "head", "ssm.time_step_rank": "head",
}  # fmt: skip
"""The words that an error may say instead."""
WINDOWED = ("llama", "phi3", "olmo2", "gemma2", "gemma3", "gpt-oss", "exaone4", "cohere2", "gemma4", "gemma-embedding")
OF_WINDOWS = {
    "attention.key_length_swa", "attention.sliding_window_pattern", "attention.value_length_swa", "rope.freq_base_swa",
    "rope.dimension_count_swa",
}  # fmt: skip


def known_keys(of=gguf.Keys):
    """The names that belong to an architecture, without its prefix."""
    for name, value in vars(of).items():
        if isinstance(value, str) and value.startswith("{arch}.") and value.count("{") == 1:
            yield value.removeprefix("{arch}.")
        elif isinstance(value, type) and not name.startswith("_"):
            yield from known_keys(value)


KEYS = sorted({*known_keys(), "rope.scale_linear", "activation.gate", "attention.new_key"})


@pytest.fixture(scope="module")
def headers(tmp_path_factory):
    """The header of a file of each architecture, all of two layers."""
    folder = tmp_path_factory.mktemp("keys")
    found = {}
    for name in MODELS.keys() - {"olmo3", "mixtral"}:
        sizes = {"num_hidden_layers": 2, "head_dim": 32} | OWN.get(name, {})
        # Gemma 4's divisors are a scaling, beside which there is no other one.
        drop = ("rope_freqs.weight",) if name == "gemma4" else ()
        file = write_gguf(folder / f"{name}.gguf", make_model(name, **sizes), lambda _: "F32", drop=drop)
        found[name] = open_gguf(file).header
    return found


def config_of(header, **changes):
    """The configuration with other keys, whose names have no prefix; None is no key."""
    kind = header.metadata["general.architecture"]
    metadata = {**header.metadata, **{name if name.startswith("general.") else f"{kind}.{name}": value
                                      for name, value in changes.items()}}  # fmt: skip
    said = {name: value for name, value in metadata.items() if value is not None}
    return GgufCheckpoint(dataclasses.replace(header, metadata=said)).config


def is_judged(header, key, value, base):
    """Check that a value changes the configuration, or is refused by its key's name."""
    try:
        return config_of(header, **base[0], **{key: value}) != base[1]
    except CheckpointError as error:
        message = str(error)
    assert key in message or HUGGING_FACE.get(key, key) in message
    return True


@pytest.mark.parametrize("kind", GGUF_FAMILIES)
@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_used_or_refused(headers, kind, key):
    header = headers[kind]
    bases = [{}, YARN, {"attention.sliding_window": 16}] if kind in WINDOWED else [{}, YARN]
    values = [7, 0.37, False, "x", np.array([3, 5], np.uint32), Strings(2)]
    without = WITHOUT_EFFECT - ({"rope.scaling.finetuned"} if kind.startswith("granite") else set())
    without |= OWN_WITHOUT_EFFECT.get(kind, set()) | (OF_WINDOWS if kind not in WINDOWED else set())
    without |= LAYER_NORMS - {GGUF_FAMILIES[kind].eps[1]}
    if key in without or (kind, key) in FREE:
        assert all(config_of(header, **{key: value}) == config_of(header) for value in values)
        return
    known = [(base, config_of(header, **base)) for base in bases if key not in base]
    assert any(is_judged(header, key, value, base) for value in values[:2] for base in known)
    assert any(is_judged(header, key, value, base) for value in values[2:] for base in known)


@pytest.mark.parametrize("kind", GGUF_FAMILIES)
def test_neutral_values_pass(headers, kind):
    header = headers[kind]
    plain = config_of(header)
    for key, value in NEUTRAL.items():
        if key in NOT_NEUTRAL.get(kind, ()):
            continue
        assert config_of(header, **{key: value}) == plain, key


@pytest.mark.parametrize("kind", GGUF_FAMILIES)
def test_an_unknown_key_is_named_with_its_value(headers, kind):
    message = rf"gguf: {kind}\.attention\.twist: unknown key of {kind}, which may change the results, got 0\.25$"
    refused(config_of, headers[kind], **{"attention.twist": 0.25}, match=message)


@pytest.mark.parametrize(
    ("said", "narrow"),
    [
        ({"attention.sliding_window_pattern": np.array([False, True])}, [False, True]),
        ({"attention.sliding_window_pattern": np.array([0, 1], np.uint32)}, [False, True]),
        ({"attention.sliding_window_pattern": 0}, [True, True]),
        ({"attention.sliding_window_pattern": 1}, [False, False]),
        ({"attention.sliding_window_pattern": 2}, [True, False]),
        ({}, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("kind", "default"), [("llama", [True] * 2), ("phi3", [True] * 2), ("olmo2", [True] * 2),
                                               ("gpt-oss", [True, False]), ("gemma3", [True] * 2)])  # fmt: skip
def test_which_layers_have_a_window(headers, kind, default, said, narrow):
    """As llama.cpp's `load_swa_pattern`: an array says it of each layer, a number n means all but each n-th."""
    config = config_of(headers[kind], **{"attention.sliding_window": 9}, **said)
    assert [config.window_left(layer) for layer in range(2)] == [8 if has else -1 for has in narrow or default]


def test_a_rotation_of_windowed_layers(headers):
    """OLMo 3's is the others' without their scaling unless it is named, Gemma 3's has a base of its own."""
    for kind, local, freq_base in (("olmo2", {}, 5e4), ("olmo2", {"rope.freq_base_swa": 7e4}, 7e4),
                                   ("gemma3", {}, 10000.0)):  # fmt: skip
        config = config_of(headers[kind], **YARN, **local, **{"attention.sliding_window": 9, "rope.freq_base": 5e4})
        assert config.layer_rope(0) == dataclasses.replace(config.rope, theta=freq_base, scaling=None)
        assert config.rope.scaling.factor == 4


@pytest.mark.parametrize("kind", ["olmo2", "gemma3"])
def test_without_windows_all_layers_rotate_alike(headers, kind):
    said = {"rope.freq_base": 5e4, "rope.freq_base_swa": 7.0}
    for window in (None, 0):
        config = config_of(headers[kind], **said, **{"attention.sliding_window": window})
        assert {(config.layer_rope(i).theta, config.window_left(i)) for i in range(2)} == {(5e4, -1)}


@pytest.mark.parametrize(
    ("kind", "said", "message"),
    [
        ("glm4moe", {"nextn_predict_layers": 2}, "nextn_predict_layers: expected fewer than block_count = 2, got 2$"),
        ("glm4moe", {"expert_gating_func": 1}, "expert_gating_func: expected 0 or 2 for glm4moe, got 1$"),
        ("glm4moe", {"expert_weights_norm": 1}, "expert_weights_norm: expected true or false, got 1$"),
        ("deepseek2", {"expert_gating_func": 3}, "expert_gating_func: expected 0 or 1 or 2 for deepseek2, got 3$"),
        ("deepseek2", {"attention.head_count_kv": 8}, "head_count_kv: expected one head of latents: 1, got 8$"),
        ("deepseek2", {"attention.key_length_mla": 16},
         "key_length_mla: expected more than rope.dimension_count = 16, got 16$"),
        ("deepseek2", {"attention.temperature_scale": 0.1}, "temperature_scale: expected 0 for deepseek2, got 0.1$"),
        ("minimax-m2", {"expert_gating_func": 1}, "expert_gating_func: expected 2 for minimax-m2, got 1$"),
        ("llama", {"general.type": "adapter"}, "general.type: expected 'model' for llama, got 'adapter'$"),
        ("llama", {"general.quantization_version": 1}, "general.quantization_version: expected 2 for llama, got 1$"),
        ("llama", {"rope.scaling.type": "none", "rope.scale_linear": 4.0},
         "rope.scale_linear: expected one scaling: .*, got 4.0$"),
        ("llama", {"rope.scaling.type": "longrope"},
         "rope.scaling.type: requires tensor rope_factors_short.weight, got"),
        ("llama", YARN | {"rope.scaling.yarn_attn_factor": 1.0}, "yarn_attn_factor: expected 1.13863, got 1.0$"),
        ("qwen2", {"attention.head_count_kv": np.array([1, 2], np.uint32)},
         "head_count_kv: expected the same for all layers, got"),
        ("qwen2", {"feed_forward_length": np.full(3, 512, np.uint32)},
         "feed_forward_length: expected as many numbers as layers, got"),
        ("qwen2", {"attention.sliding_window": 9}, "attention.sliding_window: expected 0 for qwen2, got 9$"),
        ("olmo2", {"attention.sliding_window": 9, "attention.sliding_window_pattern": np.ones(3, bool)},
         "sliding_window_pattern: expected a number, or as many as block_count = 2, got"),
        ("gpt-oss", {"attention.sliding_window": None},
         "attention.sliding_window: expected a positive integer .*, got None$"),
        ("gpt-oss", {"rope.freq_base_swa": 7.0}, "rope.freq_base_swa: expected 150000.0 for gpt-oss, got 7.0$"),
        ("granite", {"rope.scaling.finetuned": False}, "rope.scaling.finetuned: expected True for granite, got False$"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping: expected 0 for gemma3, got 30.0$"),
    ],
)  # fmt: skip
def test_what_another_model_says_is_refused(headers, kind, said, message):
    refused(config_of, headers[kind], **said, match=message)


@pytest.mark.parametrize(
    ("kind", "said", "names", "message"),
    [
        ("qwen2", {}, ["rope_freqs"], "tensor rope_freqs.weight is no part"),
        ("llama", {}, ["rope_factors_long", "rope_factors_short"], "tensor rope_factors_long.weight is no part"),
        ("phi3", {}, ["rope_factors_long"], "rope.scaling.type: requires tensor rope_factors_short.weight, got"),
        ("phi3", {"phi3.rope.scaling.factor": 4.0}, ["rope_factors_long", "rope_factors_short"],
         "factor: expected one scaling: .*, got 4.0$"),
        ("llama", {"llama.rope.scaling.type": "yarn"}, ["rope_freqs"],
         "expected one scaling: there is also tensor rope_freqs"),
    ],
)  # fmt: skip
def test_tensors_of_a_scaling_that_is_not_computed_are_refused(tmp_path, kind, said, names, message):
    tensors = {f"{name}.weight": [1.0] * 16 for name in names}
    file = write_gguf(tmp_path / "a.gguf", make_model(kind), lambda _: "F32", metadata=said, more_tensors=tensors)
    with pytest.raises(CheckpointError, match=message):
        open_source(file).load(DType.float32)
