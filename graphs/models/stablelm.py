"""StableLM: LayerNorms, and rotations of a quarter of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_kv.graphs.models.config import DecoderConfig, read_config, read_rope
from paged_kv.graphs.models.family import LAYER_NORM_EPS, Family, Gguf, Number
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    fields.refuse("qk_layernorm", "not supported")
    fields = fields.with_defaults(partial_rotary_factor=0.25, layer_norm_eps=1e-5)
    heads = fields.integer("num_attention_heads")
    return read_config(
        fields,
        eps_key="layer_norm_eps",
        rope=read_rope(fields, fields.integer("head_dim", default=fields.integer("hidden_size") // heads)),
        norm_place="before both" if fields.boolean("use_parallel_residual") else "before",
        layer_norm=True,
        norm_bias=True,
        qkv_bias=fields.boolean("use_qkv_bias"),
    )


def _of_metadata(values: Mapping[str, Any], number: Number) -> dict[str, Any]:
    """A file that does not say how much of a head is rotated has all of it rotated."""
    del number
    part = values.get("partial_rotary_factor", 1.0)
    return {"use_qkv_bias": values["attention_bias"], "partial_rotary_factor": part}


_PARALLEL = frozenset({"use_parallel_residual"})
"""Converters write true where config.json says nothing; `gguf_families.py` sees it by the second norm, as llama.cpp."""

FAMILY = Family(
    architecture="StableLmForCausalLM",
    model_type="stablelm",
    read=read,
    missing={"num_key_value_heads": 32},
    gguf=Gguf("stablelm", eps=LAYER_NORM_EPS, rotates_a_part=True, finish=_of_metadata, without_effect=_PARALLEL),
)
