"""Hunyuan's dense models: Llama with norms of q and k after their rotation, whose base `alpha` stretches."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_config
from paged_kv.graphs.models.family import Family, Gguf
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    bias = fields.boolean("attention_bias")
    return read_config(fields, qk_norm="head, rotated", qkv_bias=bias, o_bias=bias)


FAMILY = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    model_type="hunyuan_v1_dense",
    read=read,
    gguf=Gguf("hunyuan-dense"),
    renames={"self_attn.query_layernorm.": "self_attn.q_norm.", "self_attn.key_layernorm.": "self_attn.k_norm."},
)
