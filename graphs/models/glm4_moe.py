"""GLM-4.5 and 4.6: a mixture of experts chosen by sigmoids, with shared ones, and rotations of half of each head."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_config, read_rope
from paged_kv.graphs.models.family import EXPERTS, LAYER, Family, Gguf
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.mixture import read_experts


def read(fields: Fields) -> DecoderConfig:
    fields = fields.with_defaults(partial_rotary_factor=0.5, n_group=1, topk_group=1)
    layers, hidden, heads = fields.layers(), fields.integer("hidden_size"), fields.integer("num_attention_heads")
    dense = fields.integer("first_k_dense_replace", default=1, least=0)
    shared = fields.integer("n_shared_experts", default=1, least=0) * fields.integer("moe_intermediate_size")
    experts = read_experts(
        fields,
        [index >= dense for index in range(layers)],
        count_keys=("n_routed_experts", "num_local_experts"),
        sigmoid=True,
        sums_to_one=fields.boolean("norm_topk_prob", default=True),
        shared_inner=shared,
    )
    return read_config(
        fields,
        rope=read_rope(fields, fields.integer("head_dim", default=hidden // heads)),
        qk_norm="head" if fields.boolean("use_qk_norm") else None,
        qkv_bias=fields.boolean("attention_bias"),
        experts=experts,
    )


FAMILY = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    read=read,
    missing={"num_key_value_heads": 8},
    gguf=Gguf(
        "glm4moe",
        layer=LAYER | EXPERTS | {"post_attention_layernorm": "post_attention_norm"},
        sizes={
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        counts={"n_shared_experts": "expert_shared_count", "first_k_dense_replace": "leading_dense_block_count"},
        multipliers={"routed_scaling_factor": "expert_weights_scale"},
        flags={"norm_topk_prob": "expert_weights_norm"},
        drafts="nextn_predict_layers",
        rotates_a_part=True,
        neutral={"expert_gating_func": (0, 2)},  # sigmoids
    ),
)
