"""Ministral 3: Mistral whose queries grow with their position past the context of its training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_kv.graphs.models.config import DecoderConfig, QueryGrowth, read_config, read_windows, rope_section
from paged_kv.graphs.models.family import Family, Gguf, Number
from paged_kv.graphs.models.fields import MAX_SIZE, Fields


def read(fields: Fields) -> DecoderConfig:
    fields = fields.with_defaults(head_dim=128)
    rope = rope_section(fields)
    beta = 0.0 if rope is None else rope.number("llama_4_scaling_beta", default=0.0, least=0.0)
    growth = None
    if rope is not None and beta:
        growth = QueryGrowth(beta=beta, context=rope.integer("original_max_position_embeddings", most=MAX_SIZE))
    return read_config(fields, windows=read_windows(fields), q_growth=growth)


def _of_metadata(values: Mapping[str, Any], number: Number) -> dict[str, Any]:
    rope = dict(values["rope_scaling"] or {"rope_type": "default"})
    beta, all_dim = number("attention.temperature_scale", 0.0), number("rope.scaling.yarn_log_multiplier", 0.0)
    if beta:  # llama.cpp takes the context of the scaling here too
        context = number("rope.scaling.original_context_length", values["max_position_embeddings"])
        rope |= {"llama_4_scaling_beta": beta, "original_max_position_embeddings": int(context)}
    if all_dim:
        rope |= {"mscale": 1.0, "mscale_all_dim": all_dim}
    return {"rope_scaling": rope}


FAMILY = Family(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    read=read,
    gguf=Gguf(
        "mistral3",
        rotates_neighbours=True,
        finish=_of_metadata,
        reads=frozenset(
            {
                "attention.temperature_scale",
                "rope.scaling.original_context_length",
                "rope.scaling.yarn_log_multiplier",
            }
        ),
    ),
)
