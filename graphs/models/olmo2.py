"""OLMo 2: norms on the outputs of attention and MLP, and of q and k over all heads."""

from __future__ import annotations

from typing import Any

from paged_kv.graphs.models.config import DecoderConfig, read_config
from paged_kv.graphs.models.family import LAYER, NORMS_AFTER, Family, Gguf
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    return read_olmo(fields)


def read_olmo(fields: Fields, **switches: Any) -> DecoderConfig:
    """OLMo 2, with the switches that OLMo 3 adds."""
    bias = fields.boolean("attention_bias")
    return read_config(
        fields, qk_norm="all_heads", norm_place="after", norm_rounds_once=True, qkv_bias=bias, o_bias=bias, **switches
    )


FAMILY = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    read=read,
    gguf=Gguf("olmo2", layer=LAYER | NORMS_AFTER, windows=4, windowed="Olmo3ForCausalLM", has_window_rope=True),
)
