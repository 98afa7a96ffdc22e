"""Hybrid models in GGUF files, as llama.cpp's converter writes them: names, keys, and what becomes of weights."""

import numpy as np
import torch
import transformers

DELTA = {
    "head_dim": 64, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4,
    "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}  # fmt: skip
"""As many value heads as key heads: with more, the converter has them in another order, which the step takes so."""
SHARED = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
}  # fmt: skip
MODELS = {
    "qwen3next": (transformers.Qwen3NextConfig, DELTA | SHARED),
    "qwen35": (transformers.Qwen3_5TextConfig, DELTA),
    "qwen35moe": (transformers.Qwen3_5MoeTextConfig, DELTA | SHARED),
    "granitehybrid": (
        transformers.GraniteMoeHybridConfig,
        {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 6, "num_experts_per_tok": 2,
         "intermediate_size": 256, "shared_intermediate_size": 256, "mamba_n_heads": 8, "mamba_n_groups": 2,
         "mamba_d_state": 32, "attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
         "logits_scaling": 2.0},
    ),
    "lfm2": (
        transformers.Lfm2Config,
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "norm_eps": 1e-5},
    ),
    "nemotron_h": (
        transformers.NemotronHConfig,
        {"head_dim": 32, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
         "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 2, "time_step_min": 1e-9},
    ),
    "nemotron_h_moe": (
        transformers.NemotronHConfig,
        {"head_dim": 32, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
         "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 2, "time_step_min": 1e-9,
         "n_routed_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 256, "moe_intermediate_size": 256,
         "moe_shared_expert_intermediate_size": 256, "routed_scaling_factor": 1.5},
    ),
}  # fmt: skip
NORMS_PLUS_ONE = ("qwen3next", "qwen35", "qwen35moe")
PARTS = {
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha", "mamba.in_proj": "ssm_in",
    "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj", "conv.conv1d": "shortconv.conv",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_experts.c_fc": "ffn_up_shexp",
    "mlp.shared_experts.c_proj": "ffn_down_shexp", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    **{f"{at}.{ours}": theirs for at in ("linear_attn", "mamba") for ours, theirs in
       {"conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out"}.items()},
}  # fmt: skip
"""Parts of a layer, and their names in GGUF."""
BARE = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}
LFM2 = {
    ".conv.conv.": ".conv.conv1d.",
    ".out_proj.": ".o_proj.",
    ".conv.o_proj.": ".conv.out_proj.",
    "_layernorm.": "_norm.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    "model.embedding_norm.": "model.norm.",
}
"""Parts of names in transformers, and those of a step."""


def weights(model):
    """The weights of a hybrid model by the step's names, those that a file has apart as views of their own."""
    config, found = model.config, {}
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        kind = config.model_type
        if kind == "lfm2":
            for theirs, ours in LFM2.items():
                name = name.replace(theirs, ours)
        if kind == "nemotron_h":
            name = _of_nemotron(name)
        name = name.replace("shared_expert.", "shared_experts.").replace("block_sparse_moe.router", "mlp.gate")
        name = name.replace("block_sparse_moe", "mlp")
        weight = weight.squeeze(1) if weight.ndim == 3 and "conv" in name else weight
        stem, half = name.removesuffix(".weight"), weight.shape[-2] // 2 if weight.ndim > 1 else 0
        if stem.endswith("in_proj_qkvz"):
            at = stem.removesuffix("in_proj_qkvz")
            found |= {f"{at}{part}.weight": rows for part, rows in _split(weight, config).items()}
        elif stem.endswith("shared_mlp.input_linear"):
            at = stem.replace("shared_mlp.input_linear", "mlp.shared_experts")
            found |= {f"{at}.gate_proj.weight": weight[:half], f"{at}.up_proj.weight": weight[half:]}
        elif stem.endswith("shared_mlp.output_linear"):
            found[f"{stem.replace('shared_mlp.output_linear', 'mlp.shared_experts.down_proj')}.weight"] = weight
        elif stem.endswith("experts.gate_up_proj"):
            at = stem.removesuffix("gate_up_proj")
            found |= {f"{at}gate_proj.weight": weight[:, :half], f"{at}up_proj.weight": weight[:, half:]}
        elif name.endswith(("experts.down_proj", "experts.up_proj")):
            found[f"{name}.weight"] = weight
        elif "inv_freq" not in name:
            found[name] = weight
    return found


def _of_nemotron(name):
    name = name.replace("backbone.", "model.")
    name = name.replace("model.embeddings", "model.embed_tokens").replace("model.norm_f", "model.norm")
    if ".mixer." not in name:
        return name.replace(".norm.weight", ".input_layernorm.weight") if ".layers." in name else name
    for ours in ("gate", "experts", "shared_experts"):
        name = name.replace(f".mixer.{ours}.", f".mlp.{ours}.")
    for at in ("mixer", "mlp.shared_experts"):
        name = name.replace(f".{at}.up_proj.", f".{at.replace('mixer', 'mlp')}.c_fc.")
        name = name.replace(f".{at}.down_proj.", f".{at.replace('mixer', 'mlp')}.c_proj.")
    for each in "qkvo":
        name = name.replace(f".mixer.{each}_proj.", f".self_attn.{each}_proj.")
    return name.replace(".mixer.", ".mamba.")


def _split(weight, config):
    """Q, k and v of all heads, and z, of the rows of each key head."""
    heads, dim = config.linear_num_key_heads, config.linear_key_head_dim
    of_values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    apart = torch.split(weight.reshape(heads, -1, weight.shape[1]), [dim, dim, of_values, of_values], dim=1)
    q, k, v, z = (part.reshape(-1, weight.shape[1]) for part in apart)
    return {"in_proj_qkv": torch.cat([q, k, v]), "in_proj_z": z}


def stored_name(name):
    """GGUF's name of a tensor that hybrids alone have; None of others."""
    stem, _, kind = name.rpartition(".")
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    if kind in BARE:
        return f"blk.{layer}.{BARE[kind]}"
    return f"blk.{layer}.{PARTS[part]}.{kind}" if part in PARTS else None


def converted(architecture, name, values, back):
    """The converter's changes of a weight, or None of others."""
    if name.endswith("A_log"):
        return np.log(-values) if back else -np.exp(values)
    if architecture in NORMS_PLUS_ONE and name.endswith("norm.weight") and "linear_attn.norm" not in name:
        return values - 1 if back else values + 1
    return None


def keys(architecture, config):
    """The metadata that hybrids alone have, or have otherwise."""
    values = {}
    types = getattr(config, "layer_types", None) or config.layers_block_type
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in types]
    if architecture in NORMS_PLUS_ONE:
        inner = config.linear_num_value_heads * config.linear_value_head_dim
        values = {
            "ssm.conv_kernel": config.linear_conv_kernel_dim, "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads, "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": inner, "attention.recurrent_layers": [kind == "linear_attention" for kind in types],
            "full_attention_interval": 4,
        }  # fmt: skip
        if architecture != "qwen3next":
            values["rope.dimension_sections"] = [11, 11, 10, 0]
        if architecture != "qwen35":
            values["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    elif architecture == "lfm2":
        values = {"shortconv.l_cache": config.conv_L_cache, "attention.head_count_kv": heads}
        values["attention.layer_norm_rms_epsilon"] = config.norm_eps
    elif architecture == "granitehybrid":
        values = {
            "ssm.conv_kernel": config.mamba_d_conv, "ssm.state_size": config.mamba_d_state,
            "ssm.group_count": config.mamba_n_groups, "ssm.time_step_rank": config.mamba_n_heads,
            "ssm.inner_size": config.mamba_expand * config.hidden_size, "attention.head_count_kv": heads,
            "expert_shared_feed_forward_length": config.shared_intermediate_size, "rope.scaling.finetuned": False,
        }  # fmt: skip
    else:
        width = config.moe_intermediate_size if architecture == "nemotron_h_moe" else config.intermediate_size
        values = {
            "ssm.conv_kernel": config.conv_kernel, "ssm.state_size": config.ssm_state_size,
            "ssm.group_count": config.n_groups, "ssm.time_step_rank": config.mamba_num_heads,
            "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim, "attention.head_count_kv": heads,
            "feed_forward_length": [width if kind in ("mlp", "moe") else 0 for kind in types],
            "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        }  # fmt: skip
        if architecture == "nemotron_h_moe":
            values["expert_shared_feed_forward_length"] = config.moe_shared_expert_intermediate_size
            values |= {"expert_weights_norm": config.norm_topk_prob, "expert_group_count": config.n_group}
            values["expert_group_used_count"] = config.topk_group
    return {f"{architecture}.{key}": value for key, value in values.items()}
