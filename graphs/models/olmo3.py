"""OLMo 3: OLMo 2 with windows in three layers of four, which rotate without the scaling of the others."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_local_rope, read_rope, read_windows
from paged_kv.graphs.models.family import Family
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.olmo2 import read_olmo

_THETA = 500000.0


def read(fields: Fields) -> DecoderConfig:
    if "sliding_window" not in fields.values:
        fields = fields.with_defaults(sliding_window=4096)
    fields.integer("sliding_window")  # with null, transformers has no mask for the layers that want one
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", default=hidden // heads)
    return read_olmo(
        fields,
        rope=read_rope(fields, head_dim, "full_attention", theta=_THETA),
        local_rope=read_local_rope(fields, head_dim, "rope_theta", _THETA),
        windows=read_windows(fields, [(index + 1) % 4 != 0 for index in range(fields.layers())]),
    )


FAMILY = Family(architecture="Olmo3ForCausalLM", model_type="olmo3", read=read)
