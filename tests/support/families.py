"""A small checkpoint of every family, each switch of it on, with values that matter."""

from support.checkpoints import make_checkpoint

BASE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 24}
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
CASES = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": 21}),
    "qwen2": (
        "Qwen2",
        {
            "head_dim": 8,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 17,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", {}),
    "olmo2": ("Olmo2", {"head_dim": 8}),
    "granite": (
        "Granite",
        {
            "head_dim": 8,
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
}


def make_case(name, folder):
    """Saves the checkpoint of a case, by transformers, into `folder`; returns transformers' model."""
    family, overrides = CASES[name]
    return make_checkpoint(folder, family=family, **BASE | overrides)
