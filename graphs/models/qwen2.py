"""Qwen2 and Qwen2.5: Llama with biases of q, k and v, and a window in the upper layers of a few models."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_config, read_windows
from paged_kv.graphs.models.family import Family, Gguf
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    return read_config(fields, qkv_bias=True, windows=upper_windows(fields))


def upper_windows(fields: Fields) -> tuple[int, ...]:
    """The windows of the layers from `max_window_layers` on, where `use_sliding_window` is true."""
    if not fields.boolean("use_sliding_window"):
        return ()
    first = 0 if fields.get("max_window_layers") == 0 else fields.integer("max_window_layers", default=28)
    return read_windows(fields.with_missing(sliding_window=4096), [index >= first for index in range(fields.layers())])


FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    read=read,
    missing={"num_key_value_heads": 32},
    gguf=Gguf("qwen2"),
)
