"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the MLP, in all layers or in some."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_config, read_windows
from paged_kv.graphs.models.family import EXPERTS, LAYER, Family, Gguf
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.mixture import read_experts


def read(fields: Fields) -> DecoderConfig:
    bias = fields.boolean("attention_bias")
    # Unlike Qwen3's, the window is in all layers or in none.
    has_windows = fields.boolean("use_sliding_window")
    windows = read_windows(fields.with_missing(sliding_window=4096)) if has_windows else ()
    experts = read_experts(fields, mixtures(fields), sums_to_one=fields.boolean("norm_topk_prob"))
    return read_config(fields, qk_norm="head", qkv_bias=bias, o_bias=bias, windows=windows, experts=experts)


def mixtures(fields: Fields) -> list[bool]:
    """Tell for each layer if it is a mixture: every `decoder_sparse_step`-th but those of `mlp_only_layers`."""
    layers, step = fields.layers(), fields.integer("decoder_sparse_step", default=1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(index) is int and 0 <= index < layers for index in dense):
        raise fields.error("mlp_only_layers", f"expected a list of layers from 0 to {layers - 1}")
    return [(index + 1) % step == 0 and index not in dense for index in range(layers)]


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    read=read,
    missing={"num_key_value_heads": 4},
    gguf=Gguf(
        "qwen3moe",
        layer=LAYER | EXPERTS,
        defaults={"norm_topk_prob": True},
        sizes={
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
    ),
)
