"""Phi-3 and Phi-4: fused projections, LongRoPE for long contexts, rotation of a part of each head in Phi-4-mini."""

from __future__ import annotations

from paged_kv.graphs.models.config import DecoderConfig, read_config, read_windows
from paged_kv.graphs.models.family import LAYER, LONG_ROPE, Family, Gguf
from paged_kv.graphs.models.fields import Fields


def read(fields: Fields) -> DecoderConfig:
    fields = fields.with_missing(original_max_position_embeddings=4096)
    return read_config(fields, fused_qkv=True, fused_gate_up=True, windows=read_windows(fields))


FAMILY = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    read=read,
    gguf=Gguf(
        "phi3",
        layer=LAYER | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        sizes={"original_max_position_embeddings": "rope.scaling.original_context_length"},
        windows=0,
        rotates_a_part=True,
        rope_tensors=tuple(LONG_ROPE.values()),
    ),
)
