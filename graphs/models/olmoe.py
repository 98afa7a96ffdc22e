"""OLMoE: a mixture of experts in place of each MLP, and norms of q and k over all heads."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_config
from paged_kv.graphs.models.family import EXPERTS, LAYER, Family, Gguf
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.mixture import read_experts


def read(fields: Fields) -> DecoderConfig:
    fields.refuse("clip_qkv", "not supported")
    bias = fields.boolean("attention_bias")
    sums_to_one = fields.boolean("norm_topk_prob")
    layers = [True] * fields.layers()
    experts = read_experts(fields, layers, inner_key="intermediate_size", sums_to_one=sums_to_one)
    return read_config(fields, qk_norm="all_heads", qkv_bias=bias, o_bias=bias, experts=experts)


FAMILY = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    read=read,
    gguf=Gguf(
        "olmoe",
        layer=LAYER | EXPERTS,
        sizes={"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        neutral={"expert_gating_func": (0, 1), "expert_weights_norm": (False,)},
    ),
)
