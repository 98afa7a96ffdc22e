"""Phi-3.5-MoE: LayerNorms, biases everywhere, and two experts a token whose weights do not add up to 1."""

from __future__ import annotations

from dataclasses import replace

from paged_kv.graphs.models.config import DecoderConfig, head_dim_of, read_config, read_rope, read_windows, rope_section
from paged_kv.graphs.models.family import Family
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.mixture import read_experts

_THETA = 1e6


def read(fields: Fields) -> DecoderConfig:
    fields = fields.with_defaults(num_local_experts=16, num_experts_per_tok=2)
    if fields.integer("num_experts_per_tok") != 2:
        raise fields.error("num_experts_per_tok", "expected 2")
    experts = read_experts(
        fields,
        [True] * fields.layers(),
        count_keys=("num_local_experts",),
        inner_key="intermediate_size",
        jitter=fields.number("router_jitter_noise", default=0.01, least=0.0),
    )
    bias = fields.boolean("attention_bias")
    return read_config(
        fields,
        rope=read_rope(_sharpened(fields), head_dim_of(fields), theta=_THETA),
        windows=read_windows(fields),
        layer_norm=True,
        norm_bias=True,
        qkv_bias=bias,
        o_bias=bias,
        head_bias=fields.boolean("lm_head_bias"),
        experts=experts,
    )


def _sharpened(fields: Fields) -> Fields:
    """The fields with the rotation's sharpening under its usual key: here short and long texts have one each."""
    rope = rope_section(fields, theta=_THETA)
    if rope is None or rope.get("short_mscale") is None:
        return fields
    short, long = (rope.number(f"{name}_mscale") for name in ("short", "long"))
    if short != long:
        raise rope.error("long_mscale", f"expected that of short texts, short_mscale = {short:g}")
    changed = {"rope_parameters": {**rope.values, "attention_factor": short}, "rope_scaling": None}
    changed["original_max_position_embeddings"] = None  # that of the rotation counts
    return Fields(fields.file, {**fields.values, **changed}, fields.prefix)


FAMILY = Family(
    architecture="PhiMoEForCausalLM",
    model_type="phimoe",
    read=read,
    missing={"num_key_value_heads": 8},
    renames={
        "block_sparse_moe.gate.": "mlp.gate.",
        "block_sparse_moe.": "mlp.",
        ".w1.": ".gate_proj.",
        ".w2.": ".down_proj.",
        ".w3.": ".up_proj.",
    },
    engine_only=True,
)
SAVED_BY_TRANSFORMERS = replace(FAMILY, architecture="PhimoeForCausalLM")
"""The same by transformers' name for it."""
