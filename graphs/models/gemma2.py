"""Gemma 2: norms around attention and MLP with weights above one, soft caps, windows in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_kv.graphs.models.config import DecoderConfig, read_config, read_windows
from paged_kv.graphs.models.family import LAYER, NORMS_AFTER, Family, Gguf, Number
from paged_kv.graphs.models.fields import Fields

CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def read(fields: Fields) -> DecoderConfig:
    fields.refuse("use_bidirectional_attention", "not supported")
    bias = fields.boolean("attention_bias")
    # Null is no cap and no window; a key that is missing has its default.
    fields = Fields(fields.file, {"sliding_window": 4096, **CAPS, **fields.values}, fields.prefix)
    attention_cap, logits_cap = (0.0 if fields.get(key) is None else fields.number(key) for key in CAPS)
    return read_config(
        fields.with_defaults(head_dim=256, tie_word_embeddings=True),
        windows=read_windows(fields, [index % 2 == 0 for index in range(fields.layers())]),
        qkv_bias=bias,
        o_bias=bias,
        norm_place="around",
        norm_offset=1.0,
        norm_rounds_once=True,
        activation=fields.one_of("hidden_activation", {"gelu_pytorch_tanh": "gelu_tanh"}),
        sm_scale=fields.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        attention_cap=attention_cap,
        logits_cap=logits_cap,
        embedding_multiplier=fields.integer("hidden_size") ** 0.5,
    )


def _of_metadata(values: Mapping[str, Any], number: Number) -> dict[str, float]:
    """Only the largest model (46 layers) scales its scores by another size than head_dim."""
    size = values["hidden_size"] // values["num_attention_heads"]
    scored = size if values.get("num_hidden_layers") == 46 else values["head_dim"]
    return {"query_pre_attn_scalar": scored, **{key: number(key, default) for key, default in CAPS.items()}}


FAMILY = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    read=read,
    missing={"num_key_value_heads": 4},
    gguf=Gguf(
        "gemma2",
        layer=LAYER | NORMS_AFTER | {"pre_feedforward_layernorm": "ffn_norm"},
        norm_offset=1.0,
        defaults={"hidden_activation": "gelu_pytorch_tanh", "hidden_act": None},
        finish=_of_metadata,
        reads=frozenset(CAPS),
        windows=2,
        needs_window=True,
    ),
)
