"""Ministral: Mistral with windows in some layers."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_config, read_windows
from paged_kv.graphs.models.family import Family
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    if "sliding_window" not in fields.values:
        fields = fields.with_defaults(sliding_window=4096)
    return read_config(fields, windows=read_windows(fields))


FAMILY = Family(
    architecture="MinistralForCausalLM", model_type="ministral", read=read, missing={"num_key_value_heads": 8}
)
