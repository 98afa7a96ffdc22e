"""Mixtral: Mistral with a mixture of experts in place of each MLP."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, head_dim_of, read_config, read_rope, read_windows
from paged_kv.graphs.models.family import Family
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.models.mixture import read_experts


def read(fields: Fields) -> DecoderConfig:
    fields = fields.with_defaults(num_local_experts=8, num_experts_per_tok=2)
    layers = [True] * fields.layers()
    experts = read_experts(
        fields, layers, count_keys=("num_local_experts",), inner_key="intermediate_size", sums_to_one=True
    )
    return read_config(
        fields, rope=read_rope(fields, head_dim_of(fields), theta=1e6), windows=read_windows(fields), experts=experts
    )


FAMILY = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    read=read,
    missing={"num_key_value_heads": 8},
    renames={"block_sparse_moe.": "mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."},
)
