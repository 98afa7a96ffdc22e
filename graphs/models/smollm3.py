"""SmolLM3: Llama with layers, every fourth one, that do not rotate q and k."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, head_dim_of, read_config, read_rope, read_rotated, read_windows
from paged_kv.graphs.models.family import Family, Gguf
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    bias, rotates = fields.boolean("attention_bias"), read_rotated(fields)
    has_windows = fields.boolean("use_sliding_window")
    return read_config(
        fields.with_defaults(tie_word_embeddings=True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.boolean("mlp_bias"),
        rope=read_rope(fields, head_dim_of(fields), theta=2e6),
        rotates=rotates,
        windows=read_windows(fields, [not rotated for rotated in rotates]) if has_windows else (),
    )


FAMILY = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    read=read,
    missing={"num_key_value_heads": 4},
    gguf=Gguf("smollm3", rotates_neighbours=True),
)
