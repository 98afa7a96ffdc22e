"""MiniMax-M2: mixtures of experts chosen by sigmoids in all layers, norms of q and k over all heads, and rotations of a
part of each head.
"""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_config, read_rope
from paged_kv.graphs.models.family import EXPERTS, LAYER, Family, Gguf
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.mixture import read_experts

# Keys of other families' routers, which its code does not read.
_ROUTER = {"topk_method": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}


def read(fields: Fields) -> DecoderConfig:
    fields = fields.with_defaults(num_local_experts=256, num_experts_per_tok=8)
    head_dim = fields.integer("head_dim")
    if fields.get("rotary_dim") is not None:
        fields = fields.with_defaults(partial_rotary_factor=fields.integer("rotary_dim", most=head_dim) / head_dim)
    experts = read_experts(
        Fields(fields.file, {**fields.values, **_ROUTER}, fields.prefix),
        [True] * fields.layers(),
        count_keys=("num_local_experts", "num_experts"),
        inner_key="intermediate_size",
        sigmoid=True,
        sums_to_one=True,
    )
    rope = read_rope(fields, head_dim, theta=5e6)
    return read_config(fields, rope=rope, qk_norm="all_heads", experts=experts)


FAMILY = Family(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    read=read,
    missing={"num_key_value_heads": 8, "head_dim": 128},
    gguf=Gguf(
        "minimax-m2",
        layer=LAYER | EXPERTS,
        sizes={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        rotates_a_part=True,
        neutral={"expert_gating_func": (2,)},  # sigmoids
    ),
    renames={
        "block_sparse_moe.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
        "block_sparse_moe.": "mlp.",
        ".w1.": ".gate_proj.",
        ".w2.": ".down_proj.",
        ".w3.": ".up_proj.",
    },
)
