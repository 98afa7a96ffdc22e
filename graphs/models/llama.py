"""Llama 2 and 3, and what calls itself Llama: the plain decoder."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_config
from paged_kv.graphs.models.family import EXPERTS, LAYER, LLAMA_ROPE, Family, Gguf
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    """`attention_bias` stands for all four projections, `mlp_bias` for all three."""
    bias = fields.boolean("attention_bias")
    return read_config(fields, qkv_bias=bias, o_bias=bias, mlp_bias=fields.boolean("mlp_bias"))


FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    read=read,
    gguf=Gguf(
        "llama",
        layer=LAYER | EXPERTS,
        rotates_neighbours=True,
        windows=0,
        windowed="MistralForCausalLM",
        mixture="MixtralForCausalLM",
        rope_tensors=LLAMA_ROPE,
    ),
)
