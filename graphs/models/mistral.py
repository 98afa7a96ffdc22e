"""Mistral: Llama, with a window in every layer of its first releases."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_config, read_windows
from paged_kv.graphs.models.family import Family
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    # Without the key there is a window, with null there is none.
    if "sliding_window" not in fields.values:
        fields = fields.with_defaults(sliding_window=4096)
    return read_config(fields, windows=read_windows(fields))


FAMILY = Family(architecture="MistralForCausalLM", model_type="mistral", read=read, missing={"num_key_value_heads": 8})
