"""Phi-3 and Phi-4: fused projections, LongRoPE for long contexts, rotation of a part of each head in Phi-4-mini."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_config, read_windows
from paged_kv.graphs.models.fields import Fields

ARCHITECTURE = "Phi3ForCausalLM"
MODEL_TYPE = "phi3"


def read(fields: Fields) -> DecoderConfig:
    return read_config(fields, fused_projections=True, windows=read_windows(fields))
