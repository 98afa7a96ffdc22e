"""Granite 3: Llama with multipliers of its own for embeddings, attention scores, residuals and logits."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_config
from paged_kv.graphs.models.fields import Fields

ARCHITECTURE = "GraniteForCausalLM"
MODEL_TYPE = "granite"


def read(fields: Fields) -> DecoderConfig:
    bias = fields.boolean("attention_bias")
    return read_config(
        fields,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.boolean("mlp_bias"),
        sm_scale=fields.number("attention_multiplier", default=1.0),
        embedding_multiplier=fields.number("embedding_multiplier", default=1.0),
        residual_multiplier=fields.number("residual_multiplier", default=1.0),
        logits_divisor=fields.number("logits_scaling", default=1.0),
    )
