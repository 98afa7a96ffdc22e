"""Tiny random models of every decoder that transformers has: `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`.

A config is the class's own default with small sizes: `SMALL` has a size by the name of its field, `CHANGES` what a
family needs beside. Lists with an entry a layer keep the layers at which each kind occurs first.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, WINDOW = 4, 64, 4, 2, 16, 128, 19
_BY_SIZE = [
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers"
        " num_encoder_layers num_layers_per_stack",
    ),
    (
        HIDDEN,
        "hidden_size d_model n_embd emb_dim embedding_size input_embedding_size output_embedding_size"
        " word_embed_proj_dim attention_hidden_size lru_width embedding_dim pronunciation_embed_dim shape_embed_dim",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads num_heads attention_heads"
        " num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads",
    ),
    (KV_HEADS, "num_key_value_heads num_kv_heads swa_num_key_value_heads global_num_key_value_heads num_query_groups"),
    (
        HEAD_DIM,
        "head_dim d_head dim_head attention_head_size kv_channels swa_head_dim attention_head_dim"
        " linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_head mamba_head_dim index_head_dim"
        " global_head_dim",
    ),
    (
        96,
        "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim ffn_hidden_size dff dim_ff d_inner feed_forward_size"
        " shared_intermediate_size dense_intermediate_size intermediate_size_mlp n_inner",
    ),
    (
        32,
        "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size"
        " expert_ffn_hidden_size moe_shared_expert_intermediate_size q_lora_rank kv_lora_rank"
        " router_hidden_size o_lora_rank",
    ),
    (
        VOCAB,
        "vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size pronunciation_vocab_size"
        " shape_vocab_size",
    ),
    (WINDOW, "sliding_window sliding_window_size attention_window_size local_attention window_size"),
    (512, "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions model_max_length"),
    (
        4,
        "num_experts n_routed_experts num_local_experts moe_num_experts index_n_heads linear_num_heads"
        " linear_num_value_heads linear_num_key_heads",
    ),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    (1, "n_group topk_group num_expert_group first_k_dense_replace zero_expert_num"),
    (
        8,
        "qk_rope_head_dim qk_nope_head_dim rotary_dim hidden_size_per_layer_input laurel_rank"
        " index_topk gated_norm_rank",
    ),
    (24, "v_head_dim attention_chunk_size"),
]
_LAYERS = _BY_SIZE[0][1].split()
SMALL = {name: size for size, names in _BY_SIZE for name in names.split()}
_MLA = {"num_key_value_heads": HEADS, "head_dim": 8}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
CHANGES: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    **dict.fromkeys(
        "axk1 axk2 bailing_hybrid deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa"
        " kimi_linear longcat_flash minicpm3 youtu".split(),
        _MLA,
    ),
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)},
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": 96},
    },
    "deepseek_v2": {**_MLA, "num_experts_per_tok": 2},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"] * 2},
    "hrm_text": {"num_layers_per_stack": None, "num_hidden_layers": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM},
    "ministral": {"head_dim": HEAD_DIM},
    "dots3_note_text": {"num_key_value_heads": HEADS, "per_layer_config": {}},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "nemotron": {"head_dim": HEAD_DIM, "num_key_value_heads": KV_HEADS},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "xlstm": {"qk_dim_factor": 1.0},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "n_mamba_heads": 8, "mamba_headdim": 16},
    "mamba2": {"num_heads": 8},
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 32], "axial_pos_embds_dim": [16, 48]},
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"default_language": "en_XX"},
}


def families() -> dict[str, str]:
    """A model type of each class of decoders, and the class's name."""
    found: dict[str, str] = {}
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name not in found or CONFIG_MAPPING[model_type].model_type == model_type:
            found[name] = model_type
    return {model_type: name for name, model_type in found.items()}


def small_config(config_class: Any, **changes: Any) -> Any:
    """Return a config of a class with small sizes, those of its parts (text, vision, audio) too."""
    default = config_class()
    sizes: dict[str, Any] = {name: size for name, size in SMALL.items() if isinstance(vars(default).get(name), int)}
    sizes |= _a_layer_each(default)
    if "is_decoder" in vars(default):
        sizes["is_decoder"] = True
    for name in default.sub_configs:
        if name in vars(default) and vars(default)[name] is not None and name not in changes:
            part = type(vars(default)[name])
            sizes[name] = small_config(part, **CHANGES.get(part.model_type, {})).to_dict()
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    return config_class(**sizes | tokens | changes)


def _a_layer_each(default: Any) -> dict[str, Any]:
    """Lists with an entry a layer, cut to `LAYERS` that have each kind."""
    count = next((vars(default)[name] for name in _LAYERS if name in vars(default)), None)
    lists = {
        name: value
        for name, value in vars(default).items()
        if isinstance(value, list) and len(value) == count and count != 2
    }
    kinds = list(zip(*lists.values(), strict=True))
    first = sorted({kinds.index(kind) for kind in kinds})[:LAYERS]
    chosen = sorted([*first, *[i for i in range(len(kinds)) if i not in first][: LAYERS - len(first)]])
    return {name: [value[i] for i in chosen] for name, value in lists.items()}


def small_model(model_type: str, seed: int = 1, **changes: Any) -> Any:
    """A model with random weights in float32, large enough that its attention decides."""
    model_class = getattr(transformers, families()[model_type])
    config = small_config(model_class.config_class, **CHANGES.get(model_type, {}) | changes)
    with torch.device("meta"):
        size = sum(x.numel() for x in model_class(config).parameters())
    if size > 2e7:
        raise ValueError(f"{model_type}: {size} parameters are not small")
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
            elif "sink" in name:
                parameter.normal_()
    return model
