"""Ministral 3: Mistral whose queries grow with their position past the context of its training."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_config, read_windows
from paged_kv.graphs.models.family import Family
from paged_kv.graphs.models.fields import MAX_SIZE, Fields


def read(fields: Fields) -> DecoderConfig:
    fields = fields.with_defaults(head_dim=128)
    rope = fields.section("rope_parameters") or fields.section("rope_scaling")
    beta = 0.0 if rope is None else rope.number("llama_4_scaling_beta", default=0.0, least=0.0)
    growth = None
    if rope is not None and beta:
        growth = beta, rope.integer("original_max_position_embeddings", most=MAX_SIZE)
    return read_config(fields, windows=read_windows(fields), q_growth=growth)


FAMILY = Family(architecture="Ministral3ForCausalLM", model_type="ministral3", read=read)
