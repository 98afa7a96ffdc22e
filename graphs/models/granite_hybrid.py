"""Granite 4: Granite whose layers are Mamba-2 or attend, most of them without a rotation; experts beside an MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paged_kv.graphs.models import granite
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.family import EXPERTS, LAYER, LLAMA_ROPE, MAMBA, SSM_SIZES, Family, Gguf, Number
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.mixture import read_experts
from paged_kv.graphs.models.recurrence import mamba2, read_layer_types

_INFINITIES = ("Infinity", {"__float__": "Infinity"})


def read(fields: Fields) -> DecoderConfig:
    fields = fields.with_defaults(num_local_experts=8, num_experts_per_tok=2)
    layers, inner = fields.layers(), fields.integer("shared_intermediate_size", default=1024)
    rotates = fields.one_of("position_embedding_type", {"nope": False, "rope": True})
    # In GGUF files gate and up lie apart.
    fused = fields.boolean("fused_shared_mlp", default=True)
    experts = None
    if fields.integer("num_local_experts", least=0):
        experts = read_experts(
            fields,
            [True] * layers,
            count_keys=("num_local_experts",),
            inner_key="intermediate_size",
            sums_to_one=True,
            shared_inner=inner,
        )
    heads, groups = fields.integer("mamba_n_heads", default=128), fields.integer("mamba_n_groups", default=1)
    values = fields.integer("hidden_size") * fields.integer("mamba_expand", default=2)
    recurrence = mamba2(
        fields,
        layers=read_layer_types(fields, ("linear_attention", "mamba"), ("full_attention", "attention")),
        heads=heads,
        values=values,
        groups=groups,
        state_size=fields.integer("mamba_d_state", default=256),
        kernel=fields.integer("mamba_d_conv", default=4, least=2),
        conv_bias=fields.boolean("mamba_conv_bias", default=True),
        bias=fields.boolean("mamba_proj_bias"),
        dt_range=_dt_range(fields),
    )
    config = granite.read(fields)
    return replace(
        config,
        intermediate_size=inner,
        rotates=() if rotates else (False,) * layers,
        experts=experts,
        fused_gate_up=fused,
        mlp="mlp.shared_experts" if fused and experts is None else "mlp",
        recurrence=recurrence if any(recurrence.layers) else None,
    )


def _dt_range(fields: Fields) -> tuple[float, float]:
    """The range of time steps; JSON has no word for infinity, for which transformers writes an object."""
    limits = fields.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    if isinstance(limits, list) and len(limits) == 2:
        least, most = (math.inf if limit in _INFINITIES else limit for limit in limits)
        if all(isinstance(limit, int | float) for limit in (least, most)) and 0 <= least <= most and least < math.inf:
            return float(least), float(most)
    raise fields.error("time_step_limit", "expected two numbers from 0 on, the first no greater than the second")


def of_metadata(values: Mapping[str, Any], number: Number) -> dict[str, Any]:
    """The widths of Mamba-2 by that of all its values; the MLP's, which has another name beside experts."""
    inner = values.get("expert_shared") or values["intermediate_size"]
    expand = values["ssm_inner_size"] / values["hidden_size"]
    return granite.of_metadata(values, number) | {
        "shared_intermediate_size": inner,
        "position_embedding_type": "rope" if values["rotates"] else "nope",
        "mamba_expand": int(expand) if expand == int(expand) else None,
    }


FAMILY = Family(
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    read=read,
    gguf=Gguf(
        "granitehybrid",
        layer=LAYER | EXPERTS | MAMBA,
        rotates_neighbours=True,
        defaults={"fused_shared_mlp": False},
        sizes={
            "num_experts_per_tok": "expert_used_count",
            "expert_shared": "expert_shared_feed_forward_length",
            **SSM_SIZES,
        },
        counts={"num_local_experts": "expert_count"},
        switches={"rotates": "rope.scaling.finetuned"},
        multipliers=granite.MULTIPLIERS,
        finish=of_metadata,
        reads=frozenset({"attention.scale", "logit_scale"}),
        recurrent="linear_attention",
        rope_tensors=LLAMA_ROPE,
    ),
    renames={
        "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
        "block_sparse_moe.experts.": "mlp.experts.",
        "block_sparse_moe.router.layer.": "mlp.gate.",
        "block_sparse_moe.router.": "mlp.gate.",
        "shared_mlp.input_linear.": "mlp.shared_experts.gate_up_proj.",
        "shared_mlp.output_linear.": "mlp.shared_experts.down_proj.",
    },
    engine_only=True,
)
