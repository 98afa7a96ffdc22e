"""Qwen3: Llama with an RMS norm of each head of q and k."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_config
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.qwen2 import upper_windows

ARCHITECTURE = "Qwen3ForCausalLM"
MODEL_TYPE = "qwen3"


def read(fields: Fields) -> DecoderConfig:
    bias = fields.boolean("attention_bias")
    return read_config(fields, qk_norm="head", qkv_bias=bias, o_bias=bias, windows=upper_windows(fields))
