"""The forward pass of a plain decoder (Llama) in NumPy, without a cache: what the paged model must agree with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_kv.errors import ContractError
from paged_kv.graphs.models.config import DecoderConfig

Array = npt.NDArray[Any]


def recompute(
    config: DecoderConfig,
    weights: Mapping[str, Array],
    tokens: Sequence[int] | Array,
    dtype: npt.DTypeLike = np.float64,
) -> Array:
    """The logits after each token of one request, all positions at once: `[T]` token ids -> `[T, V]` of `dtype`.

    `weights` holds the tensors of `expected_tensors(config)`, of any dtype NumPy can cast. Row `t` predicts token
    `t + 1`, so one call checks a whole generated text.

    Raises:
        ContractError: `tokens` is empty or holds an id outside the vocabulary, or the model is no plain decoder.
    """
    unusual = [f.name for f in fields(config) if f.default is not MISSING and getattr(config, f.name) != f.default]
    if unusual or config.rope.past() is not None or config.rope.amplitude != 1 or config.rope.dims != config.head_dim:
        raise ContractError(f"config: only plain decoders are recomputed ({', '.join(unusual) or 'rope'})")
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.size == 0 or ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ContractError(f"tokens must be a non-empty list of ids below vocab_size = {config.vocab_size}")
    eps = config.rms_norm_eps

    def weight(name: str) -> Array:
        array: Array = weights[f"{name}.weight"].astype(dtype)
        return array

    angles = np.arange(ids.size)[:, None] * config.rope.inverse_frequencies().astype(dtype)  # [T, D / 2]
    cos, sin = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
    x = weights["model.embed_tokens.weight"][ids].astype(dtype)  # [T, hidden]
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        h = _rms_norm(x, weight(f"{layer}.input_layernorm"), eps)
        q, k, v = (_heads(h @ weight(f"{layer}.self_attn.{name}_proj").T, config.head_dim) for name in "qkv")
        attended = _attend(_rotate(q, cos, sin), _rotate(k, cos, sin), v)  # [T, Hq * D]
        x = x + attended @ weight(f"{layer}.self_attn.o_proj").T
        h = _rms_norm(x, weight(f"{layer}.post_attention_layernorm"), eps)
        gate, up = (h @ weight(f"{layer}.mlp.{name}_proj").T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight(f"{layer}.mlp.down_proj").T
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    logits: Array = _rms_norm(x, weight("model.norm"), eps) @ weight(head).T
    return logits


def _rms_norm(x: Array, scale: Array, eps: float) -> Array:
    size = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps))
    return np.asarray(x / size * scale)


def _heads(x: Array, head_dim: int) -> Array:
    """[T, H * D] -> [H, T, D]."""
    return x.reshape(x.shape[0], -1, head_dim).transpose(1, 0, 2)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding, half-split: dimension i is paired with dimension i + D / 2."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attend(q: Array, k: Array, v: Array) -> Array:
    """Causal attention: q [Hq, T, D], k and v [Hk, T, D] -> [T, Hq * D]; query head h reads KV head h // group."""
    heads, length, dim = q.shape
    k, v = (np.repeat(each, heads // each.shape[0], axis=0) for each in (k, v))
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.dtype.type(dim))  # [Hq, T, T]
    scores[:, ~np.tri(length, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray(weights @ v).transpose(1, 0, 2).reshape(length, heads * dim)
