"""Qwen3.5, dense and with experts: Qwen3-Next with the projections of its recurrent layers apart; its text alone."""

from __future__ import annotations

from dataclasses import replace

from paged_kv.graphs.models import qwen3_next
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.family import LAYER, Family
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    return qwen3_next.read_gated_delta(fields, experts=None, fused=False)


def read_mixture(fields: Fields) -> DecoderConfig:
    fields = fields.with_defaults(intermediate_size=fields.get("moe_intermediate_size"))
    return qwen3_next.read_gated_delta(fields, experts=qwen3_next.read_shared_experts(fields), fused=False)


FAMILY = Family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    read=read,
    missing={"num_key_value_heads": 4},
    gguf=replace(
        qwen3_next.GGUF,
        name="qwen35",
        layer=LAYER | qwen3_next.LINEAR_ATTENTION,
        defaults={"tiled_value_heads": True},
        sizes=qwen3_next.SIZES,
        without_effect=frozenset({"rope.dimension_sections"}),
    ),
    unread=qwen3_next.DRAFTS,
    engine_only=True,
)
MIXTURE = Family(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    read=read_mixture,
    missing={"num_key_value_heads": 2},
    gguf=replace(
        qwen3_next.GGUF,
        name="qwen35moe",
        defaults={"tiled_value_heads": True, **qwen3_next.GGUF.defaults},
        without_effect=frozenset({"rope.dimension_sections"}),
    ),
    renames=qwen3_next.SHARED_EXPERT,
    unread=qwen3_next.DRAFTS,
    engine_only=True,
)
