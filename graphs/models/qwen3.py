"""Qwen3: Llama with an RMS norm of each head of q and k."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_config
from paged_kv.graphs.models.family import Family, Gguf
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.qwen2 import upper_windows


def read(fields: Fields) -> DecoderConfig:
    bias = fields.boolean("attention_bias")
    return read_config(fields, qk_norm="head", qkv_bias=bias, o_bias=bias, windows=upper_windows(fields))


FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    read=read,
    missing={"num_key_value_heads": 32, "head_dim": 128},
    gguf=Gguf("qwen3"),
)
