"""ERNIE 4.5, without experts: Llama with rotations of adjacent elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_kv.graphs.models.config import DecoderConfig, read_config, read_rope
from paged_kv.graphs.models.family import Family, Gguf, Number
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    bias = fields.boolean("use_bias")
    fields = fields.with_defaults(head_dim=128, tie_word_embeddings=True)
    return read_config(
        fields,
        rope=read_rope(fields, fields.integer("head_dim"), theta=500000.0),
        rotates_neighbours=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def _of_metadata(values: Mapping[str, Any], number: Number) -> dict[str, bool]:
    del number
    return {"use_bias": values["attention_bias"]}


FAMILY = Family(
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    read=read,
    gguf=Gguf("ernie4_5", finish=_of_metadata),
)
