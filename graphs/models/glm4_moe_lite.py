"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts, with a list of the layers that have experts."""

from __future__ import annotations

from paged_kv.graphs.models import deepseek_v3
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.family import Family
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    fields = fields.with_missing(q_lora_rank=768).with_defaults(
        qk_nope_head_dim=192, v_head_dim=256, n_group=1, topk_group=1, routed_scaling_factor=1.8
    )
    rotated = fields.integer("qk_rope_head_dim", default=64)
    if fields.get("head_dim") not in (None, rotated):  # to transformers another name of it
        raise fields.error("head_dim", f"expected qk_rope_head_dim = {rotated}")
    return deepseek_v3.read(fields, _mixtures(fields))


def _mixtures(fields: Fields) -> list[bool]:
    """Whether each layer is a mixture; all but the first where no list says it."""
    layers, types = fields.layers(), fields.get("mlp_layer_types")
    if types is None:
        if fields.get("first_k_dense_replace") not in (None, 1):
            raise fields.error("first_k_dense_replace", "expected 1 without mlp_layer_types")
        return [index > 0 for index in range(layers)]
    if not isinstance(types, list) or len(types) != layers or any(each not in ("dense", "sparse") for each in types):
        raise fields.error("mlp_layer_types", f'expected a list of num_hidden_layers = {layers} "dense" and "sparse"')
    return [each == "sparse" for each in types]


FAMILY = Family(architecture="Glm4MoeLiteForCausalLM", model_type="glm4_moe_lite", read=read, engine_only=True)
