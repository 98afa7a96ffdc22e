"""ERNIE 4.5 with experts: chosen by softmax scores plus a bias, with shared ones beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paged_kv.graphs.models import ernie4_5
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.family import EXPERTS, LAYER, Family, Gguf, Number
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.mixture import read_experts


def read(fields: Fields) -> DecoderConfig:
    layers, step = fields.layers(), fields.integer("moe_layer_interval", default=1)
    first = fields.integer("moe_layer_start_index", default=1, least=0)
    last = fields.get("moe_layer_end_index")
    last = layers - 1 if last in (None, -1) else fields.integer("moe_layer_end_index", least=0)
    inner = fields.integer("moe_intermediate_size")
    fields = fields.with_defaults(
        num_experts_per_tok=fields.integer("moe_k", default=6),
        head_dim=fields.integer("hidden_size") // fields.integer("num_attention_heads"),
    )
    experts = read_experts(
        fields,
        [(index + 1) % step == 0 and first <= index <= last for index in range(layers)],
        count_keys=("moe_num_experts",),
        choice_bias=True,
        sums_to_one=True,
        shared_inner=inner * fields.integer("moe_num_shared_experts", default=2, least=0),
    )
    if experts is not None and fields.number("moe_norm_min", 1e-12, 0.0) > experts.chosen / experts.count:
        raise fields.error("moe_norm_min", "expected at most the least sum of the chosen scores")
    return replace(ernie4_5.read(fields), experts=experts)


def _of_metadata(values: Mapping[str, Any], number: Number) -> dict[str, Any]:
    shared, inner = number("expert_shared_feed_forward_length", 0.0), values.get("moe_intermediate_size")
    return {"use_bias": values["attention_bias"], "moe_num_shared_experts": int(shared / inner) if inner else 0}


FAMILY = Family(
    architecture="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    read=read,
    missing={"num_key_value_heads": 4},
    gguf=Gguf(
        "ernie4_5-moe",
        layer=LAYER | EXPERTS,
        sizes={
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
        counts={"moe_layer_start_index": "leading_dense_block_count"},
        finish=_of_metadata,
        reads=frozenset({"expert_shared_feed_forward_length"}),
        without_effect=frozenset({"expert_shared_count"}),  # the length says it
    ),
    renames={"mlp.moe_statics.": "mlp.gate."},
)
