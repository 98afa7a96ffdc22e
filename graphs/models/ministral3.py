"""Ministral 3: Mistral whose queries grow with their position past the context of its training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_kv.graphs.models.config import DecoderConfig, QueryGrowth, read_config, read_windows, rope_section
from paged_kv.graphs.models.family import Family, Gguf, Number
from paged_kv.graphs.models.fields import MAX_SIZE, Fields

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""The rotation where config.json has none."""


def read(fields: Fields) -> DecoderConfig:
    if fields.get("rope_parameters") is None and fields.get("rope_scaling") is None:
        fields = fields.with_defaults(rope_parameters=_YARN)
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
    missing={"num_key_value_heads": 8, "head_dim": 128},
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
