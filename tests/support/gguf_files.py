"""Seeded models, and GGUF files of them, written with the `gguf` package as llama.cpp's converter does."""

import gguf
import numpy as np
import torch
import transformers

from paged_kv.graphs.models import gemma4
from support import gguf_blocks, gguf_hybrids
from support.gguf_blocks import KINDS, dequantise, quantise

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 259,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "tie_word_embeddings": False,
}
"""Rows of whole blocks of 256; a vocabulary that is no multiple of MAX's groups of rows."""

MODELS = {
    "llama": (transformers.LlamaConfig, {"head_dim": 32}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 64}),
    "olmo2": (transformers.Olmo2Config, {}),
    "olmo3": (
        transformers.Olmo3Config,
        {"num_hidden_layers": 5, "sliding_window": 8, "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "beta_fast": 32.0,
                               "beta_slow": 1.0, "attention_factor": 1.2079441541679836,
                               "original_max_position_embeddings": 64},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}},
    ),
    "granite": (
        transformers.GraniteConfig,
        {"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0,
         "attention_bias": True},  # whose rows are reordered as those of q and k are
    ),
    "qwen3moe": (
        transformers.Qwen3MoeConfig,
        {"head_dim": 64, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
         "norm_topk_prob": True},
    ),
    "mixtral": (
        transformers.MixtralConfig,
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 256},
    ),
    "llama4": (
        transformers.Llama4TextConfig,
        {"head_dim": 32, "num_hidden_layers": 4, "num_local_experts": 6, "num_experts_per_tok": 2,
         "intermediate_size": 256, "intermediate_size_mlp": 512, "interleave_moe_layer_step": 2,
         "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "granitemoe": (
        transformers.GraniteMoeConfig,
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 256, "attention_multiplier": 0.1,
         "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0},
    ),
    "hunyuan-dense": (transformers.HunYuanDenseV1Config, {"head_dim": 32}),
    "glm4moe": (
        transformers.Glm4MoeConfig,
        {"head_dim": 32, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
         "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
         "num_nextn_predict_layers": 0, "use_qk_norm": True,
         "attention_bias": True, "n_group": 1, "topk_group": 1},
    ),
    "deepseek2": (
        transformers.DeepseekV3Config,
        {"head_dim": 16, "num_key_value_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 32,
         "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
         "topk_group": 1, "moe_intermediate_size": 256, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    ),
    "minimax-m2": (
        transformers.MiniMaxM2Config,
        {"head_dim": 32, "rotary_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2,
         "intermediate_size": 256},
    ),
    "ernie4_5-moe": (
        transformers.Ernie4_5_MoeConfig,
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 256, "moe_layer_start_index": 1,
         "moe_layer_end_index": 1, "moe_num_shared_experts": 2},
    ),
    "mistral3": (
        transformers.Ministral3Config,
        {"head_dim": 32, "sliding_window": None, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}},
    ),
    "gpt-oss": (
        transformers.GptOssConfig,
        {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 256,
         "sliding_window": 8, "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0,
         "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64}},
    ),
    "smollm3": (transformers.SmolLM3Config, {"num_hidden_layers": 4}),
    "phi3": (transformers.Phi3Config, {"sliding_window": 8}),
    "seed_oss": (transformers.SeedOssConfig, {"head_dim": 32}),
    "exaone4": (transformers.Exaone4Config, {"num_hidden_layers": 5, "sliding_window": 8}),
    "ernie4_5": (transformers.Ernie4_5Config, {"head_dim": 32}),
    "glm4": (transformers.Glm4Config, {"head_dim": 32}),
    "command-r": (transformers.CohereConfig, {"logit_scale": 0.3, "tie_word_embeddings": True, "layer_norm_eps": 1e-5}),
    "cohere2": (
        transformers.Cohere2Config,
        {"logit_scale": 0.3, "tie_word_embeddings": True, "num_hidden_layers": 5, "sliding_window": 8},
    ),
    "starcoder2": (transformers.Starcoder2Config, {"norm_epsilon": 1e-5}),
    "stablelm": (transformers.StableLmConfig, {"use_qkv_bias": True, "partial_rotary_factor": 0.25}),
    "olmoe": (
        transformers.OlmoeConfig,
        {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 256, "norm_topk_prob": False},
    ),
    "gemma2": (
        transformers.Gemma2Config,
        {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32, "tie_word_embeddings": True,
         "num_hidden_layers": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32, "tie_word_embeddings": True,
         "num_hidden_layers": 7},
    ),
    "gemma-embedding": (
        transformers.Gemma3TextConfig,
        {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32, "tie_word_embeddings": True,
         "num_hidden_layers": 7, "use_bidirectional_attention": True},
    ),
    "gemma4": (
        transformers.Gemma4TextConfig,
        {"head_dim": 32, "global_head_dim": 64, "sliding_window": 8, "tie_word_embeddings": True,
         "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
         "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "attention_k_eq_v": True,
         "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 259,
         "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 256,
         "final_logit_softcapping": 5.0, "allow_global_per_layer_attribute_access": True,
         "rope_parameters": {
             "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    ),
    **gguf_hybrids.MODELS,
}  # fmt: skip
"""Transformers' configuration of each of GGUF's architectures, and what is not in `SIZES`."""

RENAMED = {
    "block_sparse_moe.router": "mlp.gate",
    "gate.moe_statics": "gate",
    "mlp.e_score": "mlp.gate.e_score",
    "block_sparse_moe": "mlp",
    "query_layernorm": "q_norm",
    "key_layernorm": "k_norm",
    "feed_forward.": "mlp.",
    "shared_expert.": "shared_experts.",
}
"""Parts of names in transformers, and those of a step."""
GEMMAS = ("gemma2", "gemma3", "gemma-embedding")
ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "cohere": "command-r",
    "mixtral": "llama",
    "hunyuan_v1_dense": "hunyuan-dense",
    "glm4_moe": "glm4moe",
    "deepseek_v3": "deepseek2",
    "minimax_m2": "minimax-m2",
    "ernie4_5_moe": "ernie4_5-moe",
    "ministral3": "mistral3",
    "llama4_text": "llama4",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "granitemoehybrid": "granitehybrid",
    "gemma4_text": "gemma4",
}

_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "interleave_moe_layer_step": "moe_layer_interval",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
KINDS_OF_TENSORS = (".weight", ".bias", ".scale")
UNMIXED = ("nemotron_h",)
"""Architectures whose configurations have experts that they do not use."""
_YARN = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def q4_k_m(name):
    """As llama.cpp's mixture of this name: more bits where they count most."""
    wide = ("token_embd", "output.", "attn_v", "ffn_down")
    return "Q6_K" if any(part in f"{name}." for part in wide) and "attn_output" not in name else "Q4_K"


def make_model(architecture, **overrides):
    """A seeded float32 model of transformers, with every weight of use: biases and norms are not the usual 0 and 1."""
    kind, own = MODELS[architecture]
    config = kind(**(SIZES | own | overrides))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.copy_(torch.randn_like(weight) * 0.2 + (0 if "bias" in name or architecture in GEMMAS else 1))
            else:
                weight.normal_(0, 1.5 / np.sqrt(weight.shape[1]))
        for bias in _choice_biases(model).values():
            bias.normal_(0, 0.2)
    return model


def _choice_biases(model):
    """Biases by which experts are chosen, where they are no parameters."""
    return {name: bias for name, bias in model.named_buffers() if name.endswith("e_score_correction_bias")}


def write_gguf(
    file,
    model,
    encoding_of,
    *,
    drop=(),
    metadata=None,
    more_tensors=None,
    part_tensors=0,
    vocabulary=None,
    unsplit=False,
):
    """Writes `model` to `file`, and rounds its weights to what the file holds of them.

    Args:
        encoding_of: A matrix's name in GGUF -> its encoding. Vectors are F32, as converters have it.
        drop: Keys that are left out.
        metadata: More keys, or other values of these.
        more_tensors: Tensors by their names in GGUF: matrices of whole blocks as `encoding_of` says, others F32.
        part_tensors: How many a file has, where `file` is the name without the parts' numbers; 0: one file has all.
        vocabulary: Writes the tokenizer's metadata, given the writer.
        unsplit: Of latent attention the older layout, with one tensor of keys and values.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    if architecture == "nemotron_h" and "moe" in config.layers_block_type:
        architecture = "nemotron_h_moe"
    if getattr(config, "use_bidirectional_attention", None) is True:
        architecture = "gemma-embedding"
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=part_tensors)
    values = _plain_keys(config, architecture, drop)
    if architecture in gguf_hybrids.MODELS:
        values |= gguf_hybrids.keys(architecture, config)
    if architecture == "glm4moe":
        values |= {"glm4moe.expert_weights_norm": config.norm_topk_prob, "glm4moe.expert_gating_func": 2}
    if architecture == "deepseek2":
        values |= _keys_of_latents(config, unsplit)
    if architecture == "minimax-m2":
        values["minimax-m2.expert_gating_func"] = 2
    if architecture == "ernie4_5-moe":
        shared = config.moe_num_shared_experts * config.moe_intermediate_size
        values["ernie4_5-moe.expert_shared_feed_forward_length"] = shared
    if config.model_type in ("olmo3", "exaone4") and config.sliding_window:
        narrow = [kind == "sliding_attention" for kind in config.layer_types]
        values[f"{architecture}.attention.sliding_window_pattern"] = narrow
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": 10000.0}
    parameters = rope.get("full_attention", rope)
    values[f"{architecture}.rope.freq_base"] = parameters["rope_theta"]
    part = parameters.get("partial_rotary_factor", 1.0)
    if part != 1 and architecture != "deepseek2":
        values[f"{architecture}.rope.dimension_count"] = int(part * values[f"{architecture}.attention.key_length"])
    if parameters.get("rope_type") == "yarn":
        scaling = f"{architecture}.rope.scaling"
        values |= {f"{scaling}.{key}": parameters[name] for key, name in _YARN.items() if name in parameters}
        values[f"{scaling}.type"] = "yarn"
    if architecture == "mistral3" and "mscale" in parameters:
        values["mistral3.attention.temperature_scale"] = parameters["llama_4_scaling_beta"]
        values["mistral3.rope.scaling.yarn_log_multiplier"] = parameters["mscale_all_dim"]
    if architecture == "gemma4":
        values |= _keys_of_gemma4(config)
        divisors = {"rope_freqs.weight": _divisors_of_gemma4(config)}
        more_tensors = {name: each for name, each in divisors.items() if name not in drop} | (more_tensors or {})
    values["tokenizer.ggml.bos_token_id"] = config.bos_token_id
    values["tokenizer.ggml.eos_token_id"] = config.eos_token_id
    adds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    for key, value in (values | (metadata or {})).items():
        getattr(writer, f"add_{adds[type(value)]}")(key, value)
    if vocabulary is not None:
        vocabulary(writer)
    (known,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    with torch.no_grad():
        for name, weight in hugging_face_weights(model, unsplit).items():
            known = name.replace("_up_proj", "_b_proj") if "self_attn" in name else name
            known = known.replace("sinks.weight", "sinks").replace("correction_bias", "correction.bias")
            if architecture == "gemma4":
                known = _gemma4_name(name)
            stored = gguf_hybrids.stored_name(name) or names.get_name(known, try_suffixes=KINDS_OF_TENSORS)
            if architecture == "lfm2" and name == "model.norm.weight":
                stored = "token_embd_norm.weight"
            if architecture == "lfm2":
                stored = stored.replace("post_attention_norm", "ffn_norm")
            if name.endswith("sinks.weight"):
                stored += ".weight"
            plain = (
                weight.ndim == 1 or name.endswith((".bias", "scale")) or "ffn_gate_inp" in stored or "conv" in stored
            )
            kind = "F32" if plain else encoding_of(stored)
            values = _converted(architecture, name, weight.numpy(), config)
            rows = _encoded(values.reshape(-1, values.shape[-1]), kind)
            data = rows.reshape(*values.shape[:-1], -1)
            if stored not in drop:
                raw = KINDS[kind] if kind not in ("F32", "F16") else None
                writer.add_tensor(stored, data, raw_dtype=raw)
            decoded = _decoded(rows, kind).reshape(values.shape)
            weight.copy_(torch.from_numpy(_converted(architecture, name, decoded, config, back=True)))
    for name, values in (more_tensors or {}).items():
        values = np.asarray(values, np.float32)
        kind = encoding_of(name) if values.ndim == 2 and values.shape[1] % 256 == 0 else "F32"
        writer.add_tensor(name, _encoded(values, kind), raw_dtype=KINDS[kind] if kind not in ("F32", "F16") else None)
    finish(writer)
    return file


def _plain_keys(config, architecture, drop):
    """The keys whose values the configuration has under one name or another."""
    values = {}
    for key, name in _KEYS.items():
        value = getattr(config, name, None)
        if value is None and name == "moe_intermediate_size" and architecture in ("gpt-oss", "llama4", "minimax-m2"):
            value = config.intermediate_size
        if name == "intermediate_size":
            value = getattr(config, "intermediate_size_mlp", value)
        if key == "interleave_moe_layer_step":
            value = getattr(config, key, value)
        if key == "logit_scale":
            value = getattr(config, key, value)
        if key == "attention.layer_norm_epsilon":
            value = getattr(config, "norm_epsilon", value)
        if value is None and name == "num_local_experts":
            value = getattr(config, "num_experts", None) or getattr(config, "moe_num_experts", None)
        if value is None and name == "num_experts_per_tok":
            value = getattr(config, "moe_k", None)
        if value is None and name == "first_k_dense_replace":
            value = getattr(config, "moe_layer_start_index", None)
        if value is None and name == "head_dim":
            value = config.hidden_size // config.num_attention_heads
        if architecture == "gemma-embedding" and name == "sliding_window":  # transformers has halved it
            value = (value - 1) * 2
        if value is not None and key not in drop and not (key.startswith("expert") and architecture in UNMIXED):
            values[f"{architecture}.{key}"] = value
    return values


def _keys_of_latents(config, unsplit):
    """Sizes of heads, absorbed but in older files, and the keys of experts."""
    rank, rotated, value = config.kv_lora_rank, config.qk_rope_head_dim, config.v_head_dim
    lengths = {"key_length": config.qk_nope_head_dim + rotated, "value_length": value}
    values = {f"attention.{key}{'' if unsplit else '_mla'}": length for key, length in lengths.items()}
    if not unsplit:
        values |= {"attention.head_count_kv": 1, "attention.key_length": rank + rotated, "attention.value_length": rank}
    values |= {"attention.kv_lora_rank": rank, "attention.q_lora_rank": config.q_lora_rank}
    values |= {"rope.dimension_count": rotated, "expert_gating_func": 2, "expert_weights_norm": config.norm_topk_prob}
    values |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    return {f"deepseek2.{key}": value for key, value in values.items()}


def _keys_of_gemma4(config):
    """The keys that Gemma 4's files have otherwise: sizes of layers with a window, and of each layer."""
    full = config.per_layer_config[config.layer_types.index("full_attention")]
    narrow = [kind == "sliding_attention" for kind in config.layer_types]
    own, inner = config.num_hidden_layers - config.num_kv_shared_layers, config.intermediate_size
    heads = [config.num_key_value_heads if is_narrow else full.num_key_value_heads for is_narrow in narrow]
    values = {
        "attention.sliding_window_pattern": narrow, "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "attention.key_length": full.head_dim, "attention.value_length": full.head_dim,
        "attention.key_length_swa": config.head_dim, "attention.value_length_swa": config.head_dim,
        "rope.dimension_count": full.head_dim, "rope.dimension_count_swa": config.head_dim,
        "attention.head_count_kv": heads if len(set(heads)) > 1 else heads[0],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
    }  # fmt: skip
    if config.use_double_wide_mlp:
        values["feed_forward_length"] = [inner * (1 if layer < own else 2) for layer in range(len(narrow))]
    if config.enable_moe_block:
        values |= {"expert_count": config.num_experts, "expert_used_count": config.top_k_experts}
    return {f"gemma4.{key}": value for key, value in values.items()}


def _divisors_of_gemma4(config):
    """Pairs of dimensions that turn, and those that do not."""
    half = config.per_layer_config[config.layer_types.index("full_attention")].head_dim // 2
    pairs = int(half * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return [1.0] * pairs + [1e30] * (half - pairs)


def _gemma4_name(name):
    """A name that the gguf package knows, with the kind that the converter gives the tensor."""
    name = name.replace(".mlp.experts.", ".experts.").replace(".mlp.router.weight", ".router.proj.weight")
    name = name.replace("layer_scalar", "layer_scalar.weight").replace(".mlp.router.scale", ".router.proj.scale")
    return name.replace(".mlp.router.per_expert_scale", ".experts.down_proj.scale")


def _of_gemma4(model):
    """The weights of Gemma 4 by the step's names."""
    found = {}
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        for theirs, ours in gemma4.FAMILY.renames.items():
            name = name.replace(theirs, ours)
        if ".experts." in name:
            found[f"{name}.weight"] = weight
        elif name.endswith(("weight", "layer_scalar", "scale")) and not name.endswith("embed_scale"):
            found[name] = weight
    return found


def finish(writer):
    """Writes all that a writer was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hugging_face_weights(model, unsplit=False):
    """Views of the model's weights by their names in a checkpoint; of experts, stacks `[count, out, in]` of gate, of up
    and of down.
    """
    found = {}
    kind_of_model = model.config.model_type
    if ARCHITECTURES.get(kind_of_model, kind_of_model) in gguf_hybrids.MODELS:
        return gguf_hybrids.weights(model)
    if kind_of_model == "gemma4_text":
        return _of_gemma4(model)
    alternates, transposed = kind_of_model == "gpt_oss", kind_of_model in ("gpt_oss", "llama4_text")
    for name, weight in [*model.named_parameters(), *_choice_biases(model).items()]:
        if name.endswith("kv_b_proj.weight") and not unsplit:
            nope, of_heads = (
                model.config.qk_nope_head_dim,
                weight.view(model.config.num_attention_heads, -1, weight.shape[1]),
            )
            found[name.replace("kv_b_proj", "k_up_proj")] = of_heads[:, :nope].transpose(1, 2)
            found[name.replace("kv_b_proj", "v_up_proj")] = of_heads[:, nope:]
            continue
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        stem, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
        if name.endswith("sinks"):
            found[f"{name}.weight"] = weight
        elif name.endswith("e_score_correction_bias"):
            found[name] = weight.reshape(-1)
        elif ".experts." not in name:
            found[name] = weight
        else:
            rows = weight.transpose(1, 2) if transposed and kind == "weight" else weight
            if stem.endswith("down_proj"):
                found[f"{stem}.{kind}"] = rows
                continue
            half = rows.shape[1] // 2
            parts = (rows[:, 0::2], rows[:, 1::2]) if alternates else (rows[:, :half], rows[:, half:])
            for part, values in zip(("gate", "up"), parts, strict=True):
                found[f"{stem.replace('gate_up', part)}.{kind}"] = values
    return found


def round_activations(reference, encodings):
    """Every quantised linear layer, those of experts too, gets its activations as int8, as llama.cpp rounds them beside
    its encoding.
    """

    def hook(encoding):
        def rounded(_, inputs):
            x = inputs[0]
            values = gguf_blocks.round_activations(x.detach().reshape(-1, x.shape[-1]).numpy(), encoding)
            return torch.from_numpy(values.astype(np.float32)).reshape(x.shape)

        return rounded

    def first_hook(rounded):
        return lambda module, inputs: (rounded(module, inputs), *inputs[1:])

    tied = "lm_head.weight" not in encodings and reference.config.tie_word_embeddings
    for name, module in reference.named_modules():
        weight = "model.embed_tokens.weight" if tied and name == "lm_head" else f"{name}.weight"
        if isinstance(module, torch.nn.Linear) and weight in encodings:
            module.register_forward_pre_hook(hook(encodings[weight]))
        if hasattr(module, "_apply_gate") and f"{name}.down_proj.weight" in encodings:  # a stack of experts
            module.register_forward_pre_hook(first_hook(hook(encodings[f"{name}.gate_proj.weight"])))
            gate, rounded = module._apply_gate, hook(encodings[f"{name}.down_proj.weight"])
            module._apply_gate = lambda y, gate=gate, rounded=rounded: rounded(None, (gate(y),))
            reference.set_experts_implementation("batched_mm")  # which calls `_apply_gate` in all families


def _encoded(values, kind):
    if kind in ("F32", "F16"):
        return values.astype({"F32": np.float32, "F16": np.float16}[kind])
    return quantise(values, kind)


def _decoded(data, kind):
    if kind == "Q8_K":  # of no model's weights: refused
        return np.zeros((len(data), data.shape[1] // 292 * 256), np.float32)
    if kind == "NVFP4":  # without the number that comes before a block when it is loaded
        return gguf.quants.dequantize(data, KINDS[kind])
    return data.astype(np.float32) if kind in ("F32", "F16") else dequantise(data, kind)


def _converted(architecture, name, values, config, back=False):
    """The converter's changes: rows of q and k of each head by turns from its halves, and norms of Gemma plus 1."""
    if architecture in ("llama", "granite", "granitemoe", "granitehybrid", "smollm3", "mistral3") and name.split(".")[
        -2
    ] in (
        "q_proj",
        "k_proj",
    ):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        half = len(values) // heads // 2
        order = np.arange(len(values)).reshape(heads, 2, half).swapaxes(1, 2).reshape(-1)
        return np.ascontiguousarray(values[np.argsort(order)] if back else values[order])
    if architecture in GEMMAS and name.endswith("norm.weight"):
        return values - 1 if back else values + 1
    if architecture in gguf_hybrids.MODELS:
        found = gguf_hybrids.converted(architecture, name, values, back)
        if found is not None:
            return np.ascontiguousarray(found)
    return np.ascontiguousarray(values)
