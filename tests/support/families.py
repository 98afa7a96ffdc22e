"""A small checkpoint of every family, each switch of it on, with values that matter; its step, and transformers'."""

import numpy as np
import torch
import transformers

from paged_kv.engine.engine import Engine
from paged_kv.engine.interfaces import StepStates
from paged_kv.engine.requests import Sampling
from support.checkpoints import make_checkpoint, relative_error
from support.llama_family import poison

PROMPTS = [np.random.default_rng(length).integers(0, 256, length).tolist() for length in (33, 1, 120, 16)]
NEW_TOKENS = 8
PAGES = (16, 9 * len(PROMPTS))
"""Tokens of a page, and pages: enough for all prompts and their new tokens."""

BASE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
"""Sizes, and those of experts below, are the same where they can be: what is computed alike is then compiled once."""
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5, 2.0, 1.25],
    "long_factor": [4.0] * 4,
    # transformers turns all keys anew once a text is longer: past it, the two differ on purpose (graphs/rope.py).
    "original_max_position_embeddings": 256,
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
GEMMA4 = {
    "global_head_dim": 16,
    "sliding_window": 19,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 3, "intermediate_size": 24}
HYBRID = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "pad_token_id": 0,
}
MIXED = {
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
MAMBA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 40,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_head": 32,
    "mamba_d_state": 24,
    "pad_token_id": 0,
}
CASES = {
    "llama": ("Llama", {"head_dim": 24, "attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": 21}),
    "qwen2": (
        "Qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 17,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 19,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": GEMMA_ROPE["sliding_attention"]},
        },
    ),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
        },
    ),
    "phi3": (
        "Phi3",
        {
            "num_attention_heads": 4,
            "head_dim": 16,
            "sliding_window": 40,
            "rope_parameters": LONGROPE,
            "pad_token_id": 0,
        },
    ),
    "smollm3": (
        "SmolLM3",
        {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 19,
            "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
            "pad_token_id": 0,
        },
    ),
    "seed_oss": ("SeedOss", {"attention_out_bias": True}),
    "exaone4": ("Exaone4", {"num_hidden_layers": 3, "sliding_window": 19, "sliding_window_pattern": 3}),
    "exaone4, no windows": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "ernie4_5": ("Ernie4_5", {"use_bias": True, "pad_token_id": 0}),
    "glm4": ("Glm4", {"pad_token_id": 0, "eos_token_id": 258, "attention_bias": True}),
    "cohere": ("Cohere", {"logit_scale": 0.3, "pad_token_id": 0, "attention_bias": True}),
    "cohere2": (
        "Cohere2",
        {
            "num_hidden_layers": 3,
            "sliding_window": 19,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "logit_scale": 0.3,
            "pad_token_id": 0,
        },
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 19, "norm_epsilon": 0.1}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm, parallel": ("StableLm", {"use_parallel_residual": True, "partial_rotary_factor": 0.5}),
    "olmoe": ("Olmoe", EXPERTS | {"num_experts": 16, "pad_token_id": 0}),
    "glm4_moe": (
        "Glm4Moe",
        {
            "num_hidden_layers": 3,
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        EXPERTS | {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 16, "pad_token_id": 0},
    ),
    "mixtral": ("Mixtral", EXPERTS | {"num_local_experts": 16, "sliding_window": 19}),
    "llama4": (
        "Llama4",
        EXPERTS
        | {
            "num_hidden_layers": 3,
            "num_local_experts": 16,
            "intermediate_size_mlp": 96,
            "moe_layers": [0, 1],
            "no_rope_layers": [1, 0, 1],
            "attn_scale": 0.5,
            "floor_scale": 40,
            "attention_bias": True,
        },
    ),
    "phimoe": (
        "Phimoe",
        {
            "num_local_experts": 16,
            "intermediate_size": 24,
            "router_jitter_noise": 0.2,  # three scores or so are near the greatest
            "attention_bias": True,
            "lm_head_bias": True,
            "rope_parameters": LONGROPE | {"partial_rotary_factor": 1.0, "short_mscale": 1.3, "long_mscale": 1.3},
        },
    ),
    "granitemoe": (
        "GraniteMoe",
        {
            "num_local_experts": 16,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "pad_token_id": 0,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 3,
            "moe_num_experts": 16,
            "moe_k": 3,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 2,
            "moe_layer_end_index": 1,
            "pad_token_id": 0,
        },
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "rope_theta": 10000.0, "alpha": 1000.0},
            "pad_token_id": 0,
            "eod_token_id": None,
        },
    ),
    "ministral3": ("Ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3, "mscale": 1.0}}),
    "ministral": (
        "Ministral",
        {"sliding_window": 19, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma2": (
        "Gemma2",
        {
            "num_hidden_layers": 3,
            "sliding_window": 19,
            "query_pre_attn_scalar": 50,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 0.8,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 19,
            "query_pre_attn_scalar": 50,
            "rope_parameters": GEMMA_ROPE,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "num_experts": 16,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,  # True is in tests/engine/test_gguf.py
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 17,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_next": ("Qwen3Next", HYBRID | MIXED | {"linear_num_value_heads": 4, "mlp_only_layers": [1]}),
    # With experts it is Qwen3-Next's mixture: tests/unit/test_gguf.py has its names.
    "qwen3_5": ("Qwen3_5", HYBRID | {"tie_word_embeddings": True, "attention_bias": True}),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        MAMBA
        | {
            "num_local_experts": 16,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
        },
    ),
    "granite_hybrid, dense": (
        "GraniteMoeHybrid",
        MAMBA
        | {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True, "mamba_n_groups": 1},
    ),
    "gemma4": (
        "Gemma4",
        GEMMA4
        | {
            "num_hidden_layers": 5,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 24,
            "vocab_size_per_layer_input": 259,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4, experts": (
        "Gemma4",
        GEMMA4
        | {
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 24,  # also into the last layer, where it has K and V of its own
            "vocab_size_per_layer_input": 259,
            "enable_moe_block": True,
            "num_experts": 16,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.2,
            "pad_token_id": 0,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 24,
            "ssm_state_size": 16,
            "n_groups": 2,
            "time_step_min": 0.3,  # as large as a third of the steps
            "use_bias": True,
            "mlp_bias": True,
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "pad_token_id": 0,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_hidden_layers": 3,
            "num_local_experts": 16,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
            "sliding_window": 19,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.7,  # as large as a third of the values
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
}


DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 32,
}
DEEPSEEK = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "num_attention_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "moe_intermediate_size": 40,
    "n_shared_experts": 1,
}
LATENT_CASES = {
    # The widths of DeepSeek-V2-Lite, but for those of the hidden state.
    "lite": (
        "DeepseekV2",
        {
            "hidden_size": 256,
            "intermediate_size": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 1,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "moe_intermediate_size": 64,
            "rope_parameters": DEEPSEEK_YARN,
        },
    ),
    # The switches of DeepSeek-V2.
    "v2": (
        "DeepseekV2",
        DEEPSEEK
        | {
            "q_lora_rank": 48,
            "rms_norm_eps": 1e-2,  # of all norms but those of latents
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "topk_method": "group_limited_greedy",
            "n_group": 8,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            "tie_word_embeddings": True,
            "rope_parameters": DEEPSEEK_YARN | {"mscale": 1.5},
        },
    ),
    # The switches of DeepSeek-V3: sigmoids, a bias of the choice, groups by their two best experts.
    "v3": (
        "DeepseekV3",
        DEEPSEEK
        | {
            "head_dim": 8,  # of the rotated part, as transformers means it
            "q_lora_rank": 48,
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "rope_parameters": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    # GLM-4.7-Flash: V3's switches, and which layers have experts.
    "glm4_moe_lite": (
        "Glm4MoeLite",
        DEEPSEEK
        | {
            "head_dim": 8,
            "num_hidden_layers": 3,
            "q_lora_rank": 48,
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "routed_scaling_factor": 1.8,
            "rms_norm_eps": 1e-2,  # of all norms but those of latents
        },
    ),
}
"""Families that the engine runs and the server does not."""


def make_case(name, folder):
    """Saves the checkpoint of a case, by transformers, into `folder`; returns transformers' model."""
    family, overrides = (CASES | LATENT_CASES)[name]
    return make_checkpoint(folder, family=family, **BASE | overrides)


def make_cases(names, folder):
    """The checkpoints of several cases, each in a folder of its name; returns `folder`."""
    for name in names:
        make_case(name, folder / name)
    return folder


def run(model):
    """Tokens of each prompt and its greedy continuation, and the logits `[NEW_TOKENS, vocab]` that it is taken from."""
    poison(model)
    pages = np.random.default_rng(0).permutation(model.num_pages).reshape(len(PROMPTS), -1).tolist()
    texts = [list(prompt) for prompt in PROMPTS]
    logits = [[] for _ in PROMPTS]
    lengths, new = [0] * len(PROMPTS), PROMPTS
    for _ in range(NEW_TOKENS):
        rows = model.step(new, lengths, pages, states=states_in_place(model, new, lengths))
        lengths = [len(text) for text in texts]
        for text, row, kept in zip(texts, rows, logits, strict=True):
            kept.append(row.copy())
            text.append(int(row.argmax()))
        new = [text[-1:] for text in texts]
    return texts, logits


def states_in_place(model, new, lengths):
    """Each request's state in a slot of its own, where the model has states."""
    if not model.num_states:
        return None
    sources = [slot if length else -1 for slot, length in enumerate(lengths)]
    return StepStates(sources, [[(len(tokens), slot)] for slot, tokens in enumerate(new)])


def reference(folder, texts):
    """The logits of transformers for the same rows, all tokens at once and without pages."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(torch.tensor([text[:-1]])).logits[0, -NEW_TOKENS:].numpy() for text in texts]


def assert_logits(model, folder, bound, off_by=relative_error):
    """Runs the step: its logits are transformers', to `bound`."""
    texts, logits = run(model)
    for got, expected in zip(logits, reference(folder, texts), strict=True):
        assert off_by(np.array(got), expected) < bound


def engine_texts(model, prompts, new_tokens, **options):
    """The greedy tokens that an engine gives prompts, all of them at once; every page is NaN before."""
    poison(model)
    engine, texts = Engine(model, **options), [[] for _ in prompts]
    for prompt in prompts:
        engine.add_request(prompt, Sampling(new_tokens, ignore_end=True))
    while not engine.is_idle:
        for output in engine.step():
            texts[output.request] += output.tokens
        pools = [pool for pool in (engine.pool, engine.window_pool) if pool is not None]
        for pool in pools:
            pool.check_integrity()
    assert all(pool.num_used == 0 for pool in pools)
    return texts


def norm_error(got, expected):
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)
