"""GLM-4 of 2025: norms around attention and MLP, and rotations of adjacent elements in half of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_kv.graphs.models.config import DecoderConfig, read_config, read_rope
from paged_kv.graphs.models.family import LAYER, Family, Gguf, Number
from paged_kv.graphs.models.fields import Fields

_NAMES = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate_up_proj": "ffn_up",
}


def read(fields: Fields) -> DecoderConfig:
    fields = fields.with_defaults(head_dim=128, partial_rotary_factor=0.5)
    return read_config(
        fields,
        rope=read_rope(fields, fields.integer("head_dim")),
        rotates_neighbours=True,
        fused_gate_up=True,
        norm_place="around (GLM)",
        qkv_bias=fields.boolean("attention_bias", default=True),
    )


def _of_metadata(values: Mapping[str, Any], number: Number) -> dict[str, float]:
    """A file that does not say how much of a head is rotated has all of it rotated."""
    del number
    return {"partial_rotary_factor": values.get("partial_rotary_factor", 1.0)}


FAMILY = Family(
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    read=read,
    missing={"num_key_value_heads": 2},
    gguf=Gguf("glm4", layer=LAYER | _NAMES, rotates_a_part=True, finish=_of_metadata),
)
