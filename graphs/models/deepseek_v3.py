"""DeepSeek-V3 and models like it, such as Moonlight: DeepSeek-V2's attention, and experts chosen by sigmoids."""

from __future__ import annotations

from collections.abc import Sequence

from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.deepseek_v2 import read_latent_model
from paged_kv.graphs.models.family import Family
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields, mixtures: Sequence[bool] | None = None) -> DecoderConfig:
    """`mixtures` is that of `read_latent_model`."""
    fields = fields.with_missing(rope_interleave=True, norm_topk_prob=True)
    if not fields.boolean("rope_interleave"):
        raise fields.error("rope_interleave", "expected true: rotated pairs are adjacent elements")
    fields = fields.with_defaults(
        first_k_dense_replace=3, n_shared_experts=1, n_group=8, topk_group=4, routed_scaling_factor=2.5
    )
    return read_latent_model(fields, sigmoid=True, mixtures=mixtures, sums_to_one=fields.boolean("norm_topk_prob"))


FAMILY = Family(architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3", read=read, engine_only=True)
