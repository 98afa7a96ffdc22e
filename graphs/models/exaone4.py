"""EXAONE 4: norms on the outputs of attention and MLP and of each head's q and k; where layers have windows, only
these rotate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_kv.graphs.models.config import DecoderConfig, read_config, read_windows
from paged_kv.graphs.models.family import FREQUENCIES, LAYER, NORMS_AFTER, Family, Gguf, Number
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    windows: tuple[int, ...] = ()
    if fields.get("sliding_window") is not None:
        windows = read_windows(fields, _windowed(fields)) or (-1,) * fields.layers()
    rotates = tuple(window >= 0 for window in windows)
    return read_config(fields, qk_norm="head", norm_place="after", windows=windows, rotates=rotates)


def _windowed(fields: Fields) -> list[bool]:
    """Tell for each layer if it has a window where `layer_types` is missing: all but every so many-th."""
    if fields.get("layer_types") is not None:
        return []
    pattern = fields.integer("sliding_window_pattern", default=4)
    return [(index + 1) % pattern != 0 for index in range(fields.layers())]


def _of_metadata(values: Mapping[str, Any], number: Number) -> dict[str, Any]:
    """The largest model has windows whether its file names them or not."""
    del number
    if values.get("num_hidden_layers") != 64 or "sliding_window" in values:
        return {"sliding_window": values.get("sliding_window")}
    types = ["full_attention" if (index + 1) % 4 == 0 else "sliding_attention" for index in range(64)]
    return {"sliding_window": 4096, "layer_types": types}


FAMILY = Family(
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    read=read,
    missing={"num_key_value_heads": 32, "sliding_window": 4096},
    gguf=Gguf("exaone4", layer=LAYER | NORMS_AFTER, windows=4, rope_tensors=(FREQUENCIES,), finish=_of_metadata),
)
