"""ERNIE 4.5 with experts: chosen by softmax scores plus a bias, with shared ones beside them."""

from __future__ import annotations

from dataclasses import replace

from paged_kv.graphs.models import ernie4_5
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.family import Family
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.mixture import read_experts


def read(fields: Fields) -> DecoderConfig:
    layers, step = fields.layers(), fields.integer("moe_layer_interval", default=1)
    first = fields.integer("moe_layer_start_index", default=1, least=0)
    last = fields.get("moe_layer_end_index")
    last = layers - 1 if last in (None, -1) else fields.integer("moe_layer_end_index", least=0)
    inner = fields.integer("moe_intermediate_size")
    known = fields.with_defaults(num_experts_per_tok=fields.integer("moe_k", default=6))
    experts = read_experts(
        known,
        [(index + 1) % step == 0 and first <= index <= last for index in range(layers)],
        count_keys=("moe_num_experts",),
        choice_bias=True,
        sums_to_one=True,
        shared_inner=inner * fields.integer("moe_num_shared_experts", default=2, least=0),
    )
    return replace(ernie4_5.read(known), experts=experts)


FAMILY = Family(
    architecture="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    read=read,
    renames={"mlp.moe_statics.": "mlp.gate."},
)
