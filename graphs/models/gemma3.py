"""Gemma 3, text: norms around attention and MLP with weights above one, windows in five layers of six."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paged_kv.graphs.models.config import DecoderConfig, read_config, read_local_rope, read_rope, read_windows
from paged_kv.graphs.models.family import LAYER, NORMS_AFTER, Family, Gguf, Number
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        fields.refuse(key, "not supported")
    causal = not fields.boolean("use_bidirectional_attention")
    bias = fields.boolean("attention_bias")
    fields = fields.with_defaults(head_dim=256, sliding_window=4096)
    if not causal:  # half of the window lies before a token, half of it after
        width = fields.integer("sliding_window") // 2 + 1
        fields = replace(fields, values={**fields.values, "sliding_window": width})
    layers = fields.layers()
    pattern = fields.integer("sliding_window_pattern", default=6)
    windows = read_windows(fields, [(index + 1) % pattern != 0 for index in range(layers)])
    head_dim = fields.integer("head_dim")
    return read_config(
        fields.with_defaults(tie_word_embeddings=True),
        rope=read_rope(fields, head_dim, "full_attention", theta=1e6),
        local_rope=read_local_rope(fields, head_dim, "rope_local_base_freq", 10000.0),
        windows=windows,
        causal=causal,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        norm_place="around",
        norm_offset=1.0,
        norm_rounds_once=True,
        activation=fields.one_of("hidden_activation", {"gelu_pytorch_tanh": "gelu_tanh"}),
        sm_scale=fields.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        embedding_multiplier=fields.integer("hidden_size") ** 0.5,
    )


def _of_metadata(values: Mapping[str, Any], number: Number) -> dict[str, int]:
    """Only the largest model (62 layers) scales its scores by another size than head_dim."""
    del number
    size = values["hidden_size"] // values["num_attention_heads"]
    return {"query_pre_attn_scalar": size if values.get("num_hidden_layers") == 62 else values["head_dim"]}


_GGUF = Gguf(
    "gemma3",
    layer=LAYER | NORMS_AFTER | {"pre_feedforward_layernorm": "ffn_norm"},
    norm_offset=1.0,
    defaults={"hidden_activation": "gelu_pytorch_tanh", "hidden_act": None},
    finish=_of_metadata,
    windows=6,
    has_window_rope=True,
    window_theta=10000.0,
)
_SIZES_OF_DENSE = frozenset(f"dense_{layer}_feat_{side}" for layer in (2, 3) for side in ("in", "out"))
_EMBEDDING_GGUF = replace(
    _GGUF,
    name="gemma-embedding",
    defaults={**_GGUF.defaults, "use_bidirectional_attention": True},
    neutral={"attention.causal": (True, False)},  # llama.cpp ignores it here
    without_effect=_SIZES_OF_DENSE,
)
"""EmbeddingGemma; the tensors of its dense layers have their sizes."""

FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    read=read,
    missing={"num_key_value_heads": 4},
    gguf=_GGUF,
    more_gguf=(_EMBEDDING_GGUF,),
)
