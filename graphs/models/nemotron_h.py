"""Nemotron-H: each layer is Mamba-2, attention without a rotation, an MLP of squared ReLUs, or experts of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paged_kv.graphs.models.config import DecoderConfig, read_config
from paged_kv.graphs.models.family import EXPERTS, LAYER, MAMBA, SSM_SIZES, Family, Gguf, Number
from paged_kv.graphs.models.fields import MAX_LAYERS, Fields
from paged_kv.graphs.models.mixture import read_experts
from paged_kv.graphs.models.recurrence import mamba2

_KINDS = {"linear_attention": "mamba", "full_attention": "attention", "mamba": "mamba", "attention": "attention"}
_KINDS |= {"mlp": "mlp", "moe": "moe"}
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""The letters of `hybrid_override_pattern`."""


def read(fields: Fields) -> DecoderConfig:
    kinds = _kinds(fields)
    fields = fields.with_defaults(num_hidden_layers=len(kinds), head_dim=128, num_key_value_heads=8, n_group=1)
    if fields.layers() != len(kinds):
        raise fields.error("num_hidden_layers", f"expected the {len(kinds)} layers that are named")
    fields.one_of("mlp_hidden_act", {"relu2": None})
    fields.one_of("mamba_hidden_act", {"silu": None})
    fields.refuse("moe_latent_size", "experts of a latent are not supported")
    fields.refuse("sliding_window", "not supported")
    mixtures = [kind == "moe" for kind in kinds]
    experts = None
    if any(mixtures):
        experts = read_experts(
            fields.with_defaults(scoring_func="sigmoid", topk_method="noaux_tc", topk_group=1),
            mixtures,
            count_keys=("n_routed_experts", "num_local_experts"),
            sigmoid=True,
            sums_to_one=fields.boolean("norm_topk_prob", default=True),
            shared_inner=fields.integer("moe_shared_expert_intermediate_size"),
            gated=False,
        )
    heads, groups = fields.integer("mamba_num_heads", default=128), fields.integer("n_groups", default=8)
    recurrence = mamba2(
        fields,
        layers=tuple(kind == "mamba" for kind in kinds),
        heads=heads,
        values=heads * fields.integer("mamba_head_dim", default=64),
        groups=groups,
        state_size=fields.integer("ssm_state_size", default=128),
        kernel=fields.integer("conv_kernel", default=4, least=2),
        conv_bias=fields.boolean("use_conv_bias", default=True),
        bias=fields.boolean("use_bias"),
        dt_range=(fields.number("time_step_min", 0.001, 0.0), float("inf")),
    )
    return read_config(
        fields,
        "layer_norm_epsilon",
        rotates=(False,) * len(kinds),
        activation="relu2",
        gated=False,
        mlp_bias=fields.boolean("mlp_bias"),
        mlp_or_mixer=tuple("mlp" if kind in ("mlp", "moe") else "mixer" for kind in kinds),
        recurrence=recurrence,
        experts=experts,
    )


def _kinds(fields: Fields) -> list[str]:
    """The kind of each layer: by a list of names, or by a letter each."""
    key = next((key for key in ("layers_block_type", "layer_types") if fields.get(key) is not None), None)
    pattern = fields.get("hybrid_override_pattern")
    kinds, names = (fields.get(key), _KINDS) if key else (pattern, _LETTERS)
    key = key or "hybrid_override_pattern"
    valid = isinstance(kinds, list | str) and 0 < len(kinds) <= MAX_LAYERS and all(each in names for each in kinds)
    if not valid:
        raise fields.error(key, f"expected a layer each of {', '.join(names)}")
    return [names[each] for each in kinds]


def _of_metadata(values: Mapping[str, Any], number: Number) -> dict[str, Any]:
    """Nemotron-H's own words for sizes of Mamba-2; MLPs are experts where there are some."""
    del number
    inner, heads = values["ssm_inner_size"], values["mamba_n_heads"]
    experts = bool(values.get("n_routed_experts"))
    return {
        "mamba_head_dim": inner // heads if inner % heads == 0 else inner / heads,
        "mamba_num_heads": heads,
        "n_groups": values["mamba_n_groups"],
        "ssm_state_size": values["mamba_d_state"],
        "conv_kernel": values["mamba_d_conv"],
        "layer_types": ["moe" if experts and kind == "mlp" else kind for kind in values["layer_types"]],
    }


_GGUF = Gguf(
    "nemotron_h",
    layer=LAYER
    | EXPERTS
    | MAMBA
    | {
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
        "mlp.shared_experts.c_fc": "ffn_up_shexp",
        "mlp.shared_experts.c_proj": "ffn_down_shexp",
    },
    eps=("layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
    defaults={"time_step_min": 0.0},  # llama.cpp does not clamp time steps
    sizes=SSM_SIZES,
    finish=_of_metadata,
    recurrent="linear_attention",
    mlp_or_mixer=True,
)
_WITH_EXPERTS = replace(
    _GGUF,
    name="nemotron_h_moe",
    sizes={
        "num_experts_per_tok": "expert_used_count",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        **SSM_SIZES,
    },
    counts={"n_routed_experts": "expert_count", "n_shared_experts": "expert_shared_count"},
    multipliers={"routed_scaling_factor": "expert_weights_scale"},
    flags={"norm_topk_prob": "expert_weights_norm"},
)
FAMILY = Family(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    read=read,
    gguf=_GGUF,
    more_gguf=(_WITH_EXPERTS,),
    renames={
        ".mixer.norm.": ".mamba.gated.",
        ".norm.": ".input_layernorm.",
        ".mamba.gated.": ".mamba.norm.",
        "backbone.norm_f.": "model.norm.",
        "backbone.embeddings.": "model.embed_tokens.",
        "backbone.": "model.",
        ".mixer.shared_experts.up_proj.": ".mlp.shared_experts.c_fc.",
        ".mixer.shared_experts.down_proj.": ".mlp.shared_experts.c_proj.",
        ".mixer.experts.": ".mlp.experts.",
        ".mixer.gate.": ".mlp.gate.",
        ".mixer.up_proj.": ".mlp.c_fc.",
        ".mixer.down_proj.": ".mlp.c_proj.",
        **{f".mixer.{name}_proj.": f".self_attn.{name}_proj." for name in "qkvo"},
        ".mixer.": ".mamba.",
    },
    unread=("mtp.",),
    engine_only=True,
)
