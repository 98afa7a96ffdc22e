"""Command-R: LayerNorms without biases before attention and MLP at once, and rotations of adjacent elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_kv.graphs.models.config import DecoderConfig, read_config, read_rope
from paged_kv.graphs.models.family import LAYER_NORM_EPS, Family, Gguf, Number
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    fields.refuse("use_qk_norm", "not supported")
    return read_cohere(fields, theta=500000.0)


def read_cohere(fields: Fields, theta: float, **switches: Any) -> DecoderConfig:
    """Command-R, with the switches that Command-R7B adds."""
    bias = fields.boolean("attention_bias")
    fields = fields.with_defaults(tie_word_embeddings=True, layer_norm_eps=1e-5)
    heads = fields.integer("num_attention_heads")
    return read_config(
        fields,
        eps_key="layer_norm_eps",
        rope=read_rope(fields, fields.integer("head_dim", default=fields.integer("hidden_size") // heads), theta=theta),
        rotates_neighbours=True,
        norm_place="before both",
        layer_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        logits_divisor=1 / fields.number("logit_scale", default=0.0625),
        **switches,
    )


def of_metadata(values: Mapping[str, Any], number: Number) -> dict[str, float]:
    del values
    return {"logit_scale": number("logit_scale", 1.0) or 1.0}


FAMILY = Family(
    architecture="CohereForCausalLM",
    model_type="cohere",
    read=read,
    gguf=Gguf("command-r", eps=LAYER_NORM_EPS, finish=of_metadata, reads=frozenset({"logit_scale"})),
)
