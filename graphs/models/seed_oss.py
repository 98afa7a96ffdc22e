"""Seed-OSS: Llama with biases of queries, keys and values."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_config
from paged_kv.graphs.models.family import LAYER, Family, Gguf
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    return read_config(
        fields,
        qkv_bias=fields.boolean("attention_bias", default=True),
        o_bias=fields.boolean("attention_out_bias"),
        mlp_bias=fields.boolean("mlp_bias"),
    )


FAMILY = Family(
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    read=read,
    missing={"num_key_value_heads": 8, "head_dim": 128},
    gguf=Gguf("seed_oss", layer=LAYER | {"post_attention_layernorm": "post_attention_norm"}),
)
