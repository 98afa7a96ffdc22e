"""Qwen3-Next: three of four layers are Gated DeltaNet, the others attend with a gate; a mixture with a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_kv.graphs.models.config import DecoderConfig, read_config
from paged_kv.graphs.models.family import EXPERTS, LAYER, Family, Gguf, Number
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.mixture import Experts, read_experts
from paged_kv.graphs.models.qwen3_moe import mixtures
from paged_kv.graphs.models.recurrence import Recurrence, read_layer_types

SHARED_EXPERT = {".mlp.shared_expert.": ".mlp.shared_experts."}
DRAFTS = ("mtp.", "model.mtp.")
"""Beginnings of the names of tensors that draft tokens ahead."""
LINEAR_ATTENTION = {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "post_attention_layernorm": "post_attention_norm",
}
SIZES = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "ssm_inner_size": "ssm.inner_size",
}


def read(fields: Fields) -> DecoderConfig:
    return read_gated_delta(fields, experts=read_shared_experts(fields), fused=True)


def read_shared_experts(fields: Fields) -> Experts | None:
    """The mixture, beside which an MLP with a gate of its own takes all tokens."""
    return read_experts(
        fields,
        mixtures(fields),
        sums_to_one=fields.boolean("norm_topk_prob", default=True),
        shared_inner=fields.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def read_gated_delta(fields: Fields, *, experts: Experts | None, fused: bool) -> DecoderConfig:
    """A model of Gated DeltaNet and attention with a gate.

    Args:
        experts: Its mixture of experts.
        fused: Checkpoints have q, k, v and z in one weight, and b and a in another.

    Raises:
        CheckpointError: as `read_config`; value heads are no multiple of key heads.
    """
    key_heads, heads = (fields.integer(f"linear_num_{kind}_heads") for kind in ("key", "value"))
    key_dim, value_dim = (fields.integer(f"linear_{kind}_head_dim") for kind in ("key", "value"))
    if heads % key_heads:
        raise fields.error("linear_num_value_heads", f"expected a multiple of linear_num_key_heads = {key_heads}")
    fields.one_of("hidden_act", {"silu": "silu"})
    if not fields.boolean("attn_output_gate", default=True):
        raise fields.error("attn_output_gate", "attention without a gate is not supported")
    bias = fields.boolean("attention_bias")
    recurrence = Recurrence(
        kind="gated delta",
        layers=read_layer_types(fields, ("linear_attention",)),
        channels=2 * key_heads * key_dim + heads * value_dim,
        kernel=fields.integer("linear_conv_kernel_dim", least=2),
        heads=heads,
        key_heads=key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        fused_gates=fused,
        fused_qkvz=fused,
        tiled=fields.boolean("tiled_value_heads"),
    )
    return read_config(
        fields.with_defaults(head_dim=256, partial_rotary_factor=0.25),
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        norm_offset=1.0,
        norm_rounds_once=True,
        attention_gate=True,
        recurrence=recurrence,
        experts=experts,
    )


def of_metadata(values: Mapping[str, Any], number: Number) -> dict[str, Any]:
    """The width of a value, from that of all of them."""
    del number
    inner, heads = values["ssm_inner_size"], values["linear_num_value_heads"]
    return {"linear_value_head_dim": inner // heads if inner % heads == 0 else inner / heads}


GGUF = Gguf(
    "qwen3next",
    layer=LAYER | EXPERTS | LINEAR_ATTENTION,
    norm_offset=1.0,
    defaults={"norm_topk_prob": True},
    sizes={
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        **SIZES,
    },
    finish=of_metadata,
    drafts="nextn_predict_layers",
    recurrent="linear_attention",
    rotates_a_part=True,
)
FAMILY = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    read=read,
    missing={"num_key_value_heads": 2},
    gguf=GGUF,
    renames=SHARED_EXPERT,
    unread=DRAFTS,
    engine_only=True,
)
