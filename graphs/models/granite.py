"""Granite 3: Llama with multipliers of its own for embeddings, attention scores, residuals and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_kv.graphs.models.config import DecoderConfig, read_config
from paged_kv.graphs.models.family import LLAMA_ROPE, Family, Gguf, Number
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    bias = fields.boolean("attention_bias")
    scale = fields.with_missing(attention_multiplier=1.0)  # null is 1 / sqrt(head_dim)
    return read_config(
        fields,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.boolean("mlp_bias"),
        sm_scale=None if scale.get("attention_multiplier") is None else scale.number("attention_multiplier"),
        embedding_multiplier=fields.number("embedding_multiplier", default=1.0),
        residual_multiplier=fields.number("residual_multiplier", default=1.0),
        logits_divisor=fields.number("logits_scaling", default=1.0),
    )


def of_metadata(values: Mapping[str, Any], number: Number) -> dict[str, float]:
    return {
        "attention_multiplier": number("attention.scale", 0.0) or values["head_dim"] ** -0.5,
        "logits_scaling": number("logit_scale", 1.0),
    }


MULTIPLIERS = {"embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale"}
"""Their names in GGUF files."""
_HYBRID = frozenset(
    {f"ssm.{name}" for name in ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank")}
    | {"expert_shared_feed_forward_length"}
)
"""Granite 4's dense models are hybrids without recurrent layers and experts."""

FAMILY = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    read=read,
    gguf=Gguf(
        "granite",
        rotates_neighbours=True,
        multipliers=MULTIPLIERS,
        finish=of_metadata,
        reads=frozenset({"attention.scale", "logit_scale"}),
        without_effect=_HYBRID,
        neutral={"rope.scaling.finetuned": (True,)},  # it says whether q and k are rotated at all
        rope_tensors=LLAMA_ROPE,
    ),
)
