"""Gemma 4, text: layers with windows and wider ones without, whose K may be their V; the last layers share K and V.

Each layer may be told of its tokens by an embedding of its own, and have experts beside its MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_kv.graphs.models.config import (
    DecoderConfig,
    FullHeads,
    LayerInputs,
    read_config,
    read_rope,
    read_windows,
    with_separate_windows,
)
from paged_kv.graphs.models.family import EXPERTS, FREQUENCIES, LAYER, NORMS_AFTER, Family, Gguf, Number
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.mixture import Experts, read_experts

_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
    "rope_parameters": _ROPE,
    "tie_word_embeddings": True,
}
_HEADS = ("head_dim", "num_key_value_heads")


def read(fields: Fields) -> DecoderConfig:
    fields = fields.with_defaults(**_DEFAULTS)
    if fields.get("use_bidirectional_attention") not in (None, "vision"):  # of images alone
        raise fields.error("use_bidirectional_attention", "not supported")
    fields.refuse("rope_scaling", "each type of layer has its rotation in rope_parameters")
    layers, bias = fields.layers(), fields.boolean("attention_bias")
    types = fields.get("layer_types")
    if isinstance(types, list) and types:  # as transformers has it
        fields = Fields(fields.file, {**fields.values, "layer_types": [*types[:-1], "full_attention"]}, fields.prefix)
    windows = read_windows(fields, [(index + 1) % 6 != 0 and index + 1 < layers for index in range(layers)])
    full = _full_heads(fields, windows)
    shared = fields.integer("num_kv_shared_layers", default=0, least=0, most=layers - 1)
    own, kinds = set(windows[: layers - shared]), set(windows)
    if own != kinds:
        raise fields.error("num_kv_shared_layers", "expected a layer of each kind with its own K and V", shared)
    size = fields.integer("hidden_size_per_layer_input", default=256, least=0)
    config = read_config(
        fields,
        rope=read_rope(fields, full.head_dim, "full_attention"),
        local_rope=read_rope(fields, fields.integer("head_dim"), "sliding_attention"),
        windows=windows,
        full_heads=full,
        shared_kv_layers=shared,
        shared_kv_mlp=2 if fields.boolean("use_double_wide_mlp") else 1,
        layer_inputs=LayerInputs(size=size, vocab_size=fields.integer("vocab_size_per_layer_input")) if size else None,
        layer_scalar=True,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        v_norm=True,
        norm_place="around",
        norm_rounds_once=True,
        activation=fields.one_of("hidden_activation", {"gelu_pytorch_tanh": "gelu_tanh"}),
        sm_scale=1.0,
        embedding_multiplier=fields.integer("hidden_size") ** 0.5,
        logits_cap=fields.number("final_logit_softcapping", default=0.0, least=0.0),
        experts=_experts(fields, layers),
    )
    return with_separate_windows(config)


def _full_heads(fields: Fields, windows: tuple[int, ...]) -> FullHeads:
    """The heads of layers without a window: by layer as transformers writes them, or by keys of their own."""
    is_key = fields.boolean("attention_k_eq_v")
    usual = [fields.integer(name) for name in _HEADS]
    by_layer = fields.section("per_layer_config")
    if by_layer is None:
        head_dim = fields.integer("global_head_dim", default=512)
        heads = fields.integer("num_global_key_value_heads", default=usual[1]) if is_key else usual[1]
        return FullHeads(kv_heads=heads, head_dim=head_dim, value_is_key=is_key)
    full_sizes: set[tuple[int, ...]] = set()
    for layer, window in enumerate(windows):
        of_layer = by_layer.section(str(layer))
        sizes = usual if of_layer is None else [of_layer.integer(*pair) for pair in zip(_HEADS, usual, strict=True)]
        if window >= 0 and sizes != usual:
            raise by_layer.error(str(layer), "expected the heads of all layers, as it has a window")
        full_sizes |= {tuple(sizes)} if window < 0 else set()
    if len(full_sizes) != 1:
        raise fields.error("per_layer_config", "expected the same heads in all layers without a window")
    ((head_dim, heads),) = full_sizes
    return FullHeads(kv_heads=heads, head_dim=head_dim, value_is_key=is_key)


def _experts(fields: Fields, layers: int) -> Experts | None:
    return read_experts(
        Fields(fields.file, {**fields.values, "num_experts_per_tok": fields.get("top_k_experts")}, fields.prefix),
        [fields.boolean("enable_moe_block")] * layers,
        count_keys=("num_experts",),
        sums_to_one=True,
        router="router",
        parallel=True,
    )


def _of_metadata(values: Mapping[str, Any], number: Number) -> dict[str, Any]:
    full = {"head_dim": values["full_head_dim"], "num_key_value_heads": values["full_kv_heads"]}
    types = enumerate(values["layer_types"])
    return {
        "per_layer_config": {str(layer): full for layer, kind in types if kind == "full_attention"},
        "hidden_size_per_layer_input": int(number("embedding_length_per_layer_input", 0.0)),
        "vocab_size_per_layer_input": values["vocab_size"],
        "final_logit_softcapping": number("final_logit_softcapping", 0.0),
        "enable_moe_block": "num_local_experts" in values,
        "num_experts": values.get("num_local_experts"),
        "top_k_experts": values.get("num_experts_per_tok"),
    }


FAMILY = Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    read=read,
    missing={"num_key_value_heads": 4},
    renames={".experts.": ".mlp.experts.", ".router.": ".mlp.router.", ".mlp.router.proj.": ".mlp.router."},
    engine_only=True,
    gguf=Gguf(
        "gemma4",
        layer=LAYER
        | NORMS_AFTER
        | EXPERTS
        | {
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm_1": "post_ffw_norm_1",
            "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            "post_feedforward_layernorm_2": "post_ffw_norm_2",
            "per_layer_input_gate": "inp_gate",
            "per_layer_projection": "proj",
            "post_per_layer_input_norm": "post_norm",
        },
        defaults={"hidden_activation": "gelu_pytorch_tanh", "hidden_act": None},
        sizes={"moe_intermediate_size": "expert_feed_forward_length"},
        finish=_of_metadata,
        reads=frozenset({"embedding_length_per_layer_input", "final_logit_softcapping"}),
        mixture="Gemma4ForCausalLM",
        windows=6,
        needs_window=True,
        narrow_heads=True,
        has_window_rope=True,
        window_theta=10000.0,
        rope_tensors=(FREQUENCIES,),
    ),
)
