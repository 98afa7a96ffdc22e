"""Granite 3's mixtures of experts: Granite with experts in place of each MLP."""

from __future__ import annotations

from dataclasses import replace

from paged_kv.graphs.models import granite
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.family import Family
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.mixture import read_experts


def read(fields: Fields) -> DecoderConfig:
    known = fields.with_defaults(num_local_experts=8, num_experts_per_tok=2)
    layers = [True] * known.layers()
    experts = read_experts(
        known, layers, count_keys=("num_local_experts",), inner_key="intermediate_size", sums_to_one=True
    )
    return replace(granite.read(known), experts=experts)


FAMILY = Family(
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    read=read,
    renames={
        "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
        "block_sparse_moe.router.layer.": "mlp.gate.",
    },
)
