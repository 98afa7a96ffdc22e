"""InternLM 3: Llama with biases under names of its own."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_config
from paged_kv.graphs.models.family import Family
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    """`qkv_bias` (or `attention_bias`) stands for queries, keys and values, `bias` (or `mlp_bias`) for all others."""
    fields = fields.with_defaults(head_dim=128)
    of_qkv = fields.boolean("qkv_bias" if fields.get("attention_bias") is None else "attention_bias")
    bias = fields.boolean("bias" if fields.get("mlp_bias") is None else "mlp_bias")
    return read_config(fields, qkv_bias=of_qkv, o_bias=bias, mlp_bias=bias)


FAMILY = Family(
    architecture="InternLM3ForCausalLM", model_type="internlm3", read=read, missing={"num_key_value_heads": 2}
)
