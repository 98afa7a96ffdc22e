"""StarCoder2: LayerNorms, an MLP without a gate, and biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_kv.graphs.models.config import DecoderConfig, read_config, read_windows
from paged_kv.graphs.models.family import LAYER, LAYER_NORM_EPS, Family, Gguf, Number
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    bias = fields.boolean("use_bias", default=True)
    fields = fields.with_defaults(tie_word_embeddings=True, norm_epsilon=1e-5)
    return read_config(
        fields,
        eps_key="norm_epsilon",
        layer_norm=True,
        norm_bias=True,
        gated=False,
        activation=fields.one_of("hidden_act", {"gelu_pytorch_tanh": "gelu_tanh"}),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        windows=read_windows(fields),
    )


def _of_metadata(values: Mapping[str, Any], number: Number) -> dict[str, bool]:
    del number
    return {"use_bias": values["attention_bias"]}


FAMILY = Family(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    read=read,
    missing={"num_key_value_heads": 2},
    gguf=Gguf(
        "starcoder2",
        layer=LAYER | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
        eps=("norm_epsilon", LAYER_NORM_EPS[1]),
        defaults={"hidden_act": "gelu_pytorch_tanh"},
        finish=_of_metadata,
    ),
)
