"""GPT-OSS: sinks, windows in every other layer, and mixtures of experts with biases and clamped units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_kv.graphs.encodings import Encoding, block_elements
from paged_kv.graphs.models.config import DecoderConfig, head_dim_of, read_config, read_rope, read_windows
from paged_kv.graphs.models.family import EXPERTS, LAYER, Family, Gguf, Number
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.mixture import ClampedUnits, read_experts

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotation where config.json has none."""
_STACKS = ("gate_up", "down")


def read(fields: Fields) -> DecoderConfig:
    layers = fields.layers()
    if fields.get("rope_parameters") is None and fields.get("rope_scaling") is None:
        fields = fields.with_defaults(rope_parameters=_YARN)
    # Without the key there is a window, with null there is none.
    windowed = fields if "sliding_window" in fields.values else fields.with_defaults(sliding_window=128)
    units = ClampedUnits(
        alpha=fields.number("swiglu_alpha", default=1.702), limit=fields.number("swiglu_limit", default=7.0)
    )
    experts = read_experts(
        fields,
        [True] * layers,
        count_keys=("num_local_experts", "num_experts"),
        inner_key="intermediate_size",
        sums_to_one=True,
        router="router",
        bias=True,
        units=units,
        transposed=True,
        alternating=True,
    )
    bias = fields.boolean("attention_bias", default=True)
    # What it says is in the encodings.
    plain = Fields(fields.file, {**fields.values, "quantization_config": None}, fields.prefix)
    return read_config(
        plain,
        rope=read_rope(fields, head_dim_of(fields), theta=150000.0),
        windows=read_windows(windowed, [index % 2 == 0 for index in range(layers)]),
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        norm_rounds_once=True,
        experts=experts,
        encodings=_of_experts(layers) if _has_mxfp4(fields) else (),
    )


def _of_experts(layers: int) -> tuple[tuple[str, Encoding], ...]:
    """The experts' weights of all layers, which stay in their blocks."""
    parts = [f"model.layers.{layer}.mlp.experts.{name}_proj.weight" for layer in range(layers) for name in _STACKS]
    return tuple((name, "MXFP4") for name in parts)


def _has_mxfp4(fields: Fields) -> bool:
    quantised = fields.section("quantization_config")
    if quantised is None:
        return False
    if quantised.get("quant_method") != "mxfp4":
        raise quantised.error("quant_method", 'expected "mxfp4"')
    for key in ("hidden_size", "intermediate_size"):
        if fields.integer(key) % block_elements("MXFP4"):
            raise fields.error(key, f"expected a multiple of {block_elements('MXFP4')}, the values of an MXFP4 block")
    return True


def _of_metadata(values: Mapping[str, Any], number: Number) -> dict[str, Any]:
    """A file without a scaling has none, unlike a config.json; YaRN's is that of config.json."""
    del number
    scaling = values["rope_scaling"] or {"rope_type": "default"}
    return {"rope_scaling": scaling | ({"truncate": False} if scaling["rope_type"] == "yarn" else {})}


FAMILY = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    read=read,
    missing={"num_key_value_heads": 8, "head_dim": 64},
    gguf=Gguf(
        "gpt-oss",
        layer=LAYER | EXPERTS | {"self_attn.sinks": "attn_sinks", "post_attention_layernorm": "post_attention_norm"},
        sizes={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        finish=_of_metadata,
        windows=2,
        needs_window=True,
    ),
)
