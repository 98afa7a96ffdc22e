"""Llama 4: mixtures whose experts take x times their score, and layers without a rotation, whose queries grow.

The layers that rotate see the tokens of their own chunk alone, of 8,192: here a text ends with its first chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_kv.graphs.models.config import DecoderConfig, QueryGrowth, read_config, read_rope, read_rotated
from paged_kv.graphs.models.family import EXPERTS, FREQUENCIES, LAYER, Family, Gguf, Number
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.mixture import read_experts


def read(fields: Fields) -> DecoderConfig:
    fields = fields.with_defaults(head_dim=128, num_experts_per_tok=1, num_local_experts=16, attention_chunk_size=8192)
    inner, rotates = fields.integer("intermediate_size"), read_rotated(fields)
    growth = None
    if fields.boolean("attn_temperature_tuning", default=True):
        beta, context = fields.number("attn_scale", default=0.1, least=0.0), fields.integer("floor_scale", default=8192)
        growth = QueryGrowth(beta=beta, context=context, first=1, unrotated=True)
    experts = read_experts(
        fields,
        _mixtures(fields),
        count_keys=("num_local_experts",),
        inner_key="intermediate_size",
        router="router",
        shared_inner=inner,
        scales_input=True,
        transposed=True,
    )
    changed = {"intermediate_size": fields.integer("intermediate_size_mlp", default=16384)}
    if any(_chunked(fields, rotates)):
        most = fields.integer("max_position_embeddings")
        changed["max_position_embeddings"] = min(most, fields.integer("attention_chunk_size"))
    bias = fields.boolean("attention_bias")
    return read_config(
        Fields(fields.file, {**fields.values, **changed}, fields.prefix),
        rope=read_rope(fields, fields.integer("head_dim"), theta=500000.0),
        rotates=rotates,
        rotates_neighbours=True,
        qk_norm="head, rotated, no weights" if fields.boolean("use_qk_norm", default=True) else None,
        q_growth=growth,
        qkv_bias=bias,
        o_bias=bias,
        experts=experts,
    )


def _mixtures(fields: Fields) -> list[bool]:
    layers, mixtures = fields.layers(), fields.get("moe_layers")
    if mixtures is None:
        step = fields.integer("interleave_moe_layer_step", default=1)
        return [(index + 1) % step == 0 for index in range(layers)]
    if not isinstance(mixtures, list) or not all(type(each) is int and 0 <= each < layers for each in mixtures):
        raise fields.error("moe_layers", f"expected a list of layers below num_hidden_layers = {layers}")
    return [index in mixtures for index in range(layers)]


def _chunked(fields: Fields, rotates: tuple[bool, ...]) -> list[bool]:
    kinds, chunked = fields.get("layer_types"), {"full_attention": False, "chunked_attention": True}
    if kinds is None:
        return list(rotates)
    if not isinstance(kinds, list) or len(kinds) != len(rotates):
        raise fields.error("layer_types", f"expected a list of num_hidden_layers = {len(rotates)}")
    return [Fields(fields.file, {"layer_types": kind}).one_of("layer_types", chunked) for kind in kinds]


def _of_metadata(values: Mapping[str, Any], number: Number) -> dict[str, Any]:
    # llama.cpp takes a window of 0 for a model whose layers all rotate and see everything, and 128 experts for one
    # without norms of heads.
    everywhere = number("attention.sliding_window", -1.0) == 0
    layers = int(number("block_count", 1.0))
    same: dict[str, Any] = {}
    if everywhere:
        same = {"no_rope_layers": [1] * layers, "layer_types": ["full_attention"] * layers}
        same["attn_temperature_tuning"] = False
    return {
        "intermediate_size": values.get("expert_inner"),
        "intermediate_size_mlp": values["intermediate_size"],
        "use_qk_norm": values.get("num_local_experts") != 128,
        **same,
    }


FAMILY = Family(
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    read=read,
    missing={"num_key_value_heads": 8},
    renames={"feed_forward.": "mlp.", ".shared_expert.": ".shared_experts."},
    gguf=Gguf(
        "llama4",
        layer=LAYER | EXPERTS,
        sizes={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "expert_inner": "expert_feed_forward_length",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        finish=_of_metadata,
        reads=frozenset({"attention.sliding_window"}),
        rope_tensors=(FREQUENCIES,),
        # Sigmoids; and llama.cpp takes any other window for 8,192.
        neutral={"expert_gating_func": (0, 2), "attention.sliding_window": (0, 8192)},
    ),
    engine_only=True,
)
