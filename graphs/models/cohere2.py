"""Command-R7B and Command A: Command-R with windows in three layers of four, which alone rotate."""

from __future__ import annotations

from paged_kv.graphs.models.cohere import of_metadata, read_cohere
from paged_kv.graphs.models.config import DecoderConfig, read_windows
from paged_kv.graphs.models.family import LAYER_NORM_EPS, Family, Gguf
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    if "sliding_window" not in fields.values:
        fields = fields.with_defaults(sliding_window=4096)
    fields.integer("sliding_window")  # with null, transformers rotates in no layer
    pattern = fields.integer("sliding_window_pattern", default=4)
    windows = read_windows(fields, [(index + 1) % pattern != 0 for index in range(fields.layers())])
    windows = windows or (-1,) * fields.layers()
    return read_cohere(fields, theta=10000.0, windows=windows, rotates=tuple(window >= 0 for window in windows))


FAMILY = Family(
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    read=read,
    gguf=Gguf(
        "cohere2",
        eps=LAYER_NORM_EPS,
        finish=of_metadata,
        reads=frozenset({"logit_scale"}),
        windows=4,
        needs_window=True,
    ),
)
