"""ERNIE 4.5, without experts: Llama with rotations of adjacent elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_kv.graphs.models.config import DecoderConfig, head_dim_of, read_config, read_rope
from paged_kv.graphs.models.family import Family, Gguf, Number
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    bias = fields.boolean("use_bias")
    fields = fields.with_defaults(tie_word_embeddings=True)
    return read_config(
        fields,
        rope=read_rope(fields, head_dim_of(fields), theta=500000.0),
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
    missing={"num_key_value_heads": 2, "head_dim": 128},
    gguf=Gguf("ernie4_5", finish=_of_metadata),
)
