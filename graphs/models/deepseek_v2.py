"""DeepSeek-V2 and V2-Lite: latent attention with a rotated part of its own, and a mixture of experts after the first
layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paged_kv.graphs.models.config import DecoderConfig, LatentSizes, read_config, read_rope, rope_section
from paged_kv.graphs.models.family import EXPERTS, LAYER, Family, Gguf, Number
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.mixture import COUNT_KEYS, Experts, read_experts
from paged_kv.graphs.rope import Rope, Yarn
from paged_kv.options import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM

MAX_ROPE_DIM = 64
"""The largest dimension of the rotated part, which lies in the cache beside the latent."""


def read(fields: Fields) -> DecoderConfig:
    # DeepSeek's own code divides the weights of the chosen experts by their sum, transformers does not; no published
    # model sets it.
    fields.refuse("norm_topk_prob", "not supported")
    return read_latent_model(fields.with_defaults(first_k_dense_replace=0, n_shared_experts=2))


def read_latent_model(fields: Fields, mixtures: Sequence[bool] | None = None, **routing: Any) -> DecoderConfig:
    """A model with latent attention and experts; `routing` is what `read_experts` takes.

    Args:
        mixtures: Whether each layer has experts; None: those after the first `first_k_dense_replace`.
    """
    latent = _latent(fields)
    heads = fields.integer("num_attention_heads")
    if fields.integer("num_key_value_heads", default=heads) != heads:
        raise fields.error("num_key_value_heads", f"expected num_attention_heads = {heads}")
    for key in ("attention_bias", "mlp_bias"):
        fields.refuse(key, "not supported for this family")
    rope = read_rope(fields, latent.rope_dim)
    head_dim = latent.nope_dim + latent.rope_dim
    # What transformers saves as head_dim is the rotated part alone.
    sizes = Fields(fields.file, {**fields.values, "num_key_value_heads": heads, "head_dim": head_dim}, fields.prefix)
    return read_config(
        sizes,
        rope=rope,
        latent=latent,
        experts=_experts(fields, mixtures, **routing),
        sm_scale=head_dim**-0.5 * _sharpening(fields, rope) ** 2,
    )


def _latent(fields: Fields) -> LatentSizes:
    # Without the key there is a latent of the queries, with null there is none.
    has_q_rank = fields.values.get("q_lora_rank", 1536) is not None
    sizes = {
        name: fields.integer(name, default=default)
        for name, default in (
            ("kv_lora_rank", 512),
            ("qk_nope_head_dim", 128),
            ("qk_rope_head_dim", 64),
            ("v_head_dim", 128),
        )
    }
    for name, size in sizes.items():
        most = {"qk_rope_head_dim": MAX_ROPE_DIM, "qk_nope_head_dim": MAX_HEAD_DIM - MAX_ROPE_DIM}.get(
            name, MAX_HEAD_DIM
        )
        if size % HEAD_DIM_MULTIPLE or size > most:
            raise fields.error(name, f"expected a multiple of {HEAD_DIM_MULTIPLE} and at most {most}", size)
    kv_rank, nope_dim, rope_dim, v_dim = sizes.values()
    return LatentSizes(
        q_rank=fields.integer("q_lora_rank", default=1536) if has_q_rank else None,
        kv_rank=kv_rank,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=v_dim,
    )


def _experts(fields: Fields, mixtures: Sequence[bool] | None, **routing: Any) -> Experts | None:
    if mixtures is None:
        first = fields.integer("first_k_dense_replace", least=0)
        if first < fields.layers() and fields.integer("moe_layer_freq", default=1) != 1:
            raise fields.error("moe_layer_freq", "expected 1: experts in every layer from the first on")
        mixtures = [index >= first for index in range(fields.layers())]
    if not any(mixtures):
        return None
    shared_inner = fields.integer("moe_intermediate_size") * fields.integer("n_shared_experts")
    return read_experts(fields, mixtures, count_keys=COUNT_KEYS[:1], shared_inner=shared_inner, **routing)


def _sharpening(fields: Fields, rope: Rope) -> float:
    """Return what queries and keys are multiplied by for YaRN, beside the amplitude of their rotated part."""
    if rope.scaling is None:
        return 1.0
    section = rope_section(fields)
    if not isinstance(rope.scaling, Yarn) or section is None:
        raise fields.error("rope_scaling", 'expected "yarn" for this family')
    if section.get("mscale_all_dim") in (None, 0):
        return 1.0
    return Yarn.grown(rope.scaling.factor, section.number("mscale_all_dim"))


def _of_metadata(values: Mapping[str, Any], number: Number) -> dict[str, Any]:
    """Which of DeepSeek's models it is: V3 and the like choose experts by sigmoids, with a bias. Older files do not say
    by what, and have the bias alone.
    """
    function, groups = number("expert_gating_func", 0), values["n_group"] or 1
    is_sigmoid = function == 2 or (function == 0 and values["use_expert_bias"])
    rope, all_dim = values["rope_scaling"], number("rope.scaling.yarn_log_multiplier", 0.0)
    if rope is not None and all_dim:  # a tenth of it; there is no word for `mscale`, in published models the same
        rope = rope | dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * all_dim, 6))
    return {
        "architectures": [f"DeepseekV{3 if is_sigmoid else 2}ForCausalLM"],
        "topk_method": "noaux_tc" if is_sigmoid else "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": values["topk_group"] or 1,
        "rope_scaling": rope,
    }


FAMILY = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    read=read,
    gguf=Gguf(
        "deepseek2",
        layer=LAYER
        | EXPERTS
        | {
            "self_attn.q_a_proj": "attn_q_a",
            "self_attn.q_a_layernorm": "attn_q_a_norm",
            "self_attn.q_b_proj": "attn_q_b",
            "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
            "self_attn.kv_a_layernorm": "attn_kv_a_norm",
            "self_attn.k_up_proj": "attn_k_b",
            "self_attn.v_up_proj": "attn_v_b",
        },
        sizes={
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        counts={
            "n_shared_experts": "expert_shared_count",
            "first_k_dense_replace": "leading_dense_block_count",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
        },
        multipliers={"routed_scaling_factor": "expert_weights_scale"},
        flags={"norm_topk_prob": "expert_weights_norm"},
        finish=_of_metadata,
        reads=frozenset({"expert_gating_func", "rope.scaling.yarn_log_multiplier"}),
        drafts="nextn_predict_layers",
        latent=True,
        neutral={"expert_gating_func": (0, 1, 2)},  # softmax and sigmoids
    ),
    engine_only=True,
)
