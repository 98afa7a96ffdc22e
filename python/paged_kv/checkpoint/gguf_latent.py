"""Latent attention in GGUF files: the sizes of its heads, and the older of two layouts.

Newer files describe the attention absorbed, with one KV head: `attn_k_b` `[H, kv_rank, nope]` makes queries that meet
latents, `attn_v_b` `[H, v, kv_rank]` makes values of latents. Older ones describe the heads themselves: `attn_kv_b`
`[H * (nope + v), kv_rank]` has for each head the rows of its keys, then those of its values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paged_kv.checkpoint.gguf_header import GgufTensor
from paged_kv.checkpoint.gguf_keys import Metadata
from paged_kv.errors import CheckpointError

LATENT = frozenset({
    "attention.key_length_mla", "attention.kv_lora_rank", "attention.q_lora_rank", "attention.value_length_mla",
})  # fmt: skip
"""Keys that families with latent attention use."""


def latent_sizes(metadata: Metadata) -> dict[str, Any]:
    """The keys of config.json with the sizes of the latents and of the heads.

    Raises:
        CheckpointError: a size is missing, or none of those that the others allow.
    """
    heads, rank = metadata.integer("attention.head_count"), metadata.integer("attention.kv_lora_rank")
    rotated = metadata.integer("rope.dimension_count")
    expected, suffix = {"attention.head_count_kv": (heads, "attention.head_count =")}, ""
    if metadata.scalar("attention.key_length_mla") or metadata.scalar("attention.value_length_mla"):
        suffix = "_mla"
        expected = {
            "attention.head_count_kv": (1, "one head of latents:"),
            "attention.key_length": (rank + rotated, "attention.kv_lora_rank + rope.dimension_count ="),
            "attention.value_length": (rank, "attention.kv_lora_rank ="),
        }
    for name, (size, words) in expected.items():
        if metadata.integer(name, default=size) != size:
            raise metadata.error(name, f"expected {words} {size}")
    length = metadata.integer(f"attention.key_length{suffix}")
    if length <= rotated:
        raise metadata.error(f"attention.key_length{suffix}", f"expected more than rope.dimension_count = {rotated}")
    return {
        "num_key_value_heads": heads,
        "q_lora_rank": metadata.integer("attention.q_lora_rank", 0, least=0) or None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": length - rotated,
        "v_head_dim": metadata.integer(f"attention.value_length{suffix}"),
    }


def split_heads(metadata: Metadata, tensor: GgufTensor) -> Iterator[GgufTensor]:
    """`attn_k_b`, to be transposed, and `attn_v_b` of a layer's `attn_kv_b`.

    Raises:
        CheckpointError: as `latent_sizes`, or the tensor is of another shape.
    """
    sizes = latent_sizes(metadata)
    heads, rank, nope = sizes["num_key_value_heads"], sizes["kv_lora_rank"], sizes["qk_nope_head_dim"]
    rows = nope + sizes["v_head_dim"]
    if tensor.shape != (heads * rows, rank):
        problem = f"expected shape {[heads * rows, rank]}, got {list(tensor.shape)}"
        raise CheckpointError(f"{metadata.header.file}: tensor {tensor.name}: {problem}")
    data = tensor.data.reshape(heads, rows, -1)
    for part, size in (("attn_k_b", slice(nope)), ("attn_v_b", slice(nope, rows))):
        name, is_key = tensor.name.replace("attn_kv_b", part), part == "attn_k_b"
        shape = (heads, rank, nope) if is_key else (heads, rows - nope, rank)
        yield GgufTensor(name, tensor.encoding, shape, data[:, size], transposed=is_key)
