"""Granite 3's mixtures of experts: Granite with experts in place of each MLP."""

from __future__ import annotations

from dataclasses import replace

from paged_kv.graphs.models import granite
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.family import EXPERTS, LAYER, LLAMA_ROPE, Family, Gguf
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.mixture import read_experts


def read(fields: Fields) -> DecoderConfig:
    fields = fields.with_defaults(num_local_experts=8, num_experts_per_tok=2)
    layers = [True] * fields.layers()
    experts = read_experts(
        fields, layers, count_keys=("num_local_experts",), inner_key="intermediate_size", sums_to_one=True
    )
    return replace(granite.read(fields), experts=experts)


FAMILY = Family(
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    read=read,
    gguf=Gguf(
        "granitemoe",
        layer=LAYER | EXPERTS,
        rotates_neighbours=True,
        sizes={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        multipliers=granite.MULTIPLIERS,
        finish=granite.of_metadata,
        reads=frozenset({"attention.scale", "logit_scale"}),
        neutral={"rope.scaling.finetuned": (True,)},  # it says whether q and k are rotated at all
        rope_tensors=LLAMA_ROPE,
    ),
    renames={
        "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
        "block_sparse_moe.router.layer.": "mlp.gate.",
    },
)
